"""A replica on a virtual clock: a simple model of the engine.

It goes step by step, as replica/scheduler.py does: running streams take a token each, prompts the rest of the step's
budget, first come, first served, and those that wait for a prefix which is being computed are passed over. Chunks of
running sequences are held, others lie in an LRU cache. It knows no preemption, and of partly matched chunks only what a
request names (`head`).
"""

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chunkserve.replica.protocol import ChunkDelta, RoutingReport, StepTime

from .policy import PolicyOptions
from .routing_state import RoutingState

if TYPE_CHECKING:
    from .simulator import Simulator

# In place of a parent: no router hears of the chunk.
_PRIVATE = b"private"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """A request of a workload.

    digests: of its full chunks; equal ones mean equal prefixes.
    head, head_tokens: names its first tokens, up to where others with the same name part from it within a chunk; b"" if
        nothing is known of that.
    is_warmup: left out of the result.
    is_background: left out of its times and hits, but not of its work.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    digests: tuple[bytes, ...]
    head: bytes = b""
    head_tokens: int = 0
    is_warmup: bool = False
    is_background: bool = False

    @property
    def is_timed(self) -> bool:
        return not (self.is_warmup or self.is_background)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The simulated cluster.

    chunk_size: tokens per digest. chunks_per_replica: size of each cache.
    step, max_step_tokens: how long the engines' steps take, and how many tokens one has.
    max_running: sequences in a step.
    decode_token_s: fixed seconds per output token, which then takes no part in steps; None takes them from `step`.
    transit_s: from the router to the engine, and from the engine to the client.
    max_waiting: a replica refuses a request when so many wait.
    report_period_s, report_delay_s: how often replicas report and send deltas, and how long it takes to arrive.
    num_routers: requests go to them at random; each has its own state.
    prior: what routers believe of steps before the first report.
    """

    policy: str
    num_replicas: int
    chunk_size: int
    chunks_per_replica: int
    step: StepTime
    max_step_tokens: int = 512
    max_running: int = 64
    decode_token_s: float | None = None
    transit_s: float = 0.0
    max_waiting: int = 1_000_000
    report_period_s: float = 0.5
    report_delay_s: float = 0.05
    num_routers: int = 1
    options: PolicyOptions = field(default_factory=PolicyOptions)
    max_entries: int = 1_000_000
    seed: int = 0


@dataclass(slots=True, eq=False)
class Job:
    key: str
    request: SimRequest
    router: RoutingState
    replica: "SimulatedReplica | None" = None
    queued_tokens: int = 0  # its part of the replica's queue
    cached: int = 0
    computed: int = 0  # leading tokens of the prompt that are there
    num_stored: int = 0  # of its digests
    num_private: int = 0  # chunks beside its digests
    generated: int = 0
    first_s: float | None = None
    tries: int = 0
    is_over: bool = False

    @property
    def left(self) -> int:
        """Tokens of the prompt that are not computed."""
        return self.request.prompt_tokens - self.computed


@dataclass(slots=True, eq=False)
class _Steps:
    """What a replica is computing: one step, or several equal ones in which streams decode and nothing else happens.

    pieces: tokens of each prompt in it.
    """

    begin_s: float
    step_s: float
    count: int
    pieces: dict[Job, int]


