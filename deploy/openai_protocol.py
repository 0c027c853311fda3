"""Request records of the OpenAI API, and what turns them into our SamplingParams.

A parameter that we do not support is refused with a 400 that names it, unless it has the value that asks for nothing.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag
from pydantic_core import to_json

from chunkserve.replica.protocol import GrammarSpec, SamplingParams

from .api_error import bad_request, shown
from .config import ServeConfig
from .request_body import Record, json_object, validated, without_neutral

_INT64 = 2**63
_TOKEN_ID = re.compile(r"-?[0-9]{1,20}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may ask for: the knobs of ServeConfig that bound it, and what the model knows.

    max_sequence_tokens: prompt and new tokens together.
    vocab_size: token ids are below it.
    """

    max_sequence_tokens: int
    vocab_size: int
    max_choices: int
    max_prompts_per_request: int
    max_stop_strings: int
    max_stop_string_chars: int
    max_top_logprobs: int
    max_logit_bias: int
    max_grammar_bytes: int

    @classmethod
    def of(cls, config: ServeConfig, *, vocab_size: int, max_context_tokens: int) -> Self:
        return cls(
            max_sequence_tokens=min(config.max_sequence_tokens or max_context_tokens, max_context_tokens),
            vocab_size=vocab_size,
            max_choices=config.max_choices,
            max_prompts_per_request=config.max_prompts_per_request,
            max_stop_strings=config.max_stop_strings,
            max_stop_string_chars=config.max_stop_string_chars,
            max_top_logprobs=config.max_top_logprobs,
            max_logit_bias=config.max_logit_bias,
            max_grammar_bytes=config.max_grammar_bytes,
        )

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise bad_request(f"{param}: token ids are from 0 to {self.vocab_size - 1}, got {shown(wrong)}", param)


class StreamOptions(Record):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Record):
    """`strict` and `name` change nothing: the schema is always followed."""

    name: str | None = Field(default=None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Record):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> GrammarSpec | None:
        if (self.json_schema is None) == (self.type == "json_schema"):
            message = "response_format.json_schema: goes with type json_schema, and with no other"
            raise bad_request(message, "response_format.json_schema")
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else {"type": "object"}
        return GrammarSpec(kind="json_schema", text=to_json(schema).decode(), param="response_format")


