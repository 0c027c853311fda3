"""The ingress's end of the feeds, over a handle that fails as Serve's does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException

from chunkserve.deploy.generation import ReplicaLost
from chunkserve.deploy.replica_client import ServeReplicaClient
from chunkserve.replica.chunk_hash import ChunkScheme
from chunkserve.replica.protocol import FeedRequest, ReplicaError, Request, SamplingParams, TokenEvent
from chunkserve.router.shared_state import router_settings, shared_state

SCHEME = ChunkScheme(model="toy", dtype="float32", chunk_size=16)
Message = list[tuple[str, list[TokenEvent]]]


class Call:
    """A streaming call: items, then its end, a failure, or nothing for ever."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items
        self.cancelled = False

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Any:
        return await anext(self._items)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A Serve handle with one replica, r1; `feed` makes the messages for a request."""

    def __init__(self, feed: Callable[[str], AsyncIterator[Message]]) -> None:
        self._messages = feed
        self.calls: list[Call] = []
        self.run = self.feed = self

    def options(self, *, stream: bool) -> "Handle":
        assert stream
        return self

    def remote(self, request: Request | FeedRequest, *_: str) -> Call:
        if isinstance(request, FeedRequest):
            return Call(self._messages(self.running.request_id))
        self.running = request
        self.calls.append(Call(self._accepted()))
        return self.calls[-1]

    def broadcast(self, method: str) -> "Handle":
        # Serve's handle looks for a running loop when it is first used, and fails in other threads.
        asyncio.get_running_loop()
        self.broadcasts = [method]
        return self

    def results(self, *, timeout_s: float) -> list[tuple[str, str]]:
        return [("r1", "its load")]

    async def _accepted(self) -> AsyncIterator[str]:
        yield "r1"
        await asyncio.Event().wait()


def client(handle: Handle) -> ServeReplicaClient:
    settings = router_settings(
        policy="prefix", chunk_size=16, chunk_identity=SCHEME.identity, max_entries=1000, options={}
    )  # fmt: skip
    return ServeReplicaClient(handle, shared_state(f"test {id(handle)}", settings), SCHEME)  # type: ignore[arg-type]


def request() -> Request:
    return Request(request_id="a", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=2))


def event(token_id: int, *, last: bool = False) -> TokenEvent:
    return TokenEvent(
        choice=0,
        text=str(token_id),
        token_ids=(token_id,),
        finish_reason="length" if last else None,
        prompt_tokens=3,
        cached_tokens=0,
        completion_tokens=token_id,
    )


async def test_a_feed_that_cannot_be_read_has_the_request_done_elsewhere() -> None:
    feeds = 0

    async def first_fails(request_id: str) -> AsyncIterator[Message]:
        nonlocal feeds
        feeds += 1
        if feeds == 1:
            raise RayTaskError("feed", "trace", ReplicaError("a feed of replica r1 was asked of r2"))
        yield [(request_id, [event(1)])]
        yield [(request_id, [event(2, last=True)])]
        await asyncio.sleep(0.01)  # a feed lingers

    handle = Handle(first_fails)
    got = [one async for events in client(handle).generate(request()) for one in events]
    assert got == [event(1), event(2, last=True)]
    assert [call.cancelled for call in handle.calls] == [True, False], "the first try goes on computing for nobody"


async def test_after_the_first_token_a_broken_feed_is_told() -> None:
    async def breaks(request_id: str) -> AsyncIterator[Message]:
        yield [(request_id, [event(1)])]
        await asyncio.sleep(0.01)
        raise RayServeException("gone")

    handle = Handle(breaks)
    got: list[TokenEvent] = []

    async def take() -> None:
        async for events in client(handle).generate(request()):
            got.extend(events)

    with pytest.raises(ReplicaLost):
        await take()
    assert got == [event(1)]
    assert [call.cancelled for call in handle.calls] == [True]


async def test_loads_may_be_the_first_that_is_asked_of_a_handle() -> None:
    async def nothing(request_id: str) -> AsyncIterator[Message]:
        return
        yield

    handle = Handle(nothing)
    assert await client(handle).loads() == {"r1": "its load"}
    assert handle.broadcasts == ["load"]
