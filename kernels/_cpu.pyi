from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Threads and instruction sets.
def set_num_threads(num_threads: int) -> int: ...
def num_threads() -> int: ...
def supported_isas() -> list[str]: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...

# The planner; 0 for no fixed split.
def build_plan(
    *,
    paths: list[NDArray[np.int32]],
    kv_lens: NDArray[np.int64],
    q_lens: NDArray[np.int64],
    kv_present: NDArray[np.int64],
    chunk_size: int,
    share: bool,
    min_saved_tokens: int,
    num_workers: int,
    heads_per_worker_item: int,
    min_split_tokens: int,
    fixed_split_tokens: int,
    spare_chunks: int,
) -> NDArray[np.int32]: ...
def grow_plan(*, data: NDArray[np.int32], sequences: list[int], slots: list[int]) -> bool: ...

# Two-phase partition attention; addresses are those of tensors that the caller keeps alive,
# strides count elements, and 0 stands for no window, soft-cap, slopes, sinks or scales.
def attend(
    *,
    q_dtype: str,
    kv_dtype: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_slots: int,
    q: int,
    q_rows: int,
    q_token_stride: int,
    q_head_stride: int,
    k: int,
    v: int,
    k_scale: int,
    v_scale: int,
    out: int,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: int,
    sinks: int,
    plan: NDArray[Any],
) -> None: ...
def append(
    *,
    dtype: str,
    new_dtype: str,
    num_kv_heads: int,
    head_dim: int,
    num_slots: int,
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    v: int,
    v_token_stride: int,
    v_head_stride: int,
    rows: int,
    k_tiles: int,
    v_tiles: int,
    k_scale: int,
    v_scale: int,
    plan: NDArray[Any],
) -> None: ...
def copy_rows(
    *,
    dtype: str,
    num_kv_heads: int,
    head_dim: int,
    chunk_size: int,
    k_tiles: int,
    v_tiles: int,
    src_slot: int,
    dst_slot: int,
    num_rows: int,
) -> None: ...
def read_chunk(
    *,
    dtype: str,
    num_kv_heads: int,
    head_dim: int,
    chunk_size: int,
    k_tiles: int,
    v_tiles: int,
    slot: int,
    k: int,
    v: int,
) -> None: ...
def advise_large_pages(address: int, bytes: int) -> None: ...

# Products with packed weights and row-wise work, on contiguous float32 or bfloat16 tensors; see cpu_ops.py.
LINEAR_PANEL: int
# Packed, scale, bias.
PackedWeight: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]

def pack_linear(weight: Tensor, packed: Tensor) -> None: ...
def pack_linear_int8(weight: Tensor, packed: Tensor, scale: Tensor) -> None: ...
def linear(x: Tensor, weight: PackedWeight, out: Tensor) -> None: ...
def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None: ...
def rope_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None: ...
def silu_mul(gate_up: Tensor, out: Tensor) -> None: ...

# The layers of a decoder in one call; see cpu_decoder.py.
class DecoderLayers:
    def __init__(
        self, hidden: int, intermediate: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float
    ) -> None: ...
    def add(
        self,
        *,
        qkv: PackedWeight,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        output: PackedWeight,
        mlp_norm: Tensor,
        gate_up: PackedWeight,
        down: PackedWeight,
        next_norm: Tensor,
        kv_dtype: str,
        num_slots: int,
        k: int,
        v: int,
        k_scale: int,
        v_scale: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> None: ...
    def run(self, x: Tensor, h: Tensor, cos: Tensor, sin: Tensor, plan: NDArray[Any]) -> None: ...

# Limits of this machine, measured: the floor that benchmarks compare with.
def probe_read_gb_per_s(buffer: Tensor) -> float: ...
def probe_multiply_gflop_per_s(bf16_pairs: bool) -> float: ...
