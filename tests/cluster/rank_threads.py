"""A function on several ranks at once: threads, each with its own process group over gloo on loopback."""

import threading
from collections.abc import Callable
from typing import Any

from chunkserve.cluster.liveness import open_port
from chunkserve.cluster.rank_group import RankGroup


def on_ranks(num_ranks: int, run: Callable[[RankGroup], Any], timeout_s: float = 60.0) -> list[Any]:
    """What `run` returns on each rank; the first exception of a rank is raised."""
    listener = open_port("127.0.0.1")
    store = ("127.0.0.1", listener.getsockname()[1])
    results: list[Any] = [None] * num_ranks
    faults: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            group = RankGroup(
                rank=rank, num_ranks=num_ranks, store=store, listener=listener if rank == 0 else None,
                timeout_s=timeout_s,
            )  # fmt: skip
            try:
                results[rank] = run(group)
            finally:
                group.close()
        except BaseException as fault:  # noqa: BLE001
            faults.append(fault)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return results
