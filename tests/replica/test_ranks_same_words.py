"""The promise on several ranks: the words of one rank, whatever joins, leaves, is evicted or preempted."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkserve.replica.build import build_engine
from chunkserve.replica.options import ReplicaOptions
from chunkserve.replica.protocol import Request, SamplingParams, TokenEvent

from .random_llama import VOCAB_SIZE, save_random_llama
from .rank_threads import Ranks, model_ranks

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture
def tiny_model(tmp_path: Path, small_model: Path) -> Callable[[str], Path]:
    return lambda name: save_random_llama(name, tmp_path, small_model)


class OneRank:
    """The same engine with one rank."""

    def __init__(self, options: ReplicaOptions) -> None:
        self.events: list[TokenEvent] = []
        self.engine = build_engine(options, lambda events: self.events.extend(event for _, event in events))

    def tokens(self, prompt: tuple[int, ...], max_tokens: int, **options: object) -> tuple[int, ...]:
        """Alone, with nothing cached."""
        self.events.clear()
        self.engine.clear_prefixes()
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **options})
        self.engine.submit(Request(request_id="r", prompt_token_ids=prompt, sampling=params))
        self.engine._take_messages(wait=False)
        while self.engine.step():
            pass
        return tuple(token for event in self.events for token in event.token_ids)


def run_mixed(ranks: Ranks, one: OneRank, vocab_size: int, num_requests: int, seed: int) -> None:
    """Requests with shared and other prefixes, greedy and seeded, some cancelled, at random times."""
    rng = random.Random(seed)
    stems = [tuple(rng.randrange(1, vocab_size) for _ in range(size)) for size in (16, 40, 70)]
    cases = {}
    for i in range(num_requests):
        stem = rng.choice([*stems, ()])
        prompt = (
            *stem[: rng.randrange(len(stem) + 1)],
            *(rng.randrange(1, vocab_size) for _ in range(rng.randrange(1, 9))),
        )
        sampling: dict[str, object] = {}
        if i % 3 == 2:
            sampling = {"temperature": 0.8, "top_p": 0.9, "seed": i}
        if i % 4 >= 2:
            sampling |= {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.2}
        if i % 4 >= 1:
            sampling["logit_bias"] = ((i, 3.5), (rng.randrange(vocab_size // 2, vocab_size), -100.0))
        cases[f"r{i}"] = (prompt, rng.randrange(4, 24), sampling)
        ranks.submit(f"r{i}", prompt, cases[f"r{i}"][1], **sampling)
        for _ in range(rng.randrange(3)):
            ranks.turn()
        if i % 5 == 4:
            ranks.submit(f"leaver {i}", prompt, 200)
            ranks.turn()
            ranks.turn()
            ranks.engine.cancel(f"leaver {i}")
    ranks.run()
    for name, (prompt, max_tokens, sampling) in cases.items():
        assert ranks.tokens(name) == one.tokens(prompt, max_tokens, **sampling), name


@pytest.mark.parametrize(
    ("name", "num_ranks", "pool"),
    [
        *(("smollm_like", num_ranks, pool) for num_ranks in (2, 3, 4) for pool in ("roomy", "tight")),
        *((name, num_ranks, "tight") for name in ("llama2_like", "llama3_like") for num_ranks in (2, 4)),
    ],
)
def test_same_words_as_one_rank(tiny_model: Callable[[str], Path], name: str, num_ranks: int, pool: str) -> None:
    options = ReplicaOptions(
        model=str(tiny_model(name)), dtype="float32", chunk_size=16, num_threads=1, max_sequence_tokens=288,
        max_running=6, max_step_tokens=48, pool_chunks=200 if pool == "roomy" else 20,
        retain_prefixes=name != "llama2_like",
    )  # fmt: skip
    one = OneRank(options)
    ranks = model_ranks(options, num_ranks)
    try:
        run_mixed(ranks, one, VOCAB_SIZE, num_requests=20, seed=num_ranks)
        if pool == "tight":
            assert ranks.engine._tree.num_evictions > 0 or not options.retain_prefixes
        for follower in ranks.followers.values():
            follower.core.scheduler.check()
    finally:
        ranks.close()


def test_preempted_sequences_on_two_ranks(tiny_model: Callable[[str], Path]) -> None:
    options = ReplicaOptions(
        model=str(tiny_model("smollm_like")), dtype="float32", chunk_size=16, num_threads=1, max_sequence_tokens=128,
        max_running=6, max_step_tokens=48, pool_chunks=8,
    )  # fmt: skip
    one = OneRank(options)
    ranks = model_ranks(options, 2)
    try:
        for i in range(5):
            ranks.submit(f"r{i}", (i, 7), 40)
        ranks.run()
        assert ranks.engine.load().preemptions > 0
        for i in range(5):
            assert ranks.tokens(f"r{i}") == one.tokens((i, 7), 40)
    finally:
        ranks.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_small_model_says_what_transformers_says(small_model: Path, greedy_cases, num_ranks: int) -> None:
    """In one batch that grows, with prompts at the edges of chunks and of each other, and with some that leave."""
    options = ReplicaOptions(
        model=str(small_model), dtype="float32", num_threads=1, max_sequence_tokens=640, pool_chunks=40, max_running=12
    )  # fmt: skip
    ranks = model_ranks(options, num_ranks)
    try:
        for i, case in enumerate(greedy_cases):
            ranks.submit(case.name, case.prompt, 8)
            if i % 6 == 5:
                ranks.submit(f"leaver {i}", case.prompt, 100)
                ranks.turn()
                ranks.turn()
                ranks.engine.cancel(f"leaver {i}")
        ranks.run()
        for case in greedy_cases:
            assert ranks.tokens(case.name) == case.tokens[:8], case.name
    finally:
        ranks.close()


def test_deterministic_mode_gives_the_same_bits_alone_and_in_a_batch(tiny_model: Callable[[str], Path]) -> None:
    options = ReplicaOptions(
        model=str(tiny_model("smollm_like")), deterministic=True, dtype="bfloat16", chunk_size=16, num_threads=1,
        max_sequence_tokens=512, max_running=8, max_step_tokens=100, pool_chunks=200, num_ranks=2,
    )  # fmt: skip
    prompts = [tuple((i * 7 + k) % 300 for i in range(300 - 40 * k)) for k in range(4)]
    ranks = model_ranks(options, 2)
    try:
        for i, prompt in enumerate(prompts):
            ranks.submit(f"alone {i}", prompt, 8, logprobs=5)
            ranks.run()
        for i in range(8):
            ranks.submit(f"{i}", prompts[i % 4], 8, logprobs=5, cache_salt=str(i // 4), prefix_cache=i % 3 != 2)
            ranks.turn()
        ranks.run()
        for i in range(8):
            got, alone = ([e.logprobs for e in ranks.events[name]] for name in (f"{i}", f"alone {i % 4}"))
            assert got == alone, f"request {i}"
    finally:
        ranks.close()
