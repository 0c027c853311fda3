"""The whole server as a user starts it: `chunkserve serve`, Ray Serve, the real model, over HTTP."""

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from chunkserve.deploy.client import AsyncClient, Client, StreamBroken
from chunkserve.deploy.config import DEFAULT_FILE
from chunkserve.deploy.local_server import LocalServer, local_server

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-instruct"


@dataclass
class Server:
    """A running server, and what its metrics say."""

    local: LocalServer

    @property
    def url(self) -> str:
        return self.local.url

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def wait_idle(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.metric("chunkserve_chunks_in_use") or self.metric("chunkserve_waiting_sequences"):
            assert time.monotonic() < deadline, "chunks stay in use"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[Server]:
    knobs = {"dtype": "float32", "max_running_sequences": 16, "kv_pool_chunks": 300, "max_sequence_tokens": 4096}
    with local_server(knobs) as local:
        yield Server(local)


def complete(server: Server, prompt: object, **options: object) -> dict:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, **options}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_welcome_shows_a_command_that_works(server: Server) -> None:
    text = "".join(server.local.lines)
    command = re.search(r"^  (curl .*)$", text, re.MULTILINE)
    assert command, text
    answer = subprocess.run(["bash", "-c", f"{command[1]} -sS"], capture_output=True, text=True, check=True, timeout=60)
    assert "Paris" in json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_same_words_cold_and_warm(server: Server, greedy_cases, tokenizer) -> None:
    for case in greedy_cases[::5]:
        for state, cached in (("cold", 0), ("warm", len(case.prompt) - 1)):
            got = complete(server, list(case.prompt), cache_salt=f"alone {case.name}")
            assert got["choices"][0]["text"] == tokenizer.decode(case.tokens), f"{state} {case.name}"
            assert got["usage"]["completion_tokens"] == len(case.tokens)
            assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_same_words_in_a_batch_that_others_join_and_leave(server: Server, greedy_cases, tokenizer) -> None:
    rng = random.Random(3)
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:

        async def ask(case, max_tokens: int) -> str:
            await asyncio.sleep(rng.random() * 2)
            body = {"prompt": list(case.prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body)
            return answer.json()["choices"][0]["text"]

        async def leave(case) -> None:
            await asyncio.sleep(rng.random() * 2)
            body = {"prompt": list(case.prompt), "max_tokens": 500, "stream": True, "ignore_eos": True}
            async with http.stream("POST", "/v1/completions", json=body) as stream:
                async for _ in stream.aiter_lines():
                    return

        cases = greedy_cases
        texts, *_ = await asyncio.gather(
            asyncio.gather(*(ask(case, len(case.tokens)) for case in cases)), *(leave(case) for case in cases[::4])
        )
    assert texts == [tokenizer.decode(case.tokens) for case in cases]
    server.wait_idle(5)


def test_openai_package_gets_chat_streaming_and_not(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    plain = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, temperature=0)
    assert plain.choices[0].message.content == "The capital of France is Paris."
    assert plain.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=20, temperature=0, stream=True, n=2, logprobs=True,
            top_logprobs=2, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    for index in range(2):
        deltas = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(d.delta.content or "" for d in deltas) == plain.choices[0].message.content
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == plain.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert [model.id for model in client.models.list()] == [MODEL]


def test_answers_that_follow_a_schema(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "river": {"enum": ["Seine", "Thames"]}},
        "required": ["city", "river"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL, max_tokens=60, temperature=1, n=3, seed=1,
        messages=[{"role": "user", "content": "Name a city and its river."}],
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )  # fmt: skip
    for choice in answer.choices:
        place = json.loads(choice.message.content or "")
        assert choice.finish_reason == "stop"
        assert list(place) == ["city", "river"]
        assert place["river"] in ("Seine", "Thames")
    body = {"structured_outputs": {"choice": ["red", "green"]}, "max_tokens": 8}
    with Client(server.url) as ours:
        assert ours.complete("Pick a colour:", **body).text in ("red", "green")


def test_sdk_and_stop_strings_over_token_borders(server: Server) -> None:
    with Client(server.url) as client:
        full = client.complete("1, 2, 3, 4, 5,", max_tokens=24, temperature=0).text
        stop = full[5:9]
        assert len(stop) == 4
        stopped = client.complete("1, 2, 3, 4, 5,", max_tokens=24, temperature=0, stop=[stop])
        assert stopped.text == full[: full.index(stop)]
        streamed = "".join(
            piece.text for piece in client.complete("1, 2, 3, 4, 5,", max_tokens=24, temperature=0, stream=True)
        )
        assert streamed == full


async def test_sixteen_at_once_keep_one_prefix(server: Server, tokenizer) -> None:
    prefix = tokenizer.encode("A long day needs a long story, and a long story needs a good listener. " * 80)[:1024]
    before = server.metric("chunkserve_computed_prompt_tokens_total")
    tails = [tokenizer.encode(f"Question {i}: what is {i} plus {i}?") for i in range(16)]
    peak = 0.0
    async with AsyncClient(server.url) as client:
        calls = [
            asyncio.create_task(client.complete([*prefix, *tail], max_tokens=32, temperature=0, ignore_eos=True))
            for tail in tails
        ]
        while not all(call.done() for call in calls):
            peak = max(peak, await asyncio.to_thread(server.metric, "chunkserve_chunks_in_use"))
            await asyncio.sleep(0.02)
        answers = [await call for call in calls]
    assert peak <= 16 + 16, "one prefix of 16 chunks, and 16 tails"
    computed = server.metric("chunkserve_computed_prompt_tokens_total") - before
    assert computed <= 1024 + sum(map(len, tails))
    assert sum(answer.usage.cached_tokens >= 1024 for answer in answers) == 15


BAD = [
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/completions", {"prompt": [1] * 5000}, 400, "4096"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, 400, "max_tokens"),
    ("/v1/completions", '{"prompt": "a", "temperature": NaN}', 400, "JSON"),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 10_000}, 400, "stop"),
    ("/v1/completions", {"prompt": "a", "n": 10**9}, 400, "n"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [49152]}, 400, "49152"),
    ("/v1/completions", '{"prompt": ', 400, "JSON"),
    ("/v1/completions", {"prompt": "a" * 50_000_000}, 413, "max_body_bytes"),
    ("/v1/completions", {"prompt": "a", "model": "gpt-9"}, 404, "gpt-9"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "(a"}}, 400, "structured_outputs"),
    ("/v1/completions", {"prompt": "a", "no_such_thing": 1}, 400, "no_such_thing"),
]


