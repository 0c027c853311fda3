"""Two-phase partition attention in Triton: chunk-first and sequence-first items by one kernel, merged in plan order.

K and V of a layer are [S, G, C, D] each. Everything runs on the current stream, waits for nothing and allocates only
the result. With TRITON_INTERPRET=1 the same kernels run on CPU tensors, slowly, for tests.

For a CUDA graph: `reserve` for the largest batch, `stage` a plan, capture; before each replay `stage` the next plan.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import triton_kernels as kernels
from .dispatch import FP8, AttentionProblem, BackendError, LayerKV, check_append, check_attend, check_slot
from .plan import AttentionPlan
from .reference import read_plain_chunk
from .triton_plan import StagedPlan, is_capturing
from .triton_tiles import Tile, tiles_for

LOG2_E = 1.4426950408889634
INTERPRETED = not isinstance(kernels.segment_kernel, triton.runtime.JITFunction)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Numbers that a program of the merge or append kernel takes at once.
_ELEMENTS = 2048
# Few programs under the interpreter, so that each of them takes several tasks.
_INTERPRETED_SMS = 2


@dataclass(slots=True)
class _Lane:
    """What one problem keeps on one device; its calls must be ordered with each other, as on one stream."""

    staged: StagedPlan
    tiles: tuple[Tile, ...]
    num_sms: int
    partial_out: Tensor  # [P, H, D] fp32
    partial_lse_log2: Tensor  # [P, H] fp32


class TritonBackend:
    """Kernels for NVIDIA GPUs of compute capability 8.0 and up."""

    name = "triton"
    priority = 50

    def __init__(self) -> None:
        self._lanes: dict[tuple[AttentionProblem, torch.device], _Lane] = {}

    def reject(self, problem: AttentionProblem) -> str | None:
        if problem.device not in ("cuda", "cpu"):
            return f"device is {problem.device}"
        if problem.device == "cpu" and not INTERPRETED:
            return "device is cpu (TRITON_INTERPRET=1 runs the kernels there, for tests)"
        if problem.device == "cuda":
            if not torch.cuda.is_available():
                return "torch finds no CUDA device"
            major, minor = torch.cuda.get_device_capability()
            if major < 8:
                return f"compute capability is {major}.{minor}, the kernels need 8.0"
        if problem.dtype not in _DTYPES or problem.kv_dtype not in (problem.dtype, FP8):
            return (
                f"dtypes {problem.dtype} and {problem.kv_dtype} are not one of float16, bfloat16, float32, "
                "or one of them and float8_e4m3fn"
            )
        if not 8 <= problem.head_dim <= 256:
            return f"head_dim {problem.head_dim} is not in 8 to 256"
        if problem.chunk_size % 16 or not 16 <= problem.chunk_size <= 256:
            return f"chunk_size {problem.chunk_size} is no multiple of 16 up to 256"
        return None

    def allocate(self, problem: AttentionProblem, num_slots: int) -> LayerKV:
        shape = (num_slots, problem.num_kv_heads, problem.chunk_size, problem.head_dim)
        k, v = (torch.empty(shape, dtype=problem.kv_dtype, device=problem.device) for _ in range(2))
        return LayerKV(
            k=k, v=v, problem=problem, num_slots=num_slots, backend=self.name, **problem.scale_tensors(num_slots)
        )

    def num_workers(self, problem: AttentionProblem) -> int:
        """Programs that run at once: `PlanOptions.num_workers` for this problem on the current device."""
        lane = self._lane(problem, torch.empty(0, device=problem.device).device)
        return lane.num_sms * lane.tiles[0].programs_per_sm

    def reserve(self, kv: LayerKV, *, plan_ints: int, partials: int) -> None:
        """Make room for later plans, so that nothing moves between the capture of a CUDA graph and its replays.

        Once a graph is captured, a plan that would need more is refused, in eager calls too.

        Args:
            kv: any layer of the problem.
            plan_ints: numbers of the largest plan with its tasks; twice `len(plan.data)` is enough.
            partials: of the largest plan (`AttentionPlan.num_partials`).
        Raises:
            BackendError: a captured graph holds what is too small (see `release`).
        """
        lane = self._lane(kv.problem, kv.k.device)
        lane.staged.reserve(plan_ints)
        _reserve_partials(lane, partials)

    def release(self, kv: LayerKV) -> None:
        """No captured graph of this problem will be replayed again, so that memory may move."""
        self._lane(kv.problem, kv.k.device).staged.frozen = False

    def stage(self, kv: LayerKV, plan: AttentionPlan) -> None:
        """Bring a plan to the device; `append` and `attend` do so themselves, a replay of a CUDA graph cannot."""
        _check_device(kv)
        lane = self._lane(kv.problem, kv.k.device)
        _reserve_partials(lane, plan.num_partials)
        lane.staged.stage(plan)

    def append(self, kv: LayerKV, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        check_append(k, v, kv, plan)
        if not plan.num_rows:
            return
        self.stage(kv, plan)
        k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
        p = kv.problem
        lane = self._lane(p, kv.k.device)
        kernels.append_kernel[(lane.num_sms * 8,)](
            k,
            v,
            *_tiles_and_scales(kv),
            lane.staged.array,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            **append_constants(p),
        )

    def copy_rows(self, kv: LayerKV, src_slot: int, dst_slot: int, num_rows: int) -> None:
        check_slot(kv, src_slot)
        check_slot(kv, dst_slot)
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
        check_attend(q, kv, plan)
        p = kv.problem
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not plan.num_rows:
            return out
        alibi_slopes, sinks = (
            _per_head(name, x, q, p) for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks))
        )
        self.stage(kv, plan)
        lane = self._lane(p, q.device)
        q = q if q.stride(2) == 1 else q.contiguous()
        capturing = is_capturing(q)
        if capturing:
            lane.staged.freeze()
        logit_scale, softcap_log2 = scale * LOG2_E, 0.0
        if p.softcap is not None:
            logit_scale, softcap_log2 = 2 * logit_scale / p.softcap, p.softcap * LOG2_E
        smaller_rows = 0
        for tile_class, tile in enumerate(lane.tiles):
            # A captured graph must serve every later plan of as many rows: an item has at most all of them.
            needed = smaller_rows < len(q) * p.group if capturing else lane.staged.num_tasks[tile_class] > 0
            smaller_rows = tile.rows
            if not needed:
                continue
            kernels.segment_kernel[(lane.num_sms * tile.programs_per_sm,)](
                q,
                *_tiles_and_scales(kv),
                out,
                lane.partial_out,
                lane.partial_lse_log2,
                lane.staged.array,
                out if alibi_slopes is None else alibi_slopes,
                out if sinks is None else sinks,
                q.stride(0),
                q.stride(1),
                logit_scale,
                softcap_log2,
                p.window or 0,
                **segment_constants(p, tile_class, tile, alibi=alibi_slopes is not None, sinks=sinks is not None),
                num_warps=tile.warps,
            )
        if plan.num_partials or capturing:
            kernels.merge_kernel[(lane.num_sms * 8,)](
                lane.partial_out,
                lane.partial_lse_log2,
                out,
                lane.staged.array,
                out if sinks is None else sinks,
                **merge_constants(p, sinks=sinks is not None),
            )
        return out

    def _lane(self, problem: AttentionProblem, device: torch.device) -> _Lane:
        lane = self._lanes.get((problem, device))
        if lane is None:
            if device.type == "cuda":
                properties = torch.cuda.get_device_properties(device)
                capability, num_sms = properties.major * 10 + properties.minor, properties.multi_processor_count
            else:
                capability, num_sms = 80, _INTERPRETED_SMS
            tiles = tiles_for(capability, triton.next_power_of_2(problem.head_dim), problem.dtype, problem.kv_dtype)
            lane = _Lane(
                staged=StagedPlan(device, [t.rows for t in tiles], problem.group),
                tiles=tiles,
                num_sms=num_sms,
                partial_out=torch.empty(0, problem.num_heads, problem.head_dim, device=device),
                partial_lse_log2=torch.empty(0, problem.num_heads, device=device),
            )
            self._lanes[(problem, device)] = lane
        return lane


def segment_constants(
    problem: AttentionProblem, tile_class: int, tile: Tile, *, alibi: bool, sinks: bool
) -> dict[str, int | bool]:
    """Compile-time arguments of the segment kernel."""
    return {
        "NUM_KV_HEADS": problem.num_kv_heads,
        "GROUP": problem.group,
        "HEAD_DIM": problem.head_dim,
        "CHUNK": problem.chunk_size,
        "TILE_CLASS": tile_class,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "BLOCK_D": max(triton.next_power_of_2(problem.head_dim), 16),
        "STAGES": tile.stages,
        "HAS_WINDOW": problem.window is not None,
        "HAS_SOFTCAP": problem.softcap is not None,
        "HAS_ALIBI": alibi,
        "HAS_SINKS": sinks,
        "HAS_SCALES": problem.kv_dtype == FP8,
        "SPLIT_MASK": tile.rows > 16,
        "INTERPRETED": INTERPRETED,
    }


def merge_constants(problem: AttentionProblem, *, sinks: bool) -> dict[str, int | bool]:
    """Compile-time arguments of the merge kernel; a program takes heads of one row."""
    block_d = triton.next_power_of_2(problem.head_dim)
    return {
        "NUM_HEADS": problem.num_heads,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_H": min(triton.next_power_of_2(problem.num_heads), max(_ELEMENTS // block_d, 1)),
        "BLOCK_D": block_d,
        "HAS_SINKS": sinks,
    }


def append_constants(problem: AttentionProblem) -> dict[str, int | bool]:
    """Compile-time arguments of the append kernel."""
    block_d = triton.next_power_of_2(problem.head_dim)
    return {
        "NUM_KV_HEADS": problem.num_kv_heads,
        "HEAD_DIM": problem.head_dim,
        "CHUNK": problem.chunk_size,
        "BLOCK_R": max(_ELEMENTS // block_d, 1),
        "BLOCK_D": block_d,
        "HAS_SCALES": problem.kv_dtype == FP8,
    }


def _tiles_and_scales(kv: LayerKV) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K and V and their scales, as the kernels take them: fp8 as bytes, since not all GPUs know the type."""
    if kv.k_scale is None or kv.v_scale is None:
        return kv.k, kv.v, kv.k, kv.v
    return kv.k.view(torch.uint8), kv.v.view(torch.uint8), kv.k_scale, kv.v_scale


def _reserve_partials(lane: _Lane, partials: int) -> None:
    have = len(lane.partial_out)
    if partials <= have:
        return
    if lane.staged.frozen or is_capturing(lane.partial_out):
        raise BackendError(f"{partials} partials do not fit the {have} that a CUDA graph holds: call reserve before")
    rows = max(partials, 2 * have)
    lane.partial_out = lane.partial_out.new_empty(rows, *lane.partial_out.shape[1:])
    lane.partial_lse_log2 = lane.partial_lse_log2.new_empty(rows, lane.partial_lse_log2.shape[1])


def _check_device(kv: LayerKV) -> None:
    if kv.k.is_cuda and kv.k.device.index != torch.cuda.current_device():
        raise BackendError(f"kv is on {kv.k.device}, the current device is {torch.cuda.current_device()} (set_device)")


def _per_head(name: str, x: Tensor | None, q: Tensor, problem: AttentionProblem) -> Tensor | None:
    if x is None:
        return None
    if x.shape != (problem.num_heads,) or x.dtype != torch.float32 or x.device != q.device:
        raise BackendError(
            f"{name} is {tuple(x.shape)} {x.dtype} on {x.device}, expected [{problem.num_heads}] float32 on {q.device}"
        )
    return x.contiguous()
