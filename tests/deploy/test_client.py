"""The SDK, and the openai package, against the real app on a loopback port."""

import socket
import threading
import time

import httpx
import openai
import pytest

from chunkserve.deploy.client import (
    ApiError,
    AsyncClient,
    BadRequest,
    ChunkserveError,
    Client,
    ConnectionFailed,
    NotFound,
    Overloaded,
    RetryPolicy,
    StreamBroken,
    TimedOut,
    Unavailable,
    Usage,
)
from chunkserve.deploy.client_records import StreamDecoder
from chunkserve.replica.protocol import ReplicaError, ReplicaOverloaded, RequestRefused

FAST = RetryPolicy(max_retries=3, base_s=0.01)
WORDS = "w0 w1 w2 w3 w4 "


@pytest.fixture
def client(live_url):
    with Client(live_url, model="toy", retry=FAST) as client:
        yield client


def test_chat_and_complete(client, replica) -> None:
    answer = client.chat("hi", max_tokens=3, temperature=0, stop=["x"])
    assert (answer.text, answer.finish_reason) == ("w0 w1 w2 ", "length")
    assert answer.usage == Usage(prompt_tokens=19, completion_tokens=3, cached_tokens=3)
    assert answer.raw["object"] == "chat.completion"
    assert client.complete([[1, 2], [3]], n=2).choices[3].text == WORDS
    assert replica.requests[0].sampling.stop == ("x",)
    assert replica.requests[1].prompt_token_ids == (1, 2)


def test_streams(client) -> None:
    pieces = list(client.chat([{"role": "user", "content": "hi"}], stream=True))
    assert "".join(piece.text for piece in pieces) == WORDS
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    assert [piece.usage for piece in pieces if piece.usage] == [
        Usage(prompt_tokens=19, completion_tokens=5, cached_tokens=3)
    ]
    assert "".join(piece.text for piece in client.complete("a", stream=True)) == WORDS


def test_models_and_health(client, replica) -> None:
    assert client.models() == ["toy"]
    assert client.health().ok
    replica.unhealthy = ReplicaError("stuck")
    assert (client.health().ok, client.health().error) == (False, "stuck")


async def test_async(live_url) -> None:
    async with AsyncClient(live_url, retry=FAST) as client:
        assert (await client.chat("hi")).text == WORDS
        assert await client.models() == ["toy"]
        assert (await client.health()).ok
        texts = []
        async for piece in await client.complete("a", stream=True):
            texts.append(piece.text)
        assert "".join(texts) == WORDS
        with pytest.raises(BadRequest):
            await client.chat("hi", n=0)


def test_errors_have_types(client, live_url, replica) -> None:
    with pytest.raises(BadRequest) as caught:
        client.chat("hi", temperature=5)
    assert (caught.value.status, caught.value.param) == (400, "temperature")
    with Client(live_url, model="other") as other, pytest.raises(NotFound):
        other.chat("hi")
    replica.fail_with = RequestRefused("too long", "messages")
    with pytest.raises(BadRequest, match="too long"):
        client.chat("hi")
    replica.fail_with = RuntimeError("ours")
    with pytest.raises(ApiError) as caught_500:
        client.chat("hi")
    assert caught_500.value.status == 500
    assert issubclass(ApiError, ChunkserveError)


@pytest.mark.parametrize(
    ("failure", "kind"), [(ReplicaOverloaded("full"), Overloaded), (ReplicaError("rank 1 died"), Unavailable)]
)
def test_retries_end_with_the_last_error(live_url, replica, monkeypatch, failure, kind) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    replica.fail_with = failure
    with Client(live_url, retry=FAST) as client, pytest.raises(kind):
        client.chat("hi", stream=True)
    assert len(replica.requests) == 4
    # The server said: Retry-After: 1.
    assert pauses == [1.0] * 3


def test_a_retry_that_succeeds(live_url, replica, monkeypatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: setattr(replica, "fail_with", None))
    replica.fail_with = ReplicaOverloaded("full")
    with Client(live_url, retry=FAST) as client:
        assert client.chat("hi").text == WORDS
    assert len(replica.requests) == 2


