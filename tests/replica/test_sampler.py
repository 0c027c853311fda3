"""Sampling: right distribution, right filters, and nothing that depends on the neighbours in the batch."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from chunkserve.replica.sampler import Adjustment, SampleRow, _adjusted, sample, uniform
from chunkserve.replica.token_counts import TokenCounts


def row(position: int = 0, **options: object) -> SampleRow:
    defaults: dict[str, object] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 7}
    return SampleRow(position=position, **{**defaults, **options})  # type: ignore[arg-type]


def draws(logits: torch.Tensor, num: int = 4000, **options: object) -> Counter[int]:
    rows = [row(position, **options) for position in range(num)]
    return Counter(one.token_id for one in sample(logits.repeat(num, 1), rows))


LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def test_greedy_takes_the_best() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    tokens = [one.token_id for one in sample(logits, [row(temperature=0.0)] * 5)]
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.685, 0.247, 0.062, 0.007]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.7}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"min_p": 0.25}, [0.526, 0.316, 0.158, 0]),
        # top_p counts what top_k left: 0.5 of 0.8 is less than 0.7, so both stay.
        ({"top_k": 2, "top_p": 0.7}, [0.625, 0.375, 0, 0]),
        ({"top_k": 100}, [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_distribution_and_filters(options: dict[str, object], shares: list[float]) -> None:
    counts = draws(LOGITS, **options)
    for token, share in enumerate(shares):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)
        assert (counts[token] == 0) == (share == 0)


def test_nucleus_wider_than_the_first_candidates() -> None:
    logits = torch.zeros(5000)
    assert len(draws(logits, num=300, top_p=0.99)) > 250


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1))
    rows = [
        row(3), row(4, top_p=0.9), row(5, top_k=50), row(6, temperature=0.0), row(7, top_p=0.95, min_p=0.1),
        row(8, top_k=2000, logprobs=3),
    ]  # fmt: skip
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(6)]
    order = [3, 5, 1, 0, 4, 2]
    assert [together[i] for i in order] == sample(logits[order], [rows[i] for i in order])


def test_equal_probabilities_do_not_make_a_row_depend_on_its_neighbours() -> None:
    logits = torch.randn(1, 49152, generator=torch.Generator().manual_seed(0)).mul(32).round().div(8)
    wide = row(top_k=1000)
    for position in range(20):
        narrow = row(position, top_p=0.9)
        assert sample(logits, [narrow])[0] == sample(logits.repeat(2, 1), [narrow, wide])[0]


def test_low_temperature_is_greedy_and_finite() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [3.0, 3.1, 2.0]])
    assert [one.token_id for one in sample(logits, [row(temperature=1e-6)] * 2)] == [0, 1]


def test_logprobs_are_of_the_models_distribution() -> None:
    one = sample(LOGITS[None], [row(temperature=0.0, logprobs=2)])[0]
    assert one.logprob == pytest.approx(LOGITS[0].item(), abs=1e-6)
    assert [token for token, _ in one.top] == [0, 1]
    assert sample(LOGITS[None], [row(logprobs=0)])[0].top == ()
    assert sample(LOGITS[None], [row()])[0].logprob is None


def test_logits_that_are_not_numbers_give_no_token() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    got = [one.token_id for one in sample(logits, [row(temperature=0.0), row(temperature=0.0, logprobs=1), row()])]
    assert got[1] is None
    assert got[0] is not None
    assert got[2] is not None


def test_random_numbers_are_uniform_and_counted() -> None:
    numbers = [uniform(1, position) for position in range(2000)]
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert sum(numbers) / 2000 == pytest.approx(0.5, abs=0.03)
    assert uniform(1, 5) == numbers[5] != uniform(2, 5)


def adjusted(token_ids: list[int], num_prompt: int, position: int = 0, **options: object) -> SampleRow:
    counts = TokenCounts(token_ids[:num_prompt], with_prompt="repetition_penalty" in options)
    counts.follow(token_ids)
    adjustment = Adjustment(counts=counts, **options)  # type: ignore[arg-type]
    return row(position, temperature=0.0, logprobs=0, adjustment=adjustment)


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({"logit_bias": ((0, -3.0), (3, 0.5))}, 1),
        ({"logit_bias": ((3, 9.0),)}, 3),
        ({"presence_penalty": 1.5}, 1),  # 0 was generated twice: 4 - 1.5
        ({"frequency_penalty": 0.4}, 0),  # 4 - 0.8 is still above 3
        ({"frequency_penalty": 0.6}, 1),
        ({"repetition_penalty": 3.0}, 2),  # also the prompt's 1; -1 / 3 would be more than -1 x 3
        ({}, 0),
    ],
)
def test_bias_and_penalties(options: dict[str, object], best: int) -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, -1.0]])
    (one,) = sample(logits, [adjusted([1, 3, 0, 0], 2, **options)])
    assert one.token_id == best
    # Log-probabilities are those of the model.
    assert one.logprob == pytest.approx(logits[0].log_softmax(-1)[best].item())
    assert logits.tolist() == [[4.0, 3.0, 2.0, -1.0]]


def twin(logits: np.ndarray, one: SampleRow, token_ids: list[int], num_prompt: int) -> np.ndarray:
    """What OpenAI's and vLLM's documents say, token by token in numpy."""
    want, wish = logits.astype(np.float64), one.adjustment
    assert wish is not None
    for token, bias in wish.logit_bias:
        want[token] += bias
    for token in set(token_ids):
        want[token] = (
            want[token] / wish.repetition_penalty if want[token] > 0 else want[token] * wish.repetition_penalty
        )
    for token in set(token_ids[num_prompt:]):
        want[token] -= wish.presence_penalty + wish.frequency_penalty * token_ids[num_prompt:].count(token)
    return want


def test_a_batch_of_wishes_is_what_a_loop_over_tokens_gives() -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy((rng.standard_normal((40, 50)) * 3).astype(np.float32))
    rows, wants = [], []
    for i in range(40):
        history, num_prompt = rng.integers(0, 50, rng.integers(1, 60)).tolist(), int(rng.integers(1, 20))
        options: dict[str, object] = {
            "presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2),
            "repetition_penalty": rng.uniform(0.5, 2),
            "logit_bias": tuple((int(token), rng.uniform(-9, 9)) for token in rng.permutation(50)[:3]),
        }  # fmt: skip
        wished = {name: value for name, value in options.items() if rng.random() < 0.6}
        rows.append(row(i) if i % 4 == 0 else adjusted(history, min(num_prompt, len(history)), **wished))
        wants.append(
            logits[i].numpy()
            if i % 4 == 0
            else twin(logits[i].numpy(), rows[-1], history, min(num_prompt, len(history)))
        )
    np.testing.assert_allclose(_adjusted(logits, rows).numpy(), np.array(wants), rtol=1e-5, atol=1e-5)
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(40)]


def test_rows_that_wish_nothing_are_not_even_copied() -> None:
    logits = torch.randn(3, 50)
    assert _adjusted(logits, [row(i) for i in range(3)]) is logits


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-38, 1e30])
def test_a_penalty_beyond_float32_still_gives_a_token(penalty: float) -> None:
    logits = torch.tensor([[4.0, 0.0, -2.0, -1.0]])
    one = replace(adjusted([0, 1, 2], 1, repetition_penalty=penalty), temperature=1.0)
    assert sample(logits, [one])[0].token_id is not None


def test_counts_follow_their_sequence() -> None:
    counts = TokenCounts([7, 7, 9], with_prompt=True)
    token_ids = [7, 7, 9]
    for token in [9, 3, 3, *range(100, 140), 3]:
        token_ids.append(token)
        counts.follow(token_ids)
        counts.follow(token_ids)
    generated = dict(zip(counts.token_ids.tolist(), counts.generated.tolist(), strict=True))
    assert generated == {7: 0, 9: 1, 3: 3} | dict.fromkeys(range(100, 140), 1)
