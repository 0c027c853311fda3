"""The load generator against the real app on a loopback port."""

import asyncio
import json
import math
from dataclasses import replace

import pytest

from chunkserve.deploy.bench import BenchError, BenchSettings, run_bench
from chunkserve.deploy.load_client import Connection, LoadError, Sample, Target
from chunkserve.replica.protocol import ReplicaOverloaded

QUICK = {"num_requests": 12, "concurrency": 4, "shared_tokens": 300, "own_tokens": 60, "new_tokens": 5, "warmup": 2}
CALIBRATION = 2


def settings(url: str, **changes) -> BenchSettings:
    return BenchSettings(url=url, **(QUICK | changes))


def prompts(replica) -> list[bytes]:
    return [bytes(request.prompt_token_ids) for request in replica.requests[CALIBRATION:]]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_prompts_begin_alike_and_have_the_asked_for_lengths(live_url, replica, endpoint) -> None:
    done = []
    result = await run_bench(settings(live_url, endpoint=endpoint), lambda: done.append(1))
    assert (len(result.samples), len(done), result.errors.total()) == (12, 12, 0)
    sent = prompts(replica)
    assert len(set(sent)) == len(sent) == 14
    shared = len(min(sent, key=len))
    while any(prompt[:shared] != sent[0][:shared] for prompt in sent):
        shared -= 1
    assert shared == pytest.approx(300, rel=0.1)
    assert result.row()["prompt_tokens_mean"] == pytest.approx(360, rel=0.15)
    assert all(request.sampling.ignore_eos and request.sampling.max_tokens == 5 for request in replica.requests[2:])
    # The calibration must not warm the prefix that is measured.
    assert all(bytes(request.prompt_token_ids)[:60] != sent[0][:60] for request in replica.requests[:CALIBRATION])


async def test_token_ids_have_exact_lengths(live_url, replica, monkeypatch) -> None:
    monkeypatch.setattr("chunkserve.deploy.bench._TOKEN_IDS", range(1, 1000))
    result = await run_bench(settings(live_url, endpoint="token-ids", ignore_eos=False))
    assert {len(request.prompt_token_ids) for request in replica.requests} == {360}
    assert len({request.prompt_token_ids[:300] for request in replica.requests}) == 1
    assert result.row()["cached_share"] == pytest.approx(3 / 360)


async def test_the_same_seed_sends_the_same_prompts(live_url, replica) -> None:
    for seed in (1, 1, 2):
        await run_bench(settings(live_url, seed=seed, concurrency=1))
    first, second, third = replica.requests[:16], replica.requests[16:32], replica.requests[32:]
    ids = [[request.prompt_token_ids for request in run] for run in (first, second, third)]
    assert ids[0] == ids[1]
    assert not set(ids[0]) & set(ids[2])


async def test_without_sharing_each_request_has_a_salt_of_its_own(live_url, replica) -> None:
    await run_bench(settings(live_url, concurrency=1))
    assert {request.cache_salt for request in replica.requests} == {""}
    replica.requests.clear()
    await run_bench(settings(live_url, share=False, concurrency=1))
    salts = [request.cache_salt for request in replica.requests[CALIBRATION:]]
    assert len(set(salts)) == len(salts) == 14


async def test_times_are_those_of_the_server(live_url, replica) -> None:
    replica.pause_s = 0.02
    row = (await run_bench(settings(live_url, concurrency=2))).row()
    # Five words, a pause before each; the loop's timer may be late, and never early.
    assert row["ttft_ms_p50"] >= 19
    assert row["tpot_ms_p50"] >= 19
    assert row["latency_ms_p50"] >= 95
    assert row["ttft_ms_p50"] < row["latency_ms_p50"]
    assert row["output_tokens_per_s"] == pytest.approx(12 * 5 / row["wall_s"])
    assert row["wall_s"] >= 6 * 0.095


async def test_concurrency_is_kept(live_url, replica) -> None:
    replica.pause_s, most = 0.01, 0
    running = asyncio.create_task(run_bench(settings(live_url, num_requests=20)))
    while not running.done():
        most = max(most, replica.running)
        await asyncio.sleep(0.001)
    assert most == 4


async def test_open_loop_does_not_wait_for_answers(live_url, replica) -> None:
    replica.pause_s, most = 0.05, 0
    running = asyncio.create_task(run_bench(settings(live_url, rate_rps=200.0)))
    while not running.done():
        most = max(most, replica.running)
        await asyncio.sleep(0.001)
    assert most > 4
    assert running.result().row()["concurrency"] is None


