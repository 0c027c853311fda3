"""The HTTP side as a plain ASGI app: routes, limits, errors. It knows nothing of Ray."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Protocol, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chunkserve.replica.protocol import ReplicaError, ReplicaLoad, Request

from .api_error import ApiError, bad_request
from .config import ServeConfig
from .fair_queue import FairQueue
from .generation import GenerationResponse, ReplicaClient, unavailable
from .metrics import IngressMetrics
from .openai_protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestLimits,
    parse_chat,
    parse_completion,
)
from .openai_responses import Answer, ChatAnswer, CompletionAnswer

logger = logging.getLogger(__name__)

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LOADS_TIMEOUT_S = 5.0
_FIRST_CHARS_PER_TOKEN = 4
_CUT_SLACK_TOKENS = 64
_R = TypeVar("_R", bound=GenerationRequest)
_T = TypeVar("_T")
_MODEL_PATH = "/v1/models/"
# A request with this header set to 1 is told where it went, and what was cached there.
EXPLAIN_HEADER = "x-chunkserve-explain"


class TokenizerLike(Protocol):
    """Text to token ids. Called from one thread at a time, never from the event loop."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_tokens(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt that asks for the assistant's next message.

        Raises:
            ValueError: the model's chat template refuses these messages; the text says why.
        """
        ...


class Ingress:
    """Turns HTTP requests into replica requests. One per process that serves HTTP."""

    def __init__(self, config: ServeConfig, tokenizer: TokenizerLike, replica: ReplicaClient) -> None:
        self.metrics = IngressMetrics(config.model_name)
        self._config = config
        self._tokenizer = tokenizer
        self._replica = replica
        # One in eight more than run, so that a replica has the next one at hand when a sequence ends.
        running = config.max_running_sequences
        self._queue = FairQueue(
            capacity=config.num_replicas * (running + max(running // 8, 1)),
            max_waiting=config.num_replicas * config.max_waiting_requests,
        )
        self.metrics.watch_queue(self._queue)
        self._created_s = int(time.time())
        self._limits = RequestLimits.of(
            config, vocab_size=tokenizer.vocab_size, max_context_tokens=tokenizer.max_context_tokens
        )
        # Tokenizers are not safe to share between threads, and a long prompt would hold up the event loop.
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")

    async def chat(self, http: HttpRequest) -> Response:
        arrival_s = time.monotonic()
        request = await self._parsed(http, parse_chat)
        prompt = await self._in_thread(lambda: self._rendered(request))
        return self._generation(request, "messages", [prompt], ChatAnswer, http, arrival_s)

    async def complete(self, http: HttpRequest) -> Response:
        arrival_s = time.monotonic()
        request = await self._parsed(http, parse_completion)
        prompts = await self._in_thread(lambda: self._encoded(request))
        return self._generation(request, "prompt", prompts, CompletionAnswer, http, arrival_s)

    async def models(self) -> Response:
        return _json(200, {"object": "list", "data": [self._model()]})

    async def model(self, model_id: str) -> Response:
        self._check_model(model_id)
        return _json(200, self._model())

    async def health(self) -> Response:
        try:
            async with asyncio.timeout(self._config.health_stall_s):
                await self._replica.check_health()
        except TimeoutError:
            reason = f"no answer from the engine within {self._config.health_stall_s:g} s (health_stall_s)"
            return _json(503, {"status": "unhealthy", "error": reason})
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is the answer
            return _json(503, {"status": "unhealthy", "error": str(error) or type(error).__name__})
        return _json(200, {"status": "ok", "model": self._config.model_name})

    async def prometheus(self) -> Response:
        text = self.metrics.text(await self._loads())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self) -> Response:
        """What each replica does now: ReplicaLoad as JSON, for `chunkserve top`."""
        loads = await self._loads()
        body = {"model": self._config.model_name, "routing_policy": self._config.routing_policy}
        return _json(200, body | {"replicas": {name: asdict(load) for name, load in sorted(loads.items())}})

    async def reset_cache(self) -> Response:
        """Empty the prefix caches, but for what running requests use."""
        try:
            names = await self._replica.reset_cache()
        except ReplicaError as error:
            raise unavailable(str(error), "reset_failed") from None
        logger.info("cache_reset replicas=%d", len(names))
        return _json(200, {"status": "ok", "replicas": sorted(names)})

    async def _loads(self) -> Mapping[str, ReplicaLoad]:
        """By replica; empty if none answers."""
        try:
            async with asyncio.timeout(_LOADS_TIMEOUT_S):
                return await self._replica.loads()
        except (ReplicaError, TimeoutError) as error:
            logger.warning("replica_loads_missing error=%r", error)
            return {}

    async def _parsed(self, http: HttpRequest, parse: Callable[[bytes], _R]) -> _R:
        body = await _read_body(http, self._config.max_body_bytes)
        request = parse(body)
        if request.model is not None:
            self._check_model(request.model)
        request.check(self._limits)
        return request

    def _check_model(self, name: str) -> None:
        if name != self._config.model_name:
            message = f"the model {name[:80]!r} does not exist here; this server has {self._config.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _model(self) -> dict[str, object]:
        return {"id": self._config.model_name, "object": "model", "created": self._created_s, "owned_by": "chunkserve"}

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        def timed() -> _T:
            begin_s = time.perf_counter()
            try:
                return work()
            finally:
                self.metrics.observe_tokenizing(time.perf_counter() - begin_s)

        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, timed)

    def _rendered(self, request: ChatRequest) -> list[int]:
        messages = [message.flat() for message in request.messages]
        self._refuse_hopeless("\n".join(message["content"] for message in messages), "messages")
        try:
            return self._tokenizer.render_chat(messages)
        except ValueError as error:
            raise bad_request(f"messages: {error}", "messages") from None

    def _encoded(self, request: CompletionRequest) -> list[list[int]]:
        encoded = []
        for prompt in request.prompts():
            if isinstance(prompt, str):
                self._refuse_hopeless(prompt, "prompt")
                encoded.append(self._tokenizer.encode(prompt))
            else:
                encoded.append(prompt)
        return encoded

    def _refuse_hopeless(self, text: str, param: str) -> None:
        """Refuse a text whose beginning alone exceeds the context: megabytes take many seconds, and others wait."""
        context = self._limits.max_sequence_tokens
        chars = _FIRST_CHARS_PER_TOKEN * context
        while chars < len(text):
            # The cut may split a word, into a few tokens more than the whole has there.
            if len(self._tokenizer.encode(text[:chars])) > context + _CUT_SLACK_TOKENS:
                raise bad_request(
                    f"{param}: the first {chars} of {len(text)} characters alone have more tokens than the context of "
                    f"{context} (max_sequence_tokens)",
                    param,
                    "context_length_exceeded",
                )
            chars *= 4

    def _generation(
        self,
        request: GenerationRequest,
        prompt_param: str,
        prompts: list[list[int]],
        answer_type: type[Answer],
        http: HttpRequest,
        arrival_s: float,
    ) -> Response:
        answer_id = f"{answer_type.id_prefix}-{uuid.uuid4().hex}"
        http.state.answer_id = answer_id
        requests = []
        for at, prompt in enumerate(prompts):
            if not prompt:
                raise bad_request(f"{prompt_param}: expected at least one token, got none", prompt_param)
            requests.append(
                Request(
                    request_id=f"{answer_id}-{at}",
                    prompt_token_ids=tuple(prompt),
                    sampling=request.sampling(self._limits, len(prompt), prompt_param),
                    n=request.choices,
                    cache_salt=request.cache_salt or "",
                    prefix_cache=request.prefix_cache is not False,
                )
            )
        answer = answer_type(
            answer_id=answer_id,
            created_s=int(time.time()),
            model=self._config.model_name,
            num_prompts=len(requests),
            choices_per_prompt=request.choices,
            with_logprobs=requests[0].sampling.logprobs is not None,
            include_usage=request.include_usage,
        )
        return GenerationResponse(
            requests=requests,
            answer=answer,
            stream=bool(request.stream),
            replica=self._replica,
            queue=self._queue,
            metrics=self.metrics,
            arrival_s=arrival_s,
            timeout_s=self._config.request_timeout_s,
            stream_interval_tokens=self._config.stream_interval_tokens,
            explain=http.headers.get(EXPLAIN_HEADER, "") == "1",
        )


def build_http_app(config: ServeConfig, tokenizer: TokenizerLike, replica: ReplicaClient) -> FastAPI:
    """The HTTP application; its `state.ingress` is the Ingress. It owns a thread: build it where it serves."""
    ingress = Ingress(config, tokenizer, replica)
    app = FastAPI(title="chunkserve", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.ingress = ingress
    app.add_api_route("/v1/chat/completions", ingress.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", ingress.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", ingress.models, methods=["GET"], response_model=None)
    app.add_api_route(_MODEL_PATH + "{model_id:path}", ingress.model, methods=["GET"], response_model=None)
    app.add_api_route("/health", ingress.health, methods=["GET"], response_model=None)
    app.add_api_route("/status", ingress.status, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", ingress.prometheus, methods=["GET"], response_model=None)
    if config.allow_cache_reset:
        app.add_api_route("/reset_prefix_cache", ingress.reset_cache, methods=["POST"], response_model=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    paths = frozenset(path for route in app.routes if (path := getattr(route, "path", None)))
    app.add_middleware(_RequestFrame, metrics=ingress.metrics, paths=paths)
    return app


class _RequestFrame:
    """Around every request: its id, one log line, one count, and a 500 in OpenAI's shape for our own mistakes."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.monotonic()
        request_id = _request_id(scope)
        status: int | None = None

        async def framed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        state = scope.setdefault("state", {})
        try:
            await self._app(scope, receive, framed_send)
        except ClientDisconnect:
            logger.debug("client_left_while_sending request_id=%s", request_id)
        except Exception:
            logger.exception("request_failed request_id=%s path=%s", request_id, scope["path"])
            if status is not None:
                raise
            error = ApiError(500, "internal error; the server's log has it", type="server_error", code="internal")
            await _json(500, error.body())(scope, receive, framed_send)
        finally:
            path = self._label(scope["path"])
            # 499 as nginx has it: the client left before there was a status.
            self._metrics.count_http(path, status or 499)
            logger.log(
                logging.INFO if path.startswith("/v1/") else logging.DEBUG,
                "request path=%s status=%d latency_ms=%.1f request_id=%s answer_id=%s",
                path,
                status or 499,
                (time.monotonic() - start_s) * 1e3,
                request_id,
                state.get("answer_id"),
            )

    def _label(self, path: str) -> str:
        if path.startswith(_MODEL_PATH):
            return _MODEL_PATH + "{id}"
        return path if path in self._paths else "other"


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_REQUEST_ID.fullmatch(text := value.decode("latin-1")):
            return text
    return uuid.uuid4().hex


async def _read_body(http: HttpRequest, limit_bytes: int) -> bytes:
    """The body, read no further than the limit, whether or not the client declares its length."""
    # The rest of a body that is too large stays unread, so the connection is of no further use.
    too_large = ApiError(
        413,
        f"the body has more than {limit_bytes} bytes (max_body_bytes)",
        code="body_too_large",
        headers={"connection": "close"},
    )
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit_bytes:
        raise too_large
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > limit_bytes:
            raise too_large
    return bytes(body)


def _json(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, "application/json")


async def _api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.status, error.body(), error.headers)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {http.method} {http.url.path[:200]}"
    return _json(error.status_code, ApiError(error.status_code, message).body(), dict(error.headers or {}))
