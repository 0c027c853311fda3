"""The Python SDK: Client and AsyncClient.

    with Client("http://127.0.0.1:8000") as client:
        print(client.chat("What is the capital of France?", max_tokens=32).text)
        for piece in client.chat("Count to five.", stream=True):
            print(piece.text, end="", flush=True)

Retries happen only before the first token, after a failed connect or a 429, 502, 503 or 504, and honour Retry-After.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, Unpack, overload

import httpx

from .client_records import (
    Answer,
    ApiError,
    BadRequest,
    ChunkserveError,
    ConnectionFailed,
    Health,
    NotFound,
    Overloaded,
    Piece,
    StreamBroken,
    StreamDecoder,
    TimedOut,
    Unavailable,
    Usage,
    answer_of,
    error_of,
    health_of,
    translated_errors,
    translated_stream_errors,
)

__all__ = [
    "Answer",
    "ApiError",
    "AsyncClient",
    "AsyncStream",
    "BadRequest",
    "ChunkserveError",
    "Client",
    "ConnectionFailed",
    "Health",
    "NotFound",
    "Overloaded",
    "Piece",
    "RetryPolicy",
    "Sampling",
    "Stream",
    "StreamBroken",
    "TimedOut",
    "Unavailable",
    "Usage",
]

_RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_LONGEST_RETRY_AFTER_S = 60.0
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Messages = str | Sequence[Mapping[str, Any]]
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class Sampling(TypedDict, total=False):
    """Parameters of both endpoints, as in the OpenAI API; those after `n` are chunkserve's own."""

    max_tokens: int
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]
    response_format: Mapping[str, Any]
    seed: int
    stop: str | Sequence[str]
    logprobs: bool | int
    top_logprobs: int
    n: int
    top_k: int
    min_p: float
    repetition_penalty: float
    structured_outputs: Mapping[str, Any]
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    cache_salt: str
    prefix_cache: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often to try again, and the pause in seconds: base_s doubled each time up to cap_s, half of it at random."""

    max_retries: int = 3
    base_s: float = 0.5
    cap_s: float = 8.0

    def pause_s(self, attempt: int, retry_after_s: float, jitter: float) -> float:
        """Pause after failed attempt 0, 1, ...; jitter is in [0, 1). Not below what the server asked for."""
        pause_s = min(self.cap_s, self.base_s * 2**attempt) * (1 + jitter) / 2
        return max(pause_s, min(retry_after_s, _LONGEST_RETRY_AFTER_S))


class _Settings:
    """What both clients share: how requests look, which failures are tried again, how errors are told."""

    def __init__(self, model: str | None, retry: RetryPolicy) -> None:
        self._model = model
        self._retry = retry

    def _chat_body(self, messages: Messages, stream: bool, sampling: Sampling) -> dict[str, Any]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._body({"messages": list(messages)}, stream, sampling)

    def _complete_body(self, prompt: Prompt, stream: bool, sampling: Sampling) -> dict[str, Any]:
        return self._body({"prompt": prompt if isinstance(prompt, str) else list(prompt)}, stream, sampling)

    def _body(self, fields: dict[str, Any], stream: bool, sampling: Sampling) -> dict[str, Any]:
        body = {**fields, **sampling}
        if self._model is not None:
            body["model"] = self._model
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _pause_s(self, attempt: int, error: ChunkserveError) -> float | None:
        """Seconds until the next attempt; None when this failure is final."""
        refused_for_now = isinstance(error, ApiError) and error.status in _RETRIED_STATUSES
        unreached = isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)
        if attempt >= self._retry.max_retries or not (refused_for_now or unreached):
            return None
        return self._retry.pause_s(
            attempt, error.retry_after_s if isinstance(error, ApiError) else 0.0, random.random()
        )


class Stream:
    """Pieces of an answer as they come. Leaving the loop or closing it cancels the request on the server."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    def __iter__(self) -> Iterator[Piece]:
        decoder = StreamDecoder()
        with self, translated_stream_errors():
            for data in self._response.iter_bytes():
                yield from decoder.feed(data)
            decoder.close()

    def close(self) -> None:
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream:
    """Pieces of an answer as they come. Closing it cancels the request; leave a loop early only inside `async with`."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[Piece]:
        decoder = StreamDecoder()
        async with self:
            with translated_stream_errors():
                async for data in self._response.aiter_bytes():
                    for piece in decoder.feed(data):
                        yield piece
                decoder.close()

    async def close(self) -> None:
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client(_Settings):
    """Talks to one server. Safe to share between threads; close it, or use it as a context.

    Args:
        base_url: of the server, without /v1.
        model: sent with each request; None lets the server take its only one.
        timeout_s: longest wait for the next bytes of an answer.
        retry: see RetryPolicy.
    Raises:
        ChunkserveError: one of its kinds, from every method.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        model: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        retry: RetryPolicy = RetryPolicy(),
    ) -> None:
        super().__init__(model, retry)
        self._http = httpx.Client(base_url=base_url, timeout=httpx.Timeout(timeout_s, connect=connect_timeout_s))

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **sampling: Unpack[Sampling]) -> Answer: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **sampling: Unpack[Sampling]) -> Stream: ...
    def chat(self, messages: Messages, *, stream: bool = False, **sampling: Unpack[Sampling]) -> Answer | Stream:
        """The next message of a chat; a string is one user's message."""
        return self._generate(_CHAT, self._chat_body(messages, stream, sampling), stream)

    @overload
    def complete(self, prompt: Prompt, *, stream: Literal[False] = False, **sampling: Unpack[Sampling]) -> Answer: ...
    @overload
    def complete(self, prompt: Prompt, *, stream: Literal[True], **sampling: Unpack[Sampling]) -> Stream: ...
    def complete(self, prompt: Prompt, *, stream: bool = False, **sampling: Unpack[Sampling]) -> Answer | Stream:
        """The continuation of a text or of token ids, or of several of them."""
        return self._generate(_COMPLETIONS, self._complete_body(prompt, stream, sampling), stream)

    def models(self) -> list[str]:
        return [model["id"] for model in self._send("GET", "/v1/models").json()["data"]]

    def health(self) -> Health:
        """What the server says of its engine; it is not tried again."""
        with translated_errors():
            return health_of(self._http.get("/health"))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(self, path: str, body: dict[str, Any], stream: bool) -> Answer | Stream:
        response = self._send("POST", path, body, stream)
        return Stream(response) if stream else answer_of(response)

    def _send(self, method: str, path: str, body: Any = None, stream: bool = False) -> httpx.Response:
        request = self._http.build_request(method, path, json=body)
        attempt = 0
        while True:
            try:
                with translated_errors():
                    response = self._http.send(request, stream=stream)
                    if response.is_success:
                        return response
                    response.read()
                    raise error_of(response)
            except ChunkserveError as error:
                pause_s = self._pause_s(attempt, error)
                if pause_s is None:
                    raise
            time.sleep(pause_s)
            attempt += 1


