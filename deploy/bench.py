"""The load generator of `chunkserve bench`: requests with one shared beginning, against any OpenAI-compatible URL."""

import asyncio
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import numpy as np

from .load_client import Connection, LoadError, Sample, Target

# Common words, one token each with their space in most vocabularies.
_WORD_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education good new first last long great little own other old big high "
    "small large next early young important few public bad same able the of and to in is that it was for on are as with"
)
_WORDS = _WORD_TEXT.split()
_CALIBRATION_WORDS = (50, 150)
_TOKEN_IDS = range(1000, 20_000)


class BenchError(Exception):
    """The benchmark cannot start; the text says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What to send. `shared_tokens` begin every prompt, `own_tokens` differ; both are of text, without a chat's frame.

    concurrency: requests in flight, each following the one before; used unless `rate_rps` is set.
    rate_rps: mean arrivals per second, Poisson, regardless of how many are in flight.
    endpoint: "chat" (the shared part as the system's message), "completions", or "token-ids" (exact counts).
    warmup: requests before the measured ones; 0 measures a cold start.
    share: False gives each request a cache_salt of its own, so that the server shares nothing.
    seed: chooses the words; another seed shares nothing with this one.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: str = "chat"
    concurrency: int = 8
    rate_rps: float | None = None
    num_requests: int = 64
    shared_tokens: int = 1024
    own_tokens: int = 32
    new_tokens: int = 64
    temperature: float = 0.0
    ignore_eos: bool = True
    warmup: int = 1
    share: bool = True
    seed: int = 0
    label: str = "chunkserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What came back. `errors` counts messages; wall_s is from the first send to the last answer."""

    settings: BenchSettings
    model: str
    samples: tuple[Sample, ...]
    errors: Counter[str]
    wall_s: float

    def row(self) -> dict[str, Any]:
        """One flat JSON row: settings, where and when it ran, and figures; None where nothing was measured."""
        settings = asdict(self.settings)
        system = settings.pop("label")
        settings.pop("api_key")
        prompt_tokens = sum(sample.prompt_tokens for sample in self.samples)
        new_tokens = sum(sample.completion_tokens for sample in self.samples)
        row: dict[str, Any] = {
            "system": system,
            **settings,
            "model": self.model,
            "concurrency": self.settings.concurrency if self.settings.rate_rps is None else None,
            "errors": self.errors.total(),
            "wall_s": self.wall_s,
            "output_tokens_per_s": new_tokens / self.wall_s,
            "requests_per_s": len(self.samples) / self.wall_s,
            "prompt_tokens_mean": prompt_tokens / len(self.samples) if self.samples else None,
            "completion_tokens_mean": new_tokens / len(self.samples) if self.samples else None,
            "cached_share": sum(s.cached_tokens for s in self.samples) / prompt_tokens if prompt_tokens else None,
        }
        for name, values_s in self._times_s().items():
            for percent in (50, 90, 99):
                row[f"{name}_ms_p{percent}"] = float(np.percentile(values_s, percent)) * 1e3 if values_s else None
        return row | {
            "machine": platform.machine(),
            "machine_cpus": os.cpu_count(),
            "version": metadata.version("chunkserve"),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _times_s(self) -> dict[str, list[float]]:
        return {
            "ttft": [sample.ttft_s for sample in self.samples],
            "tpot": [sample.tpot_s for sample in self.samples if sample.tpot_s is not None],
            "latency": [sample.latency_s for sample in self.samples],
        }


async def run_bench(settings: BenchSettings, on_done: Callable[[], None] = lambda: None) -> BenchResult:
    """Calibrate, warm up, measure.

    Args:
        on_done: called after each measured request.
    Raises:
        BenchError: the server cannot be reached or refuses the first request.
    """
    try:
        target = Target.parse(settings.url, settings.api_key)
    except ValueError as error:
        raise BenchError(str(error)) from None
    connection = Connection(target)
    try:
        model = settings.model or (await connection.fetch("GET", "/v1/models"))["data"][0]["id"]
        prompts = await _Prompts.calibrated(connection, model, settings)
        for at in range(settings.warmup):
            await connection.stream(prompts.path, prompts.body(-1 - at))
    except LoadError as error:
        hint = " (--no-ignore-eos for servers that lack it)" if "ignore_eos" in str(error) else ""
        raise BenchError(f"{settings.url}: {error}{hint}") from None
    finally:
        await connection.close()

    load = _Load(target, prompts, on_done)
    start_s = time.perf_counter()
    if settings.rate_rps is None:
        await load.closed(settings.num_requests, settings.concurrency)
    else:
        await load.open(settings.num_requests, settings.rate_rps, random.Random(f"arrivals {settings.seed}"))
    wall_s = time.perf_counter() - start_s
    return BenchResult(settings=settings, model=model, samples=tuple(load.samples), errors=load.errors, wall_s=wall_s)


class _Prompts:
    """Request bodies by number; equal numbers and seeds give equal bodies."""

    def __init__(self, settings: BenchSettings, model: str, tokens_per_word: float) -> None:
        self.path = "/v1/chat/completions" if settings.endpoint == "chat" else "/v1/completions"
        self._settings = settings
        self._model = model
        self._tokens_per_word = tokens_per_word
        self._shared = self._part(f"shared {settings.seed}", settings.shared_tokens)

    @classmethod
    async def calibrated(cls, connection: Connection, model: str, settings: BenchSettings) -> "_Prompts":
        """With the tokens per word that this server's vocabulary has, out of two short requests."""
        prompts = cls(settings, model, 1.0)
        if settings.endpoint == "token-ids":
            return prompts
        counts = []
        for words in _CALIBRATION_WORDS:
            body = prompts._framed("", _text(random.Random(f"calibration {settings.seed}"), words))
            counts.append((await connection.stream(prompts.path, body | {"max_tokens": 2})).prompt_tokens)
        tokens_per_word = (counts[1] - counts[0]) / (_CALIBRATION_WORDS[1] - _CALIBRATION_WORDS[0])
        return cls(settings, model, tokens_per_word)

    def body(self, number: int) -> dict[str, Any]:
        own = self._part(f"own {self._settings.seed} {number}", self._settings.own_tokens)
        salt = {} if self._settings.share else {"cache_salt": f"{self._settings.seed} {number}"}
        return self._framed(self._shared, own) | salt

    def _part(self, seed: str, tokens: int) -> Any:
        source = random.Random(seed)
        if self._settings.endpoint == "token-ids":
            return [source.choice(_TOKEN_IDS) for _ in range(tokens)]
        return _text(source, round(tokens / self._tokens_per_word))

    def _framed(self, shared: Any, own: Any) -> dict[str, Any]:
        settings = self._settings
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": settings.new_tokens,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if settings.endpoint != "chat":
            return body | {"prompt": shared + own}
        system = [{"role": "system", "content": shared}] if shared else []
        return body | {"messages": [*system, {"role": "user", "content": own}]}


class _Load:
    """Sends numbered requests and keeps what came back."""

    def __init__(self, target: Target, prompts: _Prompts, on_done: Callable[[], None]) -> None:
        self.samples: list[Sample] = []
        self.errors: Counter[str] = Counter()
        self._target = target
        self._prompts = prompts
        self._on_done = on_done
        self._idle: list[Connection] = []

    async def closed(self, num_requests: int, concurrency: int) -> None:
        numbers = iter(range(num_requests))

        async def follow() -> None:
            for number in numbers:
                await self._one(number)

        await self._all([follow() for _ in range(min(concurrency, num_requests))])

    async def open(self, num_requests: int, rate_rps: float, source: random.Random) -> None:
        async def at(number: int, due_s: float) -> None:
            await asyncio.sleep(due_s)
            await self._one(number)

        due_s = 0.0
        arrivals = []
        for number in range(num_requests):
            arrivals.append(at(number, due_s))
            due_s += source.expovariate(rate_rps)
        await self._all(arrivals)

    async def _all(self, work: Sequence[Any]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for one in work:
                    group.create_task(one)
        finally:
            for connection in self._idle:
                await connection.close()

    async def _one(self, number: int) -> None:
        connection = self._idle.pop() if self._idle else Connection(self._target)
        try:
            self.samples.append(await connection.stream(self._prompts.path, self._prompts.body(number)))
        except LoadError as error:
            self.errors[str(error)] += 1
        self._idle.append(connection)
        self._on_done()


def _text(source: random.Random, words: int) -> str:
    return "".join(f" {source.choice(_WORDS)}" for _ in range(words))
