"""A plan on its device, with the tasks of each tile class: one copy per plan, one small kernel per grown step.

The array begins with a header (triton_kernels.py names its fields) and keeps its address while it is large enough, so
that a CUDA graph that read one plan reads the next one on replay.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import triton_kernels as kernels
from .dispatch import BackendError
from .plan import AttentionPlan, Int32Array

# Place in a plan's header of `PlanOptions.fixed_split_tokens`, 0 for none.
FIXED_SPLIT_FIELD: Final = 8


def tasks_of(plan: AttentionPlan, class_rows: Sequence[int], group: int) -> list[Int32Array]:
    """For each tile class an array [tasks, 2] of (item, tile), in plan order: longest work first.

    An item belongs to the smallest class that holds its rows, to the largest one if none does. With fixed splits all
    belong to the largest class of at most 64 rows: classes may differ in the last bit, and who shares an item must not
    show.

    Args:
        plan: the plan.
        class_rows: rows of each tile class, ascending.
        group: rows per query token.
    """
    rows = (plan.item_q_end - plan.item_q_begin) * group
    sizes = np.asarray(class_rows)
    if plan.data[FIXED_SPLIT_FIELD]:
        item_class = np.full(plan.num_items, max(int((sizes <= 64).sum()) - 1, 0))
    else:
        item_class = np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)
    out = []
    for i, size in enumerate(class_rows):
        items = np.flatnonzero(item_class == i)
        tiles = -(-rows[items] // size)
        first = np.cumsum(tiles) - tiles
        task_item = np.repeat(items, tiles)
        task_tile = np.arange(len(task_item)) - np.repeat(first, tiles)
        out.append(np.stack([task_item, task_tile], axis=1).astype(np.int32))
    return out


def is_capturing(x: Tensor) -> bool:
    """Whether what is launched on the tensor's device goes into a CUDA graph now."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class StagedPlan:
    """The plan that a device holds now.

    A plan is recognised by identity, and `AttentionPlan.grow` by the position of its first row and by the chunks that
    were added: these are the only ways in which a plan may change once it was staged.
    """

    def __init__(self, device: torch.device, class_rows: Sequence[int], group: int) -> None:
        if len(class_rows) > kernels.MAX_CLASSES.value:
            raise ValueError(f"{len(class_rows)} tile classes, the kernels know {kernels.MAX_CLASSES.value}")
        self.array: Tensor = torch.zeros(4096, dtype=torch.int32, device=device)
        self.num_tasks: tuple[int, ...] = (0,) * len(class_rows)
        self._class_rows = tuple(class_rows)
        self._group = group
        self.frozen = False
        self._plan: AttentionPlan | None = None
        self._first_pos = self._added_chunks = 0

    def freeze(self) -> None:
        """A CUDA graph holds the address of the array from now on."""
        self.frozen = True

    def reserve(self, num_ints: int) -> None:
        """Make room, so that no later plan of at most this size moves the array.

        Raises:
            BackendError: a CUDA graph holds the address.
        """
        if num_ints > len(self.array):
            if self.frozen:
                have = len(self.array)
                raise BackendError(
                    f"the plan is {num_ints} numbers, a captured CUDA graph holds {have} (reserve plan_ints)"
                )
            self.array = torch.zeros(max(num_ints, 2 * len(self.array)), dtype=torch.int32, device=self.array.device)
            self._plan = None

    def stage(self, plan: AttentionPlan) -> None:
        """Bring the plan to the device unless it is there; on the current stream, without waiting.

        Raises:
            BackendError: a CUDA graph is being captured and the plan is not there yet, or does not fit a captured one.
        """
        first_pos = int(plan.row_pos[0]) if plan.num_rows else 0
        if plan is self._plan and first_pos == self._first_pos:
            return
        if is_capturing(self.array):
            raise BackendError("a CUDA graph is being captured and the plan is not on the device: stage it before")
        if plan is self._plan and first_pos > self._first_pos and plan.added_chunks == self._added_chunks:
            kernels.grow_kernel[(1,)](self.array, first_pos - self._first_pos, BLOCK=256)
        else:
            self._copy(plan)
        self._plan, self._first_pos, self._added_chunks = plan, first_pos, plan.added_chunks

    def _copy(self, plan: AttentionPlan) -> None:
        tasks = tasks_of(plan, self._class_rows, self._group)
        self.num_tasks = tuple(len(t) for t in tasks)
        flat = np.concatenate([_header(plan, tasks), plan.data, *[t.ravel() for t in tasks]])
        self.reserve(len(flat))
        if self.array.device.type == "cuda":
            # Pinned memory comes from torch's cache, which keeps it until the copy is done.
            host = torch.empty(len(flat), dtype=torch.int32, pin_memory=True)
            host.numpy()[:] = flat
        else:
            host = torch.from_numpy(flat)
        self.array[: len(flat)].copy_(host, non_blocking=True)


def _header(plan: AttentionPlan, tasks: Sequence[Int32Array]) -> Int32Array:
    size = int(kernels.HEADER_SIZE.value)
    header: NDArray[np.int32] = np.zeros(size, np.int32)
    header[kernels.NUM_ROWS.value] = plan.num_rows
    for field, section in (
        (kernels.ROW_POS, plan.row_pos),
        (kernels.WRITE_SLOT, plan.write_slot),
        (kernels.WRITE_OFFSET, plan.write_offset),
        (kernels.ROW_PARTIAL_INDPTR, plan.row_partial_indptr),
        (kernels.ROW_PARTIALS, plan.row_partials),
        (kernels.ITEM_Q_BEGIN, plan.item_q_begin),
        (kernels.ITEM_Q_END, plan.item_q_end),
        (kernels.ITEM_KV_BEGIN, plan.item_kv_begin),
        (kernels.ITEM_KV_LEN, plan.item_kv_len),
        (kernels.ITEM_PARTIAL, plan.item_partial),
        (kernels.ITEM_CHUNK_INDPTR, plan.item_chunk_indptr),
        (kernels.CHUNK_SLOTS, plan.chunk_slots),
        (kernels.TAIL_ITEMS, plan.tail_items),
    ):
        # The sections are views of one array, so their distance is their place in it; an empty one has no address.
        if len(section):
            header[field.value] = size + (section.ctypes.data - plan.data.ctypes.data) // 4
    place = size + len(plan.data)
    for i, task in enumerate(tasks):
        header[kernels.TASKS.value + 2 * i : kernels.TASKS.value + 2 * i + 2] = (len(task), place)
        place += task.size
    return header
