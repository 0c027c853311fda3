"""Ranks watch each other over one TCP connection each to rank 0: beats, reports, and leaving together. No Ray.

A rank that dies closes its connection; one that stalls is silent for too long. Either way the others leave at once, and
a stalled process on the same machine is killed, so that no half of a group stays. Collectives alone would not do: they
wait for minutes, and an idle group has none.

On the wire: a hello, then frames of one letter, four bytes of length, and a body. Nothing is unpickled.
"""

import hashlib
import hmac
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

BEAT_S = 0.5
SILENCE_S = 5.0
GRACE_S = 60.0

TOKEN_BYTES = 16
_MACHINE_BYTES = 16
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sII{_MACHINE_BYTES}s")  # token, rank, pid, machine
_FRAME = struct.Struct("<cI")
_BODY_LIMIT = 1 << 16
_BEAT, _REPORT, _FAULT, _BYE = b"b", b"r", b"f", b"q"

# (rank that is lost, why)
OnLost = Callable[[int, str], None]

# Of the ranks that have come: why it is of no use to wait for the others, if it is.
Trouble = Callable[[Collection[int]], str | None]

_LOOK_S = 0.2
# Collectives fail in all ranks when one dies; who says so may be heard before the end of the one that died is seen.
_CAUSE_S = 0.5
# A rank says hello at once; others wait meanwhile.
_HELLO_S = 1.0


class LinkError(RuntimeError):
    """Ranks did not come together, or a peer is gone."""


