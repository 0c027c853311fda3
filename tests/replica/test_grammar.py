"""Answers that follow a grammar, from the real model at temperature 1, and neighbours that do not notice."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from chunkserve.replica.grammar import Grammar, GrammarError, Grammars
from chunkserve.replica.options import ReplicaOptions
from chunkserve.replica.protocol import GrammarSpec, RequestRefused
from chunkserve.replica.sampler import SampleRow, sample
from chunkserve.replica.tokenizer import Tokenizer

from .rank_threads import model_ranks
from .test_same_words import Replica

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["tall", "short", "loud"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def spec(kind: str, text: str) -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text, param="response_format")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def replica(small_model: Path) -> Replica:
    return Replica(small_model)


def ended_text(replica: Replica, name: str) -> str:
    assert replica.events[name][-1].finish_reason == "stop"
    return "".join(event.text for event in replica.events[name])


def test_answers_follow_and_neighbours_do_not_notice(replica: Replica, tokenizer) -> None:
    prompt = tuple(tokenizer.encode("Describe a person in JSON:\n"))
    replica.submit("alone", prompt, 24, temperature=1.0, seed=5)
    replica.run()
    for seed in range(4):
        person = spec("json_schema", json.dumps(PERSON))
        replica.submit(
            f"json {seed}", prompt, 200, temperature=1.0, seed=seed, grammar=person, ignore_eos=False
        )  # fmt: skip
    expression = r"[A-Z][a-z]{2,8}, [0-9]{2} (km|miles)"
    replica.submit(
        "regex", prompt, 60, temperature=1.0, seed=9, grammar=spec("regex", expression), ignore_eos=False
    )  # fmt: skip
    replica.submit("beside", prompt, 24, temperature=1.0, seed=5)
    replica.run()
    for seed in range(4):
        person = json.loads(ended_text(replica, f"json {seed}"))
        assert list(person) == ["name", "age", "tags"]
        assert len(person["name"]) <= 20
        assert 0 <= person["age"] <= 150
        assert set(person["tags"]) <= {"tall", "short", "loud"}
    assert re.fullmatch(expression, ended_text(replica, "regex"))
    assert replica.tokens("beside") == replica.tokens("alone")


def test_a_broken_grammar_is_refused_by_name_and_a_late_one_starts_at_its_beginning(
    replica: Replica, tokenizer
) -> None:
    prompt = tuple(tokenizer.encode("Yes or no?"))
    for kind, text in (("regex", "(a"), ("json_schema", '{"type": "foo"}'), ("json_schema", '{"$ref": "#/nowhere"}')):
        with pytest.raises(RequestRefused, match="response_format: ") as refused:
            replica.submit("broken", prompt, 8, grammar=spec(kind, text))
        assert refused.value.param == "response_format"
    for name in ("first", "second"):
        replica.submit(name, prompt, 8, grammar=spec("regex", "yes|no"), ignore_eos=False)
        replica.run()
        assert ended_text(replica, name) in ("yes", "no")


def test_stop_strings_and_preemption_under_a_grammar(small_model: Path, tokenizer: Tokenizer) -> None:
    replica = Replica(small_model, max_sequence_tokens=128, pool_chunks=8, chunk_size=16, max_running=6)
    prompt = tuple(tokenizer.encode("Letters:"))
    letters = spec("regex", "([a-z]{4} ){12}end")
    for seed in range(4):
        replica.submit(f"tight {seed}", prompt, 100, temperature=1.0, seed=seed, grammar=letters, ignore_eos=False)
    replica.run()
    assert replica.engine.load().preemptions > 0
    for seed in range(4):
        assert re.fullmatch("([a-z]{4} ){12}end", ended_text(replica, f"tight {seed}"))
    replica.submit("alone", prompt, 100, temperature=1.0, seed=3, grammar=letters, ignore_eos=False)
    replica.run()
    assert replica.tokens("alone") == replica.tokens("tight 3")
    replica.submit("stopped", prompt, 100, temperature=1.0, seed=1, grammar=letters, ignore_eos=False, stop=(" ",))
    replica.run()
    assert re.fullmatch("[a-z]{4}", ended_text(replica, "stopped"))


def test_an_object_of_any_shape(replica: Replica, tokenizer: Tokenizer) -> None:
    prompt = tuple(tokenizer.encode('A small JSON object, such as {"a": 1}:\n'))
    names = [f"object {seed}" for seed in range(6)]
    for seed, name in enumerate(names):
        any_object = spec("json_schema", '{"type": "object"}')
        replica.submit(name, prompt, 100, temperature=1.0, seed=seed, grammar=any_object, ignore_eos=False)
    replica.run()
    whole = [name for name in names if replica.events[name][-1].finish_reason == "stop"]
    assert whole
    for name in whole:
        assert isinstance(json.loads(ended_text(replica, name)), dict)


def allowed(grammar: Grammar, tokenizer: Tokenizer) -> list[int]:
    bits = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    grammar.allow(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def test_only_what_may_come_next_is_left(tokenizer: Tokenizer) -> None:
    matcher = Grammars(tokenizer).compile(spec("regex", "ab*"))
    for text, pattern in (("a", "ab*"), ("b", "b+")):
        left = {tokenizer.token_bytes(token).decode() for token in allowed(matcher, tokenizer)}
        assert text in left
        assert {one for one in left if not re.fullmatch(pattern, one)} <= {"<|im_end|>"}
        matcher.accept(tokenizer.encode(text)[0])


def test_the_end_tokens_are_the_models(tokenizer: Tokenizer) -> None:
    matcher = Grammars(tokenizer, (0, 2)).compile(spec("regex", "a"))
    (token,) = tokenizer.encode("a")
    assert not {0, 2} & set(allowed(matcher, tokenizer))
    matcher.accept(token)
    assert allowed(matcher, tokenizer) == [0, 2]


def test_the_sampler_masks_a_batch_as_each_row_alone(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    logits = torch.randn(5, tokenizer.vocab_size, generator=torch.Generator().manual_seed(0))
    specs = [None, spec("regex", "yes|no"), None, spec("regex", "[0-9]+"), spec("json_schema", "{}")]
    rows = [
        SampleRow(
            temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=i, position=3, logprobs=2,
            grammar=grammars.compile(one) if one is not None else None,
        )
        for i, one in enumerate(specs)
    ]  # fmt: skip
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(5)]
    for row, one in zip(rows, together, strict=True):
        assert row.grammar is None or one.token_id in allowed(row.grammar, tokenizer)


LATE = {"properties": {"a": {"type": "string", "pattern": "^(a{1000}){1000}$"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "large",
    [
        spec("regex", "(a{1000}){1000}"),
        spec("regex", "one two three (a{1000}){1000}"),
        spec("json_schema", json.dumps({"type": "object", **LATE})),
    ],
)
def test_a_grammar_that_would_hold_up_a_step_is_refused(tokenizer: Tokenizer, large: GrammarSpec) -> None:
    with pytest.raises(GrammarError, match="too many expressions"):
        Grammars(tokenizer).compile(large)


def test_a_grammar_that_fails_ends_its_own_answer(replica: Replica, tokenizer: Tokenizer) -> None:
    prompt = tuple(tokenizer.encode("Letters:"))
    replica.submit("failing", prompt, 40, grammar=spec("regex", "[a-z]+"), ignore_eos=False)
    replica.submit("beside failing", prompt, 12)
    replica.turn()
    grammar = replica.engine._streams["failing"][0].sequence.grammar
    assert grammar is not None
    grammar.accept(tokenizer.encode("7")[0])
    replica.run()
    assert replica.events["failing"][-1].finish_reason == "error"
    assert "the grammar failed: " in (replica.events["failing"][-1].error or "")
    assert replica.events["beside failing"][-1].finish_reason == "length"


def test_a_tokenizer_that_llguidance_does_not_take_refuses_each_grammar(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "vocab_size", 301)
    grammars = Grammars(tokenizer)
    grammars.warm_up()
    with pytest.raises(GrammarError, match="this model's tokenizer cannot follow grammars"):
        grammars.compile(spec("regex", "a"))


def test_a_slow_grammar_is_refused_by_the_knob_and_remembered(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, limit_s=1e-6)
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"allowed are 1e-06 s \(max_grammar_compile_s\)"):
            grammars.compile(spec("regex", "slow"))
    assert len(grammars._known) == 1


def test_a_large_schema_is_followed(tokenizer: Tokenizer) -> None:
    properties = {f"k{i}": {"type": "string", "pattern": "^[a-z]{1,200}$"} for i in range(1000)}
    schema = json.dumps({"type": "object", "properties": properties})
    assert len(schema) < 65536
    Grammars(tokenizer).compile(spec("json_schema", schema))


def test_a_known_grammar_does_not_wait_for_another_that_is_compiled(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    grammars.compile(spec("regex", "known"))
    with grammars._compiling:
        grammars.compile(spec("regex", "known"))


@pytest.mark.slow
def test_two_ranks_say_what_one_says(small_model: Path, replica: Replica, tokenizer: Tokenizer) -> None:
    options = ReplicaOptions(
        model=str(small_model), dtype="float32", num_threads=1, max_sequence_tokens=512, pool_chunks=40
    )  # fmt: skip
    prompt = tuple(tokenizer.encode("Describe a person in JSON:\n"))
    person = spec("json_schema", json.dumps(PERSON))
    wishes = {"temperature": 1.0, "seed": 3, "ignore_eos": False, "grammar": person, "repetition_penalty": 1.1}
    replica.submit("of two", prompt, 120, **wishes)
    replica.run()
    ranks = model_ranks(options, 2)
    try:
        ranks.submit("of two", prompt, 120, n=2, **wishes)
        ranks.submit("free", prompt, 12)
        with pytest.raises(RequestRefused, match="response_format: "):
            ranks.submit("broken", prompt, 12, grammar=spec("regex", "(a"))
        ranks.run()
        assert ranks.tokens("of two") == replica.tokens("of two")
        for choice in range(2):
            text = "".join(event.text for event in ranks.events["of two"] if event.choice == choice)
            assert list(json.loads(text)) == ["name", "age", "tags"]
    finally:
        ranks.close()
