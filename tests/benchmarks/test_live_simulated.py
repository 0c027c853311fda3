"""What the live routing benchmark asks, and the simulator's run of it."""

import statistics
from typing import Any

import pytest

import live_arms
import live_simulated
from chunkserve.replica.protocol import StepTime

WORDS = {"system": 1, "user": 2}


class WordTokenizer:
    """A token per word."""

    def encode(self, text: str) -> list[int]:
        return [10 + sum(word.encode()) % 1000 for word in text.split()]

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [token for m in messages for token in (WORDS[m["role"]], *self.encode(m["content"]))]


pytestmark = pytest.mark.skipif(not live_arms.WORKLOADS.exists(), reason="the workloads are not beside the repository")


def test_equal_seeds_ask_the_same_and_prompts_go_with_their_questions() -> None:
    questions = live_arms.Questions(WordTokenizer(), 15)
    one, two, other = (
        questions.asks(rate_rps=20, seconds=20, seed=seed, output_tokens=(3, 5)) for seed in (0, 0, 1)
    )  # fmt: skip
    assert one == two != other
    assert 330 < len(one) < 470
    assert all(0 < ask.at_s < 20 and 3 <= ask.output_tokens <= 5 for ask in one)
    counts = sorted((sum(ask.prompt == prompt for ask in one) for prompt in range(15)), reverse=True)
    assert counts[0] > 3 * counts[5] > 0, "prompts go by Zipf's law"
    assert sorted(ask.prompt for ask in questions.warmup(seed=0, output_tokens=(3, 5))) == list(range(15))


def test_the_simulator_is_asked_what_the_server_was() -> None:
    questions = live_arms.Questions(WordTokenizer(), 3)
    warmup = questions.warmup(seed=0, output_tokens=(2, 2))
    asks = questions.asks(rate_rps=5, seconds=4, seed=0, output_tokens=(2, 2))
    arm = live_arms.Arm(policy="prefix", load=0.1, seed=0, warmup=warmup, asks=asks)
    fit = live_simulated.Fit(step=StepTime(fixed_s=0.01, per_token_s=0.0), transit_s=0.02)
    result = live_simulated.simulated(arm, 1.0, fit, replicas=1, chunk_size=64, chunks=1000, max_step_tokens=10_000)
    assert len(result.ttft_s) == len(asks)
    assert min(result.ttft_s) == pytest.approx(0.05)
    # After the warm-up all is there that a prompt shares with all of its questions.
    shared = sum(_shared(ask, [*warmup, *asks]) for ask in asks)
    assert shared <= result.cached_tokens <= result.prompt_tokens - len(asks)


def test_the_way_is_found_that_gave_the_medians() -> None:
    questions = live_arms.Questions(WordTokenizer(), 3)

    def runs(transit_s: float) -> list[Any]:
        fit = live_simulated.Fit(step=StepTime(fixed_s=0.01, per_token_s=1e-4), transit_s=transit_s)
        sizes = {"replicas": 2, "chunk_size": 64, "chunks": 1000, "max_step_tokens": 128}
        return [live_simulated.simulated(arm, 1.0, fit, **sizes) for arm in arms]

    arms = []
    for seed in (0, 1):
        warmup = questions.warmup(seed=seed, output_tokens=(2, 2))
        asks = questions.asks(rate_rps=5, seconds=6, seed=seed, output_tokens=(2, 2))
        arms.append(live_arms.Arm(policy="prefix", load=0.1, seed=seed, warmup=warmup, asks=asks))
    medians_s = [statistics.median(result.ttft_s) for result in runs(0.034)]
    assert live_simulated.fitted_transit_s(medians_s, runs) == pytest.approx(0.034, abs=0.001)


def _shared(ask: Any, asks: list[Any]) -> int:
    """Tokens that all who ask with this prompt begin with."""
    others = [other.token_ids for other in asks if other.prompt == ask.prompt]
    return next(
        (at for at, tokens in enumerate(zip(*others, strict=False)) if len(set(tokens)) > 1), min(map(len, others))
    )
