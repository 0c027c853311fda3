"""How much work each replica has, in seconds, as one router knows it: reports, and its own requests since then."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chunkserve.replica.protocol import RoutingReport

# A report this old says nothing any more; what the router sent itself is all it has.
STALE_AFTER_S = 5.0
# A request that left the router this much before a report was taken had arrived by then.
_TRANSIT_S = 0.005
_US = 1_000_000
# Work that was done so long ago counts 1 / e in `given`.
_DECAY_S = 60.0
# Before so many prompts little is known of what other routers send.
_FEW_STEPS = 4.0

# Arrays by row, all zero for a replica that nothing is known of.
_COLUMNS = (
    "_own_us", "_since_us", "_in_flight", "_sent_since", "_new_steps", "_backlog_s", "_taken_s", "_reported_count",
)  # fmt: skip


@dataclass(slots=True)
class _Reservation:
    row: int
    at_s: float
    work_us: int
    anchor: bytes
    tokens: int
    steps: int
    is_prefilled: bool = False
    is_reported: bool = False


class LoadTable:
    """Work per replica, by row. Sums are whole microseconds, so that they return to exactly zero.

    Times are seconds of one clock, the caller's; reports carry the same clock, up to its skew between machines.

    Invariants (see `check`): per row, open requests, work and sharers are the sums over the reservations.
    """

    def __init__(self) -> None:
        self._reports: dict[int, RoutingReport] = {}
        self._open: dict[str, _Reservation] = {}
        self._since: dict[int, dict[str, _Reservation]] = {}  # not in the last report, oldest first
        self._sharers: defaultdict[bytes, Counter[int]] = defaultdict(Counter)  # by anchor and row
        self._size = 0
        self._own_us = np.zeros(0, np.int64)  # prompts of ours without a first token
        self._since_us = np.zeros(0, np.int64)  # of those, sent after the last report
        self._in_flight = np.zeros(0, np.int64)  # requests of ours
        self._sent_since = np.zeros(0, np.int64)  # of those, sent after the last report
        # Prompts computed, whoever sent them, decayed to _done_at_s: tokens and steps, since what those cost is learnt
        # as they come; and prompts that we sent after the last report, whatever became of them.
        self._done = np.zeros((2, 0))
        self._done_at_s = 0.0
        self._fresh = np.zeros((2, 0), np.int64)
        # Steps of prompts computed lately, and of those that we sent; the latter since each replica's last report.
        self._all_steps, self._own_steps = 0.0, 0.0
        self._new_steps = np.zeros(0, np.int64)
        self._backlog_s = np.zeros(0)
        self._taken_s = np.zeros(0)
        self._reported_count = np.zeros(0, np.int64)

    @property
    def num_open(self) -> int:
        """Requests that are reserved and not released."""
        return len(self._open)

    @property
    def scale(self) -> float:
        """What all routers send for each request of ours, by what was computed lately and what of it we sent.

        Between two reports we see our own requests only; others choose as we do, so theirs are taken to be like ours.
        """
        return max(1.0, (self._all_steps + _FEW_STEPS) / (self._own_steps + _FEW_STEPS))

    def report_of(self, row: int) -> RoutingReport | None:
        return self._reports.get(row)

    def add_replica(self, row: int) -> None:
        """A replica that nothing is known of."""
        if row >= self._size:
            self._grow(row + 1)
        self._since[row] = {}
        for name in _COLUMNS:
            getattr(self, name)[row] = 0
        # As much as the others: it is not to make up for what they did before it came.
        others = [other for other in self._since if other != row]
        self._done[:, row] = (self._done + self._fresh)[:, others].mean(axis=1) if others else 0.0
        self._fresh[:, row] = 0

    def remove_replica(self, row: int) -> None:
        """A replica is gone; its requests are released as their streams end."""
        for key, held in list(self._open.items()):
            if held.row == row:
                self._drop(key)
        self._reports.pop(row, None)
        self._since.pop(row)

    def reserve(
        self, key: str, row: int, work_s: float, now_s: float, anchor: bytes = b"", *, tokens: int = 0, steps: int = 0
    ) -> None:
        """A request goes to a replica; a second time it moves there.

        Args:
            key: the request's.
            row: the replica's.
            work_s: what its prompt adds to the replica's queue.
            now_s: when.
            anchor: requests with one anchor share a prefix while they run.
            tokens, steps: that the prompt makes the replica compute.
        """
        if (moved := self._open.get(key)) is not None and not moved.is_reported:
            self._fresh[:, moved.row] -= moved.tokens, moved.steps
        self._drop(key)
        held = _Reservation(row, now_s, max(0, round(work_s * _US)), anchor, tokens, steps)
        self._open[key] = held
        self._since[row][key] = held
        self._own_us[row] += held.work_us
        self._since_us[row] += held.work_us
        self._in_flight[row] += 1
        self._sent_since[row] += 1
        self._sharers[anchor][row] += 1
        self._fresh[:, row] += tokens, steps

    def row_of(self, key: str) -> int | None:
        held = self._open.get(key)
        return None if held is None else held.row

    def prefilled(self, key: str) -> None:
        """The request has its first token: its prompt waits no longer."""
        held = self._open.get(key)
        if held is None or held.is_prefilled:
            return
        held.is_prefilled = True
        self._new_steps[held.row] += held.steps
        self._own_us[held.row] -= held.work_us
        if not held.is_reported:
            self._since_us[held.row] -= held.work_us

    def release(self, key: str) -> None:
        """The request has ended, in whatever way. Nothing happens the second time."""
        self._drop(key)

    def report(self, row: int, report: RoutingReport) -> None:
        """A replica's word on its own load. Older ones than the last are ignored."""
        last = self._reports.get(row)
        if last is not None and report.taken_at_s <= last.taken_at_s:
            return
        self._reports[row] = report
        self._backlog_s[row] = report.backlog_s
        self._taken_s[row] = report.taken_at_s
        self._reported_count[row] = report.running_sequences + report.waiting_sequences
        self._add_done(row, last, report)
        since = self._since[row]
        for key, held in list(since.items()):
            if held.at_s > report.taken_at_s - _TRANSIT_S:
                break
            del since[key]
            held.is_reported = True
            self._sent_since[row] -= 1
            if not held.is_prefilled:
                self._since_us[row] -= held.work_us
        self._fresh[:, row] = sum(held.tokens for held in since.values()), sum(held.steps for held in since.values())

    def work_s(self, rows: NDArray[np.int64], now_s: float) -> NDArray[np.float64]:
        """[rows] seconds until each replica has computed all prompts that it has.

        What the replica said, less the time since, and what was sent since. Without a fresh report: what we sent that
        has no first token yet.
        """
        age_s = now_s - self._taken_s[rows]
        left_s = np.maximum(self._backlog_s[rows] - np.maximum(age_s, 0.0), 0.0)
        told_s = left_s + self.scale * self._since_us[rows] / _US
        return np.where(age_s <= STALE_AFTER_S, told_s, self._own_us[rows] / _US)

    def given(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """What prompts each replica was given lately, by all routers: tokens and steps, of what it has computed, the
        older the less, and of what we have sent since it last reported; and its backlog then, in seconds. [rows] each.
        """
        tokens, steps = self._done[:, rows] + self.scale * self._fresh[:, rows]
        return tokens, steps, self._backlog_s[rows]

    def num_requests(self, rows: NDArray[np.int64], now_s: float) -> NDArray[np.int64]:
        """[rows] requests that each replica has."""
        fresh = now_s - self._taken_s[rows] <= STALE_AFTER_S
        sent = np.rint(self.scale * self._sent_since[rows]).astype(np.int64)
        return np.maximum(np.where(fresh, self._reported_count[rows], 0) + sent, self._in_flight[rows])

    def num_sharers(self, rows: NDArray[np.int64], anchor: bytes) -> NDArray[np.int64]:
        """[rows] open requests of ours with this anchor."""
        counts = np.zeros(self._size, np.int64)
        for row, count in self._sharers.get(anchor, {}).items():
            counts[row] = count
        return counts[rows]

    def hottest_anchor(self) -> tuple[bytes, int] | None:
        """The anchor that most open requests of ours have, and how many; None without any."""
        counts = ((sharers.total(), anchor) for anchor, sharers in self._sharers.items() if anchor)
        requests, anchor = max(counts, default=(0, b""))
        return (anchor, requests) if requests else None

    def _add_done(self, row: int, last: RoutingReport | None, report: RoutingReport) -> None:
        if report.taken_at_s > self._done_at_s:
            decay = math.exp((self._done_at_s - report.taken_at_s) / _DECAY_S)
            self._done *= decay
            self._all_steps *= decay
            self._own_steps *= decay
            self._done_at_s = report.taken_at_s
        if last is not None and last.epoch == report.epoch:
            steps = report.computed_steps - last.computed_steps
            self._done[:, row] += report.computed_tokens - last.computed_tokens, steps
            self._all_steps += steps
            self._own_steps += self._new_steps[row]
        self._new_steps[row] = 0

    def _drop(self, key: str) -> None:
        held = self._open.pop(key, None)
        if held is None:
            return
        row = held.row
        self._in_flight[row] -= 1
        if not held.is_prefilled:
            self._own_us[row] -= held.work_us
        if not held.is_reported:
            del self._since[row][key]
            self._sent_since[row] -= 1
            if not held.is_prefilled:
                self._since_us[row] -= held.work_us
        sharers = self._sharers[held.anchor]
        sharers[row] -= 1
        if not sharers[row]:
            del sharers[row]
        if not sharers:
            del self._sharers[held.anchor]

    def _grow(self, size: int) -> None:
        size = max(size, 2 * self._size)
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(size - len(column), column.dtype)]))
        for name in ("_done", "_fresh"):
            columns = getattr(self, name)
            setattr(self, name, np.pad(columns, ((0, 0), (0, size - columns.shape[1]))))
        self._size = size

    def check(self) -> None:
        """Assert the invariants; linear in the requests."""
        own = np.zeros((4, self._size), np.int64)
        for key, held in self._open.items():
            waits = 0 if held.is_prefilled else held.work_us
            new = not held.is_reported
            own[:, held.row] += (1, waits, new, waits * new)
            assert (key in self._since[held.row]) == new
        for name, sums in zip(("_in_flight", "_own_us", "_sent_since", "_since_us"), own, strict=True):
            assert np.array_equal(getattr(self, name), sums), f"{name} is not the sum over the requests"
        assert sum(sharers.total() for sharers in self._sharers.values()) == len(self._open)
