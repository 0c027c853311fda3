"""Answers of the OpenAI API, whole and as streams of server-sent events; tests hold them to the `openai` types.

Events are put together from bytes made once per request, since a server sends one per token and stream.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from chunkserve.replica.protocol import TokenEvent, TokenLogprob

DONE_EVENT = b"data: [DONE]\n\n"
# JSON has no -inf; OpenAI's floor for an impossible token.
_LOWEST_LOGPROB = -9999.0


# Line breaks to str.splitlines, and so to clients that read a stream by it (httpx's iter_lines): in an event they would
# cut its JSON in two. JSON escapes all others of them already.
_LINE_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def one_line(value: object) -> bytes:
    """JSON without a line break, whatever a client takes for one."""
    json = to_json(value)
    for character, escaped in _LINE_BREAKS:
        if character in json:
            json = json.replace(character, escaped)
    return json


def sse_event(value: object) -> bytes:
    return b"data: " + one_line(value) + b"\n\n"


@dataclass(slots=True, kw_only=True)
class ChoiceState:
    """What has been sent or gathered of one choice."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    logprob_chars: int = 0
    last: TokenEvent | None = None

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None

    @property
    def started(self) -> bool:
        return self.last is not None


class Answer(ABC):
    """One HTTP answer under way: takes token events, gives events of a stream or the whole answer.

    Choice `c` of prompt `p` has the index `p * choices_per_prompt + c`.
    """

    id_prefix: str
    object_whole: str
    object_event: str

    def __init__(
        self,
        *,
        answer_id: str,
        created_s: int,
        model: str,
        num_prompts: int,
        choices_per_prompt: int,
        with_logprobs: bool,
        include_usage: bool,
    ) -> None:
        self.choices = [ChoiceState(index=index) for index in range(num_prompts * choices_per_prompt)]
        self._choices_per_prompt = choices_per_prompt
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage
        self._head = {"id": answer_id, "created": created_s, "model": model}
        event_head = one_line({**self._head, "object": self.object_event})
        self._event_head = b"data: " + event_head[:-1] + b',"choices":['
        self._event_tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def stream(self, prompt: int, events: Iterable[TokenEvent]) -> bytes:
        """The server-sent events for what is new; may be empty while text is held back."""
        out = []
        for event in events:
            choice = self.choices[prompt * self._choices_per_prompt + event.choice]
            out += [self._event_head + one_line(one) + self._event_tail for one in self._deltas(choice, event)]
            choice.last = event
        return b"".join(out)

    def stream_end(self) -> bytes:
        """What follows the last token: usage where it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE_EVENT
        return sse_event({**self._head, "object": self.object_event, "choices": [], "usage": self.usage()}) + DONE_EVENT

    def gather(self, prompt: int, events: Iterable[TokenEvent]) -> None:
        """Keep events for whole()."""
        for event in events:
            choice = self.choices[prompt * self._choices_per_prompt + event.choice]
            choice.texts.append(event.text)
            choice.logprobs += event.logprobs
            choice.last = event

    def begin_anew(self, prompt: int) -> None:
        """Forget what was gathered of a prompt's choices."""
        begin = prompt * self._choices_per_prompt
        for index in range(begin, begin + self._choices_per_prompt):
            self.choices[index] = ChoiceState(index=index)

    def whole(self) -> bytes:
        """The answer out of everything gathered; all choices are finished."""
        choices = [self._whole_choice(choice) for choice in self.choices]
        return to_json({**self._head, "object": self.object_whole, "choices": choices, "usage": self.usage()})

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, as cached only as far as it was for every one of its choices."""
        prompt_tokens = cached_tokens = completion_tokens = 0
        for at in range(0, len(self.choices), self._choices_per_prompt):
            seen = [c.last for c in self.choices[at : at + self._choices_per_prompt] if c.last is not None]
            if seen:
                prompt_tokens += seen[0].prompt_tokens
                cached_tokens += min(event.cached_tokens for event in seen)
                completion_tokens += sum(event.completion_tokens for event in seen)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    @abstractmethod
    def _deltas(self, choice: ChoiceState, event: TokenEvent) -> list[dict[str, Any]]:
        """The entries of `choices` that tell an event, one per event of the stream."""

    @abstractmethod
    def _whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        """The entry of `choices` of a whole answer."""


class ChatAnswer(Answer):
    """The answer to /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_event = "chat.completion.chunk"

    def _deltas(self, choice: ChoiceState, event: TokenEvent) -> list[dict[str, Any]]:
        deltas = []
        if not choice.started:
            deltas.append(self._delta(choice, {"role": "assistant", "content": ""}))
        if event.text or event.logprobs:
            logprobs = _chat_logprobs(event.logprobs) if self._with_logprobs else None
            deltas.append(self._delta(choice, {"content": event.text}, logprobs))
        if event.finish_reason is not None:
            deltas.append(self._delta(choice, {}) | {"finish_reason": event.finish_reason})
        return deltas

    def _delta(
        self, choice: ChoiceState, delta: dict[str, str], logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        assert choice.last is not None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": _chat_logprobs(choice.logprobs) if self._with_logprobs else None,
            "finish_reason": choice.last.finish_reason,
        }


class CompletionAnswer(Answer):
    """The answer to /v1/completions."""

    id_prefix = "cmpl"
    object_whole = object_event = "text_completion"

    def _deltas(self, choice: ChoiceState, event: TokenEvent) -> list[dict[str, Any]]:
        if not event.text and not event.logprobs and event.finish_reason is None:
            return []
        return [self._entry(choice, event.text, event.logprobs, event)]

    def _whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        assert choice.last is not None
        return self._entry(choice, "".join(choice.texts), choice.logprobs, choice.last)

    def _entry(
        self, choice: ChoiceState, text: str, tokens: Sequence[TokenLogprob], last: TokenEvent
    ) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs:
            logprobs = _completion_logprobs(tokens, choice.logprob_chars)
            choice.logprob_chars += sum(len(token.text) for token in tokens)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": last.finish_reason}


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [_chat_token(token) | {"top_logprobs": [_chat_token(top) for top in token.top]} for token in tokens],
        "refusal": None,
    }


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, _LOWEST_LOGPROB), "bytes": list(token.bytes_)}


def _completion_logprobs(tokens: Sequence[TokenLogprob], start_char: int) -> dict[str, Any]:
    offsets = []
    for token in tokens:
        offsets.append(start_char)
        start_char += len(token.text)
    return {
        "tokens": [_name(token) for token in tokens],
        "token_logprobs": [max(token.logprob, _LOWEST_LOGPROB) for token in tokens],
        "top_logprobs": [{_name(top): max(top.logprob, _LOWEST_LOGPROB) for top in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _name(token: TokenLogprob) -> str:
    """The token's text; OpenAI's `bytes:\\xe2\\x80` for a part of a character, so that no two share a name."""
    if "�" not in token.text:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes_)
