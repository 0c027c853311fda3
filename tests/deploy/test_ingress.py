"""The HTTP app in process: what comes back, and what reaches the replica. Disconnects are in test_generation.py."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import httpx
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from prometheus_client.parser import text_string_to_metric_families

from chunkserve.deploy.config import ServeConfig
from chunkserve.deploy.ingress import build_http_app
from chunkserve.replica.protocol import ReplicaError, ReplicaOverloaded, RequestRefused

from .conftest import LOAD

HI = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


def sse(body: str) -> list[dict[str, Any]]:
    """The events of a stream that ends well."""
    *events, done, empty = body.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    (name, value), *rest = response.json().items()
    assert name == "error"
    assert rest == []
    assert value.keys() == {"message", "type", "param", "code"}
    return value


async def test_chat(http, replica) -> None:
    response = await http.post(
        "/v1/chat/completions", json=HI | {"max_tokens": 3, "cache_salt": "mine", "prefix_cache": False}
    )
    assert response.status_code == 200
    answer = ChatCompletion.model_validate(response.json(), strict=True)
    assert answer.choices[0].message.content == "w0 w1 w2 "
    assert answer.choices[0].finish_reason == "length"
    (request,) = replica.requests
    assert bytes(request.prompt_token_ids) == b"<user>hi<assistant>"
    assert (request.n, request.cache_salt, request.prefix_cache, request.sampling.max_tokens) == (1, "mine", False, 3)
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_chat_stream_joins_to_the_whole(http, replica) -> None:
    streamed = await http.post("/v1/chat/completions", json=HI | {"stream": True, "n": 2})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    texts, reasons = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in sse(streamed.text):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    whole = ChatCompletion.model_validate((await http.post("/v1/chat/completions", json=HI | {"n": 2})).json())
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {0: ["stop"], 1: ["stop"]}


@pytest.mark.parametrize(
    ("options", "count"), [(None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)]
)
async def test_usage_only_when_asked_for(http, options, count) -> None:
    events = sse(
        (await http.post("/v1/completions", json={"prompt": "a", "stream": True, "stream_options": options})).text
    )
    assert [bool(event.get("usage")) for event in events] == [False] * (len(events) - count) + [True] * count


async def messages_of_a_stream(config: ServeConfig, replica, tokenizer_like, body: dict[str, Any]) -> list[str]:
    """The bodies of a streamed answer, by ASGI message."""
    bodies: list[str] = []
    asked = [{"type": "http.request", "body": json.dumps(body | {"stream": True}).encode()}]

    async def receive() -> Any:
        return asked.pop() if asked else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            assert not bodies or last_has_more[-1]
            bodies.append(message["body"].decode())
            last_has_more.append(message["more_body"])

    last_has_more: list[bool] = []
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await build_http_app(config, tokenizer_like, replica)(scope, receive, send)
    assert not last_has_more[-1]
    return bodies


@pytest.mark.parametrize(
    ("interval", "prompt", "words"),
    [
        (1, "a", [1, 1, 1, 1, 1, 1, 1]),
        (3, "a", [1, 3, 3]),
        (4, "a", [1, 4, 2]),
        (100, "a", [1, 6]),
        (2, ["a", "b"], [1, 4, 4, 4, 1]),
    ],
)
async def test_a_stream_goes_out_in_pieces_of_so_many_tokens(replica, tokenizer_like, interval, prompt, words) -> None:
    body = {"prompt": prompt, "max_tokens": 7}
    replica.words = 7
    one = await messages_of_a_stream(ServeConfig(served_model_name="toy"), replica, tokenizer_like, body)
    config = ServeConfig(served_model_name="toy", stream_interval_tokens=interval)
    bodies = await messages_of_a_stream(config, replica, tokenizer_like, body)
    assert [text.count('"text":"w') for text in bodies] == words
    if prompt == "a":
        assert [(event["choices"], event["object"]) for event in sse("".join(bodies))] == [
            (event["choices"], event["object"]) for event in sse("".join(one))
        ]


async def test_what_a_stream_holds_back_comes_before_its_error(replica, tokenizer_like) -> None:
    replica.fail_with, replica.fail_at = ReplicaError("broke"), 3
    config = ServeConfig(served_model_name="toy", stream_interval_tokens=50)
    first, rest = await messages_of_a_stream(config, replica, tokenizer_like, {"prompt": "a"})
    assert "w0" in first
    assert [name in rest for name in ("w1", "w2", "replica_failed")] == [True] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts(http, replica, stream) -> None:
    fields = {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 2, "stream": stream}
    response = await http.post("/v1/completions", json=fields)
    if stream:
        texts = dict.fromkeys(range(4), "")
        for chunk in sse(response.text):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        answer = Completion.model_validate(response.json(), strict=True)
        texts = {choice.index: choice.text for choice in answer.choices}
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    assert texts == dict.fromkeys(range(4), "w0 w1 ")
    assert {request.prompt_token_ids for request in replica.requests} == {(1, 2), (3,)}
    assert len({request.request_id for request in replica.requests}) == 2


async def test_null_bytes_pass(http, replica) -> None:
    assert (await http.post("/v1/completions", json={"prompt": "a\0b"})).status_code == 200
    assert replica.requests[0].prompt_token_ids == (97, 0, 98)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/v1/completions", {"prompt": "x" * 2048, "stream": True}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "n": 10**9}, 400, "n"),
        ("/v1/completions", {"prompt": [1000]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "frobnicate": 1}, 400, "frobnicate"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [HI["messages"][0]] * 2, "stream": True}, 400, "messages"),
    ],
)
async def test_bad_requests_reach_no_replica(http, replica, path, body, status, param) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == status
    assert error(response)["param"] == param
    assert error(response)["type"] == "invalid_request_error"
    assert replica.requests == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 90_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 90_000}]}),
    ],
)
async def test_a_hopeless_text_is_refused_by_its_beginning(http, replica, tokenizer_like, path, body) -> None:
    """Tokenising megabytes to the end would hold up everybody else's prompts."""
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert error(response)["code"] == "context_length_exceeded"
    assert "90000 characters" in error(response)["message"]
    assert "2048 (max_sequence_tokens)" in error(response)["message"]
    assert max(tokenizer_like.encoded_chars) == 4 * 2048
    assert replica.requests == []


