"""Turns of tenants in front of full replicas: shares, order, refusals, and counts that return to zero."""

import asyncio
import random
import re

import pytest

from chunkserve.deploy.fair_queue import FairQueue
from chunkserve.deploy.metrics import IngressMetrics
from chunkserve.replica.protocol import ReplicaOverloaded


class Work:
    """Requests that hold their turn until told; `served` has their tenants in the order of their turns."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.served: list[str] = []
        self._holds: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, tenant: str, *, tokens: int = 100, computed: int | None = None, sequences: int = 1) -> None:
        """A request is sent; `computed` is what it turns out to cost."""

        async def run() -> None:
            async with self.queue.turn(tenant, sequences=sequences, tokens=tokens) as turn:
                self.served.append(tenant)
                hold = asyncio.Event()
                self._holds.append(hold)
                await hold.wait()
                turn.tokens = tokens if computed is None else computed

        self.tasks.append(asyncio.create_task(run()))
        await _settle()

    async def end_one(self) -> None:
        self._holds.pop(0).set()
        await _settle()

    async def end_all(self) -> None:
        while self._holds:
            await self.end_one()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_nobody_waits_while_there_is_room() -> None:
    work = Work(FairQueue(capacity=3, max_waiting=0))
    for tenant in ("a", "a", "b"):
        await work.ask(tenant)
    assert work.served == ["a", "a", "b"]
    await work.end_all()
    assert work.queue.in_flight == work.queue.num_waiting == 0


async def test_a_flood_delays_others_by_what_runs_and_no_more() -> None:
    work = Work(FairQueue(capacity=1, max_waiting=100))
    for _ in range(20):
        await work.ask("flood")
    await work.ask("other")
    await work.ask("other")
    for _ in range(4):
        await work.end_one()
    # Both of the other's come among the first four that follow.
    assert work.served[:5].count("other") == 2
    await work.end_all()
    assert len(work.served) == 22


async def test_a_tenant_whose_prompts_are_cached_gets_more_turns() -> None:
    work = Work(FairQueue(capacity=1, max_waiting=100))
    for _ in range(30):
        await work.ask("cached", tokens=100, computed=10)
        await work.ask("new", tokens=100, computed=100)
    for _ in range(22):
        await work.end_one()
    counts = {tenant: work.served.count(tenant) for tenant in ("cached", "new")}
    assert counts["cached"] > 4 * counts["new"]
    await work.end_all()


async def test_a_tenant_that_was_away_saves_nothing_up() -> None:
    work = Work(FairQueue(capacity=1, max_waiting=100))
    await work.ask("late")
    await work.end_one()
    for _ in range(30):
        await work.ask("busy")
    for _ in range(20):
        await work.end_one()
    begin = len(work.served)
    for _ in range(10):
        await work.ask("late")
    for _ in range(8):
        await work.end_one()
    assert 3 <= work.served[begin:].count("late") <= 5
    await work.end_all()


async def test_a_full_queue_refuses_whoever_has_most_in_it() -> None:
    work = Work(FairQueue(capacity=1, max_waiting=3))
    for _ in range(4):
        await work.ask("flood")
    with pytest.raises(ReplicaOverloaded, match=r"3 requests wait for a replica; at most 3 \(max_waiting_requests\)"):
        async with work.queue.turn("flood", sequences=1, tokens=1):
            pass
    await work.ask("other")
    with pytest.raises(ReplicaOverloaded, match="this tenant has the most of them"):
        await work.tasks[3]
    await work.end_all()
    assert sorted(work.served) == ["flood", "flood", "flood", "other"]
    assert work.queue.in_flight == work.queue.num_waiting == 0


async def test_a_request_of_more_sequences_than_fit_runs_alone() -> None:
    work = Work(FairQueue(capacity=2, max_waiting=10))
    await work.ask("a")
    await work.ask("a", sequences=5)
    await work.ask("b")
    assert work.served == ["a", "b"]
    await work.end_all()
    assert work.served == ["a", "b", "a"]


async def test_what_tenants_got_is_seen_without_their_names() -> None:
    queue = FairQueue(capacity=4, max_waiting=10)
    metrics = IngressMetrics("toy")
    metrics.watch_queue(queue)
    for number in range(30):
        async with queue.turn(f"tenant {number}", sequences=1, tokens=100) as turn:
            turn.tokens = 100 * (number + 1)
    async with queue.turn("tenant 29", sequences=1, tokens=100):
        pass
    text = metrics.text({}).decode()
    served = dict(
        re.findall(r'^chunkserve_tenant_served_tokens_total{model="toy",tenant="(\w{8})"} (\S+)$', text, re.M)
    )
    deficit = dict(re.findall(r'^chunkserve_tenant_deficit{model="toy",tenant="(\w{8})"} (\S+)$', text, re.M))
    assert sorted(map(float, served.values()))[-2:] == [2900.0, 3100.0]
    assert len(served) == len(deficit) == 20
    assert "tenant 29" not in text
    assert min(map(float, deficit.values())) == 0.0
    assert max(map(float, deficit.values())) > 0.0
    tokens = [100 * (number + 1) for number in range(29)] + [3100]
    jain = sum(tokens) ** 2 / (30 * sum(number**2 for number in tokens))
    assert f'chunkserve_jain_index{{model="toy"}} {jain}' in text


async def test_names_as_many_as_requests_are_forgotten() -> None:
    queue = FairQueue(capacity=2, max_waiting=10)
    for number in range(5000):
        async with queue.turn(f"{number}", sequences=1, tokens=10):
            pass
    assert len(queue._tenants) <= 1024


async def test_counts_return_to_zero_whatever_is_cancelled_when() -> None:
    draw = random.Random(0)
    queue = FairQueue(capacity=4, max_waiting=30)
    refused = finished = 0

    async def run(tenant: str, sequences: int) -> None:
        nonlocal refused, finished
        try:
            async with queue.turn(tenant, sequences=sequences, tokens=draw.randrange(1, 100)) as turn:
                await asyncio.sleep(draw.random() * 0.003)
                turn.tokens = draw.randrange(1, 200)
            finished += 1
        except ReplicaOverloaded:
            refused += 1

    tasks = []
    for _ in range(600):
        tasks.append(asyncio.create_task(run(draw.choice("abcd"), draw.choice((1, 1, 1, 3)))))
        if draw.random() < 0.3:
            draw.choice(tasks).cancel()
        if draw.random() < 0.3:
            await asyncio.sleep(draw.random() * 0.002)
        assert queue.in_flight <= 4
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    cancelled = sum(result is not None for result in results)
    assert refused + finished + cancelled == 600
    assert min(refused, finished, cancelled) > 10
    assert queue.in_flight == queue.num_waiting == 0
    assert all(tenant.is_idle for tenant in queue._tenants.values())
