"""Replicas and routers on a virtual clock: the routing state of the live router over simulated replicas.

What a replica reports and stores reaches the routers later. `benchmarks/ours_routing_live.py --validate` compares a run
with a real server.
"""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from chunkserve.replica.protocol import ChunkDelta, RoutingReport

from .routing_state import RoutingState
from .simulated_replica import Job, SimConfig, SimRequest, SimulatedReplica


@dataclass(slots=True)
class SimResult:
    """What became of a workload. Times in virtual seconds, one entry per request that got so far."""

    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    finished_at_s: list[float] = field(default_factory=list)
    work_s: dict[str, float] = field(default_factory=dict)  # of each replica's prompts, each computed alone
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
        self.replicas: dict[str, SimulatedReplica] = {}
        self.jobs: dict[str, Job] = {}  # by position in the workload
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
        lost = [job for job in self.jobs.values() if job.replica is replica]
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
                self.replicas[name] = replica = SimulatedReplica(name, self)
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
        job = self.jobs[key] = Job(key, request, router)
        router.open(key, request.prompt_tokens, request.digests)
        self._send(job)

    def _send(self, job: Job) -> None:
        job.tries += 1
        request = job.request
        begin = self._stopwatch() if self._stopwatch else 0.0
        route = job.router.route(job.key, request.prompt_tokens, request.digests, request.output_tokens, self.now_s)
        if self._stopwatch:
            self.decision_s.append(self._stopwatch() - begin)
        for name in route.replicas:
            replica = self.replicas[name]
            if not replica.is_full:
                self.result.routed[name] += 1
                job.replica = replica
                job.router.rerouted(job.key, name, self.now_s)
                self.later(replica.enqueue, job)
                return
        self.result.rejected += 1
        self._over(job)

    def later(self, action: Callable[[Job], None], job: Job) -> None:
        """What is said of a job arrives at the other end."""
        if self.config.transit_s:
            self.after(self.config.transit_s, action, job)
        else:
            action(job)

    def has_first_token(self, job: Job) -> None:
        if job.is_over or job.first_s is not None:
            return
        job.first_s = self.now_s
        known = job.router.first_token(job.key, job.cached, self.now_s)
        self.result.stale_hits += known is not None and job.cached + self.config.chunk_size <= known[1]
        if job.request.is_timed:
            self.result.ttft_s.append(self.now_s - job.request.at_s)
            self.result.prompt_tokens += job.request.prompt_tokens
            self.result.cached_tokens += job.cached

    def has_finished(self, job: Job) -> None:
        if job.is_over:
            return
        assert job.first_s is not None
        self.result.finished_at_s.append(self.now_s)
        if job.request.output_tokens > 1 and job.request.is_timed:
            self.result.token_s.append((self.now_s - job.first_s) / (job.request.output_tokens - 1))
        self._over(job)

    def _over(self, job: Job) -> None:
        job.is_over = True
        self._open -= 1
        job.router.close(job.key)
        del self.jobs[job.key]

    def _report(self, replica: SimulatedReplica) -> None:
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
