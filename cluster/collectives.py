"""The collectives of a sharded model: sums of partial results, which carry the control rows, and gathered columns."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .control_rows import ControlRows
from .rank_group import RankGroup


class Collectives:
    """Counts what it does. A step is the same collectives with control rows and without.

    Args:
        group: the ranks.
        max_rows: rows of activations in the largest step.
        hidden_size: columns of activations.
        dtype: of activations.
        control: what rides on the all-reduces; None for a model without trees to keep equal.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        max_rows: int,
        hidden_size: int,
        dtype: torch.dtype = torch.float32,
        control: ControlRows | None = None,
    ) -> None:
        self.group = group
        self.control = control
        self._first = control.num_rows if control is not None else 0
        self._buffer = torch.zeros((self._first + max_rows, hidden_size), dtype=dtype, device=group.device)
        # Views are kept: making one takes as long as a small copy.
        self._carried = self._buffer[: self._first]
        self._whole = self._buffer[: self._first]
        self._rows = self._buffer[self._first : self._first]
        self._is_clean = True  # the carried rows are zero
        self._carrier = 0
        self._num_open = control.num_open if control is not None else 0
        self._guard: Callable[[], None] | None = None
        self.num_all_reduces = 0
        self.num_all_gathers = 0

    def begin_step(self, guard: Callable[[], None] | None = None) -> None:
        """The next all-reduce is the first of a step; the guard is called right before it, and may raise."""
        self._carrier = 0
        self._num_open = self.control.num_open if self.control is not None else 0
        self._guard = guard

    def rows(self, num_rows: int) -> Tensor:
        """[num_rows, hidden_size] for the partial results of the next `all_reduce`; overwritten by the one after it."""
        if len(self._rows) != num_rows:
            self._rows = self._buffer[self._first : self._first + num_rows]
        return self._rows

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum over ranks of what `rows` gave out; in place."""
        if self._guard is not None:
            self._guard()
            self._guard = None
        carrier = self._carrier
        self._carrier += 1
        if carrier < self._num_open:
            self._carry(carrier, partial)
        else:
            self.group.all_reduce(partial)
        self.num_all_reduces += 1
        return partial

    def _carry(self, carrier: int, partial: Tensor) -> None:
        assert self.control is not None, "no carrier is open without control rows"
        if len(self._whole) != self._first + len(partial):
            self._whole = self._buffer[: self._first + len(partial)]
        outgoing = self.control.outgoing(carrier)
        if outgoing is not None:
            self._carried.copy_(outgoing)
        elif not self._is_clean:
            self._carried.zero_()
        self.group.all_reduce(self._whole)
        self._is_clean = not self.control.incoming(carrier, self._carried) and outgoing is None

    def gather_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """[R, widths[rank]] of each rank -> [R, sum of widths]."""
        widest = max(widths)
        if part.shape[1] < widest:
            part = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = self.group.all_gather(part)
        self.num_all_gathers += 1
        return torch.cat([parts[rank, :, :width] for rank, width in enumerate(widths)], dim=1)
