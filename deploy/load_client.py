"""A lean HTTP/1.1 client for load tests, on raw asyncio streams: general ones cost more than what they measure."""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic_core import from_json, to_json


class LoadError(Exception):
    """A request that brought no full answer; the text says why, without anything that differs by request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go. `prefix` is the URL's path, before /v1; `headers` go with each request."""

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Self:
        """Out of a base URL such as http://127.0.0.1:8000, with or without /v1.

        Raises:
            ValueError: not an http or https URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL like http://127.0.0.1:8000, got {url!r}")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            host=parts.hostname, port=parts.port or (443 if tls else 80), tls=tls, prefix=prefix, api_key=api_key
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answered request. Times in seconds since it was sent; tokens as the server counted them.

    headers: of the answer, with names in lower case.
    """

    ttft_s: float
    last_token_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.completion_tokens < 2:
            return None
        return (self.last_token_s - self.ttft_s) / (self.completion_tokens - 1)


class Connection:
    """One kept-alive connection; one request at a time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._headers: dict[str, str] = {}

    async def stream(self, path: str, body: Mapping[str, Any]) -> Sample:
        """POST a streaming request and time its events.

        Raises:
            LoadError: no connection, a status that is not 200, an error event, or a stream without its end: [DONE],
                or a finish_reason from servers that send none.
        """
        start_s = time.perf_counter()
        first_s = last_s = None
        usage: dict[str, Any] | None = None
        is_ended = False
        # Closed at once after an error event: the rest of the stream must not stay in the connection.
        async with aclosing(self._events(path, to_json(body))) as payloads:
            async for payload in payloads:
                now_s = time.perf_counter()
                if payload == b"[DONE]":
                    is_ended = True
                    continue
                event = _json(payload)
                if "error" in event:
                    raise LoadError(f"error event: {event['error'].get('message')}")
                usage = event.get("usage") or usage
                is_ended = is_ended or any(choice.get("finish_reason") for choice in event.get("choices", ()))
                if _has_token(event):
                    first_s = first_s or now_s
                    last_s = now_s
        if not is_ended or usage is None or first_s is None or last_s is None:
            missing = "its end" if not is_ended else "usage" if first_s else "tokens"
            raise LoadError(f"the stream ended without {missing}")
        return Sample(
            ttft_s=first_s - start_s,
            last_token_s=last_s - start_s,
            latency_s=time.perf_counter() - start_s,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            completion_tokens=usage["completion_tokens"],
            headers=self._headers,
        )

    async def fetch(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer of a plain request.

        Raises:
            LoadError: no connection, or a status that is not 200.
        """
        content = b"".join([piece async for piece in self._request(method, path, to_json(body) if body else b"")])
        return _json(content)

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _events(self, path: str, content: bytes) -> AsyncGenerator[bytes, None]:
        rest = b""
        async with aclosing(self._request("POST", path, content)) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()

    async def _request(self, method: str, path: str, content: bytes) -> AsyncGenerator[bytes, None]:
        """The pieces of the body as they arrive; after a failure the connection is closed."""
        complete = False
        try:
            reader, writer = await self._connected()
            writer.write(self._head(method, path, len(content)) + content)
            status, headers = await _read_head(reader)
            self._headers = headers
            if status != 200:
                error = b"".join([piece async for piece in _body(reader, headers)])
                raise LoadError(f"status {status}: {_error_message(error)}")
            async for piece in _body(reader, headers):
                yield piece
            complete = headers.get("connection", "").lower() != "close"
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            raise LoadError(f"connection: {type(error).__name__}: {error}") from error
        finally:
            if not complete:
                await self.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None and self._streams[0].at_eof():
            # The server has closed it while it was idle.
            await self.close()
        if self._streams is None:
            tls = ssl.create_default_context() if self._target.tls else None
            self._streams = await asyncio.open_connection(self._target.host, self._target.port, ssl=tls)
        return self._streams

    def _head(self, method: str, path: str, length: int) -> bytes:
        target = self._target
        authorization = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        more = "".join(f"{name}: {value}\r\n" for name, value in (authorization | {**target.headers}).items())
        return (
            f"{method} {target.prefix}{path} HTTP/1.1\r\nhost: {target.host}:{target.port}\r\n{more}"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        ).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    # readuntil() bounds the size: 64 KiB is a stream reader's limit.
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise LoadError(f"not an HTTP/1 reply: {first[:80]!r}")
    fields = (line.partition(":") for line in lines)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in fields}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


def _has_token(event: Mapping[str, Any]) -> bool:
    for choice in event.get("choices", ()):
        # A chat's first event has no text, its last an empty delta; reasoning models have a field of their own.
        delta = choice.get("delta")
        if choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


def _json(content: bytes) -> Any:
    try:
        return from_json(content)
    except ValueError as error:
        raise LoadError(f"not JSON: {error}") from None


def _error_message(content: bytes) -> str:
    try:
        return str(from_json(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
