"""What the process of a rank other than rank 0 does, from joining its group to the end of it.

torch is imported once the link is there.
"""

import logging
import os
from typing import TYPE_CHECKING

from chunkserve.cluster.membership import Rendezvous, connect, join

from .options import ReplicaOptions

if TYPE_CHECKING:
    from .follower import Follower

logger = logging.getLogger(__name__)


def run_rank(host: str, rank: int, place: Rendezvous, options: ReplicaOptions, log_level: str) -> None:
    """Ends this process when the group ends: a rank alone is of no use, and what waits in a collective cannot be asked.

    Args:
        host: address of this machine, as the others of the group reach it.
    """
    logging.basicConfig(format="%(levelname)s %(asctime)s %(name)s %(message)s")
    logging.getLogger("chunkserve").setLevel(log_level.upper())

    followers: list[Follower] = []

    def lost(leader: int, reason: str) -> None:
        dump = followers[0].dump() if followers else ""
        logger.warning("rank ends rank=%d reason=%s\n%s", rank, reason, dump)
        os._exit(0)

    try:
        link = connect(place, rank, on_lost=lost)
        try:
            from .build import build_follower, device_of

            followers.append(build_follower(options, join(place, link, host=host, device=device_of(options))))
        except BaseException as fault:
            link.leave(f"{type(fault).__name__}: {fault}")
            raise
        followers[0].run()
    except BaseException:
        logger.exception("rank failed rank=%d", rank)
        os._exit(1)