async def test_errors_are_counted_and_do_not_stop_the_run(live_url, replica) -> None:
    calls = 0

    def fail_from_now_on() -> None:
        nonlocal calls
        calls += 1
        replica.fail_with = ReplicaOverloaded("full") if calls == 5 else replica.fail_with

    result = await run_bench(settings(live_url, concurrency=1), fail_from_now_on)
    assert (len(result.samples), calls) == (5, 12)
    assert result.errors == {"status 429: full": 7}
    assert result.row()["errors"] == 7


async def test_a_run_without_answers_has_a_row(live_url, replica) -> None:
    def fail() -> None:
        replica.fail_with = ReplicaOverloaded("full")

    result = await run_bench(settings(live_url, num_requests=1, concurrency=1), fail)
    replica.fail_with = None
    assert json.loads(json.dumps(result.row()))["errors"] == 0
    empty = type(result)(settings=result.settings, model="toy", samples=(), errors=result.errors, wall_s=1.0)
    assert empty.row()["ttft_ms_p50"] is None


async def test_a_server_that_cannot_be_used(live_url, unused_tcp_port) -> None:
    with pytest.raises(BenchError, match="ConnectionRefused"):
        await run_bench(settings(f"http://127.0.0.1:{unused_tcp_port}"))
    with pytest.raises(BenchError, match="does not exist"):
        await run_bench(settings(live_url, model="gpt"))
    with pytest.raises(BenchError, match="expected a URL"):
        await run_bench(settings("127.0.0.1:8000"))


async def test_broken_streams_are_errors(live_url, replica) -> None:
    connection = Connection(replace(Target.parse(live_url), headers={"x-request-id": "mine"}))
    body = {"prompt": "a", "stream": True}
    with pytest.raises(LoadError, match="without usage"):
        await connection.stream("/v1/completions", body)
    body["stream_options"] = {"include_usage": True}
    sample = await connection.stream("/v1/completions", body)
    assert (sample.completion_tokens, sample.prompt_tokens, sample.cached_tokens) == (5, 1, 3)
    assert sample.headers["x-request-id"] == "mine"
    replica.engine_error = "trees differ"
    with pytest.raises(LoadError, match="error event: trees differ"):
        await connection.stream("/v1/completions", body)
    replica.engine_error = None
    assert (await connection.stream("/v1/completions", body)).completion_tokens == 5
    await connection.close()


USAGE = b'"usage": {"prompt_tokens": 3, "completion_tokens": 1}'
PLAIN = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (PLAIN + b'data: {"choices": [{"text": "a"}], ' + USAGE + b"}\n\n", "without its end"),
        (b"SSH-2.0\r\n\r\n", "not an HTTP/1 reply"),
        (b"", "connection"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {\n\n", "not JSON"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", "without usage|without tokens"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata", "connection"),
        (b"HTTP/1.1 502 Bad\r\ncontent-length: 4\r\n\r\noops", "status 502: oops"),
    ],
)
async def test_strange_servers_are_errors(reply, says) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(LoadError, match=says):
            await Connection(Target.parse(f"http://127.0.0.1:{port}")).stream("/", {})


async def test_a_finish_reason_ends_the_stream_of_a_server_that_sends_no_done() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(PLAIN + b'data: {"choices": [{"text": "a", "finish_reason": "stop"}], ' + USAGE + b"}\n\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert (await Connection(Target.parse(f"http://127.0.0.1:{port}")).stream("/", {})).completion_tokens == 1


async def test_a_connection_that_the_server_closed_is_opened_again() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnull")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = Connection(Target.parse(f"http://127.0.0.1:{port}"))
        for _ in range(3):
            assert await connection.fetch("GET", "/") is None
            await asyncio.sleep(0.05)
        await connection.close()


def test_time_per_token_is_after_the_first() -> None:
    times = {"ttft_s": 1.0, "last_token_s": 3.0, "latency_s": 3.5, "prompt_tokens": 1, "cached_tokens": 0}
    assert math.isclose(Sample(**times, completion_tokens=5).tpot_s, 0.5)
    assert Sample(**times, completion_tokens=1).tpot_s is None


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, False, "")),
        ("http://host/v1/", ("host", 80, False, "")),
        ("https://host/api/v1", ("host", 443, True, "/api")),
    ],
)
def test_urls(url: str, where: tuple) -> None:
    target = Target.parse(url)
    assert (target.host, target.port, target.tls, target.prefix) == where
