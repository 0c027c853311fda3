"""A scripted replica and a toy tokenizer behind the real HTTP app, in process and on a loopback port."""

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import pytest
import uvicorn

from chunkserve.deploy.config import ServeConfig
from chunkserve.deploy.generation import ReplicaLost, RouteReceipt
from chunkserve.deploy.ingress import build_http_app
from chunkserve.replica.protocol import (
    FinishReason,
    HotPrefix,
    ReplicaLoad,
    Request,
    StepTime,
    TokenEvent,
    TokenLogprob,
)


class ByteTokenizer:
    """One token per UTF-8 byte; the template refuses two equal roles in a row, as real ones do."""

    vocab_size = 1000
    max_context_tokens = 2048

    def __init__(self) -> None:
        self.encoded_chars: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.encoded_chars.append(len(text))
        return list(text.encode())

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        for one, next_one in itertools.pairwise(messages):
            if one["role"] == next_one["role"]:
                raise ValueError("roles must alternate")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


@dataclass
class ScriptedReplica:
    """Says "w0 w1 ..." to everything, one word a batch, up to max_tokens; faults and pauses are set from outside.

    fail_with: raised before batch `fail_at`.
    hang_at: waits for ever before this batch.
    engine_error: the finish_reason of the second batch is "error", with this text.
    losses: so many requests are lost before their third batch; they begin anew where they may.
    """

    words: int = 5
    pause_s: float = 0.0
    # No token comes before it is set.
    held: asyncio.Event | None = None
    fail_with: Exception | None = None
    fail_at: int = 0
    hang_at: int | None = None
    engine_error: str | None = None
    losses: int = 0
    cut_short: bool = False
    unhealthy: Exception | None = None
    cached_tokens: int = 3
    requests: list[Request] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    resets: int = 0

    async def generate(
        self, request: Request, receipt: RouteReceipt | None = None, begin_anew: Callable[[], None] | None = None
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        self.requests.append(request)
        self.running += 1
        ended = False
        self.losses, is_lost = max(0, self.losses - 1), self.losses > 0
        try:
            total = min(self.words, request.sampling.max_tokens)
            if is_lost:
                for at in range(2):
                    yield [self._event(request, choice, at, total) for choice in range(request.n)]
                if begin_anew is None:
                    raise ReplicaLost("the replica is lost: it died")
                begin_anew()
            for at in range(total):
                if self.fail_with is not None and at == self.fail_at:
                    raise self.fail_with
                if at == self.hang_at:
                    await asyncio.Event().wait()
                if self.held is not None:
                    await self.held.wait()
                await asyncio.sleep(self.pause_s)
                yield [self._event(request, choice, at, total) for choice in range(request.n)]
                if self.cut_short:
                    return
            ended = True
        finally:
            self.running -= 1
            self.cancelled += not ended

    def _event(self, request: Request, choice: int, at: int, total: int) -> TokenEvent:
        finish: FinishReason | None = None
        if at + 1 == total:
            finish = "length" if total == request.sampling.max_tokens else "stop"
        if self.engine_error and at == 1:
            finish = "error"
        text = f"w{at} "
        wanted = request.sampling.logprobs
        top = tuple(logprob(f"t{rank} ", -1.0 - rank) for rank in range(wanted or 0))
        return TokenEvent(
            choice=choice,
            text=text,
            token_ids=(at,),
            logprobs=() if wanted is None else (logprob(text, -0.5, top),),
            finish_reason=finish,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            completion_tokens=at + 1,
            error=self.engine_error if finish == "error" else None,
        )

    async def check_health(self) -> None:
        if self.unhealthy is not None:
            raise self.unhealthy

    async def reset_cache(self) -> Sequence[str]:
        if self.unhealthy is not None:
            raise self.unhealthy
        self.resets += 1
        return ["replica-0"]

    async def loads(self) -> Mapping[str, ReplicaLoad]:
        if self.unhealthy is not None:
            raise self.unhealthy
        return {"replica-0": LOAD}


LOAD = ReplicaLoad(
    running_sequences=2,
    waiting_sequences=1,
    chunks_total=100,
    chunks_in_use=7,
    chunks_retained=11,
    chunk_bytes=1000,
    steps=42,
    last_step_age_s=0.25,
    computed_prompt_tokens=500,
    cached_prompt_tokens=1500,
    generated_tokens=77,
    preemptions=4,
    cancelled_requests=5,
    finished={"stop": 6, "length": 8},
    backlog_s=1.25,
    step=StepTime(),
    hot_prefixes=(HotPrefix(name="c0ffee" * 5, tokens=640, sharers=2),),
)


def logprob(text: str, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(token_id=1, text=text, bytes_=text.encode(), logprob=value, top=top)


@pytest.fixture
def replica() -> ScriptedReplica:
    return ScriptedReplica()


@pytest.fixture
def tokenizer_like() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def config() -> ServeConfig:
    return ServeConfig(served_model_name="toy", max_body_bytes=100_000, request_timeout_s=20.0, health_stall_s=0.5)


@pytest.fixture
async def http(
    config: ServeConfig, replica: ScriptedReplica, tokenizer_like: ByteTokenizer
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app in this event loop."""
    transport = httpx.ASGITransport(build_http_app(config, tokenizer_like, replica))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
        yield client


@pytest.fixture
def live_url(config: ServeConfig, replica: ScriptedReplica) -> Iterator[str]:
    """The app under a real uvicorn on a free loopback port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(build_http_app(config, ByteTokenizer(), replica), log_level="error", lifespan="off")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = server.force_exit = True
        thread.join(10)
