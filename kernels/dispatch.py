"""The backend table and the choice from it; the only file of this folder that looks at device and dtype.

A backend owns the layout of its tiles, so K and V stay with the backend that allocated them: choose one with
`select_backend`, allocate each layer with it, then append and attend.
"""

import importlib
import logging
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from .plan import AttentionPlan, PlanError

logger = logging.getLogger(__name__)

# Name, module and class of each backend. Modules load on first use: some need packages that a machine may lack.
_TABLE: Final = (
    ("cuda", "cuda_tpp", "CudaBackend"),
    ("triton", "triton_tpp", "TritonBackend"),
    ("cpu", "cpu_tpp", "CpuBackend"),
    ("reference", "reference", "ReferenceBackend"),
)


FP8: Final = torch.float8_e4m3fn


class BackendError(ValueError):
    """No backend fits, or tensors do not fit the problem that a backend was chosen for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """What a backend must be able to compute; one per kind of layer of a model, and device.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of q and of the result.
        kv_dtype: of K and V in the pool; FP8 has a scale for each slot and KV head.
        num_heads: H, query heads; query head h uses KV head h // (H // G).
        num_kv_heads: G.
        head_dim: D.
        chunk_size: C, tokens.
        window: keys that a query sees, itself included (sliding window); None for all.
        softcap: logits become softcap * tanh(logits / softcap), before any mask; None for as they are.
    """

    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    chunk_size: int
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim, self.chunk_size) < 1:
            raise BackendError(f"sizes must be at least 1: {self}")
        if self.num_heads % self.num_kv_heads:
            raise BackendError(f"{self.num_heads} query heads are no multiple of {self.num_kv_heads} KV heads")
        if self.window is not None and self.window < 1:
            raise BackendError(f"window must be at least 1 key or None, not {self.window}")
        if self.softcap is not None and not self.softcap > 0:
            raise BackendError(f"softcap must be positive or None, not {self.softcap}")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def scale_tensors(self, num_slots: int) -> dict[str, Tensor]:
        """Memory for the scales of a layer's K and V, [S, G] fp32 each; none but for FP8."""
        if self.kv_dtype != FP8:
            return {}
        shape = (num_slots, self.num_kv_heads)
        return {name: torch.empty(shape, dtype=torch.float32, device=self.device) for name in ("k_scale", "v_scale")}

    def bytes_per_slot(self) -> int:
        """K and V of a chunk of one layer, with their scales."""
        values = 2 * self.num_kv_heads * self.chunk_size * self.head_dim * self.kv_dtype.itemsize
        return values + (2 * self.num_kv_heads * 4 if self.kv_dtype == FP8 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """K and V of one layer for all slots of a pool, in the layout of the backend that allocated them.

    In an FP8 pool a value is its e4m3 number times the scale of its slot and KV head (k_scale, v_scale: [S, G] fp32).
    The scale is set by the chunk's first token, as the power of two that brings its largest value to [2, 4), and stays:
    the chunk's bits then depend on its own tokens alone, however they came in. Later values saturate at 448 scales.
    """

    k: Tensor
    v: Tensor
    problem: AttentionProblem
    num_slots: int
    backend: str
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def copy_scales(self, src_slot: int, dst_slot: int) -> None:
        """What `copy_rows` does beside the rows."""
        for scales in (self.k_scale, self.v_scale):
            if scales is not None:
                scales[dst_slot] = scales[src_slot]


class Backend(Protocol):
    """One way to run a plan. Memory that no token was written to may hold anything, NaN included."""

    @property
    def name(self) -> str: ...

    @property
    def priority(self) -> int:
        """`auto` takes the highest that accepts."""
        ...

    def reject(self, problem: AttentionProblem) -> str | None:
        """Why this backend cannot serve the problem here; None when it can."""
        ...

    def num_workers(self, problem: AttentionProblem) -> int:
        """What runs items side by side on the current device: `PlanOptions.num_workers` for this problem."""
        ...

    def allocate(self, problem: AttentionProblem, num_slots: int) -> LayerKV:
        """All memory of one layer."""
        ...

    def append(self, kv: LayerKV, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Write k and v where the plan's write_slot and write_offset say; not where -1.

        Args:
            k, v: [T, G, D] in the dtype of q; rounded to that of the pool.
        """
        ...

    def copy_rows(self, kv: LayerKV, src_slot: int, dst_slot: int, num_rows: int) -> None:
        """Copy the first `num_rows` tokens of a chunk to another slot."""
        ...

    def read_chunk(self, kv: LayerKV, slot: int) -> tuple[Tensor, Tensor]:
        """K and V of a slot as [C, G, D], of an FP8 pool in fp32 with the scales applied; for tests."""
        ...

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        plan: AttentionPlan,
        *,
        scale: float,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[T, H, D] -> [T, H, D], see `attend` below."""
        ...


def attend(
    q: Tensor,
    kv: LayerKV,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of one layer over a plan.

    Args:
        q: [T, H, D] fp32 | bf16 | fp16, rows in plan order.
        kv: this layer's tiles; the plan's new tokens are appended already.
        plan: built once per step, shared by all layers.
        scale: factor of the logits; D ** -0.5 when None.
        alibi_slopes: [H] fp32; adds slope * (key position - query position) to the logits, after the soft-cap.
        sinks: [H] fp32; a logit without a value that enters each row's denominator once.
        backend: "auto", or the name of the backend that allocated `kv`.
    Returns:
        [T, H, D], dtype of q; softmax and sums in fp32.
    Raises:
        PlanError: plan and tensors disagree.
        BackendError: q does not fit kv, or kv belongs to another backend.
    Source: ChunkAttention section 3.2 (arXiv 2402.15220).
    """
    if backend not in ("auto", kv.backend):
        raise BackendError(f"kv was allocated by backend {kv.backend}, asked for {backend}")
    scale = kv.problem.head_dim**-0.5 if scale is None else scale
    return get_backend(kv.backend).attend(q, kv, plan, scale=scale, alibi_slopes=alibi_slopes, sinks=sinks)


@runtime_checkable
class GraphBackend(Backend, Protocol):
    """What backends for GPUs have beside, so that a CUDA graph captured over one plan serves the next ones.

    `reserve` for the largest plan, `stage` a plan, capture; before each replay `stage` the plan that it shall follow.
    """

    def reserve(self, kv: LayerKV, *, plan_ints: int, partials: int) -> None:
        """Make room for plans of so many numbers (twice `len(plan.data)` is enough) and partial results."""
        ...

    def stage(self, kv: LayerKV, plan: AttentionPlan) -> None:
        """Bring a plan to the device, for all layers of the problem."""
        ...

    def release(self, kv: LayerKV) -> None:
        """No captured graph of this problem will be replayed again, so that memory may move."""
        ...


def check_attend(
    q: Tensor,
    kv: LayerKV,
    plan: AttentionPlan,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Checks that every backend's `attend` begins with.

    Raises:
        PlanError, BackendError: as `attend`.
    """
    p = kv.problem
    if q.dim() != 3 or q.shape[1:] != (p.num_heads, p.head_dim):
        raise BackendError(f"q is {tuple(q.shape)}, expected [T, {p.num_heads}, {p.head_dim}]")
    if q.dtype != p.dtype or q.device.type != p.device:
        raise BackendError(f"q is {q.dtype} on {q.device.type}, the problem says {p.dtype} on {p.device}")
    if len(q) != plan.num_rows:
        raise PlanError(f"q has {len(q)} rows, the plan has {plan.num_rows}")
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is None:
            continue
        if x.shape != (p.num_heads,) or x.dtype != torch.float32 or x.device.type != p.device:
            raise BackendError(
                f"{name} is {tuple(x.shape)} {x.dtype} on {x.device.type}, "
                f"expected [{p.num_heads}] torch.float32 on {p.device}"
            )
    if plan.chunk_size != p.chunk_size:
        raise PlanError(f"the plan has chunks of {plan.chunk_size} tokens, kv has {p.chunk_size} (chunk_size)")


def check_append(k: Tensor, v: Tensor, kv: LayerKV, plan: AttentionPlan) -> None:
    """Checks that every backend's `append` begins with.

    Raises:
        PlanError, BackendError: as `attend`.
    """
    p = kv.problem
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[1:] != (p.num_kv_heads, p.head_dim):
            raise BackendError(f"{name} is {tuple(x.shape)}, expected [T, {p.num_kv_heads}, {p.head_dim}]")
        if x.dtype != p.dtype or x.device.type != p.device:
            raise BackendError(f"{name} is {x.dtype} on {x.device.type}, the pool takes {p.dtype} on {p.device}")
        if len(x) != plan.num_rows:
            raise PlanError(f"{name} has {len(x)} rows, the plan has {plan.num_rows}")
    if plan.chunk_size != p.chunk_size:
        raise PlanError(f"the plan has chunks of {plan.chunk_size} tokens, kv has {p.chunk_size} (chunk_size)")


def check_slot(kv: LayerKV, slot: int) -> None:
    """Raises BackendError unless `slot` is one of kv's."""
    if not 0 <= slot < kv.num_slots:
        raise BackendError(f"slot {slot} is not in a pool of {kv.num_slots}")


@cache
def select_backend(problem: AttentionProblem, name: str = "auto") -> Backend:
    """The backend for a problem: the named one, or the accepting one of the highest priority.

    Raises:
        BackendError: it refuses, or all do; lists each backend with its reason.
    """
    if name != "auto":
        backend = get_backend(name)
        if reason := backend.reject(problem):
            raise BackendError(f"backend {name} cannot serve {problem}: {reason}")
    else:
        matrix = backend_matrix(problem)
        accepting = [get_backend(n) for n, reason in matrix if reason is None]
        if not accepting:
            reasons = "; ".join(f"{n}: {reason}" for n, reason in matrix)
            raise BackendError(f"no backend can serve {problem}: {reasons}")
        backend = max(accepting, key=lambda b: b.priority)
        if backend.name == "reference":
            reasons = "; ".join(f"{n}: {reason}" for n, reason in matrix if reason)
            logger.warning("attention falls back to backend=reference, which is slow: %s", reasons)
    logger.info("attention backend=%s chosen_by=%s problem=%s", backend.name, name, problem)
    return backend


def backend_matrix(problem: AttentionProblem) -> list[tuple[str, str | None]]:
    """Every backend with the reason why it cannot serve the problem, None when it can."""
    rows: list[tuple[str, str | None]] = []
    for name in available_backends():
        try:
            rows.append((name, get_backend(name).reject(problem)))
        except BackendError as error:
            rows.append((name, str(error)))
    return rows


def available_backends() -> list[str]:
    """Names of the table, usable here or not."""
    return [name for name, _, _ in _TABLE]


@cache
def get_backend(name: str) -> Backend:
    """The backend of a name.

    Raises:
        BackendError: there is none, or its module cannot be loaded here.
    """
    for row, module, class_name in _TABLE:
        if row == name:
            try:
                backend: Backend = getattr(importlib.import_module(f".{module}", __package__), class_name)()
            except ImportError as error:
                raise BackendError(f"cannot load: {error}") from error
            return backend
    raise BackendError(f"no backend is called {name}; there are {', '.join(available_backends())}, and auto")
