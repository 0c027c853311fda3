"""How a replica is built: records only, so that a process which does not run the model need not import torch."""

from dataclasses import dataclass

from .protocol import StepTime


class BuildError(ValueError):
    """A replica cannot be built as it is configured; the message names the knob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """One replica: the model, where it runs, and its sizes. None stands for `auto`.

    model: a model folder.
    dtype: of weights, K and V; None is the type that the model is stored in.
    weight_dtype: "int8" for weights of products of one byte, on CPUs; None is `dtype`.
    kv_dtype: "fp8_e4m3" for K and V of one byte; None is `dtype`.
    device: "cpu" or "cuda"; None is cuda where there is one.
    attention_backend: a name, or "auto".
    num_threads: CPU threads of the model, per rank; None is all cores, divided among the ranks.
    num_ranks: ranks that share the model.
    chunk_size: tokens per chunk.
    pool_bytes, pool_chunks: size of the KV pool of each rank, one of them; None and None is a share of the free memory.
    max_sequence_tokens: None is the model's context.
    max_step_tokens: None is 128 on CPUs, 2048 on GPUs, and at least max_running.
    cuda_graphs: on GPUs, steps that only decode are replayed from CUDA graphs (replica/decode_graphs.py).
    deterministic: the same bits for a request whoever shares its batch, and whether its prefix is found or computed.
    simulated_step: for load tests of what surrounds the model: no weights are loaded, steps take so long, and answers
        mean nothing (replica/fake.py). No knob of the server sets it.
    The others: see EngineConfig.
    """

    model: str
    dtype: str | None = None
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    device: str | None = None
    attention_backend: str = "auto"
    num_threads: int | None = None
    num_ranks: int = 1
    chunk_size: int = 64
    pool_bytes: int | None = None
    pool_chunks: int | None = None
    max_sequence_tokens: int | None = None
    max_running: int = 64
    max_step_tokens: int | None = None
    max_waiting: int = 256
    prefix_sharing: bool = True
    retain_prefixes: bool = True
    cuda_graphs: bool = True
    deterministic: bool = False
    max_grammar_compile_s: float = 1.0
    simulated_step: StepTime | None = None
