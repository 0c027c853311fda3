"""Ranks as Ray actors, in the placement group of the actor that is rank 0."""

from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .placement import replica_bundles


class RankActor:
    """The process of one rank; what it does comes from outside."""

    def run(self, main: Callable[..., None], rank: int, *args: Any) -> None:
        """Does not return while the rank is part of its group."""
        main(ray.util.get_node_ip_address(), rank, *args)


def start_ranks(num_ranks: int, main: Callable[..., None], *args: Any, uses_gpus: bool) -> list[Any]:
    """An actor for each rank but rank 0, each calling main(own address, rank, *args) in its bundle.

    The actors end with this process, and with their handles.

    Raises:
        RuntimeError: this process is in no placement group with a bundle for each rank.
    """
    group = get_current_placement_group()
    if group is None or group.bundle_count < num_ranks:
        raise RuntimeError(
            f"{num_ranks} ranks need a placement group of {num_ranks} bundles, such as "
            f"{replica_bundles(num_ranks, uses_gpus=uses_gpus)}; this actor is in {group and group.bundle_specs}"
        )
    actors = []
    for rank in range(1, num_ranks):
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=True
        )
        options = {"num_cpus": 0, "num_gpus": 1 if uses_gpus else 0, "max_restarts": 0, "max_task_retries": 0}
        actor = ray.remote(RankActor).options(scheduling_strategy=strategy, **options).remote()
        actor.run.remote(main, rank, *args)
        actors.append(actor)
    return actors
