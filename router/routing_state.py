"""All that one router knows: index, loads, costs. Live router and simulator drive the same object."""

import logging
import math
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from chunkserve.replica.protocol import ChunkDelta, RoutingReport, StepTime

from .load_table import LoadTable
from .policy import POLICIES, Choice, ClusterView, PolicyError, PolicyOptions, Reason, RouteRequest, choose_replica
from .prefix_index import PrefixIndex, PrefixMatch
from .replica_arrays import Replica, ReplicaArrays, ReplicaView, has_measured
from .route_counters import HottestPrefix, RouteCounters, RouteSamples

logger = logging.getLogger(__name__)

# A belief in chunks that are to be computed lasts for the expected wait, and this much more.
_EXPECT_MARGIN_S = 5.0
_HEAD_TOKENS = 256
# So many prompts with full chunks should have left a trace in the index.
_ENOUGH_PROMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request goes: replicas' names, best first; what the first one is expected to hold, and why it."""

    replicas: tuple[str, ...]
    cached_tokens: int
    reason: Reason


@dataclass(slots=True)
class _Ticket:
    prompt_tokens: int
    digests: tuple[bytes, ...]
    replica: str | None = None
    predicted: int = 0
    reason: Reason | None = None
    routed_s: float = 0.0
    expected_s: float | None = None  # until the first token
    alternative_s: float | None = None  # on the best of the other replicas
    is_first_done: bool = False
    decision_s: float | None = None
    failed_on: tuple[str, ...] = ()


