"""Arms of the live routing benchmark: what is asked, and a router that takes each request's policy from the request."""

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from chunkserve.replica.protocol import Request
from chunkserve.router.serve_router import ServeRouter, request_of

WORKLOADS = Path(__file__).resolve().parents[1] / "../shared/workloads"
RAY_PREFIX = "ray_prefix"
_SEPARATOR = "/"


class ArmRouter(ServeRouter, PrefixCacheAffinityRouter):
    """One server for all policies: a request's cache_salt begins with the name of its policy.

    Salts share nothing, so each arm begins cold, too. `ray_prefix` is Ray's own prefix router with its defaults; it
    gets a character per token, fewer than the text has, and its tree lives on between arms, under other first letters.
    """

    def initialize_state(self, **settings: Any) -> None:
        ServeRouter.initialize_state(self, **settings)
        PrefixCacheAffinityRouter.initialize_state(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        request = request_of(pending_request)
        if request is not None:
            self._state.policy = _policy_of(request)
            if self._state.policy == RAY_PREFIX:
                begin_s = time.perf_counter()
                ranks = await PrefixCacheAffinityRouter.choose_replicas(self, candidate_replicas, pending_request)
                self._state.decided(request.request_id, time.perf_counter() - begin_s)
                return ranks
        return await ServeRouter.choose_replicas(self, candidate_replicas, pending_request)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        ServeRouter.on_request_routed(self, pending_request, replica_id, result)
        request = request_of(pending_request)
        if request is not None and _policy_of(request) == RAY_PREFIX:
            PrefixCacheAffinityRouter.on_request_routed(self, pending_request, replica_id, result)

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        request = request_of(pending_request)
        assert request is not None
        arm = chr(0xE000 + sum(request.cache_salt.encode()) % 0x1000)
        return arm + "".join(map(chr, request.prompt_token_ids))


def _policy_of(request: Request) -> str:
    return request.cache_salt.partition(_SEPARATOR)[0]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of an arm. token_ids: what its messages come to."""

    at_s: float
    messages: list[dict[str, str]]
    prompt: int
    token_ids: list[int]
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run of a workload. policy, load and seed name it; equal loads and seeds ask the same.

    warmup: asked for before the clock starts.
    """

    policy: str
    load: float
    seed: int
    warmup: Sequence[Ask]
    asks: Sequence[Ask]

    def salt(self, number: int) -> str:
        """number: tells repeated arms apart."""
        return _SEPARATOR.join((self.policy, f"{self.load:g}", f"{self.seed}", f"{number}"))


class ChatTokenizer(Protocol):
    """What is used of `chunkserve.replica.tokenizer.Tokenizer`."""

    def encode(self, text: str) -> list[int]: ...

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


class Questions:
    """Real prompts and questions; a prompt's question is of its family."""

    def __init__(self, tokenizer: ChatTokenizer, num_prompts: int) -> None:
        prompts = [json.loads(line) for line in (WORKLOADS / "prompts.jsonl").read_text().splitlines()]
        prompts = prompts[-num_prompts:]
        questions = [json.loads(line) for line in (WORKLOADS / "questions.jsonl").read_text().splitlines()]
        self.prompts: list[str] = [prompt["text"] for prompt in prompts]
        families = ["toolqa" if prompt["id"].startswith("toolqa") else "tabmwp" for prompt in prompts]
        self._questions = [[q["question"] for q in questions if q["family"] == family] for family in families]
        self._tokenizer = tokenizer

    @cached_property
    def mean_tokens(self) -> int:
        """Of the prompts, without questions."""
        return round(statistics.mean(len(self._tokenizer.encode(prompt)) for prompt in self.prompts))

    def warmup(self, *, seed: int, output_tokens: tuple[int, int]) -> list[Ask]:
        """Each prompt once, in quick succession."""
        draw = random.Random(f"warm-up {seed}")
        order = draw.sample(range(len(self.prompts)), len(self.prompts))
        return [self._ask(0.05 * at, prompt, draw, output_tokens) for at, prompt in enumerate(order)]

    def asks(
        self, *, rate_rps: float, seconds: float, seed: int, output_tokens: tuple[int, int], zipf: float = 1.0
    ) -> list[Ask]:
        """Arrivals by a Poisson process, prompts by Zipf's law; lengths of answers are even between two."""
        draw = random.Random(f"asks {seed} {rate_rps:.6g}")
        order = list(range(len(self.prompts)))
        random.Random(f"popularity {seed}").shuffle(order)
        weights = [(rank + 1.0) ** -zipf for rank in range(len(order))]
        asks, at_s = [], 0.0
        while (at_s := at_s + draw.expovariate(rate_rps)) < seconds:
            (prompt,) = draw.choices(order, weights)
            asks.append(self._ask(at_s, prompt, draw, output_tokens))
        return asks

    def _ask(self, at_s: float, prompt: int, draw: random.Random, output_tokens: tuple[int, int]) -> Ask:
        question = draw.choice(self._questions[prompt])
        messages = [{"role": "system", "content": self.prompts[prompt]}, {"role": "user", "content": question}]
        return Ask(
            at_s=at_s,
            messages=messages,
            prompt=prompt,
            token_ids=self._tokenizer.render_chat(messages),
            output_tokens=draw.randint(*output_tokens),
        )
