import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkserve.deploy.api_error import ApiError
from chunkserve.deploy.config import ServeConfig
from chunkserve.deploy.openai_protocol import (
    ChatRequest,
    CompletionRequest,
    RequestLimits,
    parse_chat,
    parse_completion,
)
from chunkserve.replica.protocol import SamplingParams

VOCAB = 1000
CONTEXT = 512
LIMITS = RequestLimits.of(ServeConfig(), vocab_size=VOCAB, max_context_tokens=CONTEXT)
HI = [{"role": "user", "content": "hi"}]


FIELDS = st.sampled_from(
    sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "role", "content", "type"})
)


def chat(**fields: object) -> SamplingParams:
    request = parse_chat(json.dumps({"messages": HI, **fields}).encode())
    request.check(LIMITS)
    return request.sampling(LIMITS, 10, "messages")


def completion(**fields: object) -> SamplingParams:
    request = parse_completion(json.dumps({"prompt": "hi", **fields}).encode())
    request.check(LIMITS)
    return request.sampling(LIMITS, 10, "prompt")


def test_defaults_are_openais_and_fill_the_context() -> None:
    assert chat() == completion() == SamplingParams(max_tokens=CONTEXT - 10)
    assert chat(max_tokens=None, temperature=None, stop=None, n=None, stream=None) == chat()


def test_every_parameter_arrives() -> None:
    ours = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [7, VOCAB - 1]}
    openai = {"max_tokens": 3, "temperature": 0, "top_p": 0.5, "seed": -(2**63), "stop": ["a", "b"]}
    expected = SamplingParams(
        max_tokens=3,
        temperature=0.0,
        top_p=0.5,
        top_k=5,
        min_p=0.1,
        seed=-(2**63),
        stop=("a", "b"),
        stop_token_ids=(7, VOCAB - 1),
        ignore_eos=True,
        logprobs=4,
    )
    assert chat(logprobs=True, top_logprobs=4, **ours, **openai) == expected
    assert completion(logprobs=4, **ours, **openai) == expected


def test_spellings() -> None:
    assert chat(max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens=7, max_completion_tokens=7).max_tokens == 7
    assert chat(stop="x").stop == ("x",)
    assert chat(logprobs=True).logprobs == completion(logprobs=0).logprobs == 0
    assert chat(logprobs=False).logprobs is None
    assert chat(top_k=-1).top_k == 0
    assert chat(logit_bias={"5": -100, "7": 0.5}).logit_bias == ((5, -100.0), (7, 0.5))
    assert chat(presence_penalty=1).presence_penalty == completion(frequency_penalty=1).frequency_penalty == 1.0
    assert chat().repetition_penalty == 1.0
    assert chat(top_k=10**9).top_k == VOCAB


@pytest.mark.parametrize(
    "neutral",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me", "logprobs": None},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"], "functions": None},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_parameters_that_ask_for_nothing_pass(neutral: dict) -> None:
    assert chat(**neutral) == chat()


def test_completion_parameters_that_ask_for_nothing_pass() -> None:
    assert completion(best_of=1, echo=False, suffix=None, logit_bias=None, presence_penalty=0) == completion()


