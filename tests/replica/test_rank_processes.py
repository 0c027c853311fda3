"""Ranks as processes of their own, running the product as it is: one differs, dies or stalls, and all of them end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from chunkserve.replica.options import ReplicaOptions

from .random_llama import save_random_llama
from .test_ranks_same_words import OneRank

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

GONE_S = 10.0
START_S = 120.0
FAULTS = Path(__file__).parents[1] / "rank_faults"


@pytest.fixture(scope="module")
def options(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ReplicaOptions:
    folder = save_random_llama("smollm_like", tmp_path_factory.mktemp("model"), small_model)
    return ReplicaOptions(
        model=str(folder), dtype="float32", chunk_size=16, num_threads=1, max_sequence_tokens=512, max_running=6,
        max_step_tokens=48, pool_chunks=60, num_ranks=3,
    )  # fmt: skip


class Family:
    """A running rank_family.py; `lines` are what it has said so far."""

    def __init__(self, options: ReplicaOptions, folder: Path, faults: dict[str, str]) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir()
        for name, what in faults.items():
            (self.faults / name).write_text(what)
        self.log = folder / "log"
        self.lines: list[dict[str, Any]] = []
        path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.leader = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_family.py")), json.dumps(asdict(options))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True,
            env={**os.environ, "PYTHONPATH": path, "RANK_FAULTS": str(self.faults)},
        )  # fmt: skip
        self.processes = [psutil.Process(self.leader.pid)]
        self.processes += map(psutil.Process, self.hear(lambda line: "pids" in line)["pids"])

    def hear(self, wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Read lines up to one that is wanted."""
        assert self.leader.stdout is not None
        for raw in self.leader.stdout:
            self.lines.append(json.loads(raw))
            if wanted(self.lines[-1]):
                return self.lines[-1]
        raise AssertionError(f"rank 0 ended: {self.lines[-5:]}\n{self.log.read_text()[-3000:]}")

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        assert self.leader.stdin is not None
        print(
            json.dumps({"name": name, "prompt": prompt, "max_tokens": max_tokens}), file=self.leader.stdin, flush=True
        )

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(token for line in self.lines if line.get("name") == name for token in line["token_ids"])

    def wait_gone(self, timeout_s: float) -> None:
        _, alive = psutil.wait_procs(self.processes, timeout=timeout_s)
        assert not alive, f"ranks stay: {alive}\n{self.log.read_text()[-3000:]}"

    def close(self) -> None:
        for process in self.processes:
            if process.is_running():
                process.kill()
        self.leader.wait()


@pytest.fixture
def family(options: ReplicaOptions, tmp_path: Path) -> Iterator[Callable[..., Family]]:
    made: list[Family] = []

    def start(**faults: str) -> Family:
        made.append(Family(options, tmp_path, {name.replace("_", " "): what for name, what in faults.items()}))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("fault", "field"), [("flip_token", "tree"), ("lose_edit", "edits"), ("sample_another", "sampled")]
)
def test_a_rank_that_differs_ends_the_group_before_its_words_leave(
    family: Callable[..., Family], options: ReplicaOptions, fault: str, field: str
) -> None:
    ranks = family()
    ranks.hear(lambda line: "ready" in line)
    ranks.submit("kept", (5,) * 40, 4)
    ranks.hear(lambda line: line.get("finish_reason"))
    ranks.submit("running", (1, 2, 3), 500)
    for _ in range(5):
        ranks.hear(lambda line: line.get("name") == "running")
    (ranks.faults / f"in {ranks.processes[2].pid}").write_text(fault)
    begin = time.monotonic()
    if fault == "lose_edit":
        while not list(ranks.faults.glob("taken*")):
            assert time.monotonic() - begin < GONE_S
        ranks.submit("lost", (7,) * 20, 4)
    words = ranks.hear(lambda line: "stopped" in line)["stopped"]
    ranks.wait_gone(GONE_S)

    named = re.search(r"ranks differ at step (\d+): .*rank 2: ", words)
    assert named, words
    assert re.search(rf"rank 2: [^;|]*\b{field} [0-9a-f]+, not", words), words
    assert int(named[1]) == int((ranks.faults / "happened").read_text()), "seen in the first step that could show it"
    last = next(line for line in reversed(ranks.lines) if line.get("name") == "running")
    assert last["finish_reason"] == "error"
    assert "ranks differ" in last["error"]
    streamed = ranks.tokens("running")
    assert streamed == OneRank(options).tokens((1, 2, 3), 500)[: len(streamed)]
    assert not ranks.tokens("lost")
    log = ranks.log.read_text()
    for rank in range(3):
        dump = re.search(rf"rank {rank}, RankStatus.*, last edits:\n(.*)", log)
        assert dump, log[-3000:]
        assert "Join arrival=1 n=1 prompt_tokens=40" in dump[1]


def test_another_pool_size_is_named_in_the_first_step(family: Callable[..., Family]) -> None:
    ranks = family(at_pool_of_rank_1="smaller")
    ranks.hear(lambda line: "ready" in line)
    words = ranks.hear(lambda line: "stopped" in line)["stopped"]
    assert "ranks differ at step 1: rank 1: pool_chunks 56, not 60" in words
    ranks.wait_gone(GONE_S)


@pytest.mark.parametrize(
    ("rank", "phase", "how"),
    [
        *((2, phase, how) for phase in ("group", "loading", "self-test") for how in ("SIGKILL", "SIGSTOP")),
        (0, "group", "SIGSTOP"),
        (0, "loading", "SIGKILL"),
    ],
)
def test_a_rank_lost_during_start_takes_all_along(
    family: Callable[..., Family], rank: int, phase: str, how: str
) -> None:
    ranks = family(**{f"at {phase} of rank {rank}": how})
    deadline = time.monotonic() + START_S
    while not list(ranks.faults.glob("taken*")):
        assert time.monotonic() < deadline, ranks.log.read_text()[-3000:]
        time.sleep(0.02)
    ranks.wait_gone(GONE_S)
    if rank == 0:
        assert ranks.processes[0].returncode == -signal.SIGKILL
        return
    said = "is closed" if how == "SIGKILL" else "has said nothing for"
    assert said in ranks.hear(lambda line: "lost" in line)["reason"]
    assert ranks.lines[-1]["lost"] == rank


def test_a_leader_that_takes_links_and_says_nothing_is_killed(family: Callable[..., Family]) -> None:
    """Its ranks come before it listens."""
    ranks = family(at_link_of_rank_0="SIGSTOP")
    ranks.wait_gone(START_S)
    assert ranks.processes[0].returncode == -signal.SIGKILL
    assert "has said nothing" in ranks.log.read_text()
