"""One generation over HTTP: from replica streams to an answer, and back to a cancel when the client goes away."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chunkserve.replica.protocol import (
    ReplicaError,
    ReplicaLoad,
    ReplicaOverloaded,
    Request,
    RequestRefused,
    TokenEvent,
)

from .api_error import ApiError
from .fair_queue import FairQueue, QueueFull
from .metrics import IngressMetrics
from .openai_responses import Answer, sse_event

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = "1"
# Clients that say nothing of max_tokens allow as many as the context has; few answers are that long.
_EXPECTED_NEW_TOKENS = 256


class ReplicaLost(ReplicaError):
    """The replica died, or cannot be reached."""


@dataclass(slots=True)
class RouteReceipt:
    """Where a request went and why, known from its first token on."""

    replica: str | None = None
    predicted_cached_tokens: int = 0
    cached_tokens: int = 0
    decision_s: float | None = None
    reason: str | None = None

    def headers(self) -> dict[str, str]:
        if self.replica is None:
            return {}
        why = {} if self.decision_s is None else {"x-chunkserve-decision-us": f"{self.decision_s * 1e6:.0f}"}
        if self.reason is not None:
            why["x-chunkserve-reason"] = self.reason
        return why | {
            "x-chunkserve-replica": self.replica,
            "x-chunkserve-predicted-cached-tokens": str(self.predicted_cached_tokens),
            "x-chunkserve-cached-tokens": str(self.cached_tokens),
        }


class ReplicaClient(Protocol):
    """The engine replicas, as the ingress sees them."""

    def generate(
        self,
        request: Request,
        receipt: RouteReceipt | None = None,
        begin_anew: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        """What becomes of each choice, until all have a finish_reason; closing the generator cancels the request.

        A receipt is filled in before the first token comes out. A request whose replica is lost is done once more,
        elsewhere: before its first token, or where begin_anew says to forget what has come.

        Raises:
            RequestRefused: before the first item, for a request that can never be served.
            ReplicaOverloaded: before the first item, when the queue is full.
            ReplicaLost: at any time, when the replica is lost and nothing can be done about it.
            ReplicaError: at any time.
        """
        ...

    async def check_health(self) -> None:
        """Raises what is wrong when the engine is stuck or dead."""
        ...

    async def reset_cache(self) -> Sequence[str]:
        """Have every replica forget the chunks that nobody uses; the names of those that did.

        Raises:
            ReplicaError: one of them does not answer.
        """
        ...

    async def loads(self) -> Mapping[str, ReplicaLoad]:
        """What each replica does now, by its name.

        Raises:
            ReplicaError: no replica answers.
        """
        ...


def overloaded(message: str) -> ApiError:
    headers = {"retry-after": _RETRY_AFTER_S}
    return ApiError(429, message, type="rate_limit_error", code="overloaded", headers=headers)


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, headers={"retry-after": _RETRY_AFTER_S})


class GenerationResponse(Response):
    """Runs the requests of one HTTP request, one per prompt, and sends the answer, whole or as a stream.

    Up to the first token a failure is an HTTP status; after it, an error event that ends the stream. When the client
    goes away, or the surrounding task is cancelled, the replica's generators are closed, which cancels the requests.

    Args:
        stream_interval_tokens: of each choice, that go out together once a stream has begun: each piece is a message
            through Serve's proxy. The events in it are the same, and what is held back goes out with the end.
    """

    def __init__(
        self,
        *,
        requests: Sequence[Request],
        answer: Answer,
        stream: bool,
        replica: ReplicaClient,
        queue: FairQueue,
        metrics: IngressMetrics,
        arrival_s: float,
        timeout_s: float,
        stream_interval_tokens: int = 1,
        explain: bool = False,
    ) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._requests = requests
        self._answer = answer
        self._stream = stream
        self._replica = replica
        self._queue = queue
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._timeout_s = timeout_s
        self._held: list[bytes] = []
        self._max_held = stream_interval_tokens * len(requests)
        # Of the first prompt; its headers come out if the client asked for them.
        self._receipt = RouteReceipt() if explain else None
        self._first_token_s: float | None = None
        self._opened = False
        # What becomes of choices that have no finish_reason of their own.
        self._outcome = "cancelled"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            outcomes = await asyncio.gather(work, gone, return_exceptions=True)
            self._account()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _run(self, send: Send) -> None:
        try:
            await self._answer_all(send)
        except ApiError as error:
            self._outcome = "error" if error.status >= 500 else "refused"
            await self._send_error(error, send)

    async def _answer_all(self, send: Send) -> None:
        """The whole exchange; every failure of the replica comes out as an ApiError."""
        take = self._streamer(send) if self._stream else self._gather
        deadline = asyncio.timeout(self._timeout_s - (time.monotonic() - self._arrival_s))
        try:
            async with deadline:
                await self._consume(take)
        except RequestRefused as error:
            raise ApiError(400, error.message, param=error.param) from None
        except ReplicaOverloaded as error:
            self._metrics.count_rejected("tenant_queue" if isinstance(error, QueueFull) else "replica_queue")
            raise overloaded(str(error)) from None
        except ReplicaError as error:
            logger.error("replica_failed request_id=%s error=%s", self._requests[0].request_id, error)
            raise unavailable(f"the replica failed: {error}", "replica_failed") from error
        except TimeoutError:
            if not deadline.expired():
                raise
            message = f"no full answer within {self._timeout_s:g} s (request_timeout_s)"
            raise ApiError(504, message, type="timeout_error", code="timeout") from None
        if not self._answer.finished:
            raise ApiError(500, "the replica ended before its answer", type="server_error", code="incomplete")
        if self._stream:
            await self._send_end(self._answer.stream_end(), send)
        else:
            await self._send_whole(200, self._answer.whole(), send, self._explained())

    def _explained(self) -> Mapping[str, str]:
        return self._receipt.headers() if self._receipt is not None else {}

    async def _consume(self, take: Callable[[int, Sequence[TokenEvent]], Awaitable[None]]) -> None:
        async def pump(prompt: int, request: Request) -> None:
            receipt = self._receipt if prompt == 0 else None
            begin_anew = None if self._stream else lambda: self._answer.begin_anew(prompt)
            async with (
                self._queue.turn(request.cache_salt, sequences=request.n, tokens=_expected_tokens(request)) as turn,
                aclosing(self._replica.generate(request, receipt, begin_anew)) as batches,
            ):
                turn.tokens = 0
                async for events in batches:
                    turn.tokens += _computed_tokens(request, events, is_first=turn.tokens == 0)
                    _check(events)
                    if self._first_token_s is None and any(event.token_ids for event in events):
                        self._first_token_s = time.monotonic()
                        self._metrics.observe_first_token(self._first_token_s - self._arrival_s)
                    await take(prompt, events)

        if len(self._requests) == 1:
            await pump(0, self._requests[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for prompt, request in enumerate(self._requests):
                    group.create_task(pump(prompt, request))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _gather(self, prompt: int, events: Sequence[TokenEvent]) -> None:
        self._answer.gather(prompt, events)

    def _streamer(self, send: Send) -> Callable[[int, Sequence[TokenEvent]], Awaitable[None]]:
        async def take(prompt: int, events: Sequence[TokenEvent]) -> None:
            body = self._answer.stream(prompt, events)
            if not body:
                return
            self._held.append(body)
            if not self._opened:
                self._opened = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                headers += [(name.encode(), value.encode()) for name, value in self._explained().items()]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            elif len(self._held) < self._max_held or self._answer.finished:
                return
            await send({"type": "http.response.body", "body": self._take_held(), "more_body": True})

        return take

    def _take_held(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        return held

    async def _send_end(self, body: bytes, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._take_held() + body, "more_body": False})

    async def _send_error(self, error: ApiError, send: Send) -> None:
        if self._opened:
            await self._send_end(sse_event(error.body()), send)
        else:
            await self._send_whole(error.status, to_json(error.body()), send, error.headers)

    async def _send_whole(self, status: int, body: bytes, send: Send, headers: Mapping[str, str] | None = None) -> None:
        fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        raw = [(name.encode(), value.encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _account(self) -> None:
        """Count what happened, once, however it ended."""
        now_s = time.monotonic()
        usage = self._answer.usage()
        self._metrics.count_tokens(
            prompt=usage["prompt_tokens"],
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            generated=usage["completion_tokens"],
        )
        for choice in self._answer.choices:
            reason = choice.last.finish_reason if choice.last is not None else None
            self._metrics.count_finish(reason or self._outcome)
        if self._answer.finished and self._first_token_s is not None:
            self._metrics.observe_answer(
                latency_s=now_s - self._arrival_s,
                decode_s=now_s - self._first_token_s,
                longest_choice_tokens=max(c.last.completion_tokens for c in self._answer.choices if c.last is not None),
            )


def _expected_tokens(request: Request) -> int:
    """What a replica will probably compute, before anything is known of it."""
    return len(request.prompt_token_ids) + request.n * min(request.sampling.max_tokens, _EXPECTED_NEW_TOKENS)


def _computed_tokens(request: Request, events: Sequence[TokenEvent], *, is_first: bool) -> int:
    """What a replica has computed for these events; with the first ones the prompt, as far as it was not cached."""
    prompt = len(request.prompt_token_ids) - min(e.cached_tokens for e in events) if is_first and events else 0
    return prompt + sum(len(event.token_ids) for event in events)


def _check(events: Sequence[TokenEvent]) -> None:
    for event in events:
        if event.finish_reason == "error":
            raise ApiError(500, event.error or "the engine failed", type="server_error", code="engine_failed")
        if event.finish_reason == "cancelled":
            raise unavailable(event.error or "the server ended the request", "cancelled")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
