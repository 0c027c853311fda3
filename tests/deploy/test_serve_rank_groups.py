"""Two replicas of two ranks each through Ray Serve: a group fails at start, differs, or dies; the other serves on."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from chunkserve.deploy.config import DEFAULT_FILE
from chunkserve.deploy.local_server import LocalServer, local_server, loopback_port

from ..replica.random_llama import save_random_llama  # noqa: TID252

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

GONE_S = 10.0
START_S = 300.0
RANK_FAULTS = Path(__file__).parents[1] / "rank_faults"


@pytest.fixture(scope="module")
def knobs(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = save_random_llama("smollm_like", tmp_path_factory.mktemp("model"), small_model)
    return {
        "model": str(folder), "tensor_parallel_size": 2, "num_replicas": 2, "dtype": "float32", "num_threads": 1,
        "chunk_size_tokens": 16, "kv_pool_chunks": 300, "max_sequence_tokens": 4096, "max_running_sequences": 1,
        "routing_policy": "round_robin",
    }  # fmt: skip


class Faults:
    """The folder that the ranks' processes look into, and how long it took until each that had a fault was gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gone_s: dict[str, float] = {}
        self.done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        begun: dict[str, float] = {}
        while not self.done.wait(0.05):
            for path in self.folder.glob("taken by*"):
                begun.setdefault(path.name, time.monotonic())
                if path.name not in self.gone_s and not runs(int(path.name.split()[2].rstrip(":"))):
                    self.gone_s[path.name] = time.monotonic() - begun[path.name]

    def wait_gone(self, fault: str) -> float:
        """How long the process with a fault lived on."""
        deadline = time.monotonic() + START_S
        while not (found := [seconds for name, seconds in self.gone_s.items() if name.endswith(fault)]):
            assert time.monotonic() < deadline, list(self.folder.iterdir())
            time.sleep(0.05)
        return found[0]


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    """Two groups have a rank that stalls before it comes, or that dies while it loads its weights."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "at link of rank 1").write_text("SIGSTOP")
    (folder / "at loading of rank 1").write_text("SIGKILL")
    one = Faults(folder)
    yield one
    one.done.set()


@pytest.fixture(scope="module")
def server(knobs: dict[str, object], faults: Faults) -> Iterator[LocalServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(RANK_FAULTS), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
        patch.setenv("RANK_FAULTS", str(faults.folder))
        with local_server(knobs) as local:
            yield local


def processes(server: LocalServer, name: str) -> list[psutil.Process]:
    return [process for process in server.processes() if name in " ".join(process.cmdline())]


def loads(server: LocalServer, metric: str) -> dict[str, float]:
    """A metric by replica."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.findall(rf'^chunkserve_{metric}{{.*replica="(\w+)"}} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def wait_for_two(server: LocalServer) -> None:
    deadline = time.monotonic() + START_S
    while len(loads(server, "running_sequences")) < 2:
        assert time.monotonic() < deadline, "".join(server.lines[-30:])
        time.sleep(0.5)


def body(prompt: list[int], max_tokens: int, **options: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **options}


class Stream(threading.Thread):
    """A stream that is read to its end."""

    def __init__(self, server: LocalServer, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.body = f"{server.url}/v1/completions", body(prompt, max_tokens, stream=True)
        self.lines: list[str] = []
        self.end_s = 0.0
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self.url, json=self.body, timeout=120) as stream:
            for line in stream.iter_lines():
                self.lines.append(line)
        self.end_s = time.monotonic()

    @property
    def error(self) -> dict[str, str] | None:
        events = [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]
        return next((event["error"] for event in events if "error" in event), None)


def test_groups_that_fail_in_their_start_are_gone_and_replaced(server: LocalServer, faults: Faults) -> None:
    for fault in ("at link of rank 1", "at loading of rank 1"):
        assert faults.wait_gone(fault) < GONE_S
    wait_for_two(server)
    assert len(processes(server, "RankActor")) == 2
    assert len(processes(server, "ServeReplica:chunkserve:replica")) == 2
    said = "".join(server.lines)
    assert "rank 1 has not come to its group" in said
    assert "rank 1 is lost: its connection is closed" in said


