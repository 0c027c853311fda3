"""Two-phase partition attention in CUDA C++ (csrc/tpp.cu): one launch for all items, one for the merge.

K and V of a layer are [S, G, C, D] each, of the queries' type or fp8. Everything runs on the current stream, waits for
nothing and allocates only the result. It needs no CUDA package at install time: cuda_module.py compiles the source on
first use.

For a CUDA graph: `reserve` for the largest batch, `stage` a plan, capture; before each replay `stage` the next plan.
The bits of a row do not depend on the tiles or teams that its items were given, so that a plan with
`fixed_split_tokens` gives the same bits whoever shares the batch.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .cuda_module import Build, CudaBuildError, DeviceKernels, Kernels, build_cubin, compiler_missing
from .dispatch import FP8, AttentionProblem, BackendError, LayerKV, check_append, check_attend, check_slot
from .plan import AttentionPlan, Int32Array
from .reference import read_plain_chunk

_VALUES: Final = {torch.float16: "Half", torch.bfloat16: "Bfloat", torch.float32: "float"}
_KV_VALUES: Final = {**_VALUES, FP8: "E4m3"}

# Fields of Header in csrc/tpp.cu, in ints; the views are in its order.
_HEADER_INTS: Final = 17
_NUM_TILES: Final = 1
_AT_TILES: Final = 4
_VIEWS: Final = (
    "row_pos",
    "write_slot",
    "write_offset",
    "row_partial_indptr",
    "row_partials",
    "item_q_begin",
    "item_q_end",
    "item_kv_begin",
    "item_kv_len",
    "item_partial",
    "item_chunk_indptr",
    "chunk_slots",
)
# Warps of a team, in the order of Header.num_tiles; each holds 16 rows.
_TEAMS: Final = (4, 2, 1)
_WARP_ROWS: Final = 16


class Params(ctypes.Structure):
    """Params in csrc/tpp.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("plan", "q", "v_new", "k_pool", "v_pool", "out")),
        *((name, ctypes.c_void_p) for name in ("partial_out", "partial_lse_log2", "alibi_slopes", "sinks")),
        *((name, ctypes.c_void_p) for name in ("k_scale", "v_scale")),
        *((name, ctypes.c_int64) for name in ("q_token_stride", "q_head_stride", "v_token_stride", "v_head_stride")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("window", "num_heads", "num_kv_heads", "chunk_size")),
    )


@dataclass(slots=True)
class _Lane:
    """What one problem keeps on one device; its calls must be ordered with each other, as on one stream."""

    kernels: Kernels
    staged: Tensor  # int32: Header, plan, tiles
    partial_out: Tensor  # [P, H, D] fp32
    partial_lse_log2: Tensor  # [P, H] fp32
    plan: AttentionPlan | None = None
    first_pos: int = 0
    flat: Int32Array | None = None  # what `staged` holds
    captured: bool = False  # a CUDA graph holds the addresses of these tensors


