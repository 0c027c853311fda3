"""The promise: in float32, greedy, the words are transformers' own, whatever is shared, evicted, preempted."""

import random
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from chunkserve.replica.build import build_engine
from chunkserve.replica.engine import Engine
from chunkserve.replica.options import BuildError, ReplicaOptions
from chunkserve.replica.protocol import Request, SamplingParams, TokenEvent

pytestmark = [pytest.mark.model, pytest.mark.slow]


class Replica:
    """A real engine, stepped by hand."""

    def __init__(self, folder: Path, **options: object) -> None:
        defaults = {"dtype": "float32", "max_sequence_tokens": 1024, "pool_chunks": 200, "num_threads": 1}
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self.engine: Engine = build_engine(ReplicaOptions(model=str(folder), **{**defaults, **options}), self.take)

    def take(self, events: list[tuple[str, TokenEvent]]) -> None:
        for request_id, event in events:
            self.events[request_id].append(event)

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int, salt: str = "", **sampling: object) -> None:
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **sampling})
        self.engine.submit(Request(request_id=name, prompt_token_ids=prompt, sampling=params, cache_salt=salt))

    def turn(self) -> bool:
        self.engine._take_messages(wait=False)
        return self.engine.step()

    def run(self) -> None:
        while self.turn():
            pass
        self.engine.check()

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(token for event in self.events[name] for token in event.token_ids)


@pytest.fixture(scope="module")
def replica(small_model: Path) -> Replica:
    return Replica(small_model)


def test_alone_cold_and_warm(replica: Replica, greedy_cases) -> None:
    for case in greedy_cases:
        replica.submit(f"cold {case.name}", case.prompt, len(case.tokens), salt=case.name)
        replica.run()
        replica.submit(f"warm {case.name}", case.prompt, len(case.tokens), salt=case.name)
        replica.run()
        assert replica.tokens(f"cold {case.name}") == case.tokens, case.name
        assert replica.tokens(f"warm {case.name}") == case.tokens, case.name
        assert replica.events[f"cold {case.name}"][0].cached_tokens == 0
        assert replica.events[f"warm {case.name}"][0].cached_tokens == len(case.prompt) - 1


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        ({"max_running": 16, "num_threads": 2}, False),
        ({"max_running": 16, "max_step_tokens": 40, "chunk_size": 32, "pool_chunks": 400}, False),
        ({"max_running": 16, "chunk_size": 16, "pool_chunks": 66, "max_sequence_tokens": 1000}, True),
        ({"max_running": 8, "prefix_sharing": False}, False),
        ({"max_running": 16, "retain_prefixes": False, "chunk_size": 16, "pool_chunks": 800}, False),
        ({"max_running": 16, "attention_backend": "reference"}, False),
    ],
    ids=["plain", "pieces", "tiny_pool", "unshared", "paper", "reference"],
)
def test_in_a_batch_that_others_join_and_leave(small_model: Path, greedy_cases, options, preempts: bool) -> None:
    replica = Replica(small_model, **options)
    rng = random.Random(1)
    cases = list(greedy_cases) if "attention_backend" not in options else greedy_cases[:8]
    rng.shuffle(cases)
    for case in cases:
        replica.submit(case.name, case.prompt, len(case.tokens))
        if rng.random() < 0.3:
            replica.submit(f"leaver {case.name}", case.prompt[: rng.randrange(1, 90)], rng.randrange(1, 9))
        for _ in range(rng.randrange(4)):
            replica.turn()
        if rng.random() < 0.2:
            replica.submit(f"cancelled {case.name}", case.prompt, 50)
            replica.turn()
            replica.engine.cancel(f"cancelled {case.name}")
    replica.run()
    for case in cases:
        assert replica.tokens(case.name) == case.tokens, case.name
    assert (replica.engine.load().preemptions > 0) == preempts


