"""Events of all requests that one ingress has here, as one stream: a message per step, whatever the number of requests.

A message costs the same for one event as for fifty, and costs more than the event. Everything here runs on the event
loop of the replica's actor.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from .protocol import ReplicaError, TokenEvent

# Requests and their events, in order.
Message = list[tuple[str, list[TokenEvent]]]

# A feed without requests ends, so that a replica can be told to stop; but not between one request and the next.
_LINGER_S = 2.0


class TokenFeed:
    """What one reader is to be told. A second `read` takes over from the first."""

    def __init__(self) -> None:
        self._num_open = 0
        self._readers = 0
        self._pending: dict[str, list[TokenEvent]] = {}
        self._changed = asyncio.Event()
        self._reads = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody would miss it."""
        return not (self._num_open or self._readers or self._pending)

    def enter(self) -> None:
        """A request begins."""
        self._num_open += 1

    def leave(self) -> None:
        """A request ends."""
        self._num_open -= 1
        self._changed.set()

    def put(self, request_id: str, event: TokenEvent) -> None:
        self._pending.setdefault(request_id, []).append(event)
        self._changed.set()

    async def read(self) -> AsyncGenerator[Message, None]:
        """Messages until no request is open; what has piled up comes in one."""
        self._reads += 1
        turn = self._reads
        self._readers += 1
        try:
            async with aclosing(self._messages(turn)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._readers -= 1

    async def _messages(self, turn: int) -> AsyncGenerator[Message, None]:
        while True:
            self._changed.clear()
            if self._pending:
                message, self._pending = list(self._pending.items()), {}
                yield message
                continue
            try:
                async with asyncio.timeout(None if self._num_open else _LINGER_S):
                    await self._changed.wait()
            except TimeoutError:
                if not self._num_open:
                    return
            if turn != self._reads:
                return


@dataclass(slots=True)
class _Open:
    """A request that is not finished."""

    feed: TokenFeed
    unfinished: int
    done: asyncio.Future[None]
    started: bool = False


class TokenFeeds:
    """All requests of a replica and the feeds that their events go to, by reader.

    Args:
        check_alive: raises what has ended the engine, if it has.
    """

    def __init__(self, check_alive: Callable[[], None]) -> None:
        self._check_alive = check_alive
        self._feeds: dict[str, TokenFeed] = {}
        self._open: dict[str, _Open] = {}

    def open(self, request_id: str, num_choices: int, reader: str) -> asyncio.Future[None]:
        """A request begins: its events go to the reader.

        Returns:
            Done when each choice has its finish_reason. Raises what ended the engine, if that came before the first
            token: the reader is not told then, since another replica may do the request.
        Raises:
            ReplicaError: the request_id is in use.
        """
        if request_id in self._open:
            raise ReplicaError(f"request_id {request_id} is in use")
        feed = self._feeds.setdefault(reader, TokenFeed())
        feed.enter()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[request_id] = _Open(feed=feed, unfinished=num_choices, done=done)
        return done

    def close(self, request_id: str) -> int:
        """Its reader wants no more; how many choices were not finished."""
        request = self._open.pop(request_id)
        request.feed.leave()
        return request.unfinished

    def deliver(self, events: Sequence[tuple[str, TokenEvent]]) -> None:
        """The events of a step; those of requests that are closed go nowhere."""
        for request_id, event in events:
            request = self._open.get(request_id)
            if request is None or request.done.done():
                continue
            if not request.started and event.finish_reason == "error":
                try:
                    self._check_alive()
                except ReplicaError as error:
                    request.done.set_exception(error)
                    continue
            request.started = True
            request.feed.put(request_id, event)
            request.unfinished -= event.finish_reason is not None
            if not request.unfinished:
                request.done.set_result(None)

    async def read(self, reader: str) -> AsyncGenerator[Message, None]:
        """The feed of a reader; see TokenFeed.read."""
        feed = self._feeds.setdefault(reader, TokenFeed())
        try:
            async with aclosing(feed.read()) as messages:
                async for message in messages:
                    yield message
        finally:
            # A reader that is gone for good, such as an ingress that died, leaves nothing here.
            if feed.is_idle:
                self._feeds.pop(reader, None)
