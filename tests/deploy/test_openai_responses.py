import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from chunkserve.deploy.openai_responses import DONE_EVENT, Answer, ChatAnswer, CompletionAnswer
from chunkserve.replica.protocol import TokenEvent, TokenLogprob


def answer(kind: type[Answer], **changes: Any) -> Answer:
    settings: dict[str, Any] = {
        "answer_id": "x-1",
        "created_s": 7,
        "model": "toy",
        "num_prompts": 1,
        "choices_per_prompt": 1,
        "with_logprobs": False,
        "include_usage": False,
    }
    return kind(**(settings | changes))


def event(text: str, at: int = 1, **changes: Any) -> TokenEvent:
    settings: dict[str, Any] = {
        "choice": 0,
        "text": text,
        "token_ids": (1,),
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "completion_tokens": at,
    }
    return TokenEvent(**(settings | changes))


def token(text: str, logprob: float, *top: TokenLogprob, raw: bytes | None = None) -> TokenLogprob:
    return TokenLogprob(token_id=3, text=text, bytes_=raw or text.encode(), logprob=logprob, top=top)


def parsed(body: bytes) -> list[dict[str, Any]]:
    events = body.decode().removesuffix("data: [DONE]\n\n").split("\n\n")
    assert all(one.startswith("data: ") for one in events if one)
    return [json.loads(one.removeprefix("data: ")) for one in events if one]


def strict(record: type[BaseModel], value: dict[str, Any]) -> BaseModel:
    """The value as the openai package's record, which must know every field of it."""
    made = record.model_validate(value, strict=True)
    assert made.model_extra == {}
    return made


def test_chat_stream_has_openais_frames() -> None:
    reply = answer(ChatAnswer)
    body = reply.stream(0, [event("Hel")]) + reply.stream(0, [event("", 2), event("lo", 3, finish_reason="stop")])
    chunks = parsed(body)
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
        assert (chunk["id"], chunk["object"], chunk["model"]) == ("x-1", "chat.completion.chunk", "toy")
        assert "usage" not in chunk
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert reply.finished
    assert reply.stream_end() == DONE_EVENT


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_an_event_is_one_line_to_whoever_reads_lines(kind: type[Answer]) -> None:
    """str.splitlines, and httpx's iter_lines with it, also break at these."""
    text = "a\x85b\u2028c\u2029d\x0b\x0c\x1c\x1d\x1e\r\ne"
    body = answer(kind).stream(0, [event(text)])
    lines = [line for line in body.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(c["text"] if kind is CompletionAnswer else c["delta"]["content"] for c in choices) == text


def test_usage_comes_once_and_last_and_only_when_asked_for() -> None:
    reply = answer(ChatAnswer, include_usage=True)
    chunks = parsed(reply.stream(0, [event("a"), event("b", 2, finish_reason="length")]) + reply.stream_end())
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    last = strict(ChatCompletionChunk, chunks[-1])
    assert last.choices == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_whole_chat() -> None:
    reply = answer(ChatAnswer, choices_per_prompt=2, with_logprobs=True)
    lp = (token("a", -0.5, token("a", -0.5), token("b", float("-inf"))),)
    reply.gather(0, [event("a", logprobs=lp), event("x", choice=1, cached_tokens=8, logprobs=lp)])
    reply.gather(0, [event("b", 2, finish_reason="stop", logprobs=lp)])
    assert not reply.finished
    reply.gather(0, [event("y", 2, choice=1, cached_tokens=8, finish_reason="length", logprobs=lp)])
    whole = strict(ChatCompletion, json.loads(reply.whole()))
    assert [(c.message.content, c.finish_reason) for c in whole.choices] == [("ab", "stop"), ("xy", "length")]
    content = whole.choices[0].logprobs.content
    assert [(t.token, t.logprob, t.bytes) for t in content] == [("a", -0.5, [97])] * 2
    assert [(t.token, t.logprob) for t in content[0].top_logprobs] == [("a", -0.5), ("b", -9999.0)]
    assert whole.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts(stream: bool) -> None:
    reply = answer(CompletionAnswer, num_prompts=2, choices_per_prompt=2)
    events = [(p, event(f"{p}{c}", choice=c, finish_reason="stop")) for p in (1, 0) for c in (1, 0)]
    if stream:
        chunks = parsed(b"".join(reply.stream(p, [e]) for p, e in events))
        choices = [strict(Completion, chunk).choices[0] for chunk in chunks]
    else:
        for p, e in events:
            reply.gather(p, [e])
        choices = strict(Completion, json.loads(reply.whole())).choices
    assert {c.index: c.text for c in choices} == {0: "00", 1: "01", 2: "10", 3: "11"}
    assert reply.usage()["prompt_tokens"] == 18
    assert reply.usage()["prompt_tokens_details"]["cached_tokens"] == 8


def test_completion_logprobs_are_the_same_streamed_and_whole() -> None:
    half = token("�", -2.0, token("�", -2.0, raw=b"\xe2"), token("�", -3.0, raw=b"\xe3"), raw=b"\xe2")
    events = [event("ab", logprobs=(token("ab", -1.0), half)), event("c", 3, logprobs=(token("c", 0.0),))]
    events.append(event("", 4, finish_reason="stop", logprobs=(token("", -0.25),)))
    streamed = answer(CompletionAnswer, with_logprobs=True)
    whole = answer(CompletionAnswer, with_logprobs=True)
    whole.gather(0, events)
    expected = json.loads(whole.whole())["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {name: [] for name in expected}
    for chunk in parsed(streamed.stream(0, events)):
        # OpenAI streams null here too; the package's type, which serves whole answers as well, leaves it out.
        strict(Completion, chunk | {"choices": [chunk["choices"][0] | {"finish_reason": "stop"}]})
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == expected
    assert expected["tokens"] == ["ab", "bytes:\\xe2", "c", ""]
    assert expected["text_offset"] == [0, 2, 3, 4]
    assert expected["top_logprobs"][1] == {"bytes:\\xe2": -2.0, "bytes:\\xe3": -3.0}


def test_held_back_text_sends_nothing() -> None:
    reply = answer(CompletionAnswer)
    assert reply.stream(0, [event("")]) == b""
    assert len(parsed(reply.stream(0, [event("", 2, finish_reason="stop")]))) == 1