def open_port(host: str) -> socket.socket:
    """A listening socket on an address of this machine, on a port that is free; hand its port to the other ranks."""
    return socket.create_server((host, 0), backlog=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A rank's process.

    machine: where process ids mean the same: one boot, one namespace.
    """

    pid: int
    machine: bytes

    @classmethod
    def own(cls) -> "Process":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        name = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}".encode()
        return cls(pid=os.getpid(), machine=hashlib.blake2b(name, digest_size=_MACHINE_BYTES).digest())

    def is_stopped(self) -> bool:
        """By a signal, as far as that can be seen: on another machine it cannot."""
        if self.machine != Process.own().machine:
            return False
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(") ", 1)[1][0] in "Tt"
        except (FileNotFoundError, ProcessLookupError):  # ended before it is opened, or read
            return False

    def kill(self) -> None:
        """SIGKILL, if it is on this machine, and not this very process."""
        own = Process.own()
        if self.machine != own.machine or self.pid == own.pid:
            return
        logger.error("rank killed pid=%d", self.pid)
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.info("rank has ended before pid=%d", self.pid)


@dataclass(slots=True, eq=False)
class _Peer:
    rank: int
    process: Process
    connection: socket.socket
    heard_s: float
    fault: str | None = None
    gone: bool = False


class Liveness:
    """One rank's connections: rank 0's to all others, another rank's to rank 0.

    Args:
        rank: of this process.
        peers: whom it is connected to.
        on_lost: called once, from a thread of ours, for the first peer that is lost, after stalled ones were killed and
            rank 0 has ended the group; not after `leave`.
        silence_s: a peer that says nothing for so long is stalled.
        grace_s: the same until `end_grace`, for one that is not stopped: who imports a large library from a slow disk
            holds the interpreter, and with it the beats.
    """

    def __init__(
        self, rank: int, on_lost: OnLost, silence_s: float = SILENCE_S, grace_s: float = GRACE_S
    ) -> None:  # fmt: skip
        self.rank = rank
        self._peers: dict[int, _Peer] = {}  # replaced, not changed: threads go through it
        self._on_lost = on_lost
        self._silence_s = silence_s
        self._grace_s: float | None = grace_s
        self._reports: dict[int, bytes] = {}
        self._news = threading.Condition()
        self._send_lock = threading.Lock()
        self._lost: tuple[int, str] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="rank-beat", daemon=True).start()

    @classmethod
    def accept(
        cls, listener: socket.socket, num_ranks: int, token: bytes, on_lost: OnLost, *, timeout_s: float = 60.0,
        silence_s: float = SILENCE_S, grace_s: float = GRACE_S, trouble: Trouble = lambda ranks: None,
    ) -> "Liveness":  # fmt: skip
        """Rank 0's end, once all others have connected; closes the listener. Who has come is watched from then on.

        Args:
            trouble: asked now and then.
        Raises:
            LinkError: they did not within timeout_s, or will not; those that have come are told.
        """
        deadline = time.monotonic() + timeout_s
        link = cls(0, on_lost, silence_s, grace_s)
        listener.settimeout(_LOOK_S)
        with listener:
            while len(link._peers) < num_ranks - 1:
                reason = link.lost or trouble(link._peers.keys())
                if reason is None and time.monotonic() > deadline:
                    missing = [rank for rank in range(1, num_ranks) if rank not in link._peers]
                    reason = f"ranks {missing} of {num_ranks} did not come within {timeout_s} s"
                if reason is not None:
                    link.leave(reason)
                    raise LinkError(reason)
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                newcomer = _welcome(connection, token, num_ranks, _HELLO_S)
                if newcomer is None or newcomer.rank in {0, *link._peers}:
                    logger.warning("rank link refused: not one of ours")
                    connection.close()
                    continue
                link._watch(newcomer)
        return link

    @classmethod
    def connect(
        cls, leader: tuple[str, int], rank: int, token: bytes, on_lost: OnLost, *, silence_s: float = SILENCE_S,
        leader_process: Process | None = None,
    ) -> "Liveness":  # fmt: skip
        """Another rank's end.

        Args:
            leader_process: if it takes the connection and then says nothing, it is killed.
        Raises:
            LinkError: rank 0 is not there.
        """
        try:
            connection = socket.create_connection(leader, timeout=silence_s)
            connection.sendall(_hello(token, rank))
            peer = _welcome(connection, token, 1, silence_s)
        except TimeoutError as error:
            if leader_process is not None:
                leader_process.kill()
            raise LinkError(f"rank 0 at {leader[0]}:{leader[1]} has said nothing for {silence_s} s") from error
        except OSError as error:
            raise LinkError(f"rank {rank} does not reach rank 0 at {leader[0]}:{leader[1]}: {error}") from error
        if peer is None:
            raise LinkError(f"what answers at {leader[0]}:{leader[1]} is not rank 0 of this group")
        link = cls(rank, on_lost, silence_s)
        link._watch(peer)
        return link

    def end_grace(self) -> None:
        """All have started, and beat from now on."""
        for peer in self._peers.values():
            peer.heard_s = time.monotonic()
        self._grace_s = None

    def report(self, body: bytes) -> None:
        """Tell rank 0 something; only its newest report counts."""
        self._send(self._peers[0], _REPORT, body)

    def reports(self, is_new: Callable[[bytes], bool], timeout_s: float) -> dict[int, bytes]:
        """The newest report of each other rank, once all are new; or as they are when time is up, or a rank is lost."""

        def complete() -> bool:
            reports = [self._reports.get(rank) for rank in self._peers]
            return self._lost is not None or all(report is not None and is_new(report) for report in reports)

        with self._news:
            self._news.wait_for(complete, timeout_s)
            return dict(self._reports)

    @property
    def lost(self) -> str | None:
        """What is known of the first peer that was lost."""
        return None if self._lost is None else f"rank {self._lost[0]} is lost: {self._lost[1]}"

    def lost_within(self, timeout_s: float) -> str | None:
        """`lost`, once it is known; for who sees the end of a rank in another way."""
        with self._news:
            self._news.wait_for(lambda: self._lost is not None, timeout_s)
        return self.lost

    def leave(self, reason: str | None = None) -> None:
        """End the group: the others leave too, with a fault as the reason, or in peace."""
        self._closed.set()
        for peer in self._peers.values():
            if not peer.gone:
                self._send(peer, _BYE if reason is None else _FAULT, (reason or "").encode()[:_BODY_LIMIT])
                _end(peer.connection)
            peer.connection.close()

    def _watch(self, peer: _Peer) -> None:
        """From now on it must be heard."""
        self._peers = {**self._peers, peer.rank: peer}
        self._send(peer, _BEAT, b"")
        threading.Thread(target=self._listen, args=(peer,), name=f"rank-link-{peer.rank}", daemon=True).start()

    def _stalled_s(self, peer: _Peer) -> float | None:
        """How long it has been silent, if that is too long."""
        silence = time.monotonic() - peer.heard_s
        if peer.gone or silence <= self._silence_s:
            return None
        grace_s = self._grace_s
        return silence if grace_s is None or silence > grace_s or peer.process.is_stopped() else None

    def _kill_stalled(self) -> None:
        for peer in self._peers.values():
            if self._stalled_s(peer) is not None:
                peer.process.kill()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            for peer in self._peers.values():
                self._send(peer, _BEAT, b"")
                if (silence := self._stalled_s(peer)) is not None:
                    self._lose(peer, f"it has said nothing for {silence:.1f} s")

    def _listen(self, peer: _Peer) -> None:
        try:
            for kind, body in _frames(peer.connection):
                peer.heard_s = time.monotonic()
                if kind == _REPORT:
                    with self._news:
                        self._reports[peer.rank] = body
                        self._news.notify_all()
                elif kind == _FAULT:
                    peer.fault = body.decode("utf-8", "replace")
                elif kind == _BYE:
                    peer.fault = "it has left"
        except OSError as error:
            peer.gone = True
            if peer.fault is not None and len(self._peers) > 1:
                self.lost_within(_CAUSE_S)
            self._lose(peer, peer.fault or f"its connection is closed ({error})")

    def _lose(self, peer: _Peer, reason: str) -> None:
        with self._news:
            if self._closed.is_set() or self._lost is not None:
                return
            self._lost = (peer.rank, reason)
            self._news.notify_all()
        self._kill_stalled()
        if self.rank == 0:
            self.leave(self.lost)
        self._on_lost(peer.rank, reason)

    def _send(self, peer: _Peer, kind: bytes, body: bytes) -> None:
        try:
            with self._send_lock:
                peer.connection.sendall(_FRAME.pack(kind, len(body)) + body)
        except OSError as error:
            # Who reads from the connection learns of its end, and acts.
            logger.debug("rank link broken rank=%d error=%s", peer.rank, error)


def _hello(token: bytes, rank: int) -> bytes:
    own = Process.own()
    return _HELLO.pack(token, rank, own.pid, own.machine)


def _welcome(connection: socket.socket, token: bytes, num_ranks: int, timeout_s: float) -> _Peer | None:
    """Exchange hellos; None if the other end is not of our group. With one rank, it must be rank 0, and its silence is
    a TimeoutError.
    """
    connection.settimeout(timeout_s)
    try:
        got, rank, pid, machine = _HELLO.unpack(_receive(connection, _HELLO.size))
        if not hmac.compare_digest(got, token) or rank >= num_ranks:
            return None
        if num_ranks > 1:
            connection.sendall(_hello(token, 0))
    except OSError as error:
        if num_ranks == 1 and isinstance(error, TimeoutError):
            raise
        return None
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _Peer(rank, Process(pid=pid, machine=machine), connection, time.monotonic())


def _end(connection: socket.socket) -> None:
    """Nothing more is sent: closing alone says so only once nobody reads from it either."""
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError as error:
        logger.debug("rank link had ended error=%s", error)


def _frames(connection: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    """Letters and bodies; a short frame takes one call. Raises OSError at the end of the stream."""
    pending = bytearray()
    while True:
        pending += _some(connection, _FRAME.size + _BODY_LIMIT)
        while len(pending) >= _FRAME.size:
            kind, length = _FRAME.unpack_from(pending)
            if length > _BODY_LIMIT:
                raise OSError(f"a frame of {length} bytes")
            end = _FRAME.size + length
            if len(pending) < end:
                break
            body = bytes(pending[_FRAME.size : end])
            del pending[:end]
            yield kind, body


def _receive(connection: socket.socket, length: int) -> bytes:
    out = bytearray()
    while len(out) < length:
        out += _some(connection, length - len(out))
    return bytes(out)


def _some(connection: socket.socket, limit: int) -> bytes:
    piece = connection.recv(limit)
    if not piece:
        raise OSError("end of stream")
    return piece