class StructuredOutputs(Record):
    """As vLLM has it: one of a JSON schema, a regular expression, and a list of answers."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)

    def grammar(self) -> GrammarSpec:
        kinds = [name for name in ("json_", "regex", "choice") if getattr(self, name) is not None]
        param = "structured_outputs"
        if len(kinds) != 1:
            raise bad_request(f"{param}: expected one of json, regex and choice, got {len(kinds)}", param)
        if self.json_ is not None:
            return GrammarSpec(kind="json_schema", text=to_json(self.json_).decode(), param=param)
        regex = self.regex if self.regex is not None else "|".join(map(re.escape, self.choice or ()))
        return GrammarSpec(kind="regex", text=regex, param=param)


class GenerationRequest(Record):
    """What both endpoints share. None stands for a missing parameter and for null alike.

    top_k, min_p, repetition_penalty, structured_outputs, ignore_eos, stop_token_ids, cache_salt, prefix_cache: beyond
    the OpenAI API; see SamplingParams and Request.
    top_k may be -1, as other servers have it for "all".
    """

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64)
    stop: (
        Annotated[
            Annotated[str, Tag("#text")] | Annotated[list[str], Tag("#texts")],
            Discriminator(
                lambda value: {str: "#text", list: "#texts"}.get(type(value)),
                custom_error_type="stop_type",
                custom_error_message="Input should be a string or a list of strings",
            ),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = Field(default=None, ge=-1, lt=_INT64)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    structured_outputs: StructuredOutputs | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    prefix_cache: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        return self.n or 1

    def check(self, limits: RequestLimits) -> None:
        """Everything that can be known before the prompt is tokenised.

        Raises:
            ApiError: 400 that names the field, the limit and the value.
        """
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options: only allowed when stream is true", "stream_options")
        if self.choices > limits.max_choices:
            raise bad_request(f"n: at most {limits.max_choices} (max_choices), got {shown(self.choices)}", "n")
        stops = self._stops()
        if len(stops) > limits.max_stop_strings:
            raise bad_request(f"stop: at most {limits.max_stop_strings} (max_stop_strings), got {len(stops)}", "stop")
        for stop in stops:
            if not 1 <= len(stop) <= limits.max_stop_string_chars:
                allowed = f"1 to {limits.max_stop_string_chars} characters (max_stop_string_chars)"
                raise bad_request(f"stop: a stop string has {allowed}, got {len(stop)}", "stop")
        stop_ids = self.stop_token_ids or []
        if len(stop_ids) > limits.max_stop_strings:
            message = f"stop_token_ids: at most {limits.max_stop_strings} (max_stop_strings), got {len(stop_ids)}"
            raise bad_request(message, "stop_token_ids")
        limits.check_token_ids(stop_ids, "stop_token_ids")
        bias = self.logit_bias or {}
        if len(bias) > limits.max_logit_bias:
            message = f"logit_bias: at most {limits.max_logit_bias} tokens (max_logit_bias), got {len(bias)}"
            raise bad_request(message, "logit_bias")
        for token in bias:
            if not _TOKEN_ID.fullmatch(token):
                raise bad_request(f"logit_bias: keys are token ids, got {shown(token)}", "logit_bias")
        token_ids = [int(token) for token in bias]
        limits.check_token_ids(token_ids, "logit_bias")
        if len(set(token_ids)) < len(token_ids):
            raise bad_request("logit_bias: a token stands there twice", "logit_bias")
        grammar = self._grammar()
        if grammar is not None and len(grammar.text.encode()) > limits.max_grammar_bytes:
            size = f"at most {limits.max_grammar_bytes} bytes (max_grammar_bytes), got {len(grammar.text.encode())}"
            raise bad_request(f"{grammar.param}: {size}", grammar.param)
        if grammar is not None and self.ignore_eos:
            raise bad_request(f"ignore_eos: an answer with {grammar.param} has an end", "ignore_eos")
        param, alternatives = self._alternatives()
        if alternatives is not None and alternatives > limits.max_top_logprobs:
            message = f"{param}: at most {limits.max_top_logprobs} (max_top_logprobs), got {shown(alternatives)}"
            raise bad_request(message, param)

    def sampling(self, limits: RequestLimits, prompt_tokens: int, prompt_param: str) -> SamplingParams:
        """How to continue a prompt of this many tokens; without max_tokens, up to the end of the context.

        Raises:
            ApiError: 400 when the prompt, or prompt and max_tokens together, exceed the context.
        """
        context = limits.max_sequence_tokens
        if prompt_tokens >= context:
            message = f"the prompt has {prompt_tokens} tokens; at most {context - 1} leave room for an answer"
            raise bad_request(
                f"{prompt_param}: {message} (max_sequence_tokens {context})", prompt_param, "context_length_exceeded"
            )
        param, wanted = self._max_tokens()
        if wanted is not None and prompt_tokens + wanted > context:
            message = f"prompt ({prompt_tokens} tokens) and {param} ({shown(wanted)}) together exceed the context"
            raise bad_request(
                f"{param}: {message} of {context} tokens (max_sequence_tokens)", param, "context_length_exceeded"
            )
        return SamplingParams(
            max_tokens=context - prompt_tokens if wanted is None else wanted,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=min(max(self.top_k or 0, 0), limits.vocab_size),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            grammar=self._grammar(),
            seed=self.seed,
            stop=tuple(self._stops()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self._alternatives()[1],
        )

    def _grammar(self) -> GrammarSpec | None:
        return self.structured_outputs.grammar() if self.structured_outputs is not None else None

    def _stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def _max_tokens(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    @abstractmethod
    def _alternatives(self) -> tuple[str, int | None]:
        """The field that asks for log-probabilities, and how many alternatives; None for none at all."""


class TextPart(Record):
    type: Literal["text"]
    text: str


_Content = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[TextPart], Tag("#parts")],
    Discriminator(
        lambda value: {str: "#text", list: "#parts"}.get(type(value)),
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class ChatMessage(Record):
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content

    def flat(self) -> dict[str, str]:
        """As chat templates want it: text parts joined by line ends, and the developer as the system."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)

    def check(self, limits: RequestLimits) -> None:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs: only allowed when logprobs is true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("max_tokens: contradicts max_completion_tokens; send one of them", "max_tokens")
        super().check(limits)

    def _grammar(self) -> GrammarSpec | None:
        wanted = self.response_format.grammar() if self.response_format is not None else None
        other = super()._grammar()
        if wanted is not None and other is not None:
            raise bad_request("structured_outputs: contradicts response_format; send one of them", "structured_outputs")
        return wanted or other

    def _max_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super()._max_tokens()

    def _alternatives(self) -> tuple[str, int | None]:
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None