class SimulatedReplica:
    """One engine; `sim` has the clock, and hears of first and last tokens."""

    def __init__(self, name: str, sim: "Simulator") -> None:
        self.name = name
        self.sim = sim
        self.config = sim.config
        # Digest -> parent, least recently used first; chunks that no router hears of have _PRIVATE.
        self.cache: OrderedDict[bytes, bytes | None] = OrderedDict()
        self.heads: set[bytes] = set()
        self.held: Counter[bytes] = Counter()  # chunks of running sequences
        self.pending: Counter[bytes] = Counter()  # of those, being computed; and heads
        self.reserved = 0  # chunks that running sequences will need beside those in the cache
        self.waiting: dict[Job, None] = {}  # in order of arrival
        self.coming: Counter[bytes] = Counter()  # chunks of waiting prompts
        self.queued_tokens = 0
        self.computed_tokens = self.computed_steps = 0  # of prompts
        self.running: dict[Job, None] = {}
        self.steps: _Steps | None = None
        self.epoch = 0
        self.sequence = 0
        self.changes: list[tuple[bytes, bytes | None, bool]] = []
        self.is_alive = True
        self.is_draining = False

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= self.config.max_waiting

    def enqueue(self, job: Job) -> None:
        if job.is_over or not self.is_alive or job.replica is not self:
            return
        request = job.request
        cached = self._depth(request, self.coming) * self.config.chunk_size
        job.queued_tokens = request.prompt_tokens - min(cached, request.prompt_tokens - 1)
        self.queued_tokens += job.queued_tokens
        self.coming.update(request.digests)
        self.waiting[job] = None
        if self.steps is None:
            self._begin()
        elif self.steps.count > 1:
            # Streams decode until one ends; with a newcomer no longer than the step that is under way.
            steps = self.steps
            passed = math.ceil((self.sim.now_s - steps.begin_s) / steps.step_s)
            self._schedule(steps.begin_s, steps.step_s, min(max(passed, 1), steps.count), steps.pieces)

    def report(self, now_s: float) -> RoutingReport:
        """As replica/reporter.py makes it."""
        step, per_step = self.config.step, self.config.max_step_tokens
        tokens = self.queued_tokens + sum(max(0, job.left - 1) for job in self.running)
        fixed_s = step.fixed_s + step.per_sequence_s * len(self.running)
        return RoutingReport(
            epoch=self.epoch,
            taken_at_s=now_s,
            backlog_s=tokens * step.per_token_s + tokens / per_step * fixed_s,
            running_sequences=len(self.running),
            waiting_sequences=len(self.waiting),
            chunks_total=self.config.chunks_per_replica,
            chunks_in_use=len(self.held) + self.reserved,
            chunks_retained=max(0, len(self.cache) - len(self.held)),
            step=step,
            max_step_tokens=per_step,
            computed_tokens=self.computed_tokens,
            computed_steps=self.computed_steps,
            chunk_identity="simulated",
            draining=self.is_draining,
        )

    def delta(self) -> ChunkDelta:
        changes, self.changes = tuple(self.changes), []
        self.sequence += len(changes)
        return ChunkDelta(epoch=self.epoch, sequence=self.sequence, is_snapshot=False, changes=changes)

    def clear(self) -> None:
        """Lose all chunks that nobody uses, as when weights are loaded anew."""
        for digest in [digest for digest in self.cache if digest not in self.held]:
            del self.cache[digest]
        self.heads.clear()
        self.changes.clear()
        self.epoch += 1
        self.sequence = 0

    def abandon(self, job: Job) -> None:
        """A client went away."""
        if job in self.waiting:
            self._unqueue(job)
        elif job in self.running:
            self._leave(job)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The next step: running sequences a token each, the rest of the budget for prompts in order of arrival."""
        config = self.config
        budget = config.max_step_tokens - len(self.running)
        pieces: dict[Job, int] = {}
        for job in self.running:
            if job.left:
                pieces[job] = min(job.left, 1 + budget)
                budget -= pieces[job] - 1
        for job in list(self.waiting):
            if budget <= 0 or len(self.running) >= config.max_running:
                break
            depth = self._depth(job.request)
            if self._waits(job.request, depth):
                continue
            if not self._join(job, depth):
                break
            pieces[job] = min(job.left, budget)
            budget -= pieces[job]
        if not self.running:
            return
        decoding = [job for job in self.running if job not in pieces]
        count = 1 if pieces else min(job.request.output_tokens - job.generated for job in decoding)
        step, tokens = config.step, len(decoding) + sum(pieces.values())
        seconds = step.fixed_s + step.per_token_s * tokens + step.per_sequence_s * len(self.running)
        if step.per_context_s:
            context = sum(job.request.prompt_tokens + job.generated + 0.5 * count for job in decoding)
            context += sum(size * (job.computed + 0.5 * size) for job, size in pieces.items())
            seconds += step.per_context_s * context
        self._schedule(self.sim.now_s, seconds, count, pieces)

    def _schedule(self, begin_s: float, step_s: float, count: int, pieces: dict[Job, int]) -> None:
        self.steps = steps = _Steps(begin_s, step_s, count, pieces)
        self.sim.at(max(self.sim.now_s, begin_s + count * step_s), self._end, steps)

    def _end(self, steps: _Steps) -> None:
        if self.steps is not steps or not self.is_alive:
            return
        self.steps = None
        for job in list(self.running):
            size = steps.pieces.get(job, 0)
            if size:
                job.computed += size
                self._store(job)
                self.computed_tokens += size
                if job.left:
                    continue
                self.computed_steps += math.ceil((job.computed - job.cached) / self.config.max_step_tokens)
                job.generated = 1
                self.sim.later(self.sim.has_first_token, job)
                if self.config.decode_token_s is not None:
                    self._leave(job)
                    self.sim.after(
                        (job.request.output_tokens - 1) * self.config.decode_token_s, self.sim.has_finished, job
                    )
                    continue
            else:
                job.generated += steps.count
            if job.generated >= job.request.output_tokens:
                self._leave(job)
                self.sim.later(self.sim.has_finished, job)
        self._begin()

    # -- chunks --------------------------------------------------------------------------------------------------------

    def _waits(self, request: SimRequest, depth: int) -> bool:
        """Whether what comes after the chunks that are there is being computed for another one."""
        if depth < len(request.digests) and request.digests[depth] in self.pending:
            return True
        return request.head in self.pending and depth == request.head_tokens // self.config.chunk_size

    def _join(self, job: Job, depth: int) -> bool:
        """Take the chunks that a sequence needs; False if they are not to be had now."""
        request, size = job.request, self.config.chunk_size
        private = max(0, -(-(request.prompt_tokens + request.output_tokens) // size) - len(request.digests))
        missing = [digest for digest in request.digests if digest not in self.cache]
        self.held.update(request.digests)
        if not self._make_room(len(missing) + private) and self.running:
            self._release(request.digests)
            return False
        cached = depth * size
        if request.head in self.heads and depth == request.head_tokens // size:
            cached = max(cached, request.head_tokens)
        self._unqueue(job)
        self.running[job] = None
        self.reserved += len(missing) + private
        job.num_private = private
        job.cached = job.computed = min(cached, request.prompt_tokens - 1)
        job.num_stored = depth
        if not request.is_warmup:
            self.sim.result.work_s[self.name] += self.config.step.prefill_s(
                job.left, job.cached, self.config.max_step_tokens
            )
        self.pending.update(request.digests[depth:])
        if request.head and request.head not in self.heads:
            self.pending[request.head] += 1
        return True

    def _store(self, job: Job) -> None:
        """The chunks that a prompt has computed are there for others."""
        request = job.request
        upto = min(job.computed // self.config.chunk_size, len(request.digests))
        for at in range(job.num_stored, upto):
            digest = request.digests[at]
            if digest not in self.cache:
                self.cache[digest] = parent = request.digests[at - 1] if at else None
                self.changes.append((digest, parent, True))
                self.reserved -= 1
            _take(self.pending, (digest,))
        job.num_stored = max(job.num_stored, upto)
        if request.head and job.computed >= request.head_tokens:
            self.heads.add(request.head)
            self.pending.pop(request.head, None)

    def _leave(self, job: Job) -> None:
        """A sequence is through, or given up; its chunks stay until others need the room."""
        request = job.request
        del self.running[job]
        self._release(request.digests)
        _take(self.pending, request.digests[job.num_stored :])
        if request.head and request.head not in self.heads:
            _take(self.pending, (request.head,))
        missing = sum(digest not in self.cache for digest in request.digests[job.num_stored :])
        self.reserved = max(0, self.reserved - job.num_private - missing) if self.running else 0
        for at in range(job.num_private):
            self.cache[f"{job.key} {at}".encode()] = _PRIVATE
        for digest in reversed(request.digests):  # the head is used last, and goes last
            if digest in self.cache:
                self.cache.move_to_end(digest)
        self._make_room(0)

    def _make_room(self, needed: int) -> bool:
        """Evict what was used least recently, as far as it must be; False if too much is held."""
        excess = len(self.cache) + self.reserved + needed - self.config.chunks_per_replica
        if excess <= 0:
            return True
        gone = list(itertools.islice((digest for digest in self.cache if digest not in self.held), excess))
        for digest in gone:
            if self.cache.pop(digest) != _PRIVATE:
                self.changes.append((digest, None, False))
        return len(gone) == excess

    def _release(self, digests: Sequence[bytes]) -> None:
        _take(self.held, digests)

    def _depth(self, request: SimRequest, coming: Counter[bytes] | None = None) -> int:
        for depth, digest in enumerate(request.digests):
            if digest not in self.cache and (coming is None or digest not in coming):
                return depth
        return len(request.digests)

    def _unqueue(self, job: Job) -> None:
        del self.waiting[job]
        self.queued_tokens -= job.queued_tokens
        _take(self.coming, job.request.digests)


def _take(counter: Counter[bytes], keys: Iterable[bytes]) -> None:
    """One less of each; at 0 it is gone."""
    for key in keys:
        if counter[key] > 1:
            counter[key] -= 1
        else:
            counter.pop(key, None)
