"""Two-phase partition attention on CPUs, over the C++ module `_cpu`.

Tiles (derivation of the layout: kernels/README.md), P being 64 or what is left of C or D, and pairs for bf16 only:
    K of a slot and KV head: [C / P][D][P], or [C / P][D / 2][P][2]: every column is one token.
    V of a slot and KV head: [D / P][C][P], or [D / P][C / 2][P][2]: every column is one value of the head dim.
"""

from typing import Any

import torch
from torch import Tensor

from . import _cpu
from .dispatch import FP8, AttentionProblem, BackendError, LayerKV, check_append, check_attend, check_slot
from .plan import AttentionPlan, PlanError

# PlanOptions.min_saved_tokens for this backend: a run of one chunk pays from four sequences on, a run of two sequences
# from three chunks. Takes 10 to 17 % off a binary tree of single chunks (benchmarks/ours_forest.py).
MIN_SAVED_TOKENS = 160

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_KV_DTYPES = {**_DTYPES, FP8: "float8_e4m3fn"}


class CpuBackend:
    """Native kernels; the instruction set and the number of threads are those of `_cpu`.

    Over K and V in bfloat16, queries and attention's weights are rounded to it if `cpu_ops.rounds_to_bfloat16()`.
    """

    name = "cpu"
    priority = 30

    def reject(self, problem: AttentionProblem) -> str | None:
        if problem.device != "cpu":
            return f"device is {problem.device}"
        if problem.dtype not in _DTYPES or problem.kv_dtype not in _KV_DTYPES:
            return f"dtypes {problem.dtype} and {problem.kv_dtype} are not among {', '.join(_KV_DTYPES.values())}"
        if problem.head_dim % 8 or not 8 <= problem.head_dim <= 256:
            return f"head_dim {problem.head_dim} is no multiple of 8 up to 256"
        if problem.chunk_size % 16 or not 16 <= problem.chunk_size <= 256:
            return f"chunk_size {problem.chunk_size} is no multiple of 16 up to 256"
        return None

    def num_workers(self, problem: AttentionProblem) -> int:
        """Threads in force."""
        return _cpu.num_threads()

    def allocate(self, problem: AttentionProblem, num_slots: int) -> LayerKV:
        shape = (num_slots, problem.num_kv_heads, problem.chunk_size * problem.head_dim)
        k, v = (torch.empty(shape, dtype=problem.kv_dtype) for _ in range(2))
        for tiles in (k, v):
            _cpu.advise_large_pages(tiles.data_ptr(), tiles.nbytes)
        return LayerKV(
            k=k, v=v, problem=problem, num_slots=num_slots, backend=self.name, **problem.scale_tensors(num_slots)
        )

    def append(self, kv: LayerKV, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        check_append(k, v, kv, plan)
        k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
        p = kv.problem
        try:
            _cpu.append(
                dtype=_KV_DTYPES[p.kv_dtype],
                new_dtype=_DTYPES[p.dtype],
                num_kv_heads=p.num_kv_heads,
                head_dim=p.head_dim,
                num_slots=kv.num_slots,
                k=k.data_ptr(),
                k_token_stride=k.stride(0),
                k_head_stride=k.stride(1),
                v=v.data_ptr(),
                v_token_stride=v.stride(0),
                v_head_stride=v.stride(1),
                rows=len(k),
                k_tiles=kv.k.data_ptr(),
                v_tiles=kv.v.data_ptr(),
                k_scale=_address(kv.k_scale),
                v_scale=_address(kv.v_scale),
                plan=plan.data,
            )
        except ValueError as error:
            raise PlanError(str(error)) from error

    def copy_rows(self, kv: LayerKV, src_slot: int, dst_slot: int, num_rows: int) -> None:
        check_slot(kv, src_slot)
        check_slot(kv, dst_slot)
        p = kv.problem
        if not 0 <= num_rows <= p.chunk_size:
            raise BackendError(f"cannot copy {num_rows} rows of a chunk of {p.chunk_size} (chunk_size)")
        _cpu.copy_rows(
            dtype=_KV_DTYPES[p.kv_dtype],
            num_kv_heads=p.num_kv_heads,
            head_dim=p.head_dim,
            chunk_size=p.chunk_size,
            k_tiles=kv.k.data_ptr(),
            v_tiles=kv.v.data_ptr(),
            src_slot=src_slot,
            dst_slot=dst_slot,
            num_rows=num_rows,
        )
        kv.copy_scales(src_slot, dst_slot)

    def read_chunk(self, kv: LayerKV, slot: int) -> tuple[Tensor, Tensor]:
        check_slot(kv, slot)
        p = kv.problem
        k, v = (torch.empty(p.chunk_size, p.num_kv_heads, p.head_dim, dtype=p.kv_dtype) for _ in range(2))
        _cpu.read_chunk(
            dtype=_KV_DTYPES[p.kv_dtype],
            num_kv_heads=p.num_kv_heads,
            head_dim=p.head_dim,
            chunk_size=p.chunk_size,
            k_tiles=kv.k.data_ptr(),
            v_tiles=kv.v.data_ptr(),
            slot=slot,
            k=k.data_ptr(),
            v=v.data_ptr(),
        )
        if kv.k_scale is not None and kv.v_scale is not None:
            return k.float() * kv.k_scale[slot, :, None], v.float() * kv.v_scale[slot, :, None]
        return k, v

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
        if not scale > 0:
            raise BackendError(f"scale must be positive, not {scale}")
        if alibi_slopes is not None:
            alibi_slopes = alibi_slopes.contiguous()
        if sinks is not None:
            sinks = sinks.contiguous()
        if q.stride(2) != 1:
            q = q.contiguous()
        p = kv.problem
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        try:
            _cpu.attend(
                **native_pool(kv),
                q_dtype=_DTYPES[p.dtype],
                num_heads=p.num_heads,
                num_kv_heads=p.num_kv_heads,
                head_dim=p.head_dim,
                q=q.data_ptr(),
                q_rows=len(q),
                q_token_stride=q.stride(0),
                q_head_stride=q.stride(1),
                out=out.data_ptr(),
                scale=scale,
                window=p.window or 0,
                softcap=p.softcap or 0.0,
                alibi_slopes=_address(alibi_slopes),
                sinks=_address(sinks),
                plan=plan.data,
            )
        except ValueError as error:
            raise PlanError(str(error)) from error
        return out


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def native_pool(kv: LayerKV) -> dict[str, Any]:
    """A layer's pool as native code takes it; the caller keeps it alive."""
    return {
        "kv_dtype": _KV_DTYPES[kv.problem.kv_dtype],
        "num_slots": kv.num_slots,
        "k": kv.k.data_ptr(),
        "v": kv.v.data_ptr(),
        "k_scale": _address(kv.k_scale),
        "v_scale": _address(kv.v_scale),
    }
