"""One rank's end is the end of all, in seconds: processes that die, stall, leave, or never come."""

import dataclasses
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from chunkserve.cluster import liveness
from chunkserve.cluster.liveness import LinkError, Liveness, Process
from chunkserve.cluster.membership import Meeting, Membership
from chunkserve.cluster.rank_group import RankGroupError

SILENCE_S = 3.0
GONE_S = 10.0


class Family:
    """This process as rank 0, the others as processes."""

    def __init__(self, num_ranks: int, *, busy: bool) -> None:
        self.lost = threading.Event()
        self.reason = ""
        meeting = Meeting(num_ranks, silence_s=SILENCE_S)
        place = dataclasses.asdict(meeting.rendezvous)
        place["token"] = place["token"].hex()
        place["leader"]["machine"] = place["leader"]["machine"].hex()
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("rank_process.py")),
                 json.dumps({"place": place, "rank": rank, "busy": busy})],
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(1, num_ranks)
        ]  # fmt: skip
        self.membership: Membership = meeting.join(on_lost=self._on_lost)
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "joined\n"

    def _on_lost(self, rank: int, reason: str) -> None:
        self.reason = f"rank {rank}: {reason}"
        self.lost.set()

    def wait_gone(self) -> float:
        """Seconds until all processes have ended."""
        begin = time.monotonic()
        for process in self.processes:
            process.wait(GONE_S)
        return time.monotonic() - begin

    def close(self) -> None:
        self.membership.leave()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def family() -> Iterator[Callable[..., Family]]:
    made: list[Family] = []

    def build(num_ranks: int, *, busy: bool = False) -> Family:
        made.append(Family(num_ranks, busy=busy))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stalls_takes_all_along(
    family: Callable[..., Family], how: signal.Signals, busy: bool
) -> None:
    ranks = family(3, busy=busy)
    failed: list[Exception] = []
    if busy:

        def work() -> None:
            try:
                while True:
                    ranks.membership.group.all_reduce(torch.ones(10))
            except RankGroupError as error:
                failed.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        time.sleep(0.2)
    ranks.processes[1].send_signal(how)
    assert ranks.lost.wait(GONE_S)
    assert ranks.wait_gone() < GONE_S
    assert ranks.processes[1].returncode == -signal.SIGKILL, "a stalled rank is killed"
    if busy:
        worker.join(GONE_S)
        assert not worker.is_alive()
        assert failed
    else:
        assert ("said nothing" if how is signal.SIGSTOP else "connection is closed") in ranks.reason
        assert ranks.reason.startswith("rank 2")


