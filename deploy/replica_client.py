"""The replicas behind a Serve handle, as the ingress uses them: requests out, events back, and what routing learns."""

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from chunkserve.replica.chunk_hash import ChunkScheme
from chunkserve.replica.protocol import (
    ChunkDelta,
    EngineStopped,
    FeedRequest,
    ReplicaError,
    ReplicaLoad,
    Request,
    TokenEvent,
)
from chunkserve.router.route_metrics import RouteMetrics
from chunkserve.router.routing_state import RoutingState
from chunkserve.router.shared_state import follow_chunks

from .generation import ReplicaLost, RouteReceipt

logger = logging.getLogger(__name__)

_RESET_TIMEOUT_S = 30.0


class ServeReplicaClient:
    """The replicas behind a Serve handle; ReplicaClient of deploy/generation.py.

    Args:
        handle: of the replicas' deployment, whose router is ServeRouter.
        routing: what that router decides by; what is seen of the answers goes back into it.
        scheme: how prompts' chunks are named there.
    """

    def __init__(self, handle: "DeploymentHandle[Any]", routing: RoutingState, scheme: ChunkScheme) -> None:
        self._handle = handle
        self._routing = routing
        self._scheme = scheme
        self._metrics = RouteMetrics(routing.policy)
        self._chunk_feed: asyncio.Task[None] | None = None
        self._feeds = _Feeds(handle)

    async def generate(
        self,
        request: Request,
        receipt: RouteReceipt | None = None,
        begin_anew: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        if self._chunk_feed is None or self._chunk_feed.done():
            self._chunk_feed = _create_shared_task(
                follow_chunks(
                    self._routing,
                    self._chunk_deltas,
                    on_round=lambda: self._metrics.update(self._routing, time.time()),
                )
            )
        key, prompt = request.request_id, request.prompt_token_ids
        begin_s = time.perf_counter()
        digests = self._scheme.digests(request.cache_salt, prompt) if request.prefix_cache else ()
        self._metrics.samples.hash_s.append(time.perf_counter() - begin_s)
        self._routing.open(key, len(prompt), digests)
        counters, num_tokens, first_s = self._routing.counters, 0, 0.0
        try:
            for last_try in (False, True):
                started = False
                try:
                    async with aclosing(self._stream(request)) as stream:
                        async for events in stream:
                            if begin_anew is not None:
                                _raise_if_lost(events)
                            if not started and (cached := _cached_tokens(events)) is not None:
                                started = True
                                first_s = time.perf_counter()
                                self._metrics.samples.ttft_s.append(first_s - begin_s)
                                self._has_first_token(key, cached, receipt)
                            num_tokens = max(num_tokens, *(event.completion_tokens for event in events))
                            yield events
                    if num_tokens > 1:
                        self._metrics.samples.token_s.append((time.perf_counter() - first_s) / (num_tokens - 1))
                    return
                except ReplicaLost:
                    # As long as nothing has reached the client, another replica may do it.
                    if last_try or (started and begin_anew is None):
                        counters.broken_streams += started
                        raise
                    if begin_anew is not None:
                        begin_anew()
                    self._routing.failed(key)
                    logger.warning("request_retried request_id=%s", key)
        except (asyncio.CancelledError, GeneratorExit):
            counters.cancels += 1
            raise
        finally:
            self._routing.close(key)

    async def _stream(self, request: Request) -> AsyncGenerator[Sequence[TokenEvent], None]:
        call = self._handle.options(stream=True).run.remote(request, self._feeds.reader)
        inbox = self._feeds.open(request.request_id)
        ending: asyncio.Task[None] | None = None
        unfinished = request.n
        try:
            replica = await anext(call)
            ending = asyncio.create_task(_watch(call, inbox))
            self._feeds.follow(replica, inbox)
            while unfinished:
                events = await inbox.take()
                unfinished -= sum(event.finish_reason is not None for event in events)
                yield events
        except (RayError, RayServeException) as error:
            unfinished = 0
            raise _replica_error(error) from error
        finally:
            self._feeds.close(request.request_id)
            if unfinished:
                call.cancel()
            if ending is not None:
                ending.cancel()

    def _has_first_token(self, key: str, cached_tokens: int, receipt: RouteReceipt | None) -> None:
        known = self._routing.first_token(key, cached_tokens, time.time())
        if receipt is not None and known is not None:
            receipt.replica, receipt.predicted_cached_tokens = known
            receipt.cached_tokens = cached_tokens
            receipt.decision_s = self._routing.decision_s(key)
            receipt.reason = self._routing.reason(key)

    def _chunk_deltas(self, since: Mapping[str, tuple[int, int]]) -> Sequence[tuple[str, ChunkDelta | None]]:
        return list(self._handle.broadcast("chunk_delta", dict(since)).results(timeout_s=5))

    async def check_health(self) -> None:
        try:
            await self._handle.check_health.remote()
        except (RayError, RayServeException) as error:
            raise _replica_error(error) from error

    async def reset_cache(self) -> Sequence[str]:
        try:
            answers = self._handle.broadcast("reset_cache")
            return list(await asyncio.to_thread(answers.results, timeout_s=_RESET_TIMEOUT_S))
        except (RayError, RayServeException, TimeoutError) as error:
            raise _replica_error(error) from error

    async def loads(self) -> Mapping[str, ReplicaLoad]:
        try:
            # On this loop: the first use of a handle, in whatever way, ties it to the loop that it finds.
            answers = self._handle.broadcast("load")
            return dict(await asyncio.to_thread(answers.results, timeout_s=5))
        except (RayError, RayServeException, TimeoutError) as error:
            raise _replica_error(error) from error


class _Inbox:
    """What a replica says about one request; `replica` is its name, once it has accepted."""

    def __init__(self) -> None:
        self.replica: str | None = None
        self._items: asyncio.Queue[Sequence[TokenEvent] | Exception] = asyncio.Queue()

    def put(self, item: Sequence[TokenEvent] | Exception) -> None:
        self._items.put_nowait(item)

    async def take(self) -> Sequence[TokenEvent]:
        """The next events, all that have piled up. Raises the failure that stands in their place."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        events = list(item)
        while not self._items.empty():
            more = self._items.get_nowait()
            if isinstance(more, Exception):
                self._items.put_nowait(more)
                break
            events += more
        return events


class _Feeds:
    """One feed from each replica that has requests of ours: a message per step, whatever their number.

    reader: the name of this end.
    """

    def __init__(self, handle: "DeploymentHandle[Any]") -> None:
        self.reader = uuid.uuid4().hex
        self._handle = handle
        self._inboxes: dict[str, _Inbox] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def open(self, request_id: str) -> _Inbox:
        inbox = self._inboxes[request_id] = _Inbox()
        return inbox

    def close(self, request_id: str) -> None:
        del self._inboxes[request_id]

    def follow(self, replica: str, inbox: _Inbox) -> None:
        """The replica has accepted the request: see to it that its feed is read."""
        inbox.replica = replica
        if replica not in self._tasks:
            self._tasks[replica] = _create_shared_task(self._read(replica))

    async def _read(self, replica: str) -> None:
        """Read a replica's feed for as long as there is a request for it."""
        try:
            while self._inboxes_of(replica):
                feed: AsyncIterator[Any] = self._handle.options(stream=True).feed.remote(
                    FeedRequest(replica=replica, reader=self.reader)
                )
                async for message in feed:
                    for request_id, events in message:
                        if (inbox := self._inboxes.get(request_id)) is not None:
                            inbox.put(events)
        except (RayError, RayServeException) as error:
            logger.warning("feed_failed replica=%s error=%r", replica, error)
            self._lose(replica, str(_replica_error(error)))
        except asyncio.CancelledError:
            self._lose(replica, "the replica's feed was cancelled")
            raise
        finally:
            del self._tasks[replica]

    def _lose(self, replica: str, reason: str) -> None:
        """What the replica says does not arrive here, whatever the reason: another one may do what has not begun."""
        for inbox in self._inboxes_of(replica):
            inbox.put(ReplicaLost(reason))

    def _inboxes_of(self, replica: str) -> list[_Inbox]:
        return [inbox for inbox in self._inboxes.values() if inbox.replica == replica]


def _create_shared_task(coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """A task that outlives the request which happens to begin it.

    In a context of its own: Serve cancels all calls that were made in the context of a request whose client has left.
    """
    return asyncio.create_task(coroutine, context=contextvars.Context())


async def _watch(call: AsyncIterator[Any], inbox: _Inbox) -> None:
    """Tell an inbox when the call that its request hangs on fails; its end as such says nothing that events do not."""
    try:
        async for _ in call:
            pass
    except (RayError, RayServeException) as error:
        inbox.put(_replica_error(error))


def _raise_if_lost(events: Sequence[TokenEvent]) -> None:
    for event in events:
        if event.is_lost:
            raise ReplicaLost(event.error)


def _cached_tokens(events: Sequence[TokenEvent]) -> int | None:
    """Cached tokens of the first choice that has a token."""
    return next((event.cached_tokens for event in events if event.token_ids), None)


def _replica_error(error: Exception) -> ReplicaError:
    """What a replica raised, without Ray's wrapping and its stack trace; or that it is lost."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EngineStopped):
        return ReplicaLost(str(cause))
    if isinstance(cause, ReplicaError):
        return cause
    if cause is not None:
        return ReplicaError(f"{type(cause).__name__}: {cause}")
    return ReplicaLost(f"the replica is lost: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
