"""What every rank of a replica does in a step: schedule, plan, run, sample, commit. Equal inputs give equal steps."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from chunkserve.kernels.plan import AttentionPlan, PlanOptions

from .planner import Planner
from .protocol import FinishReason
from .rank_sync import RankSync
from .sampler import Adjustment, Sampled, SampleRow, sample
from .scheduler import Batch, Scheduler
from .sequence import Sequence


class Runner(Protocol):
    """Computes a step; see ModelRunner."""

    def run(self, batch: Batch, plan: AttentionPlan) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A step that is computed.

    sampled: the next token of each sequence that has one, in the batch's order.
    ended: those among them that have ended with it, and why.
    """

    batch: Batch
    sampled: dict[Sequence, Sampled]
    ended: dict[Sequence, FinishReason] = field(default_factory=dict)


class StepCore:
    """Scheduler, plan, model and sampler of one rank.

    Args:
        scheduler: owns the sequences.
        runner: computes.
        plan: how steps are cut into work items.
        eos_token_ids: end a completion.
        sync: where the replica has several ranks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        plan: PlanOptions,
        eos_token_ids: frozenset[int],
        sync: RankSync | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.num_steps = 0
        self._runner = runner
        self._planner = Planner(scheduler.tree.chunk_size, plan)
        self._eos_token_ids = eos_token_ids
        self._sync = sync
        self._sequences: dict[int, Sequence] = {}  # by arrival; those that have not ended

    def join(self, sequences: Iterable[Sequence]) -> None:
        """They wait for their turn."""
        for sequence in sequences:
            self._sequences[sequence.arrival] = sequence
            self.scheduler.add(sequence)

    def leave(self, arrival: int) -> None:
        """A sequence goes, wherever it is; nothing happens if it has ended."""
        sequence = self._sequences.pop(arrival, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    def compute(self) -> Outcome | None:
        """One step; nothing is committed yet. None if there is nothing to compute."""
        batch = self.scheduler.schedule()
        if batch is None:
            assert not self.scheduler.waiting, "sequences wait, and nothing runs that they could wait for"
            return None
        if self._sync is not None:
            self._sync.begin_step(batch)
        plan = self._planner.plan(batch)
        logits = self._runner.run(batch, plan)
        if self._sync is not None:
            self._sync.end_step()
        sequences = [row.sequence for row in batch.rows if row.samples]
        chosen = sample(logits, [_sample_row(sequence) for sequence in sequences]) if sequences else []
        sampled = dict(zip(sequences, chosen, strict=True))
        reasons = {sequence: self._end(sequence, one.token_id) for sequence, one in sampled.items()}
        ended = {sequence: reason for sequence, reason in reasons.items() if reason is not None}
        return Outcome(batch=batch, sampled=sampled, ended=ended)

    def settle(self, outcome: Outcome) -> None:
        """K and V and tokens of a step are there for others; what has ended is out."""
        tokens = {s: one.token_id for s, one in outcome.sampled.items() if one.token_id is not None}
        self.scheduler.commit(outcome.batch, tokens)
        for sequence, token_id in tokens.items():
            if sequence.grammar is not None:
                sequence.grammar.accept(token_id)
        for sequence, reason in outcome.ended.items():
            sequence.finish_reason = reason
            self.leave(sequence.arrival)
        if self._sync is not None:
            self._sync.note_sampled([-1 if one.token_id is None else one.token_id for one in outcome.sampled.values()])
        self.num_steps += 1

    def _end(self, sequence: Sequence, token_id: int | None) -> FinishReason | None:
        """Whether a new token is the last one."""
        if token_id is None:
            return "error"
        params = sequence.request.sampling
        if token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos):
            return "stop"
        return "length" if sequence.num_generated + 1 >= params.max_tokens else None


def _sample_row(sequence: Sequence) -> SampleRow:
    params = sequence.request.sampling
    return SampleRow(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=sequence.seed,
        position=len(sequence.token_ids),
        logprobs=params.logprobs,
        adjustment=_adjustment(sequence),
        grammar=sequence.grammar,
    )


def _adjustment(sequence: Sequence) -> Adjustment | None:
    params, counts = sequence.request.sampling, sequence.counts
    if counts is None and not params.logit_bias:
        return None
    if counts is not None:
        counts.follow(sequence.token_ids)
    return Adjustment(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        counts=counts,
    )
