"""From a model folder and a few sizes to an engine that runs; what `auto` means is decided here."""

import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from chunkserve.cluster.collectives import Collectives
from chunkserve.cluster.control_rows import ControlRows
from chunkserve.cluster.membership import Membership
from chunkserve.kernels import cpu_ops, cpu_tpp
from chunkserve.kernels.cuda_graph import captured
from chunkserve.kernels.dispatch import FP8, AttentionProblem, Backend, select_backend
from chunkserve.kernels.plan import PlanOptions

from .chunk_hash import ChunkScheme
from .decode_graphs import DecodeGraphs
from .engine import Emit, Engine, EngineConfig, build_tree
from .fake import FakeModelRunner
from .follower import Follower
from .grammar import Grammars
from .kv_store import KVStore, bytes_per_chunk
from .model import Decoder, DecoderConfig, decoder_rejects
from .model_config import ModelConfig, read_config
from .model_runner import Model, ModelRunner
from .options import BuildError, ReplicaOptions
from .prefix_tree import PrefixTree
from .protocol import StepTime
from .rank_sync import STATUS_BYTES, RankSync
from .reporter import RoutingReporter
from .scheduler import Scheduler
from .step_core import StepCore
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .transformers_model import TransformersConfig

logger = logging.getLogger(__name__)

# `auto` takes this share of the memory that is left, on CPUs no more than the limit: other programs live there too.
_CPU_POOL_SHARE, _CPU_POOL_LIMIT_BYTES = 0.25, 2 << 30
_GPU_POOL_SHARE = 0.85

# A step delays running streams and cancels: a few tenths of a second on two cores. Products gain nothing beyond.
_CPU_STEP_TOKENS, _GPU_STEP_TOKENS = 128, 2048