async def test_the_template_says_why(http) -> None:
    response = await http.post("/v1/chat/completions", json=HI | {"messages": HI["messages"] * 2})
    assert error(response)["message"] == "messages: roles must alternate"


@pytest.mark.parametrize(
    "content", [b"{", b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "\\ud800"}', b"[" * 10_000]
)
async def test_invalid_json(http, replica, content) -> None:
    response = await http.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert "JSON" in error(response)["message"]
    assert replica.requests == []


async def test_large_body_is_not_read_to_its_end(http) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(50):
            sent += 1
            yield b"x" * 2**20

    for headers in ({}, {"content-length": str(50 * 2**20)}):
        sent = 0
        response = await http.post("/v1/completions", content=body(), headers=headers)
        assert response.status_code == 413
        assert "100000 bytes (max_body_bytes)" in error(response)["message"]
        assert sent <= 1


async def test_unknown_path_and_method_have_openais_shape(http) -> None:
    assert error(await http.get("/v1/nothing"))["message"] == "Not Found: GET /v1/nothing"
    response = await http.get("/v1/completions")
    assert response.status_code == 405
    assert error(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "retry"),
    [
        (RequestRefused("needs 65 chunks; the pool has 64 (kv_pool_bytes)", "messages"), 400, False),
        (ReplicaOverloaded("257 requests wait; at most 256 (max_waiting_requests)"), 429, True),
        (ReplicaError("rank 1 died"), 503, True),
        (RuntimeError("a mistake of ours"), 500, False),
    ],
)
async def test_failures_before_the_first_token_are_statuses(http, replica, stream, failure, status, retry) -> None:
    replica.fail_with = failure
    response = await http.post("/v1/chat/completions", json=HI | {"stream": stream})
    assert response.status_code == status
    assert ("retry-after" in response.headers) == retry
    assert (str(failure) in error(response)["message"]) == (status != 500)


