"""What the SDK gives back: answers, pieces of streams, exceptions; and how they come out of HTTP."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx


class ChunkserveError(Exception):
    """Base of everything the SDK raises."""


class ApiError(ChunkserveError):
    """The server refused or failed; `param` names the field at fault where there is one."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(ApiError):
    """400, 413 or 422: the request can never succeed as it stands."""


class NotFound(ApiError):
    """404: no such model or path."""


class Overloaded(ApiError):
    """429, after all retries."""


class Unavailable(ApiError):
    """502, 503 or 504, after all retries."""


class ConnectionFailed(ChunkserveError):
    """No connection, or it broke before the answer."""


class TimedOut(ChunkserveError):
    """Nothing came within the time limit."""


class StreamBroken(ChunkserveError):
    """A stream ended before its end; what came before it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request; cached_tokens are those of the prompt that were in the prefix tree."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    index: int
    text: str
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer. `raw` is the server's JSON, with logprobs where they were asked for."""

    choices: tuple[Choice, ...]
    usage: Usage
    request_id: str
    raw: dict[str, Any]

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text of one choice. The last piece of a stream has no text, and `usage`."""

    index: int
    text: str
    finish_reason: str | None
    usage: Usage | None
    raw: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    ok: bool
    status: str
    error: str | None


class StreamDecoder:
    """Server-sent events out of bytes as they arrive. Lines end at line feeds only: text may hold other separators."""

    def __init__(self) -> None:
        self._rest = b""
        self._done = False

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that are complete now.

        Raises:
            StreamBroken: the server sent an error event, or what is no event.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line.removeprefix(b"data:").strip()
            if payload == b"[DONE]":
                self._done = True
            else:
                yield from _pieces(_event(payload))

    def close(self) -> None:
        """Called after the last bytes.

        Raises:
            StreamBroken: there was no end mark.
        """
        if not self._done:
            raise StreamBroken("the connection ended before the answer did")


def _event(payload: bytes) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError as error:
        raise StreamBroken(f"an event is not JSON: {error}") from error
    if not isinstance(event, dict):
        raise StreamBroken(f"an event is not a JSON object but {type(event).__name__}")
    return event


def _pieces(event: dict[str, Any]) -> Iterator[Piece]:
    if "error" in event:
        raise StreamBroken(event["error"]["message"])
    for choice in event["choices"]:
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        # The first event of a chat tells the role only.
        if text or choice["finish_reason"] is not None:
            yield Piece(
                index=choice["index"], text=text or "", finish_reason=choice["finish_reason"], usage=None, raw=event
            )
    if event.get("usage"):
        yield Piece(index=0, text="", finish_reason=None, usage=_usage(event["usage"]), raw=event)


def _usage(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
    )


def answer_of(response: httpx.Response) -> Answer:
    raw = response.json()
    choices = tuple(
        Choice(
            index=choice["index"],
            text=choice["message"]["content"] if "message" in choice else choice["text"],
            finish_reason=choice["finish_reason"],
        )
        for choice in raw["choices"]
    )
    request_id = response.headers.get("x-request-id", raw["id"])
    return Answer(choices=choices, usage=_usage(raw["usage"]), request_id=request_id, raw=raw)


def health_of(response: httpx.Response) -> Health:
    if not response.is_success and response.status_code != 503:
        raise error_of(response)
    raw = response.json()
    return Health(ok=response.is_success, status=raw["status"], error=raw.get("error"))


def error_of(response: httpx.Response) -> ApiError:
    """The exception for a reply that is not a success. Its body may be a proxy's, and not OpenAI's error object."""
    message, param = response.text[:500] or response.reason_phrase, None
    if response.headers.get("content-type", "").startswith("application/json"):
        error = response.json().get("error")
        if isinstance(error, dict):
            message, param = error.get("message", message), error.get("param")
    retry_after = response.headers.get("retry-after", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
    return _BY_STATUS.get(response.status_code, ApiError)(response.status_code, message, param, retry_after_s)


_BY_STATUS: dict[int, type[ApiError]] = {
    400: BadRequest,
    404: NotFound,
    413: BadRequest,
    422: BadRequest,
    429: Overloaded,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


@contextmanager
def translated_errors() -> Iterator[None]:
    """httpx's exceptions as ours; httpx's own is the cause."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise ConnectionFailed(f"no connection to {error.request.url.host} in time") from error
    except httpx.TimeoutException as error:
        raise TimedOut(f"nothing came within the time limit (timeout_s): {type(error).__name__}") from error
    except httpx.HTTPError as error:
        raise ConnectionFailed(str(error) or type(error).__name__) from error


@contextmanager
def translated_stream_errors() -> Iterator[None]:
    """As translated_errors, once a stream has begun."""
    try:
        with translated_errors():
            yield
    except ConnectionFailed as error:
        raise StreamBroken(f"the connection broke: {error}") from error.__cause__
