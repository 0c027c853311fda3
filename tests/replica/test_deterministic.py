"""deterministic: the bits of a request depend on nothing but the request."""

from pathlib import Path

import pytest

from chunkserve.replica.build import check_options
from chunkserve.replica.options import BuildError, ReplicaOptions

from .test_same_words import Replica

pytestmark = [pytest.mark.model, pytest.mark.slow]

NEW_TOKENS = 6


def bits(replica: Replica, name: str) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
    """Tokens with their log-probabilities and those of the alternatives, which equal logits alone give."""
    logprobs = [logprob for event in replica.events[name] for logprob in event.logprobs]
    return [(one.token_id, one.logprob, tuple((top.token_id, top.logprob) for top in one.top)) for one in logprobs]


def prompts_of(tokenizer) -> list[tuple[int, ...]]:
    """A prompt longer than two splits of attention, its beginnings, and others that leave it inside chunks."""
    book = tokenizer.encode("The keeper wrote down the wind, the waves and the names of all ships that passed. " * 45)
    stems = [book[:550], book[:513], book[:300], book[:90], book[5:100]]
    return [(*stem, *tokenizer.encode(f" Entry {i}:")) for i, stem in enumerate(stems)]


def sampling_of(i: int) -> dict[str, object]:
    """Greedy and drawn requests by turns."""
    return {"logprobs": 5} | ({"temperature": 0.8, "top_p": 0.9, "seed": i} if i % 2 else {})


@pytest.mark.parametrize(("dtype", "weight_dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_same_bits_alone_and_in_a_batch_cold_and_warm_whole_and_in_pieces(
    small_model: Path, tokenizer, dtype: str, weight_dtype: str | None
) -> None:
    sizes = {
        "deterministic": True, "max_sequence_tokens": 1024, "pool_chunks": 400, "max_running": 32, "dtype": dtype,
        "weight_dtype": weight_dtype,
    }  # fmt: skip
    prompts = prompts_of(tokenizer)
    alone = Replica(small_model, **sizes, max_step_tokens=1024)  # a prompt is one piece
    for i, prompt in enumerate(prompts):
        alone.submit(f"cold {i}", prompt, NEW_TOKENS, salt=str(i), **sampling_of(i))
        alone.run()
    expected = [bits(alone, f"cold {i}") for i in range(len(prompts))]
    for i, prompt in enumerate(prompts):
        alone.submit(f"warm {i}", prompt, NEW_TOKENS, salt=str(i), **sampling_of(i))
        alone.run()
        assert alone.events[f"warm {i}"][0].cached_tokens == len(prompt) - 1
        assert bits(alone, f"warm {i}") == expected[i]

    together = Replica(small_model, **sizes, max_step_tokens=90)
    for i in range(32):
        which = i % len(prompts)
        together.submit(f"{i}", prompts[which], NEW_TOKENS, **sampling_of(which))
        for _ in range(i % 3):
            together.turn()
    together.run()
    for i in range(32):
        assert bits(together, f"{i}") == expected[i % len(prompts)], f"request {i}"
    assert together.engine.load().cached_prompt_tokens > 4000, "prefixes were found, copied and waited for"


def test_without_it_bits_depend_on_the_batch(small_model: Path, tokenizer) -> None:
    """What the test above compares can differ."""
    prompt = prompts_of(tokenizer)[0]
    replica = Replica(small_model, dtype="bfloat16", num_threads=2, max_running=8)
    replica.submit("alone", prompt, NEW_TOKENS, salt="alone", logprobs=5)
    replica.run()
    for i in range(3):
        replica.submit(f"{i}", prompt, NEW_TOKENS, logprobs=5)
    replica.run()
    assert bits(replica, "2") != bits(replica, "alone")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention_backend": "reference"}, "attention backend is reference"),
        ({"num_ranks": 3}, "tensor_parallel_size is 3"),
    ],
)
def test_what_cannot_promise_it_is_refused(small_model: Path, options, words: str) -> None:
    with pytest.raises(BuildError, match=f"deterministic is true; .*{words}"):
        check_options(ReplicaOptions(model=str(small_model), deterministic=True, **options))
