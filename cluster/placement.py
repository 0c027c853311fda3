"""Replicas and ranks as the bundles of placement groups. Pure."""

from typing import Literal

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD"]

# A bundle must hold something; ranks on CPUs divide the cores themselves.
_CPU_SHARE = 0.001


def replica_bundles(num_ranks: int, *, uses_gpus: bool) -> list[dict[str, float]]:
    """What a replica reserves, a bundle for each rank; rank 0 is in the first."""
    if num_ranks < 1:
        raise ValueError(f"a replica has at least one rank, got {num_ranks}")
    bundle = {"GPU": 1.0} if uses_gpus else {"CPU": _CPU_SHARE}
    return [dict(bundle) for _ in range(num_ranks)]
