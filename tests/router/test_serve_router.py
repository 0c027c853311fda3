"""The router inside Ray Serve: two real replicas, over HTTP."""

import re
import time
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from chunkserve.deploy.cli import app
from chunkserve.deploy.config import DEFAULT_FILE
from chunkserve.deploy.local_server import LocalServer, local_server
from chunkserve.router.route_metrics import METRIC_NAMES

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

CHUNK = 64


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    # So that replicas can be told to go, without a change of the application.
    document = yaml.safe_load(DEFAULT_FILE.read_text())
    document["applications"][0]["external_scaler_enabled"] = True
    config = tmp_path_factory.mktemp("config") / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    knobs = {
        "num_replicas": 2, "num_threads": 1, "kv_pool_chunks": 96, "max_sequence_tokens": 2048,
        "allow_cache_reset": True,
    }  # fmt: skip
    with local_server(knobs, config=config) as local:
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


def test_a_request_that_opts_out_finds_nothing_and_leaves_nothing(server: LocalServer) -> None:
    for _ in range(2):
        assert ask(server, prompt_of(55), prefix_cache=False)[1:] == (0, 0)
    ask(server, prompt_of(55))
    assert ask(server, prompt_of(55))[1] == 5 * CHUNK
    assert ask(server, prompt_of(55), prefix_cache=False)[1:] == (0, 0)


def test_a_reset_empties_both_replicas_and_reaches_the_router(server: LocalServer) -> None:
    ask(server, prompt_of(57), cache_salt="reset")
    answer = httpx.post(f"{server.url}/reset_prefix_cache", timeout=60)
    assert answer.status_code == 200
    assert len(answer.json()["replicas"]) == 2
    loads = httpx.get(f"{server.url}/status", timeout=60).json()["replicas"]
    assert [load["chunks_retained"] for load in loads.values()] == [0, 0]
    time.sleep(2)
    assert ask(server, prompt_of(57), cache_salt="reset")[1:] == (0, 0)


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


LONG = "A tool may be called by its name and its arguments, as JSON, on a line of its own. " * 20
TOOLS = '{"name": "search", "parameters": {"query": "string", "limit": "integer"}}\n' * 16
# Two requests of a kind that begin alike and end differently.
KINDS = {
    "chat": [{"messages": [{"role": "user", "content": LONG + end}]} for end in ("One?", "Another?")],
    "chat with tools in its system text": [
        {"messages": [{"role": "system", "content": LONG + TOOLS}, {"role": "user", "content": end}]}
        for end in ("Where is Rome?", "Who was there?")
    ],
    "completions": [{"prompt": LONG + end} for end in ("One", "Another, longer one")],
    "token ids": [{"prompt": [*prompt_of(70), end, end]} for end in (5, 6)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_ingress_names_chunks_as_the_engine_cuts_them(server: LocalServer, kind: str) -> None:
    for number, body in enumerate(KINDS[kind]):
        answer = httpx.post(
            f"{server.url}/v1/{'chat/' if 'messages' in body else ''}completions",
            json=body | {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "cache_salt": f"borders {kind}"},
            headers={"x-chunkserve-explain": "1"},
            timeout=120,
        )
        predicted, cached = (int(answer.headers[f"x-chunkserve-{n}cached-tokens"]) for n in ("predicted-", ""))
        # What the router expects ends at the last border of a chunk before the place where the engine's hit ends.
        assert predicted == cached // CHUNK * CHUNK
        assert (cached >= 4 * CHUNK) == bool(number)
        assert int(answer.headers["x-chunkserve-decision-us"]) > 0
        assert answer.headers["x-chunkserve-reason"] == ("affinity" if number else "cold")
        if not number:
            time.sleep(1.5)  # as above


def ray_metrics(server: LocalServer) -> dict[str, float]:
    """Our metrics as Ray gives them to Prometheus, summed over their labels."""
    folder = Path(server.processes()[0].environ()["RAY_TMPDIR"], "ray/session_latest")
    (port,) = {int(path.read_text()) for path in folder.glob("metrics_export_port_*")}
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
    found: dict[str, float] = {}
    for name, value in re.findall(r"^ray_(chunkserve_\w+)(?:{[^}]*})? (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def test_ray_has_the_routers_metrics_and_its_load_returns_to_zero_after_disconnects(server: LocalServer) -> None:
    """Clients leave in prefill and in decode; what they had reserved is released."""
    for _ in range(2):
        ask(server, prompt_of(81), cache_salt="left")
    body = {"max_tokens": 300, "ignore_eos": True, "stream": True, "cache_salt": "left"}
    before = ray_metrics(server).get("chunkserve_cancel_total", 0.0)

    def leave(number: int) -> None:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body | {"prompt": prompt_of(500 + number, 300)}, timeout=120
        ) as stream:
            next(stream.iter_raw())

    def leave_early(number: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/completions", json=body | {"prompt": prompt_of(520 + number, 1000)}, timeout=0.2
            )

    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(leave if number % 2 else leave_early, number) for number in range(6)]
        for call in calls:
            call.result()
    deadline = time.monotonic() + 60
    while True:
        found = ray_metrics(server)
        # Those that left at once may not have come as far as the router.
        if found.get("chunkserve_cancel_total", 0.0) >= before + 3 and not found["chunkserve_route_open_requests"]:
            break
        assert time.monotonic() < deadline, found
        time.sleep(1)
    assert found["chunkserve_phantom_load"] == 0
    assert found["chunkserve_route_degraded"] == 0
    assert found["chunkserve_replica_trust"] == 2
    deadline = time.monotonic() + 30
    while found["chunkserve_replica_queued_seconds"]:
        assert time.monotonic() < deadline, found
        time.sleep(1)
        found = ray_metrics(server)
    # What has happened has its metric; nothing has failed.
    names = {name.removesuffix("_total").removesuffix("_count") for name in found}
    never = {"chunkserve_route_faults", "chunkserve_retries", "chunkserve_stream_broken", "chunkserve_index_gaps"}
    rarely = {"chunkserve_route_stale_hit", "chunkserve_index_evictions", "chunkserve_index_resyncs"}
    assert set(METRIC_NAMES) - rarely - names == never


def test_top_shows_what_is_shared(server: LocalServer) -> None:
    def stream(number: int) -> int:
        prompt = [*prompt_of(80)[: 5 * CHUNK], number, 6, 7]
        body = {"prompt": prompt, "max_tokens": 120, "ignore_eos": True, "stream": True, "cache_salt": "top"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        return answer.status_code

    ask(server, prompt_of(80), cache_salt="top")
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(stream, 100 + number) for number in range(3)]
        hot: list[dict[str, object]] = []
        while not hot:
            assert not all(one.done() for one in streams), "nothing was shared while they ran"
            replicas = httpx.get(f"{server.url}/status", timeout=30).json()["replicas"]
            hot = [hot for load in replicas.values() for hot in load["hot_prefixes"] if hot["sharers"] == 3]
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["top", "--once", "--url", server.url])
        assert [one.result() for one in streams] == [200] * 3
    assert hot[0]["tokens"] == 5 * CHUNK
    assert len(replicas) == 2
    assert shown.exit_code == 0, shown.output
    assert str(hot[0]["name"])[:12] in shown.stdout
    assert all(name in shown.stdout for name in replicas)
    assert "2 replica(s), policy prefix" in shown.stdout


