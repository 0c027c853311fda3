"""The replicas of a router, and what its policy reads of them as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chunkserve.replica.protocol import RoutingReport, StepTime

from .cost import CostModel


@dataclass(slots=True)
class Replica:
    """One replica, as a router knows it; the index and the load table have it under `row`.

    behind_s: since when it has reported changes to its chunks that are not known; None if all of them are.
    """

    name: str
    row: int
    seed: int
    joined_s: float
    report: RoutingReport | None = None
    is_trusted: bool = True
    epoch: int | None = None
    sequence: int = 0
    behind_s: float | None = None

    def note_behind(self) -> None:
        """After a report, or changes to chunks."""
        report = self.report
        if report is None or not self.is_trusted or report.epoch != self.epoch or report.sequence <= self.sequence:
            self.behind_s = None
        elif self.behind_s is None:
            self.behind_s = report.taken_at_s

    def view(self, queued_s: float, now_s: float) -> "ReplicaView":
        report = self.report
        return ReplicaView(
            queued_s=queued_s,
            is_trusted=self.is_trusted,
            kv_used_ratio=report.chunks_in_use / report.chunks_total if report else None,
            report_age_s=now_s - report.taken_at_s if report else None,
            index_lag_s=now_s - self.behind_s if self.behind_s is not None else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica, for people. queued_s: its work; None of what it has not reported."""

    queued_s: float
    is_trusted: bool
    kv_used_ratio: float | None
    report_age_s: float | None
    index_lag_s: float


def has_measured(report: RoutingReport) -> bool:
    """Whether a replica knows what its steps cost. Before it has made one it reports what everybody believes at first:
    next to replicas that have measured, that may look fast.
    """
    return report.step != StepTime()


class ReplicaArrays:
    """What of the replicas changes seldom, by position. Who has measured nothing is taken to be like one that has."""

    def __init__(self, replicas: Sequence[Replica], chunk_size: int) -> None:
        reports = [replica.report for replica in replicas if replica.report]
        like = next((report.step for report in reports if has_measured(report)), StepTime())
        self.chunk_size = chunk_size
        self.names = [replica.name for replica in replicas]
        self.rows = np.array([replica.row for replica in replicas], np.int64)
        self.zeros = np.zeros(len(replicas), np.int64)
        self.seeds = np.array([replica.seed for replica in replicas], np.uint64)
        self.joined_s = np.array([replica.joined_s for replica in replicas], np.float64)
        self.free_tokens = np.full(len(replicas), np.inf)
        self.cost = CostModel(
            fixed_s=np.full(len(replicas), like.fixed_s),
            per_token_s=np.full(len(replicas), like.per_token_s),
            per_context_s=np.full(len(replicas), like.per_context_s),
            per_sequence_s=np.full(len(replicas), like.per_sequence_s),
            max_step_tokens=np.full(len(replicas), np.inf),
        )
        self.has_context_cost = like.per_context_s > 0
        self._at = {name: at for at, name in enumerate(self.names)}
        for replica in replicas:
            if replica.report:
                self.update(replica.name, replica.report)

    @classmethod
    def of(cls, replicas: Sequence[Replica], chunk_size: int) -> "ReplicaArrays":
        """Draining replicas are left out while there are others."""
        staying = [replica for replica in replicas if not (replica.report and replica.report.draining)]
        return cls(staying or replicas, chunk_size)

    def update(self, name: str, report: RoutingReport) -> None:
        """A replica's new report; thousands of them come between two decisions, so nothing is built anew."""
        at = self._at.get(name)
        if at is None:
            return
        cost, step = self.cost, report.step
        if has_measured(report):
            cost.fixed_s[at], cost.per_token_s[at] = step.fixed_s, step.per_token_s
            cost.per_context_s[at], cost.per_sequence_s[at] = step.per_context_s, step.per_sequence_s
            self.has_context_cost |= step.per_context_s > 0
        cost.max_step_tokens[at] = report.max_step_tokens
        free = report.chunks_total - report.chunks_in_use - report.chunks_retained
        self.free_tokens[at] = self.chunk_size * free
