"""From a batch and its places in the tree to the plan that the kernels read. No torch."""

from chunkserve.kernels.plan import AttentionPlan, PlanOptions, build_plan

from .scheduler import Batch
from .sequence import Sequence


class Planner:
    """Builds a plan when the batch changes its structure; between changes it lets it grow (paper 3.3)."""

    def __init__(self, chunk_size: int, options: PlanOptions) -> None:
        self.chunk_size = chunk_size
        self.options = options
        self.num_built = 0
        self._plan: AttentionPlan | None = None
        self._sequences: list[Sequence] = []  # of the plan's rows

    def plan(self, batch: Batch) -> AttentionPlan:
        sequences = [row.sequence for row in batch.rows]
        if self._plan is not None and not batch.changed and sequences == self._sequences:
            slots = {i: sequences[i].slots[-1] for i in self._plan.full_sequences()}
            if self._plan.grow(slots):
                return self._plan
        self._sequences = sequences
        self._plan = build_plan(
            paths=[sequence.slots for sequence in sequences],
            kv_lens=[row.end for row in batch.rows],
            q_lens=[row.num_tokens for row in batch.rows],
            kv_present=[sequence.kv_present for sequence in sequences],
            chunk_size=self.chunk_size,
            options=self.options,
        )
        self.num_built += 1
        return self._plan