class AsyncClient(_Settings):
    """Client for asyncio; see there."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        model: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        retry: RetryPolicy = RetryPolicy(),
    ) -> None:
        super().__init__(model, retry)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=httpx.Timeout(timeout_s, connect=connect_timeout_s))

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **sampling: Unpack[Sampling]
    ) -> Answer: ...
    @overload
    async def chat(self, messages: Messages, *, stream: Literal[True], **sampling: Unpack[Sampling]) -> AsyncStream: ...
    async def chat(
        self, messages: Messages, *, stream: bool = False, **sampling: Unpack[Sampling]
    ) -> Answer | AsyncStream:
        """The next message of a chat; a string is one user's message."""
        return await self._generate(_CHAT, self._chat_body(messages, stream, sampling), stream)

    @overload
    async def complete(
        self, prompt: Prompt, *, stream: Literal[False] = False, **sampling: Unpack[Sampling]
    ) -> Answer: ...
    @overload
    async def complete(self, prompt: Prompt, *, stream: Literal[True], **sampling: Unpack[Sampling]) -> AsyncStream: ...
    async def complete(
        self, prompt: Prompt, *, stream: bool = False, **sampling: Unpack[Sampling]
    ) -> Answer | AsyncStream:
        """The continuation of a text or of token ids, or of several of them."""
        return await self._generate(_COMPLETIONS, self._complete_body(prompt, stream, sampling), stream)

    async def models(self) -> list[str]:
        return [model["id"] for model in (await self._send("GET", "/v1/models")).json()["data"]]

    async def health(self) -> Health:
        """What the server says of its engine; it is not tried again."""
        with translated_errors():
            return health_of(await self._http.get("/health"))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _generate(self, path: str, body: dict[str, Any], stream: bool) -> Answer | AsyncStream:
        response = await self._send("POST", path, body, stream)
        return AsyncStream(response) if stream else answer_of(response)

    async def _send(self, method: str, path: str, body: Any = None, stream: bool = False) -> httpx.Response:
        request = self._http.build_request(method, path, json=body)
        attempt = 0
        while True:
            try:
                with translated_errors():
                    response = await self._http.send(request, stream=stream)
                    if response.is_success:
                        return response
                    await response.aread()
                    raise error_of(response)
            except ChunkserveError as error:
                pause_s = self._pause_s(attempt, error)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)
            attempt += 1
