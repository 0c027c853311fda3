"""What a replica tells routers: its chunks, its backlog in seconds, what its steps cost."""

import time
from collections.abc import Callable
from dataclasses import replace

from .chunk_hash import ChunkScheme
from .chunk_journal import ChunkJournal
from .prompt_counts import PromptCounts
from .protocol import Request, RoutingReport, StepTime
from .scheduler import Batch, Scheduler
from .step_fit import StepFit

_PERIOD_S = 0.1


class RoutingReporter:
    """Watches one engine from its thread; `report` and `journal.delta` may be called from any.

    Args:
        scheme: how chunks are named.
        max_step_tokens: of the engine.
        wall_clock: Unix time in seconds; routers compare it with theirs.
    """

    def __init__(
        self, scheme: ChunkScheme, *, max_step_tokens: int, wall_clock: Callable[[], float] = time.time
    ) -> None:
        # Nanoseconds tell restarts apart.
        self.journal = ChunkJournal(scheme, epoch=time.time_ns())
        self._fit = StepFit()
        self._max_step_tokens = max_step_tokens
        self._wall_clock = wall_clock
        self._digests: dict[str, tuple[bytes, ...]] = {}
        self._published_s = 0.0
        self._report: RoutingReport | None = None

    def begin(self, request: Request) -> None:
        """A request has come."""
        if request.prefix_cache:
            digests = self.journal.scheme.digests(request.cache_salt, request.prompt_token_ids)
            self._digests[request.request_id] = digests

    def end(self, request_id: str) -> None:
        """A request has ended."""
        self._digests.pop(request_id, None)

    def observe(self, batch: Batch, seconds: float) -> None:
        """A step took so long."""
        tokens = batch.num_tokens
        context = sum(row.num_tokens * (row.end - 0.5 * row.num_tokens) for row in batch.rows) / tokens
        self._fit.observe(max(seconds, 1e-6), tokens=tokens, context_tokens=context, sequences=len(batch.rows))

    def publish(self, scheduler: Scheduler, prompts: PromptCounts, *, now: bool = False) -> None:
        """Bring the report up to date, if it is old, or `now`; it stays the same as long as nothing but time passes."""
        at_s = self._wall_clock()
        if not now and at_s - self._published_s < _PERIOD_S:
            return
        self._published_s = at_s
        tree, step = scheduler.tree, self._fit.step
        report = RoutingReport(
            epoch=self.journal.epoch,
            sequence=self.journal.sequence,
            taken_at_s=at_s,
            backlog_s=round(self._backlog_s(scheduler, step), 3),
            running_sequences=len(scheduler.running),
            waiting_sequences=len(scheduler.waiting),
            chunks_total=tree.pool.num_slots,
            chunks_in_use=tree.num_nodes - tree.num_idle,
            chunks_retained=tree.num_idle,
            step=step,
            max_step_tokens=self._max_step_tokens,
            computed_tokens=prompts.computed_tokens,
            computed_steps=prompts.computed_steps,
            chunk_identity=self.journal.scheme.identity,
        )
        # Another report makes Serve tell all routers.
        if self._report is None or replace(self._report, taken_at_s=at_s) != report:
            self._report = report

    def report(self) -> RoutingReport | None:
        """The last report; None before the first."""
        return self._report

    def _backlog_s(self, scheduler: Scheduler, step: StepTime) -> float:
        started = sum(max(0, len(s.token_ids) - s.num_computed - 1) for s in scheduler.running)
        waiting = self.journal.uncached_tokens(
            (self._digests.get(s.request.request_id, ()), len(s.token_ids)) for s in scheduler.waiting
        )
        tokens = started + waiting
        # Streams that decode beside the prompts take their part of each step.
        decoding = step.per_sequence_s * len(scheduler.running)
        return tokens * step.per_token_s + tokens / self._max_step_tokens * (step.fixed_s + decoding)