def _prompt_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "#text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return {str: "#texts", int: "#ids", list: "#id_lists"}.get(type(first))


_Prompt = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[list[str], Tag("#texts")]
    | Annotated[list[int], Tag("#ids")]
    | Annotated[list[list[int]], Tag("#id_lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of strings, a list of token ids, or a list of those",
    ),
]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: _Prompt
    logprobs: int | None = Field(default=None, ge=0)

    def check(self, limits: RequestLimits) -> None:
        prompts = self.prompts()
        if len(prompts) > limits.max_prompts_per_request:
            allowed = f"at most {limits.max_prompts_per_request} prompts (max_prompts_per_request)"
            raise bad_request(f"prompt: {allowed}, got {len(prompts)}", "prompt")
        if not prompts or not all(prompts):
            raise bad_request("prompt: expected at least one token, got an empty prompt", "prompt")
        for prompt in prompts:
            if not isinstance(prompt, str):
                limits.check_token_ids(prompt, "prompt")
        super().check(limits)
        most = max(limits.max_choices, limits.max_prompts_per_request)
        if len(prompts) * self.choices > most:
            message = f"n: at most {most} answers to one request (max_prompts_per_request)"
            raise bad_request(f"{message}, got {len(prompts)} prompts x {self.choices}", "n")

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        token_ids = [entry for entry in self.prompt if isinstance(entry, int)]
        if token_ids:
            return [token_ids]
        return [entry for entry in self.prompt if not isinstance(entry, int)]

    def _alternatives(self) -> tuple[str, int | None]:
        return "logprobs", self.logprobs


# Values of OpenAI parameters that ask for nothing we would have to do; null does so for every one. "*": any value.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "user": ("*",),
}
_NEUTRAL_CHAT = _NEUTRAL | {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ("*",),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": ("*",),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "safety_identifier": ("*",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_NEUTRAL_COMPLETION = _NEUTRAL | {"best_of": (1,), "echo": (False,), "suffix": ("",)}
_NEUTRAL_MESSAGE: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_calls": ([],),
}


def parse_chat(body: bytes) -> ChatRequest:
    """A chat request out of an HTTP body.

    Raises:
        ApiError: 400 that names the field at fault.
    """
    fields = without_neutral(json_object(body), _NEUTRAL_CHAT)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [
            without_neutral(message, _NEUTRAL_MESSAGE, f"messages[{at}].") if isinstance(message, dict) else message
            for at, message in enumerate(messages)
        ]
    return validated(ChatRequest, fields)


def parse_completion(body: bytes) -> CompletionRequest:
    """A completion request out of an HTTP body.

    Raises:
        ApiError: 400 that names the field at fault.
    """
    return validated(CompletionRequest, without_neutral(json_object(body), _NEUTRAL_COMPLETION))
