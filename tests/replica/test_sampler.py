"""Sampling: right distribution, right filters, and nothing that depends on the neighbours in the batch."""

from collections import Counter

import pytest
import torch

from chunkserve.replica.sampler import Adjustment, SampleRow, sample, uniform


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


def adjusted(token_ids: list[int], num_prompt: int, **options: object) -> SampleRow:
    defaults: dict[str, object] = {
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": ()
    }  # fmt: skip
    adjustment = Adjustment(token_ids=token_ids, num_prompt=num_prompt, **{**defaults, **options})  # type: ignore[arg-type]
    return row(temperature=0.0, logprobs=0, adjustment=adjustment)


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


def test_penalties_are_those_of_a_loop_over_the_vocabulary_and_leave_neighbours_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 50, generator=generator) * 3
    history = torch.randint(0, 50, (30,), generator=generator).tolist()
    options = {"presence_penalty": 0.7, "frequency_penalty": -0.3, "repetition_penalty": 1.4, "logit_bias": ((9, 2.0),)}
    want = logits[1].tolist()
    want[9] += 2.0
    for token in range(50):
        if token in history:
            want[token] = want[token] / 1.4 if want[token] > 0 else want[token] * 1.4
        if count := history[10:].count(token):
            want[token] -= 0.7 - 0.3 * count
    got = sample(logits, [row(1), adjusted(history, 10, **options), row(2)])
    assert got[1].token_id == max(range(50), key=want.__getitem__)
    alone = sample(logits[[0, 2]], [row(1), row(2)])
    assert [got[0].token_id, got[2].token_id] == [one.token_id for one in alone]
