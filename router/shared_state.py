"""One RoutingState per process and deployment, for Serve's router and for the ingress that sees the answers.

Apart from serve_router.py, since Ray Serve pickles the module of a router class by value: its globals are copies.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pydantic import TypeAdapter

from chunkserve.replica.protocol import ChunkDelta, RoutingReport

from .policy import policy_options
from .routing_state import RoutingState

logger = logging.getLogger(__name__)

FEED_PERIOD_S = 0.5

_REPORT = TypeAdapter(RoutingReport)
_states: dict[tuple[str, str], RoutingState] = {}
_states_lock = threading.Lock()


def router_settings(
    *,
    policy: str,
    chunk_size: int,
    chunk_identity: str,
    max_entries: int,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The `request_router_kwargs` of ServeRouter: plain JSON.

    Args:
        policy, chunk_size, chunk_identity, max_entries: see RoutingState.
        options: fields of PolicyOptions that differ from their defaults; those of CostOptions stand under `cost`.
    Raises:
        ValueError: no such policy or option, or a wrong value.
    """
    settings = {
        "policy": policy,
        "chunk_size": chunk_size,
        "chunk_identity": chunk_identity,
        "max_entries": max_entries,
        "options": dict(options or {}),
    }
    _new_state(settings)
    return settings


def shared_state(deployment: str, settings: Mapping[str, Any]) -> RoutingState:
    """This process's state for a deployment; the same object for equal settings."""
    key = deployment, json.dumps(settings, sort_keys=True)
    with _states_lock:
        if key not in _states:
            _states[key] = _new_state(settings)
        return _states[key]


def report_from_stats(stats: Mapping[str, Any]) -> RoutingReport:
    """What a replica's `record_routing_stats` returned.

    Raises:
        ValidationError: it is no RoutingReport.
    """
    return _REPORT.validate_python(dict(stats))


def _new_state(settings: Mapping[str, Any]) -> RoutingState:
    return RoutingState(
        policy=settings["policy"],
        options=policy_options(settings["options"]),
        chunk_size=settings["chunk_size"],
        chunk_identity=settings["chunk_identity"],
        max_entries=settings["max_entries"],
    )


class DeltaSource(Protocol):
    """Asks all replicas how their chunks changed: `chunk_delta` of replica/replica_actor.py."""

    def __call__(self, since: Mapping[str, tuple[int, int]]) -> Sequence[tuple[str, ChunkDelta | None]]: ...


async def follow_chunks(
    state: RoutingState,
    ask: DeltaSource,
    period_s: float = FEED_PERIOD_S,
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Keep a state's index up to what replicas store and evict, until cancelled. Runs beside the requests; replicas are
    not asked while nothing happens.

    on_round: called once a period.
    """
    while True:
        await asyncio.sleep(period_s)
        on_round()
        if not state.may_be_behind or not (cursors := state.cursors()):
            continue
        try:
            deltas = await asyncio.to_thread(ask, cursors)
        except Exception as error:  # noqa: BLE001 - replicas come and go; the next round asks again
            logger.warning("chunk_feed_failed error=%r", error)
            continue
        for name, delta in deltas:
            if delta is not None and name in cursors:
                state.apply(name, cursors[name], delta)
