"""A deployed fleet of the live routing benchmark, and what came of the arms that ran on it."""

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import ray
from ray import serve

from chunkserve.deploy.app import application
from chunkserve.deploy.config import ServeConfig
from chunkserve.deploy.load_client import Connection, LoadError, Sample, Target
from chunkserve.deploy.local_server import loopback_port
from chunkserve.replica.fake import FakeModelRunner
from chunkserve.replica.protocol import StepTime
from chunkserve.replica.tokenizer import Tokenizer
from live_arms import RAY_PREFIX, Arm, ArmRouter, Ask, Questions

# Until routers have heard of all: a report, and a delta.
SETTLE_S = 1.1
# A prompt's own part: the question, the end of the template, and what lies behind the last full chunk.
OWN_TOKENS = 90
OUTPUT_TOKENS = (8, 24)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Replicas of one kind. step: what their steps cost; simulated, or about what they take."""

    kind: str
    replicas: int
    step: StepTime
    is_simulated: bool

    def config(self) -> ServeConfig:
        return ServeConfig(
            num_replicas=self.replicas, num_threads=1, max_sequence_tokens=4096, kv_pool_chunks=200,
            max_step_tokens=256 if self.is_simulated else 128, log_level="warning",
        )  # fmt: skip

    def rate_rps(self, load: float, own_tokens: int = OWN_TOKENS) -> float:
        """own_tokens: of a prompt, that nobody shares."""
        step, output = self.step, statistics.mean(OUTPUT_TOKENS)
        prefill_s = step.prefill_s(own_tokens, 0, int(self.config().max_step_tokens))
        return load * self.replicas / (prefill_s + output * (step.per_token_s + step.per_sequence_s))


SIMULATED = Fleet(
    kind="simulated steps",
    replicas=4,
    step=StepTime(fixed_s=0.04, per_token_s=8e-4, per_sequence_s=3e-4),
    is_simulated=True,
)
REAL = Fleet(
    kind="smollm2", replicas=2, step=StepTime(fixed_s=0.03, per_token_s=1.5e-3, per_sequence_s=5e-3), is_simulated=False
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of an Ask: a sample, or why there is none."""

    ask: Ask
    sample: Sample | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of an arm. begin_s: from the first warm-up request to the begin of the measured ones."""

    arm: Arm
    answers: list[Answer]
    begin_s: float


class Server:
    """A deployed fleet, and the arms that have run on it. unshared: each request has a cache_salt of its own."""

    def __init__(self, fleet: Fleet, url: str, *, unshared: bool) -> None:
        self.fleet = fleet
        self.unshared = unshared
        self.url = url
        self._target = replace(Target.parse(url), headers={"x-chunkserve-explain": "1"})
        self._numbers = itertools.count()

    def status(self) -> dict[str, dict[str, Any]]:
        """ReplicaLoad of each replica."""
        return httpx.get(f"{self.url}/status", timeout=30).json()["replicas"]

    def total(self, *fields: str) -> int:
        return sum(load[field] for load in self.status().values() for field in fields)

    def salt(self, arm: Arm) -> str:
        """One that is nobody else's."""
        return arm.salt(next(self._numbers))

    def run(self, arm: Arm, salt: str, *, warm_up: bool) -> Run:
        """Ask, and see that the server counted what was asked."""
        prompts, generated = ("computed_prompt_tokens", "cached_prompt_tokens"), ("generated_tokens",)
        before = self.total(*prompts), self.total(*generated)
        warmup, run = asyncio.run(self._run(arm, salt, arm.warmup if warm_up else ()))
        answers = [*warmup, *run.answers]
        samples = [(answer.ask, answer.sample) for answer in answers if answer.sample is not None]
        for ask, sample in samples:
            got = sample.prompt_tokens, sample.completion_tokens
            if got != (len(ask.token_ids), ask.output_tokens) or sample.cached_tokens >= sample.prompt_tokens:
                raise SystemExit(
                    f"{arm.policy}: {sample} does not fit {len(ask.token_ids)}, {ask.output_tokens} tokens"
                )
            if (seen := int(sample.headers["x-chunkserve-cached-tokens"])) != sample.cached_tokens:
                raise SystemExit(
                    f"{arm.policy}: {seen} cached tokens in the headers, {sample.cached_tokens} in the usage"
                )
        if len(samples) == len(answers):
            asked = sum(len(ask.token_ids) for ask, _ in samples), sum(ask.output_tokens for ask, _ in samples)
            counted = self.total(*prompts) - before[0], self.total(*generated) - before[1]
            if counted != asked:
                raise SystemExit(f"{arm.policy}: the replicas count {counted} tokens, asked were {asked}")
        return run

    async def _run(self, arm: Arm, salt: str, first: Sequence[Ask]) -> tuple[list[Answer], Run]:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        warmup = await self._ask(first, salt)
        if warmup:
            await asyncio.sleep(SETTLE_S)
        begin_s = loop.time() - start_s
        return warmup, Run(arm=arm, answers=await self._ask(arm.asks, salt), begin_s=begin_s)

    async def _ask(self, asks: Sequence[Ask], salt: str) -> list[Answer]:
        idle: list[Connection] = []
        loop = asyncio.get_running_loop()
        start_s = loop.time()

        async def one(number: int, ask: Ask) -> Answer:
            own_salt = f"{salt}/{number}" if self.unshared else salt
            await asyncio.sleep(start_s + ask.at_s - loop.time())
            connection = idle.pop() if idle else Connection(self._target)
            try:
                return Answer(ask=ask, sample=await connection.stream("/v1/chat/completions", _body(ask, own_salt)))
            except LoadError as error:
                return Answer(ask=ask, error=str(error))
            finally:
                idle.append(connection)

        answers = await asyncio.gather(*itertools.starmap(one, enumerate(asks)))
        for connection in idle:
            await connection.close()
        return list(answers)

    def step(self) -> StepTime:
        """What steps cost, by the replicas' own fits."""
        found = [load["step"] for load in self.status().values() if load["steps"]]
        return StepTime(**{name: statistics.mean(one[name] for one in found) for name in found[0]})

    def check(self, questions: Questions, tokenizer: Tokenizer) -> None:
        """Answers are right, cold and warm, before anything is timed."""
        asks = questions.warmup(seed=-1, output_tokens=OUTPUT_TOKENS)[:3]
        if not self.fleet.is_simulated:
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            ids = tokenizer.render_chat(messages)
            asks = [Ask(at_s=0, messages=messages, prompt=0, token_ids=ids, output_tokens=7)]
        model = FakeModelRunner(vocab_size=tokenizer.vocab_size, num_slots=1, chunk_size=16)
        for ask, policy in zip(asks, ("prefix", "round_robin", RAY_PREFIX), strict=False):
            salt = f"{policy}/check"
            ids = list(ask.token_ids)
            for _ in range(ask.output_tokens):
                ids.append(model.next_token(salt, ids))
            wanted = tokenizer.decode(ids[len(ask.token_ids) :])
            for _ in ("cold", "warm"):
                body = _body(ask, salt) | {"stream": False, "stream_options": None}
                reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120).json()
                text = reply["choices"][0]["message"]["content"]
                if text != (wanted if self.fleet.is_simulated else "The capital of France is Paris."):
                    raise SystemExit(
                        f"{self.fleet.kind}: the answer is {text!r}, expected {wanted!r}; nothing is timed"
                    )


def _body(ask: Ask, salt: str) -> dict[str, Any]:
    return {
        "messages": ask.messages, "max_tokens": ask.output_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt,
    }  # fmt: skip


@contextmanager
def ray_session() -> Iterator[str]:
    """Ray and Serve of one's own; the URL of their proxy. They end with the block."""
    # Names of Unix sockets are short, and Ray's lie deep in its folder.
    with (
        loopback_port() as port,
        tempfile.TemporaryDirectory(prefix="cs", dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        ray.init(_temp_dir=folder, include_dashboard=False, log_to_driver=False, logging_level="warning", num_cpus=64)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def deployed(fleet: Fleet, url: str, *, unshared: bool) -> Iterator[Server]:
    step = fleet.step if fleet.is_simulated else None
    serve.run(application(fleet.config(), router_class=ArmRouter, simulated_step=step), name="live", route_prefix="/")
    yield Server(fleet, url, unshared=unshared)
    serve.delete("live")