async def test_failures_after_the_first_token_are_events(http, replica) -> None:
    replica.fail_with, replica.fail_at = ReplicaError("rank 1 died"), 2
    response = await http.post("/v1/chat/completions", json=HI | {"stream": True})
    assert response.status_code == 200
    last = json.loads(response.text.rstrip().rsplit("\n\n", 1)[1].removeprefix("data: "))
    assert last["error"]["code"] == "replica_failed"
    assert "[DONE]" not in response.text


async def test_one_failed_prompt_ends_the_others(http, replica) -> None:
    replica.fail_with, replica.fail_at = ReplicaError("rank 1 died"), 2
    response = await http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert response.status_code == 503
    assert (replica.running, replica.cancelled) == (0, 2)


async def test_engine_error_and_early_end_are_errors(http, replica) -> None:
    replica.engine_error = "trees differ"
    response = await http.post("/v1/chat/completions", json=HI)
    assert (response.status_code, error(response)["message"]) == (500, "trees differ")
    assert (replica.running, replica.cancelled) == (0, 1)
    replica.engine_error, replica.cut_short = None, True
    response = await http.post("/v1/chat/completions", json=HI)
    assert (response.status_code, error(response)["code"]) == (500, "incomplete")


@pytest.mark.parametrize("hang_at", [0, 2])
async def test_time_limit(replica, hang_at, tokenizer_like) -> None:
    replica.hang_at = hang_at
    app = build_http_app(ServeConfig(request_timeout_s=0.1), tokenizer_like, replica)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as http:
        whole = await http.post("/v1/completions", json={"prompt": "a"})
        stream = await http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert whole.status_code == 504
    assert "request_timeout_s" in error(whole)["message"]
    assert stream.status_code == (200 if hang_at else 504)
    assert json.loads(stream.text.rstrip().rsplit("\n\n", 1)[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    assert (replica.running, replica.cancelled) == (0, 2)


async def test_request_ids(http) -> None:
    sane = await http.post("/v1/chat/completions", json=HI, headers={"x-request-id": "abc-1.2"})
    assert sane.headers["x-request-id"] == "abc-1.2"
    for name in ("a b", "x" * 129, "<script>", ""):
        response = await http.get("/health", headers={"x-request-id": name})
        assert response.headers["x-request-id"] not in (name, "abc-1.2")
        assert len(response.headers["x-request-id"]) == 32


async def test_models(http) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert Model.model_validate(model, strict=True).id == "toy"
    assert (await http.get("/v1/models/toy")).json() == model
    response = await http.get("/v1/models/org/other")
    assert (response.status_code, error(response)["code"]) == (404, "model_not_found")


async def test_health_tells_the_engines_truth(http, replica) -> None:
    assert (await http.get("/health")).json() == {"status": "ok", "model": "toy"}
    replica.unhealthy = ReplicaError("no step for 31 s")
    response = await http.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "unhealthy", "error": "no step for 31 s"}


async def test_health_of_a_silent_engine(http, replica, monkeypatch) -> None:
    monkeypatch.setattr(replica, "check_health", asyncio.Event().wait)
    response = await http.get("/health")
    assert response.status_code == 503
    assert "health_stall_s" in response.json()["error"]


async def metrics(http: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    return {
        (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != "model")): sample.value
        for family in families
        for sample in family.samples
    }


async def test_metrics(http, replica) -> None:
    await http.post("/v1/chat/completions", json=HI | {"n": 2}, headers={"x-request-id": "secret-id"})
    await http.post("/v1/chat/completions", json=HI | {"n": 0})
    await http.get("/a/b/c")
    replica.fail_with = ReplicaOverloaded("full")
    await http.post("/v1/completions", json={"prompt": "a"})
    seen = await metrics(http)
    prompt_tokens = len(replica.requests[0].prompt_token_ids)
    for name, value in {
        ("chunkserve_http_requests_total", "/v1/chat/completions", "200"): 1,
        ("chunkserve_http_requests_total", "/v1/chat/completions", "400"): 1,
        ("chunkserve_http_requests_total", "/v1/completions", "429"): 1,
        ("chunkserve_http_requests_total", "other", "404"): 1,
        ("chunkserve_rejected_total", "replica_queue"): 1,
        ("chunkserve_route_tokenize_seconds_count",): 2,
        ("chunkserve_finished_choices_total", "stop"): 2,
        ("chunkserve_finished_choices_total", "refused"): 1,
        ("chunkserve_request_prompt_tokens_total",): prompt_tokens,
        ("chunkserve_request_cached_tokens_total",): 3,
        ("chunkserve_request_generated_tokens_total",): 10,
        ("chunkserve_ttft_seconds_count",): 1,
        ("chunkserve_time_per_output_token_seconds_count",): 1,
        ("chunkserve_request_latency_seconds_count",): 1,
        ("chunkserve_running_sequences", "replica-0"): 2,
        ("chunkserve_waiting_sequences", "replica-0"): 1,
        ("chunkserve_pool_chunks", "replica-0"): 100,
        ("chunkserve_chunks_in_use", "replica-0"): 7,
        ("chunkserve_chunks_retained", "replica-0"): 11,
        ("chunkserve_kv_bytes_in_use", "replica-0"): 7000,
        ("chunkserve_steps_total", "replica-0"): 42,
        ("chunkserve_preemptions_total", "replica-0"): 4,
        ("chunkserve_cached_prompt_tokens_total", "replica-0"): 1500,
        ("chunkserve_computed_prompt_tokens_total", "replica-0"): 500,
        ("chunkserve_sequences_finished_total", "stop", "replica-0"): 6,
    }.items():
        assert seen[name] == value, name
    assert "secret-id" not in (await http.get("/metrics")).text


async def test_status(http, replica) -> None:
    body = (await http.get("/status")).json()
    assert (body["model"], body["routing_policy"]) == ("toy", "prefix")
    assert body["replicas"] == {"replica-0": json.loads(json.dumps(asdict(LOAD)))}
    replica.unhealthy = ReplicaError("gone")
    assert (await http.get("/status")).json()["replicas"] == {}


async def test_reset_is_there_only_where_it_is_allowed(http, config, replica, tokenizer_like) -> None:
    assert (await http.post("/reset_prefix_cache")).status_code == 404
    allowed = config.model_copy(update={"allow_cache_reset": True})
    transport = httpx.ASGITransport(build_http_app(allowed, tokenizer_like, replica))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
        response = await client.post("/reset_prefix_cache")
        assert (response.status_code, response.json()) == (200, {"status": "ok", "replicas": ["replica-0"]})
        assert replica.resets == 1
        assert (await client.get("/reset_prefix_cache")).status_code == 405
        replica.unhealthy = ReplicaError("gone")
        assert (await client.post("/reset_prefix_cache")).status_code == 503


async def test_metrics_without_a_replica(http, replica) -> None:
    replica.unhealthy = ReplicaError("gone")
    seen = await metrics(http)
    assert ("chunkserve_request_prompt_tokens_total",) in seen
    assert not any("replica-0" in name for name in seen)


async def test_prompts_and_answers_are_not_logged(http, caplog) -> None:
    caplog.set_level(logging.DEBUG, "chunkserve")
    secret = {"messages": [{"role": "user", "content": "xyzzy"}]}
    await http.post("/v1/chat/completions", json=secret)
    await http.post("/v1/completions", json={"prompt": "xyzzy", "n": 0})
    assert "request path=/v1/chat/completions status=200" in caplog.text
    assert "xyzzy" not in caplog.text
    assert "w0" not in caplog.text


async def test_a_tenant_that_floods_does_not_keep_others_waiting(replica, tokenizer_like) -> None:
    config = ServeConfig(served_model_name="toy", max_running_sequences=1)
    replica.pause_s, replica.held = 0.01, asyncio.Event()
    transport = httpx.ASGITransport(build_http_app(config, tokenizer_like, replica))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:

        async def ask(tenant: str) -> int:
            return (await client.post("/v1/chat/completions", json=HI | {"cache_salt": tenant})).status_code

        flood = [asyncio.create_task(ask("flood")) for _ in range(12)]
        while 'chunkserve_queued_requests{model="toy"} 10.0' not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.001)
        assert len(replica.requests) == 2
        replica.held.set()
        assert await ask("other") == 200
        assert {await task for task in flood} == {200}
    # One runs and one is at hand; the other tenant's comes with the next turns.
    assert [request.cache_salt for request in replica.requests].index("other") <= 4
