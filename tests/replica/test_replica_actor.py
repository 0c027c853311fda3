"""The replica's actor without Serve around it; with it, it is tested in tests/deploy."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from chunkserve.replica.protocol import GrammarSpec, ReplicaOverloaded, Request, SamplingParams
from chunkserve.replica.replica_actor import ReplicaActor
from chunkserve.replica.token_feed import TokenFeeds


class CompilingEngine:
    """Compiles for as long as it is told to, and says what it was asked for."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun = threading.Event()
        self.asked: list[str] = []

    def prepare(self, request: Request) -> None:
        self.begun.set()
        self.may_end.wait(10)

    def submit(self, request: Request) -> None:
        self.asked.append("submit")

    def cancel(self, request_id: str) -> None:
        self.asked.append("cancel")

    def check_alive(self) -> None:
        pass


@pytest.fixture
async def engine() -> CompilingEngine:
    return CompilingEngine()


@pytest.fixture
async def actor(engine: CompilingEngine) -> AsyncIterator[ReplicaActor]:
    actor = object.__new__(ReplicaActor)
    actor._loop = asyncio.get_running_loop()
    actor._engine = engine  # type: ignore[assignment]
    actor._feeds = TokenFeeds(engine.check_alive)
    actor._compiler = ThreadPoolExecutor(1)
    actor._num_preparing, actor._max_preparing = 0, 2
    yield actor
    engine.may_end.set()
    actor._compiler.shutdown()


def with_grammar(request_id: str) -> Request:
    spec = GrammarSpec(kind="regex", text="a", param="structured_outputs")
    return Request(request_id=request_id, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1, grammar=spec))


async def test_a_client_that_leaves_while_its_grammar_compiles_leaves_no_request(engine, actor) -> None:
    call = asyncio.create_task(_first(actor, with_grammar("r")))
    while not engine.begun.is_set():
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    engine.may_end.set()
    actor._compiler.shutdown()
    assert "submit" not in engine.asked
    assert not actor._feeds._open


async def test_too_many_that_wait_for_their_grammars_are_overload(engine, actor, monkeypatch) -> None:
    monkeypatch.setattr("chunkserve.replica.replica_actor._replica_name", lambda: "r")
    calls = [asyncio.create_task(_first(actor, with_grammar(str(i)))) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ReplicaOverloaded, match="2 requests wait for their grammars"):
        await _first(actor, with_grammar("one too many"))
    engine.may_end.set()
    assert await asyncio.gather(*calls) == ["r", "r"]
    assert await _first(actor, with_grammar("later")) == "r"
    assert engine.asked.count("submit") == 3


async def _first(actor: ReplicaActor, request: Request) -> str:
    return await anext(actor.run(request, "ingress"))
