"""The replica's actor without Serve around it; with it, it is tested in tests/deploy."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from chunkserve.replica.protocol import GrammarSpec, Request, SamplingParams
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


async def test_a_client_that_leaves_while_its_grammar_compiles_leaves_no_request() -> None:
    engine = CompilingEngine()
    actor = object.__new__(ReplicaActor)
    actor._loop = asyncio.get_running_loop()
    actor._engine = engine  # type: ignore[assignment]
    actor._feeds = TokenFeeds(engine.check_alive)
    actor._compiler = ThreadPoolExecutor(1)
    spec = GrammarSpec(kind="regex", text="a", param="structured_outputs")
    request = Request(
        request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1, grammar=spec)
    )  # fmt: skip
    call = asyncio.create_task(_first(actor, request))
    while not engine.begun.is_set():
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    engine.may_end.set()
    actor._compiler.shutdown()
    assert "submit" not in engine.asked
    assert not actor._feeds._open


async def _first(actor: ReplicaActor, request: Request) -> str:
    return await anext(actor.run(request, "ingress"))