def test_pool_of_six_serves_twenty_four(small_model: Path, greedy_cases) -> None:
    """24 requests that share nothing, against a pool that holds six of them."""
    case = next(case for case in greedy_cases if case.name == "story")
    needed = -(-(len(case.prompt) + len(case.tokens)) // 64)
    replica = Replica(small_model, pool_chunks=6 * needed, max_sequence_tokens=6 * needed * 64, max_running=24)
    for i in range(24):
        replica.submit(str(i), case.prompt, len(case.tokens), salt=str(i))
    replica.run()
    assert all(replica.tokens(str(i)) == case.tokens for i in range(24))


def test_one_copy_of_a_prefix_of_1024_tokens(small_model: Path, tokenizer) -> None:
    replica = Replica(small_model, max_sequence_tokens=2048, max_running=16)
    prefix = tokenizer.encode("All work and no play makes a dull day. " * 120)[:1024]
    assert len(prefix) == 1024
    for i in range(16):
        replica.submit(str(i), (*prefix, *tokenizer.encode(f"Question {i}: what is {i} plus {i}?")), 8)
    peak = 0
    while replica.turn():
        peak = max(peak, replica.engine.load().chunks_in_use)
    assert peak == 16 + 16, "one prefix of 16 chunks, and 16 tails"
    load = replica.engine.load()
    tails = sum(event[0].prompt_tokens for event in replica.events.values()) - 16 * 1024
    assert load.computed_prompt_tokens <= 1024 + tails
    assert [replica.events[str(i)][0].cached_tokens >= 1024 for i in range(16)] == [False] + [True] * 15


def test_seeded_text_is_the_same_in_any_batch(replica: Replica, greedy_cases) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    case = greedy_cases[1]
    replica.submit("alone", case.prompt, 24, salt="seeded", **sampling)
    replica.run()
    for other in greedy_cases[:8]:
        replica.submit(f"with {other.name}", other.prompt, 24)
    replica.submit("together", case.prompt, 24, **sampling)
    replica.submit("other seed", case.prompt, 24, **{**sampling, "seed": 12})
    replica.run()
    assert replica.tokens("together") == replica.tokens("alone") != replica.tokens("other seed")


def test_bfloat16_is_near(small_model: Path, greedy_cases) -> None:
    """bfloat16 may choose other words in a close call; the log-probability of the first token stays near."""
    first = {}
    for dtype in ("float32", "bfloat16"):
        replica = Replica(small_model, dtype=dtype)
        for case in greedy_cases:
            replica.submit(case.name, case.prompt, 1, logprobs=0)
        replica.run()
        first[dtype] = [replica.events[case.name][0].logprobs[0].logprob for case in greedy_cases]
    # fmt: off
    differences = sorted(abs(a - b) for a, b in zip(first["float32"], first["bfloat16"], strict=True))
    # fmt: on
    assert differences[len(differences) // 2] < 0.05
    assert differences[-1] < 0.6


def test_wrong_sizes_are_refused_with_the_knob(small_model: Path) -> None:
    for options, words in [
        ({"max_sequence_tokens": 9000}, "max_sequence_tokens is 9000; the model's context has 8192"),
        ({"pool_chunks": None, "pool_bytes": 1000}, "kv_pool_bytes is 1000"),
        ({"device": "cuda"}, "device is cuda"),
    ]:
        with pytest.raises(BuildError, match=words):
            Replica(small_model, **options)


def test_bias_and_repetition_penalty_give_transformers_words(small_model: Path, replica: Replica, tokenizer) -> None:
    prompt = tokenizer.encode("The sea was calm, the sea was blue, the sea was")
    bias = {tokenizer.encode(" calm")[0]: 6.0, tokenizer.encode(" the")[0]: -4.0}
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0,
        repetition_penalty=1.3, sequence_bias=[[[token], value] for token, value in bias.items()],
    )  # fmt: skip
    replica.submit("plain", tuple(prompt), 24)
    replica.submit("bent", tuple(prompt), 24, repetition_penalty=1.3, logit_bias=tuple(bias.items()))
    replica.run()
    assert replica.tokens("bent") == tuple(tokens[0, len(prompt) :].tolist()) != replica.tokens("plain")