# In deterministic mode attention is cut at multiples of this, rounded up to whole chunks; prefixes are read together in
# such pieces only.
_FIXED_SPLIT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What `auto` comes to on this machine."""

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    num_threads: int
    max_tokens: int
    step_tokens: int
    num_slots: int
    chunk_bytes: int
    problems: tuple[AttentionProblem, ...]
    backend: Backend


def check_options(options: ReplicaOptions) -> None:
    """Find out whether a replica can be built here, without loading the model.

    Raises:
        BuildError: a knob does not fit the model or the machine; names it.
        ModelError, BackendError: the model or the attention backend cannot be used.
    """
    _sizes(options, load_config(Path(options.model)), 0, options.num_ranks)


def load_config(folder: Path) -> "DecoderConfig | TransformersConfig":
    """Of our own decoder where it knows the model, of transformers' model otherwise.

    Raises:
        ModelError: neither can serve it.
    """
    if decoder_rejects(read_config(folder)) is None:
        return DecoderConfig.load(folder)
    # transformers' models take seconds to import.
    from .transformers_model import TransformersConfig

    return TransformersConfig.load(folder)


def build_engine(
    options: ReplicaOptions, emit: Emit, chunk_scheme: ChunkScheme | None = None, place: Membership | None = None
) -> Engine:
    """Load the model, take the KV memory, and put an engine over them; it is not started yet.

    Args:
        chunk_scheme: with it the engine keeps what routers ask for.
        place: of rank 0 in its group, where there are several ranks; others call `build_follower` at the same time.
    Raises:
        As `check_options`.
    """
    simulated = options.simulated_step
    runner, config = _build_runner(options, place) if simulated is None else _simulated_runner(options, simulated)
    reporter = RoutingReporter(chunk_scheme, max_step_tokens=config.max_step_tokens) if chunk_scheme else None
    tree = build_tree(config, reporter, audited=place is not None)
    return Engine(
        runner=runner,
        tokenizer=Tokenizer(Path(options.model)),
        config=config,
        emit=emit,
        reporter=reporter,
        tree=tree,
        sync=_build_sync(runner, place, tree) if place is not None and isinstance(runner, ModelRunner) else None,
    )


def _simulated_runner(options: ReplicaOptions, step: StepTime) -> tuple[FakeModelRunner, EngineConfig]:
    """A model that computes nothing and takes its time."""
    model = DecoderConfig.load(Path(options.model))
    sizes = _sizes(options, model, 0, 1)
    logger.warning("replica simulated step=%s: answers mean nothing", step)
    return FakeModelRunner(
        vocab_size=model.vocab_size, num_slots=sizes.num_slots, chunk_size=options.chunk_size, step=step
    ), _engine_config(options, sizes, model.eos_token_ids, sizes.num_slots)


def build_follower(options: ReplicaOptions, place: Membership) -> Follower:
    """What a rank other than rank 0 runs.

    Raises:
        As `check_options`.
    """
    runner, config = _build_runner(options, place)
    tree = build_tree(config, audited=True)
    sync = _build_sync(runner, place, tree)
    scheduler = Scheduler(tree, max_running=config.max_running, max_step_tokens=config.max_step_tokens)
    core = StepCore(scheduler, runner, plan=config.plan, eos_token_ids=config.eos_token_ids, sync=sync)
    grammars = Grammars(Tokenizer(Path(options.model)), config.eos_token_ids)
    grammars.warm_up()
    return Follower(core, sync, grammars)


def device_of(options: ReplicaOptions) -> str:
    """Where the model runs.

    Raises:
        BuildError: it cannot.
    """
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BuildError("device is cuda; torch finds no CUDA device here")
    return device


def _build_runner(options: ReplicaOptions, place: Membership | None) -> tuple[ModelRunner, EngineConfig]:
    """This rank's share of the model over its KV memory; the tightest rank sizes the pools of all."""
    folder = Path(options.model)
    config = load_config(folder)
    rank, num_ranks = (place.rank, place.num_ranks) if place is not None else (0, 1)
    sizes = _sizes(options, config, rank, num_ranks)
    torch.set_num_threads(sizes.num_threads)
    cpu_ops.set_num_threads(sizes.num_threads)
    model: Model
    if isinstance(config, DecoderConfig):
        model = Decoder(
            folder,
            dtype=sizes.dtype,
            weight_dtype=sizes.weight_dtype,
            device=sizes.device,
            max_tokens=sizes.max_tokens,
            rank=rank,
            num_ranks=num_ranks,
        )
    else:
        from .transformers_model import TransformersModel

        model = TransformersModel(folder, config, dtype=sizes.dtype, device=sizes.device)
        model.check(sizes.backend, options.chunk_size)
    num_slots = sizes.num_slots
    if place is not None:
        place.group.check_exact(model.activation_dtype, config.hidden_size)
        num_slots = place.group.smallest(num_slots)
        place.link.end_grace()
        model.collectives = _collectives(place, model, sizes.step_tokens)
    kv = KVStore(sizes.backend, sizes.problems, num_slots=num_slots)
    logger.info(
        "replica built model=%s runs_as=%s rank=%d ranks=%d device=%s dtype=%s weight_dtype=%s backend=%s threads=%d "
        "chunks=%d pool_bytes=%d",
        folder.name, type(model).__name__, rank, num_ranks, sizes.device, sizes.dtype,
        sizes.weight_dtype or sizes.dtype, sizes.backend.name, sizes.num_threads, num_slots,
        num_slots * sizes.chunk_bytes,
    )  # fmt: skip
    graphs = None
    if sizes.device == "cuda" and options.cuda_graphs and isinstance(model, Decoder) and place is None:
        capture = partial(captured, pool=torch.cuda.graph_pool_handle())
        graphs = DecodeGraphs(model.forward, kv, device=sizes.device, max_rows=options.max_running, capture=capture)
        with torch.inference_mode():
            graphs.capture_all()
    return ModelRunner(model, kv, graphs), _engine_config(options, sizes, config.eos_token_ids, num_slots)


def _engine_config(
    options: ReplicaOptions, sizes: _Sizes, eos_token_ids: frozenset[int], num_slots: int
) -> EngineConfig:
    return EngineConfig(
        chunk_size=options.chunk_size,
        num_slots=num_slots,
        chunk_bytes=sizes.chunk_bytes,
        max_sequence_tokens=sizes.max_tokens,
        max_running=options.max_running,
        max_step_tokens=sizes.step_tokens,
        max_waiting=options.max_waiting,
        prefix_sharing=options.prefix_sharing,
        retain_prefixes=options.retain_prefixes,
        eos_token_ids=eos_token_ids,
        max_grammar_compile_s=options.max_grammar_compile_s,
        plan=_plan_options(options, sizes),
    )


def _collectives(place: Membership, model: Model, step_tokens: int) -> Collectives:
    hidden_size, dtype = model.config.hidden_size, model.activation_dtype
    control = ControlRows(
        rank=place.rank,
        num_ranks=place.num_ranks,
        num_carriers=1 + 2 * model.config.num_layers,  # the embedding; each layer's attention and MLP
        hidden_size=hidden_size,
        status_bytes=STATUS_BYTES,
        dtype=dtype,
        device=model.device,
    )
    return Collectives(place.group, max_rows=step_tokens, hidden_size=hidden_size, dtype=dtype, control=control)


def _build_sync(runner: ModelRunner, place: Membership, tree: PrefixTree) -> RankSync:
    assert runner.model.collectives is not None
    return RankSync(place, runner.model.collectives, tree)


