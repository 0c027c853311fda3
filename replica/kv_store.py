"""The KV memory of one rank: all slots of all layers, taken at start."""

from collections.abc import Sequence

from chunkserve.kernels.dispatch import AttentionProblem, Backend, LayerKV

from .prefix_tree import Copy


class KVStore:
    """Sole owner of a rank's K and V.

    Args:
        backend: lays the chunks out, and writes them.
        problems: shapes, types and masks of each layer's attention.
        num_slots: size; `bytes_per_chunk` tells what a slot costs over all layers.
    """

    def __init__(self, backend: Backend, problems: Sequence[AttentionProblem], *, num_slots: int) -> None:
        self.backend = backend
        self.num_slots = num_slots
        self.layers: list[LayerKV] = [backend.allocate(problem, num_slots) for problem in problems]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy rows of partly matched chunks, in order, on every layer."""
        for copy in copies:
            for layer in self.layers:
                self.backend.copy_rows(layer, copy.src_slot, copy.dst_slot, copy.num_rows)


def bytes_per_chunk(problems: Sequence[AttentionProblem]) -> int:
    """K and V of one chunk on every layer, in bytes, for the heads of this rank."""
    return sum(problem.bytes_per_slot() for problem in problems)
