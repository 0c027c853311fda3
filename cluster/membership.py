"""How the ranks of a replica find each other, and what each then has: the process group and the links. No Ray.

Links come first, and torch, which takes seconds to import, with the group: a rank is watched from its beginning.
"""

import secrets
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .liveness import SILENCE_S, TOKEN_BYTES, LinkError, Liveness, OnLost, Process, Trouble, open_port

if TYPE_CHECKING:
    from .rank_group import RankGroup

# Long enough for the others to load their weights from a slow disk; a rank that dies is noticed in seconds by its link.
COLLECTIVE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where rank 0 waits for the others; plain data that may cross processes.

    host: address of rank 0; store_port, link_port: on it.
    leader: rank 0's process.
    token: a secret of this group.
    join_timeout_s: for all to come together.
    silence_s: a rank that says nothing for so long has stalled.
    """

    num_ranks: int
    host: str
    store_port: int
    link_port: int
    leader: Process
    token: bytes = field(repr=False)
    join_timeout_s: float = 60.0
    silence_s: float = SILENCE_S


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's place in its group."""

    group: "RankGroup"
    link: Liveness

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def num_ranks(self) -> int:
        return self.group.num_ranks

    def leave(self, reason: str | None = None) -> None:
        """End the group; the reason is what went wrong, if something did."""
        self.link.leave(reason)
        self.group.close()


class Meeting:
    """Rank 0's side of the rendezvous: its ports are open as soon as this is made.

    Args:
        host: address of this machine that the other ranks reach; nothing listens elsewhere.
    """

    def __init__(
        self, num_ranks: int, *, host: str = "127.0.0.1", join_timeout_s: float = 60.0, silence_s: float = SILENCE_S
    ) -> None:
        self._store, self._link = open_port(host), open_port(host)
        self.rendezvous = Rendezvous(
            num_ranks=num_ranks,
            host=host,
            store_port=self._store.getsockname()[1],
            link_port=self._link.getsockname()[1],
            leader=Process.own(),
            token=secrets.token_bytes(TOKEN_BYTES),
            join_timeout_s=join_timeout_s,
            silence_s=silence_s,
        )

    def join(
        self, *, device: str = "cpu", on_lost: OnLost = lambda rank, reason: None,
        trouble: Trouble = lambda ranks: None,
    ) -> Membership:  # fmt: skip
        """Rank 0's place, once all are there.

        Args:
            on_lost: called after the group has been ended because a rank was lost, which may be before this returns.
            trouble: see `Liveness.accept`.
        Raises:
            LinkError, RankGroupError: not all came.
        """
        place = self.rendezvous
        link = Liveness.accept(
            self._link, place.num_ranks, place.token, on_lost,
            timeout_s=place.join_timeout_s, silence_s=place.silence_s, trouble=trouble,
        )  # fmt: skip
        try:
            return _join(place, link, self._store, place.host, device)
        except BaseException as fault:
            end_start(link, fault)
            raise

    def close(self) -> None:
        """Give the ports back, if nobody joined."""
        self._store.close()
        self._link.close()


def end_start(link: Liveness, fault: BaseException) -> None:
    """Rank 0 cannot go on with its start: tell the others.

    Raises:
        LinkError: a rank is lost, and the fault came of that.
    """
    lost = link.lost_within(1.0)
    link.leave(lost or f"{type(fault).__name__}: {fault}")
    if lost is not None:
        raise LinkError(lost) from fault


def connect(place: Rendezvous, rank: int, *, on_lost: OnLost) -> Liveness:
    """Another rank's link to rank 0, which watches it from now on.

    Args:
        on_lost: called once when rank 0 is lost, or has ended the group; this rank must go.
    Raises:
        LinkError: rank 0 is not there.
    """
    return Liveness.connect(
        (place.host, place.link_port), rank, place.token, on_lost, silence_s=place.silence_s,
        leader_process=place.leader,
    )  # fmt: skip


def join(place: Rendezvous, link: Liveness, *, host: str, device: str) -> Membership:
    """Another rank's place.

    Args:
        link: of `connect`.
        host: this rank's own address.
    Raises:
        RankGroupError: not all came.
    """
    return _join(place, link, None, host, device)


def _join(place: Rendezvous, link: Liveness, listener: socket.socket | None, host: str, device: str) -> Membership:
    from .rank_group import RankGroup

    group = RankGroup(
        rank=link.rank,
        num_ranks=place.num_ranks,
        store=(place.host, place.store_port),
        listener=listener,
        host=host,
        device=device,
        join_timeout_s=place.join_timeout_s,
        timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    return Membership(group, link)