class CudaBackend:
    """Kernels for NVIDIA GPUs of compute capability 8.0 and up, where Triton is missing, refuses, or is slower."""

    name = "cuda"
    priority = 40

    def __init__(self, load: Callable[[AttentionProblem, torch.device], Kernels] | None = None) -> None:
        """
        Args:
            load: where kernels come from; None compiles them for the device.
        """
        self._load = load or load_kernels
        self._lanes: dict[tuple[AttentionProblem, torch.device], _Lane] = {}

    def reject(self, problem: AttentionProblem) -> str | None:
        if problem.device != "cuda":
            return f"device is {problem.device}"
        if problem.dtype not in _VALUES or problem.kv_dtype not in (problem.dtype, FP8):
            return (
                f"dtypes {problem.dtype} and {problem.kv_dtype} are not one of float16, bfloat16, float32, "
                "or one of them and float8_e4m3fn"
            )
        if problem.head_dim % 16 or not 16 <= problem.head_dim <= 256:
            return f"head_dim {problem.head_dim} is no multiple of 16 up to 256"
        if problem.chunk_size % 16 or not 16 <= problem.chunk_size <= 256:
            return f"chunk_size {problem.chunk_size} is no multiple of 16 up to 256"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            return f"compute capability is {major}.{minor}, the kernels need 8.0"
        return compiler_missing()

    def allocate(self, problem: AttentionProblem, num_slots: int) -> LayerKV:
        shape = (num_slots, problem.num_kv_heads, problem.chunk_size, problem.head_dim)
        k, v = (torch.empty(shape, dtype=problem.kv_dtype, device=problem.device) for _ in range(2))
        self._lane(problem, k.device)  # Compiles now rather than in the first step.
        return LayerKV(
            k=k, v=v, problem=problem, num_slots=num_slots, backend=self.name, **problem.scale_tensors(num_slots)
        )

    def num_workers(self, problem: AttentionProblem) -> int:
        """Warps that run at once: `PlanOptions.num_workers` for this problem on the current device."""
        kernels = self._lane(problem, torch.empty(0, device=problem.device).device).kernels
        return kernels.num_blocks * kernels.warps

    def reserve(self, kv: LayerKV, *, plan_ints: int, partials: int) -> None:
        """Make room for later plans, so that nothing moves between the capture of a CUDA graph and its replays.

        Args:
            kv: any layer of the problem.
            plan_ints: numbers of the largest plan with its tiles; twice `len(plan.data)` is enough.
            partials: of the largest plan (`AttentionPlan.num_partials`).
        Raises:
            BackendError: a CUDA graph is being captured, or was, and holds the address of what is too small.
        """
        lane = self._lane(kv.problem, kv.k.device)
        if plan_ints > len(lane.staged):
            _refuse_capture(kv, lane, f"the staged plan needs {plan_ints} numbers, has {len(lane.staged)}")
            lane.staged = lane.staged.new_zeros(max(plan_ints, 2 * len(lane.staged)))
            lane.plan = None
        if partials > len(lane.partial_out):
            _refuse_capture(kv, lane, f"{partials} partials do not fit {len(lane.partial_out)}")
            rows = max(partials, 2 * len(lane.partial_out))
            lane.partial_out = lane.partial_out.new_empty(rows, *lane.partial_out.shape[1:])
            lane.partial_lse_log2 = lane.partial_lse_log2.new_empty(rows, *lane.partial_lse_log2.shape[1:])

    def release(self, kv: LayerKV) -> None:
        """No captured graph of this problem will be replayed again, so that memory may move."""
        self._lane(kv.problem, kv.k.device).captured = False

    def stage(self, kv: LayerKV, plan: AttentionPlan) -> None:
        """Bring a plan to the device unless it is there, on the current stream, without waiting.

        A plan is recognised by identity, and `AttentionPlan.grow` by the position of its first row: these are the only
        ways in which a plan may change once it was staged. `append` and `attend` stage their plan themselves, a replay
        of a CUDA graph cannot.

        Raises:
            BackendError: a CUDA graph is being captured and the plan is not there yet.
        """
        lane = self._lane(kv.problem, kv.k.device)
        first_pos = int(plan.row_pos[0]) if plan.num_rows else 0
        if plan is lane.plan and first_pos == lane.first_pos:
            return
        if _is_capturing(kv):
            raise BackendError("a CUDA graph is being captured and the plan is not on the device: call stage before")
        if plan is lane.plan and lane.flat is not None:
            flat = lane.flat
            flat[_HEADER_INTS : _HEADER_INTS + len(plan.data)] = plan.data
        else:
            flat = device_plan(plan, group=kv.problem.group, max_warps=lane.kernels.warps)
        self.reserve(kv, plan_ints=len(flat), partials=plan.num_partials)
        host = torch.from_numpy(flat)
        if kv.k.is_cuda:
            # Pinned memory comes from torch's cache, which keeps it until the copy is done.
            host = host.pin_memory()
        lane.staged[: len(flat)].copy_(host, non_blocking=True)
        lane.plan, lane.first_pos, lane.flat = plan, first_pos, flat

    def append(self, kv: LayerKV, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        check_append(k, v, kv, plan)
        if not plan.num_rows:
            return
        self.stage(kv, plan)
        k, v = _aligned(k, 16), _aligned(v, 16)
        params = self._params(kv)
        params.q, params.q_token_stride, params.q_head_stride = k.data_ptr(), k.stride(0), k.stride(1)
        params.v_new, params.v_token_stride, params.v_head_stride = v.data_ptr(), v.stride(0), v.stride(1)
        self._lane(kv.problem, kv.k.device).kernels.launch("tpp_append", params)

    def copy_rows(self, kv: LayerKV, src_slot: int, dst_slot: int, num_rows: int) -> None:
        check_slot(kv, src_slot)
        check_slot(kv, dst_slot)
        if not 0 <= num_rows <= kv.problem.chunk_size:
            raise BackendError(f"cannot copy {num_rows} rows of a chunk of {kv.problem.chunk_size} (chunk_size)")
        for pool in (kv.k, kv.v):
            pool[dst_slot, :, :num_rows] = pool[src_slot, :, :num_rows]
        kv.copy_scales(src_slot, dst_slot)

    def read_chunk(self, kv: LayerKV, slot: int) -> tuple[Tensor, Tensor]:
        check_slot(kv, slot)
        return read_plain_chunk(kv, slot)

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
        check_attend(q, kv, plan, alibi_slopes=alibi_slopes, sinks=sinks)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not plan.num_rows:
            return out
        self.stage(kv, plan)
        q = _aligned(q, 4)
        p = kv.problem
        params = self._params(kv)
        params.q, params.q_token_stride, params.q_head_stride = q.data_ptr(), q.stride(0), q.stride(1)
        params.out = out.data_ptr()
        params.scale, params.softcap, params.window = scale, p.softcap or 0.0, p.window or 0
        if alibi_slopes is not None:
            alibi_slopes = alibi_slopes.contiguous()
            params.alibi_slopes = alibi_slopes.data_ptr()
        if sinks is not None:
            sinks = sinks.contiguous()
            params.sinks = sinks.data_ptr()
        lane = self._lane(p, q.device)
        lane.kernels.launch("tpp_segment", params)
        lane.captured |= _is_capturing(kv)
        # A captured graph serves later plans too, that may have partial results.
        if plan.num_partials or _is_capturing(kv):
            lane.kernels.launch("tpp_merge", params)
        return out

    def _params(self, kv: LayerKV) -> Params:
        p = kv.problem
        lane = self._lane(p, kv.k.device)
        return Params(
            plan=lane.staged.data_ptr(),
            k_pool=kv.k.data_ptr(),
            v_pool=kv.v.data_ptr(),
            k_scale=kv.k_scale.data_ptr() if kv.k_scale is not None else None,
            v_scale=kv.v_scale.data_ptr() if kv.v_scale is not None else None,
            partial_out=lane.partial_out.data_ptr(),
            partial_lse_log2=lane.partial_lse_log2.data_ptr(),
            num_heads=p.num_heads,
            num_kv_heads=p.num_kv_heads,
            chunk_size=p.chunk_size,
        )

    def _lane(self, problem: AttentionProblem, device: torch.device) -> _Lane:
        lane = self._lanes.get((problem, device))
        if lane is None:
            lane = _Lane(
                kernels=self._load(problem, device),
                staged=torch.zeros(4096, dtype=torch.int32, device=device),
                partial_out=torch.empty(0, problem.num_heads, problem.head_dim, device=device),
                partial_lse_log2=torch.empty(0, problem.num_heads, device=device),
            )
            self._lanes[(problem, device)] = lane
        return lane


def load_kernels(problem: AttentionProblem, device: torch.device) -> Kernels:
    """Compile for the device, or take from the cache.

    Raises:
        BackendError: with the compiler's or the driver's message.
    """
    properties = torch.cuda.get_device_properties(device)
    build = Build(
        value=_VALUES[problem.dtype],
        kv_value=_KV_VALUES[problem.kv_dtype],
        head_dim=problem.head_dim,
        arch=f"sm_{properties.major}{properties.minor}",
        shared_limit=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )
    try:
        return DeviceKernels(build_cubin(build, Path.home() / ".cache" / "chunkserve" / "cuda"), device)
    except CudaBuildError as error:
        raise BackendError(f"backend cuda: {error}") from error


def device_plan(plan: AttentionPlan, *, group: int, max_warps: int) -> Int32Array:
    """A plan as the kernels read it: Header, the plan's own array, and the row tiles of its items.

    Args:
        plan: any.
        group: query heads per KV head.
        max_warps: of the largest team.
    """
    tiles = _row_tiles((plan.item_q_end - plan.item_q_begin).astype(np.int64) * group, max_warps)
    header = np.zeros(_HEADER_INTS, np.int32)
    header[0] = plan.num_rows
    header[_NUM_TILES : _NUM_TILES + len(_TEAMS)] = [len(t) for t in tiles]
    header[_AT_TILES] = _HEADER_INTS + len(plan.data)
    for field, name in enumerate(_VIEWS, _AT_TILES + 1):
        view: Int32Array = getattr(plan, name)
        # The views lie in one array, so their distance is their place in it; an empty one has no address.
        if len(view):
            header[field] = _HEADER_INTS + (view.ctypes.data - plan.data.ctypes.data) // 4
    return np.concatenate([header, plan.data, *[t.astype(np.int32).ravel() for t in tiles]])


def _row_tiles(rows: NDArray[np.int64], max_warps: int) -> list[NDArray[np.int64]]:
    """[tiles, 2] of (item, first row) for each team size, in the order of the items: longest work first.

    Full tiles go to the largest team; what is left of an item goes to the smallest one that holds it.
    """
    whole = max_warps * _WARP_ROWS
    full, rest = np.divmod(rows, whole)
    out = []
    smaller = [w for w in _TEAMS if w < max_warps]
    for warps in _TEAMS:
        if warps > max_warps:
            out.append(np.zeros((0, 2), np.int64))
            continue
        fewest = max((w for w in smaller if w < warps), default=0) * _WARP_ROWS  # what the next smaller team holds
        takes_rest = (rest > fewest) & (rest <= warps * _WARP_ROWS)
        tiles = takes_rest.astype(np.int64) + (full if warps == max_warps else 0)
        items = np.repeat(np.arange(len(rows)), tiles)
        number = np.arange(len(items)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        first = number * whole if warps == max_warps else full[items] * whole
        out.append(np.stack([items, first], axis=1))
    return out


def _aligned(x: Tensor, num_bytes: int) -> Tensor:
    """The tensor, copied unless its rows are contiguous and begin at multiples of so many bytes."""
    size = x.element_size()
    fits = x.stride(2) == 1 and all(s * size % num_bytes == 0 for s in x.stride()[:2]) and not x.data_ptr() % num_bytes
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _is_capturing(kv: LayerKV) -> bool:
    return kv.k.is_cuda and torch.cuda.is_current_stream_capturing()


def _refuse_capture(kv: LayerKV, lane: _Lane, problem: str) -> None:
    if lane.captured or _is_capturing(kv):
        raise BackendError(f"{problem}, and a CUDA graph holds its address: call reserve before the first capture")