def test_bad_input_is_named_and_disturbs_nobody(server: Server, greedy_cases, tokenizer) -> None:
    case = greedy_cases[0]
    good: list[dict] = []
    stream = threading.Thread(target=lambda: good.append(complete(server, list(case.prompt), cache_salt="beside")))
    stream.start()
    for path, body, status, words in BAD:
        content = body if isinstance(body, str) else json.dumps(body)
        try:
            answer = httpx.post(server.url + path, content=content, timeout=60)
        except httpx.WriteError:
            # The server answered 413 and closed before it had read 50 MB.
            assert status == 413
            continue
        assert answer.status_code == status, (body if len(content) < 200 else path, answer.text[:300])
        error = answer.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        assert words in error["message"], error
    stream.join()
    assert good[0]["choices"][0]["text"] == tokenizer.decode(case.tokens)


def _post_raw(server: Server, body: dict) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["decode", "prefill", "queue"])
def test_a_client_that_leaves_frees_its_chunks(server: Server, stream: bool, phase: str) -> None:
    server.wait_idle(10)
    cancelled = server.metric("chunkserve_cancelled_requests_total")
    salt = f"{phase} {stream}"
    busy = []
    if phase == "queue":
        busy = [_post_raw(server, {"prompt": [5, i], "max_tokens": 3000, "ignore_eos": True}) for i in range(16)]
        while server.metric("chunkserve_running_sequences") < 16:
            time.sleep(0.05)
    prompt = [7] * (3000 if phase == "prefill" else 30)
    body = {"prompt": prompt, "max_tokens": 1000, "stream": stream, "ignore_eos": True, "cache_salt": salt}
    connection = _post_raw(server, body)
    if phase == "queue":
        while not server.metric("chunkserve_waiting_sequences"):
            time.sleep(0.02)
    else:
        while not server.metric("chunkserve_running_sequences"):
            time.sleep(0.02)
    if phase == "decode":
        time.sleep(0.5)
    for each in [connection, *busy]:
        each.close()
    server.wait_idle(3)
    assert server.metric("chunkserve_cancelled_requests_total") - cancelled == 1 + len(busy)