BAD_SHARED = [
    ({"max_tokens": 0}, "max_tokens", "1"),
    ({"max_tokens": -5}, "max_tokens", "-5"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": CONTEXT}, "max_tokens", str(CONTEXT)),
    ({"max_tokens": 2**70}, "max_tokens", str(CONTEXT)),
    ({"temperature": -0.1}, "temperature", "0"),
    ({"temperature": 2.1}, "temperature", "2"),
    ({"temperature": "1"}, "temperature", "number"),
    ({"temperature": True}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.01}, "top_p", "1"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"min_p": 1.5}, "min_p", "1"),
    ({"seed": 2**63}, "seed", str(2**63)),
    ({"seed": 0.5}, "seed", "integer"),
    ({"n": 0}, "n", "1"),
    ({"n": 10**9}, "n", "max_choices"),
    ({"stop": ["x"] * 10_000}, "stop", "max_stop_strings"),
    ({"stop": "x" * 257}, "stop", "max_stop_string_chars"),
    ({"stop": ""}, "stop", "1 to"),
    ({"stop": [1]}, "stop[0]", "string"),
    ({"stop": 1}, "stop", "list of strings"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", str(VOCAB)),
    ({"stop_token_ids": [2**63]}, "stop_token_ids", str(2**63)),
    ({"stop_token_ids": [0] * 17}, "stop_token_ids", "17"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
    ({"cache_salt": "x" * 257}, "cache_salt", "256"),
    ({"prefix_cache": "no"}, "prefix_cache", "boolean"),
    ({"presence_penalty": 2.5}, "presence_penalty", "2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2"),
    ({"frequency_penalty": False}, "frequency_penalty", "number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"repetition_penalty": -1}, "repetition_penalty", "-1"),
    ({"presence_penalty": "1"}, "presence_penalty", "number"),
    ({"logit_bias": [5]}, "logit_bias", "dictionary"),
    ({"logit_bias": {"5": None}}, "logit_bias.5", "number"),
    ({"logit_bias": {"9" * 30: 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "100"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", str(VOCAB)),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "twice"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias", "max_logit_bias"),
    ({"structured_outputs": {}}, "structured_outputs", "one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "2"),
    ({"structured_outputs": {"regex": "a" * 65_537}}, "structured_outputs", "max_grammar_bytes"),
    ({"structured_outputs": {"lark": "x"}}, "structured_outputs.lark", "unknown"),
    ({"beams": 4}, "beams", "unknown parameter"),
]
BAD_CHAT = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": None}, "messages", "list"),
    ({"messages": ["hi"]}, "messages[0]", "ChatMessage|dictionary"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "text parts"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name", "not supported"),
    ({"messages": [*HI, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content[0].type", "text"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs is true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "max_top_logprobs"),
    ({"logprobs": 3}, "logprobs", "boolean"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "contradicts"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "1"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}},
        "response_format",
        "65536 bytes (max_grammar_bytes), got 70",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema", "type"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "end"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "contradicts",
    ),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
]
BAD_COMPLETION = [
    *[({"prompt": empty}, "prompt", "empty prompt") for empty in ("", [], [""], [[]], ["a", ""], [[1], []])],
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [VOCAB]}, "prompt", f"{VOCAB - 1}, got {VOCAB}"),
    ({"prompt": [2**63]}, "prompt", str(2**63)),
    ({"prompt": [[5], [VOCAB]]}, "prompt", str(VOCAB)),
    ({"prompt": [True]}, "prompt", "token ids"),
    ({"prompt": [1, True]}, "prompt[1]", "integer"),
    ({"prompt": [1, "a"]}, "prompt[1]", "integer"),
    ({"prompt": [1.0]}, "prompt", "token ids"),
    ({"prompt": None}, "prompt", "string"),
    ({"prompt": {}}, "prompt", "string"),
    ({"prompt": ["x"] * 65}, "prompt", "max_prompts_per_request"),
    ({"prompt": ["x"] * 60, "n": 2}, "n", "60 prompts x 2"),
    ({"logprobs": 21}, "logprobs", "max_top_logprobs"),
    ({"echo": True}, "echo", "not supported"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
]


def _refused(caught: pytest.ExceptionInfo[ApiError], param: str | None, says: str) -> None:
    error = caught.value
    assert (error.status, error.param) == (400, param)
    assert any(word in error.message for word in says.split("|"))
    if param is not None:
        assert param in error.message


@pytest.mark.parametrize(("fields", "param", "says"), BAD_SHARED + BAD_CHAT)
def test_bad_chat_is_refused_by_name(fields: dict, param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    _refused(caught, param, says)


@pytest.mark.parametrize(("fields", "param", "says"), BAD_SHARED + BAD_COMPLETION)
def test_bad_completion_is_refused_by_name(fields: dict, param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    _refused(caught, param, says)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"hi"',
        b"{",
        b'{"prompt": "a",}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "presence_penalty": NaN}',
        b'{"prompt": "a", "logit_bias": {"5": Infinity}}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "n": ' + b"9" * 100_000 + b"}",
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ApiError) as caught:
            parse(body)
        _refused(caught, None, "JSON")


def test_a_number_beyond_floats_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion(b'{"prompt": "a", "temperature": 1e999}')
    _refused(caught, "temperature", "finite")


def test_the_message_stays_short() -> None:
    with pytest.raises(ApiError) as caught:
        completion(prompt={"x" * 1_000_000: 1})
    assert len(caught.value.message) < 300


def test_prompt_over_the_context_names_limit_and_length() -> None:
    request = parse_chat(json.dumps({"messages": HI}).encode())
    with pytest.raises(ApiError) as caught:
        request.sampling(LIMITS, CONTEXT, "messages")
    _refused(caught, "messages", f"{CONTEXT} tokens")
    assert caught.value.code == "context_length_exceeded"
    assert request.sampling(LIMITS, CONTEXT - 1, "messages").max_tokens == 1


def test_max_sequence_tokens_narrows_the_context() -> None:
    config = ServeConfig(max_sequence_tokens=100)
    assert RequestLimits.of(config, vocab_size=VOCAB, max_context_tokens=CONTEXT).max_sequence_tokens == 100
    assert RequestLimits.of(config, vocab_size=VOCAB, max_context_tokens=50).max_sequence_tokens == 50


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("\0", ["\0"])],
)
def test_prompt_kinds(prompt: object, prompts: list) -> None:
    assert parse_completion(json.dumps({"prompt": prompt}).encode()).prompts() == prompts


def test_messages_are_flattened() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    dumped = {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None, "annotations": []}
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}, dumped]
    request = parse_chat(json.dumps({"messages": messages}).encode())
    assert [message.flat() for message in request.messages] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "ok"},
    ]


def test_openai_parameters_are_all_known() -> None:
    """What the openai package can send is supported, neutral, or refused as unsupported; never "unknown"."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    for parse, params, needed in (
        (parse_chat, chat_create_params.CompletionCreateParamsBase, {"messages": HI}),
        (parse_completion, completion_create_params.CompletionCreateParamsBase, {"prompt": "a"}),
    ):
        for name in params.__annotations__.keys() - needed.keys():
            parse(json.dumps({**needed, name: None}).encode())


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([2**63, -1, "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | FIELDS, inner, max_size=3),
    max_leaves=6,
)


def outcome(parse: Callable, body: object) -> SamplingParams | ApiError:
    try:
        request = parse(json.dumps(body).encode())
        request.check(LIMITS)
        return request.sampling(LIMITS, 10, "prompt")
    except ApiError as error:
        return error


@given(JSON_VALUES, st.dictionaries(FIELDS, JSON_VALUES, max_size=4))
def test_any_json_is_taken_or_refused(whole: object, fields: dict) -> None:
    """Nothing that a client can send raises anything but a 400."""
    for parse, needed in ((parse_chat, {"messages": HI}), (parse_completion, {"prompt": "hi"})):
        for body in (whole, {**needed, **fields}):
            result = outcome(parse, body)
            if isinstance(result, ApiError):
                assert result.status == 400
                assert len(result.message) < 500
            else:
                assert 1 <= result.max_tokens <= CONTEXT - 10
                assert 0 <= result.temperature <= 2
                assert len(result.stop) <= 16