def test_what_is_not_retried(client, replica) -> None:
    replica.fail_with, replica.fail_at = ReplicaError("rank 1 died"), 2
    texts = []
    with pytest.raises(StreamBroken, match="rank 1 died"):
        texts.extend(piece.text for piece in client.chat("hi", stream=True))
    replica.fail_with, replica.fail_at = RuntimeError("ours"), 0
    with pytest.raises(ApiError):
        client.chat("hi")
    assert len(replica.requests) == 2


def test_pauses_grow_and_are_bounded() -> None:
    policy = RetryPolicy(max_retries=9, base_s=1.0, cap_s=8.0)
    assert [policy.pause_s(attempt, 0.0, 0.0) for attempt in range(5)] == [0.5, 1, 2, 4, 4]
    assert policy.pause_s(0, 0.0, 0.5) == 0.75
    assert policy.pause_s(0, 7.0, 0.0) == 7.0
    assert policy.pause_s(0, 10_000.0, 0.0) == 60.0


def test_no_server(monkeypatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Client(f"http://127.0.0.1:{unused.getsockname()[1]}") as client, pytest.raises(ConnectionFailed):
            client.chat("hi")
    assert len(pauses) == 3


def test_time_limit(live_url, replica) -> None:
    for replica.hang_at, stream in ((0, False), (0, True), (2, True)):
        with Client(live_url, timeout_s=0.3, retry=FAST) as client, pytest.raises(TimedOut):
            list(client.chat("hi", stream=stream))
    assert len(replica.requests) == 3


def test_closing_a_stream_cancels(client, replica) -> None:
    replica.hang_at = 3
    with client.chat("hi", stream=True) as stream:
        for piece in stream:
            if piece.text == "w1 ":
                break
    deadline = time.monotonic() + 5
    while replica.cancelled == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (replica.cancelled, replica.running) == (1, 0)


def test_a_server_that_hangs_up() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    event = b'data: {"choices":[{"index":0,"text":"half","finish_reason":null}]}\n\n'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(head + event)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            pieces = iter(client.complete("a", stream=True))
            assert next(pieces).text == "half"
            with pytest.raises(StreamBroken):
                next(pieces)
        thread.join()


def test_stream_bytes_may_break_anywhere() -> None:
    text = "a\u2028b\x85c é"
    event = httpx.Response(200, json={"choices": [{"index": 0, "text": text, "finish_reason": None}]}).content
    body = b": comment\r\n\r\ndata: " + event + b"\r\n\r\ndata: [DONE]\n\n"
    for size in (1, 7, len(body)):
        decoder = StreamDecoder()
        pieces = [piece for at in range(0, len(body), size) for piece in decoder.feed(body[at : at + size])]
        decoder.close()
        assert [piece.text for piece in pieces] == [text]


@pytest.mark.parametrize("payload", [b"{", b"[]", b'{"error":{"message":"no"}}'])
def test_what_is_no_event_breaks_the_stream(payload) -> None:
    with pytest.raises(StreamBroken):
        list(StreamDecoder().feed(b"data: " + payload + b"\n\n"))


async def test_the_openai_package(live_url, replica) -> None:
    async with openai.AsyncOpenAI(base_url=live_url + "/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model="toy", messages=messages, logprobs=True, top_logprobs=2)
        assert answer.choices[0].message.content == WORDS
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
        text = ""
        stream = await client.chat.completions.create(
            model="toy", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        assert (text, chunk.usage.prompt_tokens_details.cached_tokens) == (WORDS, 3)
        assert (await client.completions.create(model="toy", prompt=[1, 2], extra_body={"top_k": 3})).choices
        assert [model.id async for model in client.models.list()] == ["toy"]
        assert replica.requests[-1].sampling.top_k == 3
        with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
            await client.completions.create(model="toy", prompt="a", frequency_penalty=3)
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt", prompt="a")
        replica.fail_with, replica.fail_at = ReplicaError("rank 1 died"), 2
        broken = await client.completions.create(model="toy", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="rank 1 died"):
            assert [chunk.choices[0].text async for chunk in broken]