def _sizes(options: ReplicaOptions, config: ModelConfig, rank: int, num_ranks: int) -> _Sizes:
    device = device_of(options)
    max_tokens = options.max_sequence_tokens or config.max_context_tokens
    if max_tokens > config.max_context_tokens:
        raise BuildError(
            f"max_sequence_tokens is {max_tokens}; the model's context has {config.max_context_tokens} tokens"
        )
    dtype = getattr(torch, options.dtype) if options.dtype else config.dtype
    problems = config.problems(
        device=device,
        dtype=dtype,
        chunk_size=options.chunk_size,
        kv_dtype=FP8 if options.kv_dtype == "fp8_e4m3" else None,
        rank=rank,
        num_ranks=num_ranks,
    )
    chunk_bytes = bytes_per_chunk(problems)
    backend = select_backend(problems[0], options.attention_backend)
    if options.deterministic and (reason := _why_not_deterministic(config, backend, num_ranks)):
        raise BuildError(f"deterministic is true; {reason}")
    if options.weight_dtype and (reason := _why_not_int8(config, device)):
        raise BuildError(f"weight_dtype is {options.weight_dtype}; {reason}")
    for problem in set(problems[1:]):
        select_backend(problem, backend.name)
    return _Sizes(
        device=device,
        dtype=dtype,
        weight_dtype=torch.int8 if options.weight_dtype == "int8" else None,
        num_threads=options.num_threads or max(1, len(os.sched_getaffinity(0)) // num_ranks),
        max_tokens=max_tokens,
        step_tokens=options.max_step_tokens
        or max(_CPU_STEP_TOKENS if device == "cpu" else _GPU_STEP_TOKENS, options.max_running),
        num_slots=_num_slots(options, device, chunk_bytes, max_tokens, num_ranks),
        chunk_bytes=chunk_bytes,
        problems=problems,
        backend=backend,
    )


def _why_not_int8(config: ModelConfig, device: str) -> str | None:
    """Why weights cannot be kept as int8; None where they can."""
    if device != "cpu":
        return f"device is {device}, and products of int8 weights are written for CPUs only"
    if not isinstance(config, DecoderConfig):
        return "this model runs as transformers wrote it, with torch's products, which take no int8 weights"
    return None


def _why_not_deterministic(config: ModelConfig, backend: Backend, num_ranks: int) -> str | None:
    """What would let the bits of a row depend on the other rows of a step; None where nothing does."""
    if backend.name != "cpu":
        return (
            f"the attention backend is {backend.name}, and products beside it are torch's, whose sums depend on the "
            "number of rows: it is offered with device cpu and attention_backend cpu"
        )
    if not isinstance(config, DecoderConfig):
        return "this model runs as transformers wrote it, and the sums of torch's products depend on the number of rows"
    if num_ranks > 2:
        return f"tensor_parallel_size is {num_ranks}: sums over more than 2 depend on the number of rows"
    return None


def _plan_options(options: ReplicaOptions, sizes: _Sizes) -> PlanOptions:
    split = -(-_FIXED_SPLIT_TOKENS // options.chunk_size) * options.chunk_size
    return PlanOptions(
        fixed_split_tokens=split if options.deterministic else None,
        share=options.prefix_sharing,
        min_saved_tokens=cpu_tpp.MIN_SAVED_TOKENS if sizes.device == "cpu" else 1,
        num_workers=sizes.backend.num_workers(sizes.problems[0]),
        heads_per_worker_item=sizes.problems[0].num_kv_heads,
    )


def _num_slots(options: ReplicaOptions, device: str, chunk_bytes: int, max_tokens: int, num_ranks: int) -> int:
    needed = -(-max_tokens // options.chunk_size)
    if options.pool_chunks is not None:
        if options.pool_chunks < needed:
            raise BuildError(
                f"kv_pool_chunks is {options.pool_chunks}; one sequence of max_sequence_tokens {max_tokens} takes "
                f"{needed}: raise kv_pool_chunks or lower max_sequence_tokens"
            )
        return options.pool_chunks
    if options.pool_bytes is not None:
        if options.pool_bytes < needed * chunk_bytes:
            raise BuildError(
                f"kv_pool_bytes is {options.pool_bytes}; one sequence of max_sequence_tokens {max_tokens} takes "
                f"{needed * chunk_bytes} bytes: raise kv_pool_bytes or lower max_sequence_tokens"
            )
        return options.pool_bytes // chunk_bytes
    if device == "cuda":
        # The weights are not loaded yet; each rank takes its part of the files.
        weights = sum(file.stat().st_size for file in Path(options.model).glob("*.safetensors")) // num_ranks
        free = int((torch.cuda.mem_get_info()[0] - weights) * _GPU_POOL_SHARE)
    else:
        free = min(int(psutil.virtual_memory().available * _CPU_POOL_SHARE), _CPU_POOL_LIMIT_BYTES) // num_ranks
    return max(free // chunk_bytes, needed)
