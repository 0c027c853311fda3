"""The router inside Ray Serve: two real replicas, over HTTP."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from chunkserve.deploy.local_server import LocalServer, local_server

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

CHUNK = 64


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[LocalServer]:
    knobs = {"num_replicas": 2, "num_threads": 1, "kv_pool_chunks": 96, "max_sequence_tokens": 2048}
    with local_server(knobs) as local:
        yield local


def ask(server: LocalServer, prompt: list[int], *, stream: bool = False, **options: object) -> tuple[str, int, int]:
    """Where a prompt went, and the cached tokens that were predicted and found there."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": stream, **options}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-chunkserve-explain": "1"}, timeout=120)
    assert answer.status_code == 200, answer.text
    names = ("replica", "predicted-cached-tokens", "cached-tokens")
    replica, predicted, cached = (answer.headers[f"x-chunkserve-{name}"] for name in names)
    return replica, int(predicted), int(cached)


def prompt_of(number: int, length: int = 5 * CHUNK + 10) -> list[int]:
    return [1000 + (number * 7919 + i * 31) % 40_000 for i in range(length)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_goes_where_it_is_and_the_prediction_is_exact(server: LocalServer, stream: bool) -> None:
    for number in range(4):
        salt = f"exact {stream}"
        first, predicted, cached = ask(server, prompt_of(number), stream=stream, cache_salt=salt)
        assert (predicted, cached) == (0, 0)
        time.sleep(1.5)  # until the replica has reported that it is idle: one with work may be passed over
        for question in range(2):
            prompt = [*prompt_of(number)[: 5 * CHUNK], 5 + question, 6, 7]
            assert ask(server, prompt, stream=stream, cache_salt=salt) == (first, 5 * CHUNK, 5 * CHUNK)


def test_tenants_share_nothing(server: LocalServer) -> None:
    ask(server, prompt_of(50), cache_salt="one")
    assert ask(server, prompt_of(50), cache_salt="two")[1:] == (0, 0)
    assert ask(server, prompt_of(50), cache_salt="one")[1] == 5 * CHUNK


def test_evictions_reach_the_router(server: LocalServer) -> None:
    ask(server, prompt_of(60), cache_salt="evicted")
    # Far more than both pools hold.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: ask(server, prompt_of(n, 1500), cache_salt="flood"), range(100, 112)))
    time.sleep(2)
    assert ask(server, prompt_of(60), cache_salt="evicted")[1:] == (0, 0)


def test_different_prompts_use_both_replicas(server: LocalServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        went = list(pool.map(lambda n: ask(server, prompt_of(n), cache_salt="spread")[0], range(200, 208)))
    assert len(set(went)) == 2


def test_requests_survive_the_death_of_a_replica(server: LocalServer) -> None:
    replicas = [
        process for process in server.processes() if "ServeReplica:chunkserve:replica" in " ".join(process.cmdline())
    ]
    assert len(replicas) == 2
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, server, prompt_of(n, 500), cache_salt="death") for n in range(301, 313)]
        time.sleep(0.3)
        replicas[0].kill()
        outcomes = [answer.exception() for answer in answers]
    # What had no token yet was done elsewhere; nothing hangs.
    assert sum(outcome is None for outcome in outcomes) >= 10
    assert ask(server, prompt_of(400), cache_salt="death")[0]