@pytest.mark.slow
def test_the_leader_leaves_and_the_others_go(family: Callable[..., Family]) -> None:
    ranks = family(3)
    ranks.membership.leave()
    assert ranks.wait_gone() < GONE_S
    assert [process.returncode for process in ranks.processes] == [3, 3]
    assert not ranks.lost.is_set()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_no_orphan_stays_when_the_leader_dies_or_stalls(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "leader.py"
    script.write_text(
        "import sys, threading\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.cluster.test_liveness import Family\n"
        "family = Family(3, busy=False)\n"
        "print(*[process.pid for process in family.processes], flush=True)\n"
        "threading.Event().wait()\n"
    )
    leader = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    pids = [int(pid) for pid in leader.stdout.readline().split()]
    assert len(pids) == 2
    leader.send_signal(how)
    try:
        deadline = time.monotonic() + GONE_S
        while any(_runs(pid) for pid in pids):
            assert time.monotonic() < deadline, "an orphan stays"
            time.sleep(0.05)
        assert leader.wait(GONE_S) == -signal.SIGKILL, "a stalled leader is killed"
    finally:
        leader.kill()
        leader.wait()


def test_strangers_are_refused_and_missing_ranks_named() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    strangers = [socket.create_connection(address) for _ in range(2)]
    strangers[0].sendall(b"x" * 40)
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    with pytest.raises(LinkError, match=r"ranks \[1, 2\] of 3 did not come within 1 s"):
        Liveness.accept(listener, 3, b"t" * 16, lambda rank, reason: None, timeout_s=1)
    for stranger in strangers:
        stranger.close()


def test_ranks_wait_for_one_that_comes_late() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    token, address = b"t" * 16, listener.getsockname()
    lost: list[str] = []
    links: list[Liveness] = []

    def on_lost(rank: int, reason: str) -> None:
        lost.append(f"{rank} {reason}")

    def lead() -> None:
        links.append(Liveness.accept(listener, 3, token, on_lost))

    leader = threading.Thread(target=lead)
    leader.start()
    early = Liveness.connect(address, 1, token, on_lost, silence_s=1.0)
    time.sleep(2.0)
    assert not lost
    links.append(Liveness.connect(address, 2, token, on_lost))
    leader.join()
    early.report(b"here")
    (link,) = (link for link in links if link.rank == 0)
    assert link.reports(lambda body: body == b"here", timeout_s=1)[1] == b"here"
    for each in (link, early, *links):
        each.leave()


@contextmanager
def silent_rank(grace_s: float) -> Iterator[tuple[Liveness, subprocess.Popen[bytes], "queue.Queue[str]"]]:
    """Rank 0's end, a process that says hello and no more, and why it is lost."""
    listener = socket.create_server(("127.0.0.1", 0))
    token, lost = b"t" * 16, queue.Queue[str]()
    process = subprocess.Popen(["sleep", "60"])
    connection = socket.create_connection(listener.getsockname())
    connection.sendall(liveness._HELLO.pack(token, 1, process.pid, Process.own().machine))
    link = Liveness.accept(listener, 2, token, lambda _, reason: lost.put(reason), silence_s=1.0, grace_s=grace_s)
    try:
        yield link, process, lost
    finally:
        link.leave()
        connection.close()
        process.kill()
        process.wait()


def test_who_starts_may_be_silent_unless_it_is_stopped() -> None:
    """Importing holds the interpreter for seconds."""
    with silent_rank(grace_s=GONE_S) as (_, process, lost):
        with pytest.raises(queue.Empty):
            lost.get(timeout=2.0)
        process.send_signal(signal.SIGSTOP)
        assert "said nothing" in lost.get(timeout=GONE_S / 2)
        assert process.wait(GONE_S) == -signal.SIGKILL


def test_who_starts_may_not_be_silent_for_ever() -> None:
    with silent_rank(grace_s=2.0) as (_, process, lost):
        assert "said nothing" in lost.get(timeout=GONE_S)
        assert process.wait(GONE_S) == -signal.SIGKILL


def test_who_has_started_may_not_be_silent() -> None:
    with silent_rank(grace_s=60.0) as (link, process, lost):
        time.sleep(1.5)
        begin = time.monotonic()
        link.end_grace()
        assert "said nothing" in lost.get(timeout=GONE_S)
        assert time.monotonic() - begin >= 1.0, "what was silent before does not count"
        assert process.wait(GONE_S) == -signal.SIGKILL


@contextmanager
def three_links() -> Iterator[tuple[Liveness, list[Liveness], "queue.Queue[str]"]]:
    """Rank 0's end, those of ranks 1 and 2, and what rank 0 loses."""
    listener = socket.create_server(("127.0.0.1", 0))
    followers: dict[int, Liveness] = {}
    token = os.urandom(16)

    def connect(rank: int) -> None:
        followers[rank] = Liveness.connect(listener.getsockname(), rank, token, lambda rank, reason: None)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    lost: queue.Queue[str] = queue.Queue()
    leader = Liveness.accept(listener, 3, token, lambda rank, reason: lost.put(f"{rank} {reason}"))
    for thread in threads:
        thread.join()
    try:
        yield leader, [followers[1], followers[2]], lost
    finally:
        for link in (leader, *followers.values()):
            link.leave()


def test_who_ends_without_a_word_is_named_before_those_whose_collectives_fail_of_it() -> None:
    with three_links() as (leader, followers, lost):
        followers[0].leave("its all-reduce failed")
        leader.reports(lambda body: False, timeout_s=0.3)
        followers[1]._peers[0].connection.shutdown(socket.SHUT_RDWR)
        assert "connection is closed" in lost.get(timeout=GONE_S)
        assert leader.lost is not None
        assert leader.lost.startswith("rank 2")


def test_reports_are_the_newest_of_each_rank() -> None:
    with three_links() as (leader, followers, lost):
        for follower in followers:
            follower.report(b"old")
            follower.report(b"new")
        assert leader.reports(lambda body: body == b"new", timeout_s=10) == {1: b"new", 2: b"new"}
        begin = time.monotonic()
        assert leader.reports(lambda body: False, timeout_s=0.2) == {1: b"new", 2: b"new"}
        assert time.monotonic() - begin >= 0.2
        followers[0].leave("it broke")
        leader.reports(lambda body: False, timeout_s=10)
        assert lost.get(timeout=GONE_S) == f"{followers[0].rank} it broke"
        assert leader.lost == f"rank {followers[0].rank} is lost: it broke"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False
