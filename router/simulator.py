"""Replicas and routers on a virtual clock: the routing state of the live router over a simple model of the engine.

The engine's model: prompts are computed first come, first served, in steps with a token budget; a running stream gets
a token per step; chunks are kept in an LRU cache; what a replica reports and stores reaches the routers later. It knows
no partly matched chunks, no memory of running streams and no preemption.
"""

import heapq
import itertools
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from chunkserve.replica.protocol import ChunkDelta, RoutingReport, StepTime

from .policy import PolicyOptions
from .routing_state import RoutingState


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """A request of a workload. digests: of its full chunks; equal ones mean equal prefixes."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The simulated cluster.

    chunk_size: tokens per digest. chunks_per_replica: size of each cache.
    step, max_step_tokens: how long the engines' steps take, and how many tokens one has.
    decode_token_s: fixed seconds per output token; None takes them from `step`.
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
    decode_token_s: float | None = None
    max_waiting: int = 1_000_000
    report_period_s: float = 0.5
    report_delay_s: float = 0.05
    num_routers: int = 1
    options: PolicyOptions = field(default_factory=PolicyOptions)
    max_entries: int = 1_000_000
    seed: int = 0


@dataclass(slots=True)
class SimResult:
    """What became of a workload. Times in virtual seconds, one entry per request that got so far."""

    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    finished_at_s: list[float] = field(default_factory=list)
    work_s: dict[str, float] = field(default_factory=dict)  # computing prompts, per replica
    routed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stale_hits: int = 0
    rejected: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def max_over_mean_work(self) -> float:
        work = list(self.work_s.values())
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    @property
    def ttft_s_mean(self) -> float:
        return sum(self.ttft_s) / max(1, len(self.ttft_s))

    def ttft_s_at(self, share: float) -> float:
        """A quantile of the time to the first token."""
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


@dataclass(slots=True, eq=False)
class _Job:
    key: str
    request: SimRequest
    router: RoutingState
    replica: "_Replica | None" = None
    queued_s: float = 0.0  # its part of the replica's backlog
    first_s: float | None = None
    cached: int = 0
    tries: int = 0
    is_over: bool = False


class _Replica:
    """One engine."""

    def __init__(self, name: str, sim: "Simulator") -> None:
        self.name = name
        self.sim = sim
        self.config = sim.config
        self.cache: OrderedDict[bytes, bytes | None] = OrderedDict()  # digest -> parent, least recently used first
        self.queue: deque[_Job] = deque()
        self.coming: Counter[bytes] = Counter()  # chunks of queued prompts
        self.current: _Job | None = None
        self.current_until_s = 0.0
        self.queued_s = 0.0
        self.running: set[_Job] = set()
        self.mixed_s = 0.0  # time spent in steps that computed prompts, in which decoding is slowed down
        self.epoch = 0
        self.sequence = 0
        self.changes: list[tuple[bytes, bytes | None, bool]] = []
        self.is_alive = True
        self.is_draining = False

    def enqueue(self, job: _Job) -> bool:
        if len(self.queue) >= self.config.max_waiting:
            return False
        cached = self._depth(job.request, self.coming) * self.config.chunk_size
        job.queued_s = self._prefill_s(job.request, min(cached, job.request.prompt_tokens - 1))
        self.queued_s += job.queued_s
        self.coming.update(job.request.digests)
        self.queue.append(job)
        job.replica = self
        if self.current is None:
            self._start()
        return True

    def report(self, now_s: float) -> RoutingReport:
        left_s = max(0.0, self.current_until_s - now_s) if self.current else 0.0
        return RoutingReport(
            epoch=self.epoch,
            taken_at_s=now_s,
            backlog_s=self.queued_s + left_s,
            running_sequences=len(self.running),
            waiting_sequences=len(self.queue) + (self.current is not None),
            chunks_total=self.config.chunks_per_replica,
            chunks_in_use=0,
            chunks_retained=len(self.cache),
            step=self.config.step,
            max_step_tokens=self.config.max_step_tokens,
            chunk_identity="simulated",
            draining=self.is_draining,
        )

    def delta(self) -> ChunkDelta:
        changes, self.changes = tuple(self.changes), []
        self.sequence += len(changes)
        return ChunkDelta(epoch=self.epoch, sequence=self.sequence, is_snapshot=False, changes=changes)

    def clear(self) -> None:
        """Lose all chunks, as when weights are loaded anew."""
        self.cache.clear()
        self.changes.clear()
        self.epoch += 1
        self.sequence = 0

    def abandon(self, job: _Job) -> None:
        """A client went away."""
        if job in self.running:
            self.running.discard(job)
        elif job is not self.current and job in self.queue:
            self.queue.remove(job)
            self._unqueue(job)

    def _start(self) -> None:
        if not self.queue or not self.is_alive:
            return
        job = self.queue.popleft()
        self._unqueue(job)
        tokens = self._depth(job.request) * self.config.chunk_size
        job.cached = min(tokens, job.request.prompt_tokens - 1)
        seconds = self._prefill_s(job.request, job.cached)
        self.current = job
        self.current_until_s = self.sim.now_s + seconds
        self.sim.after(seconds, self._prefilled, job, seconds, self.epoch)

    def _prefilled(self, job: _Job, seconds: float, epoch: int) -> None:
        if not self.is_alive:
            return
        self.current = None
        self.mixed_s += seconds
        self.sim.result.work_s[self.name] += seconds
        if epoch == self.epoch:
            self._keep(job.request.digests)
        if not job.is_over:
            self.running.add(job)
            self.sim.has_first_token(job)
            per_token_s = self._decode_step_s()
            self.sim.after((job.request.output_tokens - 1) * per_token_s, self._finished, job, self.mixed_s)
        self._start()

    def _finished(self, job: _Job, mixed_s: float) -> None:
        if job.is_over or not self.is_alive:
            return
        missed_s = (self.mixed_s - mixed_s) * self._slowdown()
        if missed_s > 1e-3:
            self.sim.after(missed_s, self._finished, job, self.mixed_s)
            return
        self.running.discard(job)
        self.sim.has_finished(job)

    def _prefill_s(self, request: SimRequest, cached: int) -> float:
        step, new = self.config.step, request.prompt_tokens - cached
        running = len(self.running) if self.config.decode_token_s is None else 0
        steps = math.ceil(new / max(1, self.config.max_step_tokens - running))
        context = cached + 0.5 * new
        return (step.fixed_s + step.per_sequence_s * running) * steps + (
            step.per_token_s + step.per_context_s * context
        ) * new

    def _decode_step_s(self) -> float:
        if self.config.decode_token_s is not None:
            return self.config.decode_token_s
        step = self.config.step
        return step.fixed_s + (step.per_token_s + step.per_sequence_s) * len(self.running)

    def _slowdown(self) -> float:
        """Share of the time in mixed steps that a decoding stream loses."""
        if self.config.decode_token_s is not None:
            return 0.0
        full_s = self._decode_step_s() + self.config.step.per_token_s * self.config.max_step_tokens
        return 1 - self._decode_step_s() / full_s

    def _depth(self, request: SimRequest, coming: Counter[bytes] | None = None) -> int:
        for depth, digest in enumerate(request.digests):
            if digest not in self.cache and (coming is None or not coming.get(digest)):
                return depth
        return len(request.digests)

    def _keep(self, digests: Sequence[bytes]) -> None:
        for parent, digest in itertools.pairwise((None, *digests)):
            assert digest is not None
            if digest not in self.cache:
                self.cache[digest] = parent
                self.changes.append((digest, parent, True))
        for digest in reversed(digests):  # the head is used last, and goes last
            self.cache.move_to_end(digest)
        while len(self.cache) > self.config.chunks_per_replica:
            gone, _ = self.cache.popitem(last=False)
            self.changes.append((gone, None, False))

    def _unqueue(self, job: _Job) -> None:
        self.queued_s = max(0.0, self.queued_s - job.queued_s) if self.queue else 0.0
        self.coming.subtract(job.request.digests)
        if not self.queue:
            self.coming.clear()


class Simulator:
    """One run. `at` schedules what else should happen; then `run`.

    Args:
        config: the cluster.
        stopwatch: real seconds, to time decisions with; None leaves that out.
    """

    def __init__(self, config: SimConfig, stopwatch: Callable[[], float] | None = None) -> None:
        self.config = config
        self.now_s = 0.0
        self.result = SimResult()
        self.decision_s: list[float] = []
        self.routers = [
            RoutingState(
                policy=config.policy,
                options=config.options,
                chunk_size=config.chunk_size,
                max_entries=config.max_entries,
                seed=config.seed * 1000 + i,
            )
            for i in range(config.num_routers)
        ]
        self.replicas: dict[str, _Replica] = {}
        self.jobs: dict[str, _Job] = {}  # by position in the workload
        self._stopwatch = stopwatch
        self._random = random.Random(config.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._tick = itertools.count()
        self._open = 0
        self._more_to_come = 0
        self._set_replicas([f"replica-{i}" for i in range(config.num_replicas)])

    # -- for scenarios -------------------------------------------------------------------------------------------------

    def at(self, time_s: float, action: Callable[..., None], *args: object) -> None:
        """Do something at a virtual time."""
        heapq.heappush(self._events, (time_s, next(self._tick), action, args))

    def after(self, seconds: float, action: Callable[..., None], *args: object) -> None:
        self.at(self.now_s + seconds, action, *args)

    def run(self, workload: Iterable[SimRequest]) -> SimResult:
        """Serve the workload to its end."""
        for number, request in enumerate(workload):
            self._more_to_come += 1
            self.at(request.at_s, self._arrive, f"request-{number}", request)
        while self._events:
            self.now_s, _, action, args = heapq.heappop(self._events)
            action(*args)
            if not self._open and not self._more_to_come:
                break
        return self.result

    def add_replica(self, name: str) -> None:
        self._set_replicas([*self.replicas, name])

    def kill_replica(self, name: str) -> None:
        """It dies: what has no first token goes elsewhere, once; streams are broken."""
        replica = self.replicas[name]
        replica.is_alive = False
        lost = [*([replica.current] if replica.current else []), *replica.queue, *replica.running]
        self._set_replicas([other for other in self.replicas if other != name])
        for job in lost:
            if job.is_over:
                continue
            if job.first_s is None and job.tries < 2 and self.replicas:
                self.result.retried += 1
                self._send(job)
            else:
                self.result.failed += 1
                self._over(job)

    def drain_replica(self, name: str) -> None:
        self.replicas[name].is_draining = True

    def clear_replica(self, name: str) -> None:
        self.replicas[name].clear()

    def cancel(self, key: str) -> None:
        """The client of a request goes away."""
        job = self.jobs.get(key)
        if job is None or job.is_over:
            return
        self.result.cancelled += 1
        if job.replica is not None:
            job.replica.abandon(job)
        self._over(job)

    # -- what happens --------------------------------------------------------------------------------------------------

    def _set_replicas(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.replicas:
                self.replicas[name] = replica = _Replica(name, self)
                self.result.work_s.setdefault(name, 0.0)
                # Not all at once.
                self.after(self._random.random() * self.config.report_period_s, self._report, replica)
        self.replicas = {name: self.replicas[name] for name in names}
        for router in self.routers:
            router.set_replicas(names, self.now_s)

    def _arrive(self, key: str, request: SimRequest) -> None:
        self._more_to_come -= 1
        self._open += 1
        router = self.routers[self._random.randrange(len(self.routers))]
        job = self.jobs[key] = _Job(key, request, router)
        router.open(key, request.prompt_tokens, request.digests)
        self._send(job)

    def _send(self, job: _Job) -> None:
        job.tries += 1
        request = job.request
        begin = self._stopwatch() if self._stopwatch else 0.0
        route = job.router.route(job.key, request.prompt_tokens, request.digests, request.output_tokens, self.now_s)
        if self._stopwatch:
            self.decision_s.append(self._stopwatch() - begin)
        for name in route.replicas:
            if self.replicas[name].enqueue(job):
                self.result.routed[name] += 1
                job.router.rerouted(job.key, name, self.now_s)
                return
        self.result.rejected += 1
        self._over(job)

    def has_first_token(self, job: _Job) -> None:
        job.first_s = self.now_s
        self.result.ttft_s.append(self.now_s - job.request.at_s)
        self.result.prompt_tokens += job.request.prompt_tokens
        self.result.cached_tokens += job.cached
        known = job.router.first_token(job.key, job.cached)
        self.result.stale_hits += known is not None and job.cached + self.config.chunk_size <= known[1]

    def has_finished(self, job: _Job) -> None:
        assert job.first_s is not None
        self.result.finished_at_s.append(self.now_s)
        if job.request.output_tokens > 1:
            self.result.token_s.append((self.now_s - job.first_s) / (job.request.output_tokens - 1))
        self._over(job)

    def _over(self, job: _Job) -> None:
        job.is_over = True
        self._open -= 1
        job.router.close(job.key)
        del self.jobs[job.key]

    def _report(self, replica: _Replica) -> None:
        if not replica.is_alive:
            return
        since = (replica.epoch, replica.sequence)
        report, delta = replica.report(self.now_s), replica.delta()
        self.after(self.config.report_delay_s, self._deliver, replica.name, report, since, delta)
        self.after(self.config.report_period_s, self._report, replica)

    def _deliver(self, name: str, report: RoutingReport, since: tuple[int, int], delta: ChunkDelta) -> None:
        for router in self.routers:
            router.report(name, report)
            router.apply(name, since, delta)
