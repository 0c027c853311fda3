"""Clients that leave, against a real HTTP server: the replica must notice, whatever the request was doing."""

import asyncio
import json
import time
from urllib.parse import urlsplit

import httpx
import pytest


async def open_request(url: str, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "not within 5 s"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hang_at", [0, 3])
async def test_leaving_cancels_in_queue_and_in_decode(live_url, replica, stream, hang_at) -> None:
    replica.hang_at = hang_at
    reader, writer = await open_request(live_url, {"prompt": ["a", "b"], "stream": stream})
    await until(lambda: replica.running == 2)
    if stream and hang_at:
        await reader.readuntil(b"w1")
    assert replica.cancelled == 0
    writer.close()
    await until(lambda: replica.cancelled == 2)
    assert replica.running == 0
    async with httpx.AsyncClient(base_url=live_url) as http:
        text = (await http.get("/metrics")).text
    assert 'chunkserve_finished_choices_total{finish_reason="cancelled",model="toy"} 2.0' in text
    # A stream that had begun has had its status.
    status = 200 if stream and hang_at else 499
    assert f'http_requests_total{{model="toy",path="/v1/completions",status="{status}"}} 1.0' in text


async def test_a_whole_answer_that_begins_anew_has_each_word_once_and_a_stream_ends(live_url, replica) -> None:
    async with httpx.AsyncClient(base_url=live_url) as http:
        replica.losses = 1
        reply = await http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
        assert reply.status_code == 200
        assert [choice["text"] for choice in reply.json()["choices"]] == ["w0 w1 w2 w3 w4 "] * 4
        assert reply.json()["usage"]["completion_tokens"] == 20

        replica.losses = 1
        body = (await http.post("/v1/completions", json={"prompt": "a", "stream": True})).text
        assert "w1" in body
        assert "replica_failed" in body
        assert "[DONE]" not in body
    assert replica.running == replica.losses == 0


async def test_leaving_while_sending_the_body(live_url, replica) -> None:
    parts = urlsplit(live_url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n{"prompt":')
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    async with httpx.AsyncClient(base_url=live_url) as http:
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert len(replica.requests) == 1


async def test_a_finished_answer_is_not_a_cancel(live_url, replica) -> None:
    async with httpx.AsyncClient(base_url=live_url) as http:
        for stream in (False, True):
            assert (await http.post("/v1/completions", json={"prompt": "a", "stream": stream})).status_code == 200
    await until(lambda: replica.running == 0)
    assert replica.cancelled == 0


async def test_a_huge_body_gets_its_413_over_a_real_socket(live_url, replica) -> None:
    parts = urlsplit(live_url)
    for head in (f"content-length: {50 * 2**20}", "transfer-encoding: chunked"):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode())
        writer.write(b"186a1\r\n" + b"x" * 100_001 + b"\r\n")
        status = await asyncio.wait_for(reader.readline(), 5)
        assert b" 413 " in status
        writer.close()
    assert replica.requests == []


async def test_many_streams_at_once_end_exactly_once(live_url, replica) -> None:
    replica.words, replica.pause_s = 20, 0.001
    async with httpx.AsyncClient(base_url=live_url, limits=httpx.Limits(max_connections=None)) as http:
        posts = [http.post("/v1/completions", json={"prompt": "a", "stream": True}) for _ in range(50)]
        for response in await asyncio.gather(*posts):
            assert response.text.count("data: [DONE]") == 1
            assert response.text.count('"finish_reason":"stop"') == 1
    assert (len(replica.requests), replica.running, replica.cancelled) == (50, 0, 0)