def test_both_groups_answer(server: LocalServer) -> None:
    wait_for_two(server)
    answers: list[httpx.Response] = []

    def ask(i: int) -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body([i + 5] * 20, 40), timeout=120))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 8
    generated = loads(server, "generated_tokens_total")
    assert len(generated) == 2
    assert all(generated.values())
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("fault", ["sample_another", "SIGKILL"])
def test_one_group_ends_and_the_other_serves_on(server: LocalServer, faults: Faults, fault: str) -> None:
    wait_for_two(server)
    alone = httpx.post(f"{server.url}/v1/completions", json=body([9, 9, 9], 8), timeout=120).json()
    streams = [Stream(server, [i, 7], 2500) for i in (1, 2)]
    deadline = time.monotonic() + 60
    while sorted(loads(server, "running_sequences").values()) != [1.0, 1.0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # A sequence per group runs; of these, one more waits at each.
    waiting: dict[int, httpx.Response] = {}

    def ask(i: int) -> None:
        waiting[i] = httpx.post(f"{server.url}/v1/completions", json=body([9, 9, 9], 8), timeout=300)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    while sorted(loads(server, "waiting_sequences").values()) != [1.0, 1.0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rank = processes(server, "RankActor")[0]
    leaders = processes(server, "ServeReplica:chunkserve:replica")
    before = len(server.lines)
    if fault == "SIGKILL":
        rank.send_signal(signal.SIGKILL)
    else:
        (faults.folder / f"in {rank.pid}").write_text(fault)
    gone, _ = psutil.wait_procs([rank, *leaders], timeout=GONE_S, callback=lambda _: None)
    assert rank in gone
    assert len(gone) == 2, "the rank and its leader are gone, the other leader is not"
    for thread in [*threads, *streams]:
        thread.join(120)
    failed = [stream for stream in streams if stream.error is not None]
    assert len(failed) == 1, [stream.lines[-3:] for stream in streams]
    (whole,) = (stream for stream in streams if stream not in failed)
    assert any('"finish_reason":"length"' in line for line in whole.lines[-5:]), whole.lines[-5:]
    assert failed[0].error["code"] == "engine_failed"
    assert ("ranks differ" if fault == "sample_another" else "rank 1 is lost") in failed[0].error["message"]
    # What had not begun was done by the other group.
    for answer in waiting.values():
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == alone["choices"][0]["text"]
    assert "request_retried" in "".join(server.lines[before:])
    wait_for_two(server)
    assert len(processes(server, "RankActor")) == 2


def test_no_orphan_stays_when_the_parent_is_killed_in_the_start(knobs: dict[str, object], tmp_path: Path) -> None:
    program = str(Path(sys.executable).with_name("chunkserve"))
    settings = [f"{knob}={yaml.safe_dump(value).splitlines()[0]}" for knob, value in knobs.items()]
    family: dict[int, psutil.Process] = {}
    # Names of Unix sockets are short, and Ray's lie deep in its folder.
    with (
        loopback_port() as port,
        tempfile.TemporaryDirectory(prefix="cs", dir="/tmp", ignore_cleanup_errors=True) as ray,
    ):
        command = [
            program,
            "serve",
            str(DEFAULT_FILE),
            "--port",
            str(port),
            *(w for s in settings for w in ("--set", s)),
        ]
        log = tmp_path / "log"
        parent = subprocess.Popen(
            command, env={**os.environ, "RAY_TMPDIR": ray}, stdout=log.open("w"), stderr=subprocess.STDOUT
        )  # fmt: skip
        try:
            deadline = time.monotonic() + START_S
            while not any("RankActor" in command_of(process) for process in family.values()):
                assert time.monotonic() < deadline
                assert parent.poll() is None, log.read_text()
                family |= {process.pid: process for process in psutil.Process(parent.pid).children(recursive=True)}
                time.sleep(0.05)
            parent.send_signal(signal.SIGKILL)
            _, alive = psutil.wait_procs(list(family.values()), timeout=90)
            assert not alive, alive
        finally:
            parent.kill()
            parent.wait()
            for process in family.values():
                if runs(process.pid):
                    process.kill()


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