def test_a_replica_that_drains_gets_no_new_prefixes_and_ends_its_streams(server: LocalServer) -> None:
    def replicas() -> set[str]:
        return set(httpx.get(f"{server.url}/status", timeout=60).json()["replicas"])

    def until_there_are(number: int, among: Set[str] = frozenset()) -> None:
        deadline = time.monotonic() + 120
        while len(replicas()) != number or not among <= replicas():
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def scale(num_replicas: int) -> None:
        dashboard = re.search(r"dashboard at .*?(http://[\w.:]+)", "".join(server.lines))
        assert dashboard
        path = "/api/v1/applications/chunkserve/deployments/replica/scale"
        answer = httpx.post(dashboard[1] + path, json={"target_num_replicas": num_replicas}, timeout=60)
        assert answer.status_code == 200, answer.text

    def stream(number: int) -> tuple[str, str]:
        body = {
            "prompt": prompt_of(number),
            "max_tokens": 150,
            "ignore_eos": True,
            "stream": True,
            "cache_salt": "drain",
        }
        answer = httpx.post(
            f"{server.url}/v1/completions", json=body, headers={"x-chunkserve-explain": "1"}, timeout=120
        )
        return answer.headers["x-chunkserve-replica"], answer.text

    until_there_are(2)
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, number) for number in range(600, 608)]
        while not httpx.get(f"{server.url}/metrics", timeout=60).text.count("chunkserve_running_sequences{"):
            time.sleep(0.1)
        time.sleep(1)
        scale(1)
        time.sleep(3)
        new = {ask(server, prompt_of(number), cache_salt="drain")[0] for number in range(620, 626)}
        ended = [one.result() for one in streams]
    assert len({replica for replica, _ in ended}) == 2, "both had streams"
    for _, text in ended:
        # As a key: the model writes the word now and then, in quotes that JSON escapes.
        assert '"error":' not in text
        assert text.endswith("data: [DONE]\n\n")
    assert len(new) == 1, "new prefixes go to the one that stays"
    for number in (1, 2):
        scale(number)
        until_there_are(number, among=new)


def test_requests_survive_the_death_of_a_replica(server: LocalServer) -> None:
    """Last of this server's tests."""
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
