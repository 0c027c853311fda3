"""Ranks watch each other over one TCP connection each to rank 0: beats, reports, and leaving together. No Ray.

A rank that dies closes its connection; one that stalls is silent for too long. Either way the others leave at once, and
a stalled process on the same machine is killed, so that no half of a group stays. Collectives alone would not do: they
wait for minutes, and an idle group has none.

On the wire: a hello, then frames of one letter, four bytes of length, and a body. Nothing is unpickled.
"""

import hashlib
import hmac
import logging
import math
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

BEAT_S = 0.5
SILENCE_S = 5.0

TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sII16s")  # token, rank, pid, machine
_FRAME = struct.Struct("<cI")
_BODY_LIMIT = 1 << 16
_BEAT, _REPORT, _FAULT, _BYE = b"b", b"r", b"f", b"q"

# (rank that is lost, why)
OnLost = Callable[[int, str], None]


class LinkError(RuntimeError):
    """Ranks did not come together, or a peer is gone."""


@dataclass(slots=True, eq=False)
class _Peer:
    rank: int
    pid: int | None  # None on another machine
    connection: socket.socket
    heard_s: float
    fault: str | None = None
    gone: bool = False


class Liveness:
    """One rank's connections: rank 0's to all others, another rank's to rank 0.

    Args:
        rank: of this process.
        peers: whom it is connected to.
        on_lost: called once, from a thread of ours, for the first peer that is lost; not after `close`.
        silence_s: a peer that says nothing for so long is stalled.
    """

    def __init__(self, rank: int, peers: list[_Peer], on_lost: OnLost, silence_s: float = SILENCE_S) -> None:
        self.rank = rank
        self._peers = {peer.rank: peer for peer in peers}
        self._on_lost = on_lost
        self._silence_s = silence_s
        self._reports: dict[int, bytes] = {}
        self._news = threading.Condition()
        self._send_lock = threading.Lock()
        self._lost: tuple[int, str] | None = None
        self._closed = threading.Event()
        for peer in peers:
            # Rank 0 is silent until all have come, which may be long after this one has: until then the time to join
            # is the limit.
            peer.heard_s = time.monotonic() if rank == 0 else math.inf
            threading.Thread(target=self._listen, args=(peer,), name=f"rank-link-{peer.rank}", daemon=True).start()
        self._send_beats()
        threading.Thread(target=self._beat, name="rank-beat", daemon=True).start()

    @classmethod
    def accept(
        cls, listener: socket.socket, num_ranks: int, token: bytes, on_lost: OnLost, *, timeout_s: float = 60.0,
        silence_s: float = SILENCE_S,
    ) -> "Liveness":  # fmt: skip
        """Rank 0's end, once all others have connected; closes the listener.

        Raises:
            LinkError: they did not within timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        peers: dict[int, _Peer] = {}
        with listener:
            while len(peers) < num_ranks - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    missing = [rank for rank in range(1, num_ranks) if rank not in peers]
                    for peer in peers.values():
                        peer.connection.close()
                    raise LinkError(f"ranks {missing} of {num_ranks} did not come within {timeout_s} s") from None
                newcomer = _welcome(connection, token, num_ranks)
                if newcomer is None or newcomer.rank in {0, *peers}:
                    logger.warning("rank link refused: not one of ours")
                    connection.close()
                    continue
                peers[newcomer.rank] = newcomer
        return cls(0, list(peers.values()), on_lost, silence_s)

    @classmethod
    def connect(
        cls, leader: tuple[str, int], rank: int, token: bytes, on_lost: OnLost, *, timeout_s: float = 60.0,
        silence_s: float = SILENCE_S,
    ) -> "Liveness":  # fmt: skip
        """Another rank's end.

        Raises:
            LinkError: rank 0 is not there.
        """
        try:
            connection = socket.create_connection(leader, timeout=timeout_s)
            connection.sendall(_hello(token, rank))
            peer = _welcome(connection, token, 1)
        except OSError as error:
            raise LinkError(f"rank {rank} does not reach rank 0 at {leader[0]}:{leader[1]}: {error}") from error
        if peer is None:
            raise LinkError(f"what answers at {leader[0]}:{leader[1]} is not rank 0 of this group")
        return cls(rank, [peer], on_lost, silence_s)

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

    def leave(self, reason: str | None = None) -> None:
        """End the group: the others leave too, with a fault as the reason, or in peace."""
        self._closed.set()
        for peer in self._peers.values():
            if not peer.gone:
                self._send(peer, _BYE if reason is None else _FAULT, (reason or "").encode()[:_BODY_LIMIT])
            peer.connection.close()

    def kill_stalled(self) -> None:
        """SIGKILL for peers on this machine that are connected and silent."""
        for peer in self._peers.values():
            silent = time.monotonic() - peer.heard_s > self._silence_s
            if silent and not peer.gone and peer.pid is not None:
                logger.error("stalled rank killed rank=%d pid=%d", peer.rank, peer.pid)
                os.kill(peer.pid, signal.SIGKILL)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._send_beats()
            for peer in self._peers.values():
                silence = time.monotonic() - peer.heard_s
                if silence > self._silence_s and not peer.gone:
                    self._lose(peer, f"it has said nothing for {silence:.1f} s")

    def _send_beats(self) -> None:
        for peer in self._peers.values():
            self._send(peer, _BEAT, b"")

    def _listen(self, peer: _Peer) -> None:
        try:
            while True:
                kind, length = _FRAME.unpack(_receive(peer.connection, _FRAME.size))
                if length > _BODY_LIMIT:
                    raise OSError(f"a frame of {length} bytes")
                body = _receive(peer.connection, length)
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
            self._lose(peer, peer.fault or f"its connection is closed ({error})")

    def _lose(self, peer: _Peer, reason: str) -> None:
        with self._news:
            if self._closed.is_set() or self._lost is not None:
                return
            self._lost = (peer.rank, reason)
            self._news.notify_all()
        self._on_lost(peer.rank, reason)

    def _send(self, peer: _Peer, kind: bytes, body: bytes) -> None:
        try:
            with self._send_lock:
                peer.connection.sendall(_FRAME.pack(kind, len(body)) + body)
        except OSError as error:
            # Who reads from the connection learns of its end, and acts.
            logger.debug("rank link broken rank=%d error=%s", peer.rank, error)


def _hello(token: bytes, rank: int) -> bytes:
    return _HELLO.pack(token, rank, os.getpid(), _machine())


def _welcome(connection: socket.socket, token: bytes, num_ranks: int) -> _Peer | None:
    """Exchange hellos; None if the other end is not of our group. With one rank, it must be rank 0."""
    connection.settimeout(10.0)
    try:
        got, rank, pid, machine = _HELLO.unpack(_receive(connection, _HELLO.size))
        if not hmac.compare_digest(got, token) or rank >= num_ranks:
            return None
        if num_ranks > 1:
            connection.sendall(_hello(token, 0))
    except OSError:
        return None
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _Peer(rank, pid if machine == _machine() and pid != os.getpid() else None, connection, time.monotonic())


def _receive(connection: socket.socket, length: int) -> bytes:
    out = bytearray()
    while len(out) < length:
        piece = connection.recv(length - len(out))
        if not piece:
            raise OSError("end of stream")
        out += piece
    return bytes(out)


def _machine() -> bytes:
    """Where process ids mean the same: one boot, one namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.blake2b(f"{boot} {os.stat('/proc/self/ns/pid').st_ino}".encode(), digest_size=16).digest()
