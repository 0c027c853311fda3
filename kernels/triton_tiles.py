"""Tile shapes of the Triton kernels: a table by device class, head dim and dtype, with defaults.

The defaults are reasoned and compiled, not measured: no entry spills a register, and each fits the shared memory of
its device. Private tokens are bound by memory: tiles of 16 rows, and enough stages that a multiprocessor waits for
26 KB and more at a time. Shared segments are bound by the matrix units once they have about 150 rows: tiles of 64 and
128 rows.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One tile class.

    Attributes:
        rows: query tokens x group per program; a power of two of at least 16.
        keys: per step of the loop; a power of two of at least 16.
        warps: of one program.
        stages: of the software pipeline; at least 3, or no tile is loaded ahead.
        programs_per_sm: resident programs per multiprocessor; the grid is this times their number.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs_per_sm: int


# (device class, padded head dim, bytes per element of q) -> tile classes by rows, ascending. A device class is the
# compute capability from which on its entries hold. Shared memory of one program: 163 KB on 8.0, 99 KB on 8.6, 8.9 and
# 12.0, 227 KB on 9.0 and 10.0.
_SMALL_128: Final = (
    Tile(rows=16, keys=32, warps=4, stages=4, programs_per_sm=1),
    Tile(rows=64, keys=32, warps=8, stages=3, programs_per_sm=1),
)
_SMALL_256: Final = (
    Tile(rows=16, keys=32, warps=4, stages=3, programs_per_sm=1),
    Tile(rows=64, keys=16, warps=8, stages=3, programs_per_sm=1),
)
_TABLE: Final[dict[tuple[int, int, int], tuple[Tile, ...]]] = {
    (80, 32, 2): (
        Tile(rows=16, keys=64, warps=4, stages=4, programs_per_sm=4),
        Tile(rows=64, keys=32, warps=4, stages=4, programs_per_sm=3),
        Tile(rows=128, keys=64, warps=8, stages=3, programs_per_sm=1),
    ),
    (80, 64, 2): (
        Tile(rows=16, keys=64, warps=4, stages=4, programs_per_sm=3),
        Tile(rows=64, keys=64, warps=4, stages=3, programs_per_sm=2),
        Tile(rows=128, keys=64, warps=8, stages=3, programs_per_sm=1),
    ),
    (80, 128, 2): (
        Tile(rows=16, keys=64, warps=4, stages=3, programs_per_sm=2),
        Tile(rows=64, keys=64, warps=8, stages=3, programs_per_sm=1),
        Tile(rows=128, keys=32, warps=8, stages=3, programs_per_sm=1),
    ),
    (80, 256, 2): (
        Tile(rows=16, keys=32, warps=4, stages=3, programs_per_sm=2),
        Tile(rows=64, keys=32, warps=8, stages=3, programs_per_sm=1),
    ),
    (86, 64, 2): (
        Tile(rows=16, keys=64, warps=4, stages=3, programs_per_sm=2),
        Tile(rows=64, keys=64, warps=4, stages=3, programs_per_sm=2),
        Tile(rows=128, keys=64, warps=8, stages=3, programs_per_sm=1),
    ),
    (86, 128, 2): _SMALL_128,
    (86, 256, 2): _SMALL_256,
    (90, 128, 2): (
        Tile(rows=16, keys=64, warps=4, stages=3, programs_per_sm=3),
        Tile(rows=64, keys=32, warps=4, stages=3, programs_per_sm=2),
        Tile(rows=128, keys=64, warps=8, stages=3, programs_per_sm=1),
    ),
    (90, 256, 2): (
        Tile(rows=16, keys=32, warps=4, stages=3, programs_per_sm=3),
        Tile(rows=64, keys=32, warps=8, stages=3, programs_per_sm=1),
    ),
    (100, 128, 2): (
        Tile(rows=16, keys=64, warps=4, stages=3, programs_per_sm=3),
        Tile(rows=64, keys=64, warps=8, stages=3, programs_per_sm=1),
        Tile(rows=128, keys=32, warps=8, stages=3, programs_per_sm=1),
    ),
    (100, 256, 2): (
        Tile(rows=16, keys=32, warps=4, stages=3, programs_per_sm=2),
        Tile(rows=64, keys=16, warps=8, stages=3, programs_per_sm=1),
    ),
    (120, 128, 2): _SMALL_128,
    (120, 256, 2): _SMALL_256,
    # fp32 runs on the plain multiply-add units, for tests and small models: one class.
    (80, 64, 4): (Tile(rows=16, keys=32, warps=4, stages=3, programs_per_sm=3),),
    (80, 128, 4): (Tile(rows=16, keys=16, warps=4, stages=3, programs_per_sm=2),),
    (80, 256, 4): (Tile(rows=16, keys=16, warps=4, stages=3, programs_per_sm=1),),
}


def tiles_for(capability: int, block_d: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tile classes by rows, ascending: the entry of the newest device class that is not newer than the device.

    Args:
        capability: compute capability as major x 10 + minor, at least 80.
        block_d: head dim padded to a power of two, at most 256.
        dtype: of q, 2 or 4 bytes.
        kv_dtype: of the pool; what fp8 is turned into takes registers, so that large tiles take fewer keys at once.
    Raises:
        KeyError: the table does not reach there.
    """
    size = dtype.itemsize
    keys = [(c, d, e) for c, d, e in _TABLE if c <= capability and d >= block_d and e == size]
    if not keys:
        raise KeyError(f"no tiles for capability {capability}, head dim {block_d}, {dtype}")
    smallest = min(d for _, d, _ in keys)
    tiles = _TABLE[max(key for key in keys if key[1] == smallest)]
    if kv_dtype.itemsize > 1:
        return tiles
    return tuple(replace(tile, keys=min(tile.keys, 32)) if tile.rows > 16 else tile for tile in tiles)