def test_nothing_listens_beyond_loopback(server: Server) -> None:
    addresses = {
        connection.laddr.ip
        for process in server.local.processes()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses
    assert all(ip.removeprefix("::ffff:").startswith("127.") or ip == "::1" for ip in addresses), addresses


def test_a_killed_replica_is_told_and_replaced(server: Server) -> None:
    """Last of this server's tests: what streams ends with an error event, health says so, a new replica comes."""
    names = {process: " ".join(process.cmdline()) for process in server.local.processes()}
    (replica,) = [process for process, name in names.items() if "ServeReplica:chunkserve:replica" in name]
    with Client(server.url) as client:
        pieces = iter(client.complete("Once upon a time", max_tokens=2000, ignore_eos=True, stream=True))
        next(pieces)
        replica.send_signal(signal.SIGKILL)
        with pytest.raises(StreamBroken, match="lost"):
            list(pieces)
        deadline = time.monotonic() + 300
        while httpx.get(f"{server.url}/health", timeout=60).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert client.complete("The capital of France is", max_tokens=4, temperature=0).text.startswith(" Paris")


def test_two_replicas_share_the_load(small_model: Path) -> None:
    def tokens_of_replicas(url: str) -> list[float]:
        text = httpx.get(f"{url}/metrics", timeout=30).text
        found = re.findall(r'^chunkserve_generated_tokens_total{.*replica="\w+"} (\S+)$', text, re.MULTILINE)
        return [float(count) for count in found]

    async def ask_all(url: str) -> list[str]:
        async with AsyncClient(url) as client:
            calls = [client.complete(f"Number {i} is", max_tokens=12, ignore_eos=True) for i in range(12)]
            return [answer.text for answer in await asyncio.gather(*calls)]

    knobs = {"num_replicas": 2, "num_threads": 1, "max_sequence_tokens": 1024, "routing_policy": "round_robin"}
    with local_server(knobs) as server:
        # The server answers as soon as the first replica does.
        deadline = time.monotonic() + 120
        while len(tokens_of_replicas(server.url)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert all(asyncio.run(ask_all(server.url)))
        assert all(count > 0 for count in tokens_of_replicas(server.url))


def test_a_wrong_knob_stops_the_start_by_name() -> None:
    command = [str(Path(sys.executable).with_name("chunkserve")), "serve", str(DEFAULT_FILE)]
    for knob, words in [
        ("chunk_size_tokens=60", "chunk_size_tokens"),
        ("dtype=int3", "dtype"),
        ("chunk_size=64", "chunk_size"),
    ]:
        result = subprocess.run([*command, "--set", knob], capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode != 0
        assert words in result.stderr + result.stdout
        assert "Traceback" not in result.stderr + result.stdout


def test_a_server_ends_with_the_process_that_started_it(small_model: Path) -> None:
    code = "from chunkserve.deploy.local_server import local_server\nwith local_server(): pass"
    parent = subprocess.Popen([sys.executable, "-c", code])
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while not any("raylet" in process.name() for process in family):
            assert time.monotonic() < deadline, "Ray does not start"
            time.sleep(0.2)
            family = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(family, timeout=90)
        assert not alive
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
