"""Ranks as Ray actors, in the placement group of the actor that is rank 0."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .liveness import SILENCE_S, Process
from .placement import replica_bundles


class RankActor:
    """The process of one rank; what it does comes from outside."""

    def process(self) -> Process:
        """Answers as soon as the process is up."""
        return Process.own()

    def run(self, main: Callable[..., None], rank: int, *args: Any) -> None:
        """Does not return while the rank is part of its group."""
        main(ray.util.get_node_ip_address(), rank, *args)


@dataclass(slots=True, eq=False)
class _Rank:
    actor: Any
    process: Any  # ObjectRef of Process
    end: Any  # ObjectRef of what ended it
    up_s: float | None = None  # when its process was first seen


class Ranks:
    """An actor for each rank but rank 0, each calling main(own address, rank, *args) in its bundle.

    The actors end with this process, and with this object.

    Raises:
        RuntimeError: this process is in no placement group with a bundle for each rank.
    """

    def __init__(self, num_ranks: int, main: Callable[..., None], *args: Any, uses_gpus: bool) -> None:
        group = get_current_placement_group()
        if group is None or group.bundle_count < num_ranks:
            raise RuntimeError(
                f"{num_ranks} ranks need a placement group of {num_ranks} bundles, such as "
                f"{replica_bundles(num_ranks, uses_gpus=uses_gpus)}; this actor is in {group and group.bundle_specs}"
            )
        self._ranks: dict[int, _Rank] = {}
        for rank in range(1, num_ranks):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=True
            )
            options = {"num_cpus": 0, "num_gpus": 1 if uses_gpus else 0, "max_restarts": 0, "max_task_retries": 0}
            actor = ray.remote(RankActor).options(scheduling_strategy=strategy, **options).remote()
            self._ranks[rank] = _Rank(actor, actor.process.remote(), actor.run.remote(main, rank, *args))

    def trouble(self, linked: Collection[int]) -> str | None:
        """Why it is of no use to wait for ranks that are not linked, if it is: one has ended, or is up and stalls."""
        for rank, one in self._ranks.items():
            if rank in linked:
                continue
            if _is_there(one.end):
                return f"the process of rank {rank} has ended before it came to its group: {_error(one.end)}"
            if one.up_s is None and _is_there(one.process):
                one.up_s = time.monotonic()
            if one.up_s is not None and (silence := time.monotonic() - one.up_s) > SILENCE_S:
                return f"rank {rank} has not come to its group, and its process is up for {silence:.1f} s"
        return None

    def kill(self) -> None:
        """At once where it can be: Ray gives a process that stalls five seconds."""
        for one in self._ranks.values():
            if one.up_s is not None and not _is_there(one.end):
                ray.get(one.process).kill()
            ray.kill(one.actor)


def _is_there(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


def _error(ref: Any) -> str:
    try:
        ray.get(ref)
    except RayError as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return "it has nothing left to do"
