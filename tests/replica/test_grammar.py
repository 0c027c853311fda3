"""Answers that follow a grammar, from the real model at temperature 1, and neighbours that do not notice."""

import json
import re
import time
from pathlib import Path

import pytest
import torch

from chunkserve.replica import grammar
from chunkserve.replica.grammar import GrammarError, Grammars
from chunkserve.replica.protocol import GrammarSpec, RequestRefused
from chunkserve.replica.tokenizer import Tokenizer

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


def test_only_what_may_come_next_is_left(tokenizer: Tokenizer) -> None:
    matcher = Grammars(tokenizer).compile(spec("regex", "ab*"))
    for text, pattern in (("a", "ab*"), ("b", "b+")):
        logits = torch.zeros(tokenizer.vocab_size)
        matcher.restrict(logits)
        left = {tokenizer.token_bytes(int(token)).decode() for token in logits.isfinite().nonzero()}
        assert text in left
        assert {one for one in left if not re.fullmatch(pattern, one)} <= {"<|im_end|>"}
        matcher.accept(tokenizer.encode(text)[0])


def test_a_grammar_that_would_hold_up_every_step_is_refused_and_remembered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer)
    grammars.compile(spec("regex", "warm"))
    monkeypatch.setattr(grammar, "_COMPILE_LIMIT_S", 0.1)
    with pytest.raises(GrammarError, match="to compile; allowed are"):
        grammars.compile(spec("regex", "(a{1000}){1000}"))
    begin_s = time.monotonic()
    with pytest.raises(GrammarError, match="to compile; allowed are"):
        grammars.compile(spec("regex", "(a{1000}){1000}"))
    assert time.monotonic() - begin_s < 0.1
