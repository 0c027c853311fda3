"""From the knobs of the server to those of a replica; apart from app.py, whose Ray takes seconds to import."""

import logging
from pathlib import Path

from chunkserve.replica.options import ReplicaOptions

from .config import ConfigError, ServeConfig
from .small_model import NAME as SMALL_MODEL
from .small_model import ensure_small_model

logger = logging.getLogger(__name__)


def replica_options(config: ServeConfig) -> ReplicaOptions:
    """What each replica is built from.

    Raises:
        ConfigError: the model folder is not there.
    """
    if config.model == SMALL_MODEL:
        folder = ensure_small_model(say=logger.info)
    else:
        folder = Path(config.model).expanduser().resolve()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model: expected {SMALL_MODEL} or a folder with config.json, got {config.model!r}")
    return ReplicaOptions(
        model=str(folder),
        dtype=None if config.dtype == "auto" else config.dtype,
        weight_dtype=None if config.weight_dtype == "auto" else config.weight_dtype,
        kv_dtype=None if config.kv_dtype == "auto" else config.kv_dtype,
        device=None if config.device == "auto" else config.device,
        attention_backend=config.attention_backend,
        num_threads=None if config.num_threads == "auto" else config.num_threads,
        num_ranks=config.tensor_parallel_size,
        chunk_size=config.chunk_size_tokens,
        pool_bytes=None if config.kv_pool_bytes == "auto" else config.kv_pool_bytes,
        pool_chunks=config.kv_pool_chunks,
        max_sequence_tokens=config.max_sequence_tokens,
        max_running=config.max_running_sequences,
        max_step_tokens=None if config.max_step_tokens == "auto" else config.max_step_tokens,
        max_waiting=config.max_waiting_requests,
        prefix_sharing=config.prefix_sharing,
        retain_prefixes=config.retain_prefixes,
        cuda_graphs=config.cuda_graphs,
        deterministic=config.deterministic,
        max_grammar_compile_s=config.max_grammar_compile_s,
    )
