"""What a router counts comes back to exactly zero, however requests end; retries, deaths and drains on the way.

Engines, feeds, client and router are real; the model is not, and Ray is not there. With Ray: tests/router.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest

from chunkserve.deploy.generation import ReplicaLost
from chunkserve.replica.protocol import Request, SamplingParams, StepTime
from chunkserve.replica.tokenizer import Tokenizer
from chunkserve.router.routing_state import RoutingState

from .in_process_cluster import CHUNK, Cluster, replica_name

pytestmark = pytest.mark.model


@pytest.fixture
async def make(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Cluster]]:
    monkeypatch.setattr("chunkserve.replica.replica_actor._replica_name", replica_name.get)
    clusters: list[Cluster] = []

    def make(*names: str, step: StepTime | None = None) -> Cluster:
        clusters.append(Cluster(tokenizer, names, step))
        return clusters[-1]

    yield make
    for cluster in clusters:
        await cluster.close()


def request(name: str, prompt: int, *, chunks: int = 3, max_tokens: int = 8, n: int = 1) -> Request:
    ids = tuple(1000 + prompt * 37 + at for at in range(chunks * CHUNK + 5))
    return Request(
        request_id=name,
        prompt_token_ids=ids,
        n=n,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
    )


async def tokens(cluster: Cluster, request: Request) -> list[int]:
    """All tokens of a request that goes well."""
    return [token async for events in cluster.client.generate(request) for e in events for token in e.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def assert_zero(state: RoutingState) -> None:
    state.check()
    assert state.num_open == state.loads.num_open == 0
    assert not any(getattr(state.loads, name).any() for name in ("_own_us", "_since_us", "_in_flight", "_sent_since"))
    assert not state.loads._sharers


async def test_disconnects_in_prefill_and_in_decode_leave_nothing(make: Callable[..., Cluster]) -> None:
    cluster = make("a", "b", step=StepTime(fixed_s=0.02, per_token_s=1e-3))
    in_prefill = asyncio.create_task(tokens(cluster, request("prefill", 1, chunks=40)))
    await until(lambda: cluster.state.loads.num_open == 1)
    assert sum(cluster.state.work_s(0.0).values()) > 0
    in_prefill.cancel()
    async with aclosing(cluster.client.generate(request("decode", 2, max_tokens=1000))) as stream:
        await anext(stream)
        assert cluster.state.num_open >= 1
    with pytest.raises(asyncio.CancelledError):
        await in_prefill
    assert_zero(cluster.state)
    # The engines hear of it too.
    await until(lambda: not any(r.engine.load().running_sequences for r in cluster.replicas.values()))
    assert sum(r.engine.load().cancelled_requests for r in cluster.replicas.values()) == 2


async def test_a_death_before_the_first_token_is_retried_once_elsewhere_under_the_same_id(
    make: Callable[..., Cluster],
) -> None:
    cluster = make("a", "b", step=StepTime(fixed_s=0.05, per_token_s=0.0))
    wanted = await tokens(make("alone"), request("r", 1))
    running = asyncio.create_task(tokens(cluster, request("r", 1)))
    await until(lambda: len(cluster.sent) == 1)
    await asyncio.sleep(0.01)
    cluster.kill(cluster.sent[0][1])
    assert await running == wanted, "every token once, from the first on"
    assert [name for name, _ in cluster.sent] == ["r", "r"]
    assert len({replica for _, replica in cluster.sent}) == 2
    assert_zero(cluster.state)


async def test_a_second_death_is_told_and_not_retried(make: Callable[..., Cluster]) -> None:
    cluster = make("a", "b", "c", step=StepTime(fixed_s=0.5, per_token_s=0.0))
    running = asyncio.create_task(tokens(cluster, request("r", 1)))
    for tries in (1, 2):
        await until(lambda tries=tries: len(cluster.sent) == tries)
        await asyncio.sleep(0.01)
        cluster.kill(cluster.sent[-1][1])
    with pytest.raises(ReplicaLost):
        await running
    assert len(cluster.sent) == 2
    assert_zero(cluster.state)


async def test_a_death_after_the_first_token_is_told_and_nothing_begins_again(make: Callable[..., Cluster]) -> None:
    cluster = make("a", "b", step=StepTime(fixed_s=0.02, per_token_s=0.0))
    got: list[int] = []

    async def take() -> None:
        async for events in cluster.client.generate(request("r", 1, max_tokens=200)):
            got.extend(token for event in events for token in event.token_ids)

    running = asyncio.create_task(take())
    await until(lambda: len(got) >= 2)
    cluster.kill(cluster.sent[0][1])
    with pytest.raises(ReplicaLost):
        await running
    assert len(cluster.sent) == 1
    assert len(got) < 200
    assert_zero(cluster.state)


@pytest.mark.parametrize("how", ["killed", "engine fails"])
async def test_what_may_begin_anew_does_so_once_elsewhere(make: Callable[..., Cluster], how: str) -> None:
    """Of a whole answer the client has seen nothing, whenever its replica is lost."""
    wanted = await tokens(make("alone"), request("r", 1, max_tokens=60))
    cluster = make("a", "b", "c", step=StepTime(fixed_s=0.02, per_token_s=0.0))
    got: list[int] = []

    async def take() -> None:
        async for events in cluster.client.generate(request("r", 1, max_tokens=60), None, got.clear):
            got.extend(token for event in events for token in event.token_ids)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no more")

    def lose() -> None:
        name = cluster.sent[-1][1]
        if how == "killed":
            cluster.kill(name)
        else:
            cluster.replicas[name].engine._core._runner.run = fail  # type: ignore[method-assign]

    running = asyncio.create_task(take())
    await until(lambda: len(got) >= 2)
    lose()
    await running
    assert got == wanted
    assert len({replica for _, replica in cluster.sent}) == len(cluster.sent) == 2
    assert cluster.state.counters.retries == {"after": 1}
    assert_zero(cluster.state)

    if how == "engine fails":
        cluster.kill(cluster.sent[0][1])  # as Serve does
    got.clear()
    running = asyncio.create_task(take())
    await until(lambda: len(got) >= 2)
    lose()
    await until(lambda: len(cluster.sent) == 4)
    await until(lambda: len(got) >= 2)
    lose()
    with pytest.raises(ReplicaLost):
        await running
    assert len(cluster.sent) == 4
    assert_zero(cluster.state)


async def test_an_engine_that_fails_at_the_first_step_costs_one_retry(make: Callable[..., Cluster]) -> None:
    cluster = make("a", "b")
    request_ = request("r", 1)
    wanted = await tokens(make("alone"), request_)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no more")

    cluster.replicas["a"].engine._core._runner.run = fail  # type: ignore[method-assign]
    got = [await tokens(cluster, request(f"r{at}", 1 if at < 2 else at)) for at in range(6)]
    assert got[:2] == [wanted] * 2
    assert "a" in {replica for _, replica in cluster.sent}
    assert len(cluster.sent) > 6
    assert_zero(cluster.state)


async def test_hundreds_of_requests_with_every_end_leave_nothing(make: Callable[..., Cluster]) -> None:
    cluster = make("a", "b", "c", step=StepTime(fixed_s=0.001, per_token_s=1e-5))
    draw, ends = random.Random(0), Counter[str]()

    async def one(name: str) -> None:
        what = request(name, draw.randrange(12), chunks=draw.randrange(1, 6), max_tokens=12, n=draw.choice((1, 1, 2)))
        stop_after = draw.choice((None, None, 1, 4))
        try:
            async with aclosing(cluster.client.generate(what)) as stream:
                number = 0
                async for _ in stream:
                    number += 1
                    if number == stop_after:
                        break
            ends["closed" if stop_after else "finished"] += 1
        except ReplicaLost:
            ends["lost"] += 1
        except asyncio.CancelledError:
            ends["cancelled"] += 1
            raise

    tasks: list[asyncio.Task[None]] = []
    for number in range(400):
        tasks.append(asyncio.create_task(one(f"{number}")))
        await asyncio.sleep(draw.random() * 0.004)
        if draw.random() < 0.25:
            draw.choice(tasks[-20:]).cancel()
        if number % 20 == 0:
            cluster.report()
            cluster.state.check()
        if number % 100 == 60:
            cluster.kill(draw.choice(list(cluster.replicas)))
            cluster.add(f"new {number}")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)] == []
    assert (
        sum(isinstance(result, asyncio.CancelledError) for result in results) + ends.total() - ends["cancelled"] == 400
    )
    assert min(ends[name] for name in ("finished", "closed", "cancelled", "lost")) > 0, ends
    assert len(cluster.sent) > 380
    assert_zero(cluster.state)
    await until(lambda: not any(r.engine.load().chunks_in_use for r in cluster.replicas.values()))