class RoutingState:
    """What a router knows and does, apart from talking. Safe to call from several threads.

    A request's life: `open`, `route` (again after a failure), `first_token`, `close`. A route for a request that is not
    open reserves nothing, so after `close` nothing of it is left, whatever came late.

    Args:
        policy: a name of POLICIES.
        options: their knobs.
        chunk_size: tokens per digest.
        chunk_identity: what replicas must report to be matched by chunks; None trusts all.
        max_entries: bound of the index.
        seed: of the draws.
    Raises:
        PolicyError: no such policy.
    """

    def __init__(
        self,
        *,
        policy: str,
        options: PolicyOptions | None = None,
        chunk_size: int,
        chunk_identity: str | None = None,
        max_entries: int = 1_000_000,
        seed: int | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise PolicyError(f"routing_policy is {policy!r}; expected one of {', '.join(POLICIES)}")
        self.policy = policy
        self.options = options or PolicyOptions()
        self.chunk_size = chunk_size
        self.index = PrefixIndex(max_entries)
        self.loads = LoadTable()
        self.counters = RouteCounters()
        self.samples = RouteSamples()
        self._chunk_identity = chunk_identity
        self._replicas: dict[str, Replica] = {}
        self._tickets: dict[str, _Ticket] = {}
        self._free_rows: list[int] = []
        self._num_rows = 0
        self._turn = 0
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._arrays: ReplicaArrays | None = None

    # -- replicas ------------------------------------------------------------------------------------------------------

    @property
    def replica_names(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    def set_replicas(self, names: Sequence[str], now_s: float) -> None:
        """These replicas are there now, and no others."""
        with self._lock:
            for name in set(self._replicas) - set(names):
                self.remove_replica(name)
            # All that are there at the start are equally new: nobody is held back then.
            is_start = not self._replicas
            for name in names:
                if name not in self._replicas:
                    self.add_replica(name, -np.inf if is_start else now_s)

    def add_replica(self, name: str, now_s: float) -> None:
        with self._lock:
            row = self._free_rows.pop() if self._free_rows else self._num_rows
            self._num_rows = max(self._num_rows, row + 1)
            seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
            self._replicas[name] = Replica(name, row, seed, now_s)
            self.index.add_replica(row)
            self.loads.add_replica(row)
            self._arrays = None

    def remove_replica(self, name: str) -> None:
        """A replica has died or left: its chunks and its load are forgotten at once."""
        with self._lock:
            replica = self._replicas.pop(name, None)
            if replica is None:
                return
            self.index.remove_replica(replica.row)
            self.loads.remove_replica(replica.row)
            self._free_rows.append(replica.row)
            self._arrays = None

    def report(self, name: str, report: RoutingReport) -> None:
        """A replica's report. A new epoch empties its part of the index; another chunk identity is not matched."""
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None or (replica.report and report.taken_at_s <= replica.report.taken_at_s):
                return
            self._enter_epoch(replica, report.epoch)
            trusted = self._chunk_identity in (None, report.chunk_identity)
            if replica.is_trusted and not trusted:
                logger.error(
                    "replica_mismatch replica=%s chunk_identity=%s expected=%s: routed by load only",
                    name, report.chunk_identity, self._chunk_identity,
                )  # fmt: skip
                self.index.clear_replica(replica.row)
            last = replica.report
            # Those that have measured nothing are taken to be like others that have, and draining ones are left out.
            if last is None or last.draining != report.draining or has_measured(last) != has_measured(report):
                self._arrays = None
            elif self._arrays is not None:
                self._arrays.update(name, report)
            replica.is_trusted = trusted
            replica.report = report
            replica.note_behind()
            self.loads.report(replica.row, report)

    def cursors(self) -> dict[str, tuple[int, int]]:
        """Epoch and sequence of the last delta of each replica that has made itself known: what to ask from."""
        with self._lock:
            return {r.name: (r.epoch, r.sequence) for r in self._replicas.values() if r.epoch is not None}

    @property
    def may_be_behind(self) -> bool:
        """Whether chunks may have changed since the last deltas: requests are open, or a replica has said so."""
        with self._lock:
            return bool(self._tickets) or any(r.behind_s is not None for r in self._replicas.values())

    def apply(self, name: str, since: tuple[int, int], delta: ChunkDelta) -> None:
        """Chunks that a replica stored and evicted since an earlier delta.

        Args:
            since: the cursor that it was asked with; a delta that does not continue ours is dropped.
        """
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None or not replica.is_trusted or since != (replica.epoch, replica.sequence):
                return
            self._enter_epoch(replica, delta.epoch)
            if delta.is_snapshot:
                self.counters.resyncs += 1
                if replica.sequence:
                    self.counters.gaps += 1
                    logger.warning("index_gap replica=%s sequence=%d", name, replica.sequence)
                self.index.clear_replica(replica.row)
            for digest, parent, is_stored in delta.changes:
                if is_stored:
                    self.index.store((digest,), replica.row, parent)
                else:
                    self.index.evict((digest,), replica.row)
            replica.sequence = delta.sequence
            replica.note_behind()

    # -- requests ------------------------------------------------------------------------------------------------------

    def open(self, key: str, prompt_tokens: int, digests: tuple[bytes, ...]) -> None:
        """A request is about to be sent."""
        with self._lock:
            self._tickets[key] = _Ticket(prompt_tokens, digests)

    def route(
        self,
        key: str,
        prompt_tokens: int,
        digests: Sequence[bytes],
        output_tokens: int,
        now_s: float,
        candidates: Sequence[str] | None = None,
    ) -> Route:
        """Choose, and count the request as sent to the first of the ranked replicas.

        Args:
            candidates: names of replicas that may be chosen; None is all. Unknown ones are left out.
        Raises:
            LookupError: there is no replica to choose.
        """
        with self._lock:
            arrays = self._columns() if candidates is None else self._subset(candidates)
            if not len(arrays.rows):
                raise LookupError("no replica to choose from")
            match = self.index.match(digests, now_s, self._num_rows)
            request = self._request(prompt_tokens, digests, output_tokens, match)
            view = self._view(request, arrays, match, now_s)
            choice = choose_replica(self.policy, request, view, self.options)
            return self._commit(key, digests, request, arrays, view, choice, now_s)

    def route_open(self, key: str, output_tokens: int, now_s: float, candidates: Sequence[str] | None = None) -> Route:
        """`route` for an open request, away from where it has failed before if there is any other replica.

        Raises:
            LookupError: it is not open, or there is no replica to choose.
        """
        with self._lock:
            ticket = self._tickets.get(key)
            if ticket is None:
                raise LookupError(f"request {key} is not open")
            names = self.replica_names if candidates is None else candidates
            if ticket.failed_on:
                names = [name for name in names if name not in ticket.failed_on] or names
            return self.route(key, ticket.prompt_tokens, ticket.digests, output_tokens, now_s, names)

    def failed(self, key: str) -> None:
        """The replica of an open request was lost; the next route goes elsewhere."""
        with self._lock:
            ticket = self._tickets.get(key)
            if ticket is not None and ticket.replica is not None:
                ticket.failed_on = (*ticket.failed_on, ticket.replica)
                self.counters.retries["after" if ticket.is_first_done else "before"] += 1
                ticket.is_first_done = False
                self.loads.release(key)

    def rerouted(self, key: str, name: str, now_s: float) -> None:
        """Serve sent an open request to another replica than the first of its ranks."""
        with self._lock:
            ticket, replica = self._tickets.get(key), self._replicas.get(name)
            if ticket is None or replica is None or ticket.replica == name:
                return
            ticket.replica = name
            ticket.expected_s = ticket.alternative_s = None
            match = self.index.match(ticket.digests, now_s, self._num_rows)
            ticket.predicted = min(int(match.depths[replica.row]) * self.chunk_size, ticket.prompt_tokens - 1)
            step = replica.report.step if replica.report else StepTime()
            tokens = ticket.prompt_tokens - ticket.predicted
            self.loads.reserve(key, replica.row, step.per_token_s * tokens, now_s, tokens=tokens, steps=1)
            if replica.is_trusted:
                self.index.expect(ticket.digests, replica.row, now_s + _EXPECT_MARGIN_S, now_s)

    def first_token(self, key: str, cached_tokens: int, now_s: float | None = None) -> tuple[str, int] | None:
        """The request's prompt is computed; cached_tokens of it had been there. None for now_s: nobody looks at times.

        Returns:
            The replica's name and the cached tokens predicted; None if nothing is known of the request.
        """
        with self._lock:
            ticket = self._tickets.get(key)
            if ticket is None or ticket.replica is None:
                return None
            if not ticket.is_first_done:
                ticket.is_first_done = True
                self.loads.prefilled(key)
                self._learn(ticket, cached_tokens)
                if now_s is not None:
                    self._compare_times(ticket, now_s - ticket.routed_s)
            return ticket.replica, ticket.predicted

    def _learn(self, ticket: _Ticket, cached_tokens: int) -> None:
        counters = self.counters
        counters.first_tokens += 1
        counters.chunked_first_tokens += bool(ticket.digests)
        counters.prompt_tokens += ticket.prompt_tokens
        counters.predicted_cached_tokens += ticket.predicted
        counters.actual_cached_tokens += cached_tokens
        counters.prediction_error_tokens += abs(cached_tokens - ticket.predicted)
        counters.stale_hits += cached_tokens + self.chunk_size <= ticket.predicted
        replica = self._replicas.get(ticket.replica or "")
        # Whatever was predicted: all of the prompt's chunks are there now.
        if replica is not None and replica.is_trusted:
            self.index.store(ticket.digests, replica.row)

    def _compare_times(self, ticket: _Ticket, actual_s: float) -> None:
        if ticket.expected_s is not None:
            self.counters.actual_s += actual_s
            self.counters.time_error_s += abs(actual_s - ticket.expected_s)
        if ticket.alternative_s is not None:
            self.samples.regret_s.append(max(0.0, actual_s - ticket.alternative_s))

    def decided(self, key: str, seconds: float) -> None:
        """Choosing for an open request took so long."""
        with self._lock:
            if (ticket := self._tickets.get(key)) is not None:
                ticket.decision_s = seconds
                self.samples.decision_s.append(seconds)

    def fault(self) -> None:
        """Our own code failed, and a request went by power of two choices."""
        with self._lock:
            self.counters.faults += 1
            self.counters.decisions["degraded"] = self.counters.decisions.get("degraded", 0) + 1

    def reason(self, key: str) -> Reason | None:
        """Why an open request went where it went; None if nothing is known of it."""
        ticket = self._tickets.get(key)
        return None if ticket is None else ticket.reason

    def decision_s(self, key: str) -> float | None:
        """How long the last choice for an open request took; None if nothing is known of it."""
        ticket = self._tickets.get(key)
        return None if ticket is None else ticket.decision_s

    def close(self, key: str) -> None:
        """The request has ended, in whatever way; a second time nothing happens."""
        with self._lock:
            self._tickets.pop(key, None)
            self.loads.release(key)

    def work_s(self, now_s: float) -> dict[str, float]:
        """Seconds of work by replica, as this router sees it."""
        return {name: view.queued_s for name, view in self.replica_views(now_s).items()}

    def replica_views(self, now_s: float) -> dict[str, ReplicaView]:
        """Each replica, as this router sees it."""
        with self._lock:
            replicas = list(self._replicas.values())
            rows = np.array([replica.row for replica in replicas], np.int64)
            seconds = self.loads.work_s(rows, now_s).tolist()
            return {
                replica.name: replica.view(work_s, now_s) for replica, work_s in zip(replicas, seconds, strict=True)
            }

    def hottest_prefix(self, now_s: float) -> HottestPrefix | None:
        """The one that most open requests gather around; None without any."""
        with self._lock:
            hottest = self.loads.hottest_anchor()
            if hottest is None:
                return None
            anchor, requests = hottest
            copies = int((self.index.match((anchor,), now_s, self._num_rows).depths > 0).sum())
            return HottestPrefix(copies=copies, share=requests / max(1, self.loads.num_open))

    @property
    def degraded(self) -> str | None:
        """Why prompts are routed as if nothing were cached anywhere; None if they are not."""
        if self._replicas and not any(replica.is_trusted for replica in self._replicas.values()):
            return "no replica names its chunks as this router does"
        if self.counters.chunked_first_tokens >= _ENOUGH_PROMPTS and not len(self.index):
            return f"nothing is known of the chunks of {self.counters.chunked_first_tokens} prompts"
        return None

    @property
    def num_open(self) -> int:
        """Requests that are open. When it is 0, `loads.num_open` is too."""
        return len(self._tickets)

    # -- inner ---------------------------------------------------------------------------------------------------------

    def _enter_epoch(self, replica: Replica, epoch: int) -> None:
        if replica.epoch == epoch:
            return
        if replica.epoch is not None:
            logger.info("replica_epoch replica=%s epoch=%d", replica.name, epoch)
            self.index.clear_replica(replica.row)
        replica.epoch = epoch
        replica.sequence = 0

    def _request(
        self, prompt_tokens: int, digests: Sequence[bytes], output_tokens: int, match: PrefixMatch
    ) -> RouteRequest:
        anchor = digests[min(match.num_common, len(digests) - 1)] if digests else b""
        head = digests[min(-(-_HEAD_TOKENS // self.chunk_size), len(digests)) - 1] if digests else b""
        return RouteRequest(prompt_tokens=prompt_tokens, output_tokens=output_tokens, anchor=anchor, head=head)

    def _view(self, request: RouteRequest, arrays: ReplicaArrays, match: PrefixMatch, now_s: float) -> ClusterView:
        rows = arrays.rows
        shares = request.anchor and self.options.cost.sharing_weight and arrays.has_context_cost
        return ClusterView(
            seeds=arrays.seeds,
            work_s=self.loads.work_s(rows, now_s),
            given_s=self._given_s(arrays),
            num_requests=self.loads.num_requests(rows, now_s),
            cached_tokens=np.minimum(match.depths[rows] * self.chunk_size, request.prompt_tokens - 1),
            num_sharers=self.loads.num_sharers(rows, request.anchor) if shares else arrays.zeros,
            free_tokens=arrays.free_tokens,
            age_s=now_s - arrays.joined_s,
            cost=arrays.cost,
            draw=self._random.getrandbits(64),
            turn=self._turn,
        )

    def _given_s(self, arrays: ReplicaArrays) -> NDArray[np.float64]:
        tokens, steps, backlog_s = self.loads.given(arrays.rows)
        return arrays.cost.compute_s(tokens, steps) + backlog_s

    def _commit(
        self,
        key: str,
        digests: Sequence[bytes],
        request: RouteRequest,
        arrays: ReplicaArrays,
        view: ClusterView,
        choice: Choice,
        now_s: float,
    ) -> Route:
        self._turn += 1
        first = choice.ranked[0]
        name, row = arrays.names[first], int(arrays.rows[first])
        cached = int(view.cached_tokens[first])
        ticket = self._tickets.get(key)
        if ticket is not None:
            prefill = view.cost.prefill_s(request.prompt_tokens, view.cached_tokens.astype(float))
            expected, prefill_s = view.work_s + prefill, float(prefill[first])
            ticket.replica, ticket.predicted, ticket.reason = name, cached, choice.reason
            ticket.routed_s, ticket.expected_s = now_s, float(expected[first])
            expected[first] = np.inf
            ticket.alternative_s = float(expected.min()) if len(expected) > 1 else None
            tokens = request.prompt_tokens - cached
            steps = math.ceil(tokens / float(view.cost.max_step_tokens[first]))
            self.loads.reserve(key, row, prefill_s, now_s, request.anchor, tokens=tokens, steps=steps)
            if self._replicas[name].is_trusted:
                until_s = now_s + 2 * (float(view.work_s[first]) + prefill_s) + _EXPECT_MARGIN_S
                self.index.expect(digests, row, until_s, now_s)
        self.counters.decisions[choice.reason] = self.counters.decisions.get(choice.reason, 0) + 1
        return Route(
            replicas=tuple(arrays.names[at] for at in choice.ranked), cached_tokens=cached, reason=choice.reason
        )

    def _columns(self) -> ReplicaArrays:
        if self._arrays is None:
            self._arrays = ReplicaArrays.of(list(self._replicas.values()), self.chunk_size)
        return self._arrays

    def _subset(self, candidates: Sequence[str]) -> ReplicaArrays:
        if len(candidates) == len(self._replicas) and all(name in self._replicas for name in candidates):
            return self._columns()
        return ReplicaArrays.of(
            [self._replicas[name] for name in candidates if name in self._replicas], self.chunk_size
        )

    def check(self) -> None:
        """Assert the invariants of index and loads."""
        with self._lock:
            self.index.check()
            self.loads.check()
            assert self.loads.num_open <= len(self._tickets), "work is reserved for a request that has ended"
