"""Our policies as a request router of Ray Serve: an adapter around one RoutingState per process and deployment."""

import asyncio
import json
import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import TypeAdapter
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from chunkserve.replica.protocol import ChunkDelta, Request, RoutingReport

from .cost import CostOptions
from .policy import PolicyOptions
from .routing_state import RoutingState

logger = logging.getLogger(__name__)

# Of the class below, for RequestRouterConfig.
ROUTER_CLASS = "chunkserve.router.serve_router:ServeRouter"
FEED_PERIOD_S = 0.5

_REPORT = TypeAdapter(RoutingReport)
_OPTIONS = TypeAdapter(PolicyOptions)

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
        PolicyError: no such policy.
        ValidationError: no such option, or a wrong value.
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


def policy_options(fields: Mapping[str, Any]) -> PolicyOptions:
    """PolicyOptions out of plain JSON.

    Raises:
        ValueError: a field that there is not, or a wrong value.
    """
    known = set(PolicyOptions.__dataclass_fields__)
    unknown = set(fields) - known | set(fields.get("cost", {})) - set(CostOptions.__dataclass_fields__)
    if unknown:
        raise ValueError(f"routing_options: no option {', '.join(sorted(unknown))}; expected some of {sorted(known)}")
    return _OPTIONS.validate_python(dict(fields))


def routing_state(deployment: str, settings: Mapping[str, Any]) -> RoutingState:
    """This process's state for a deployment; the same object for equal settings.

    The router that Serve makes and the ingress that sees the answers share it, since Serve's hooks carry no results.
    """
    key = deployment, json.dumps(settings, sort_keys=True)
    with _states_lock:
        if key not in _states:
            _states[key] = _new_state(settings)
        return _states[key]


def _new_state(settings: Mapping[str, Any]) -> RoutingState:
    return RoutingState(
        policy=settings["policy"],
        options=policy_options(settings["options"]),
        chunk_size=settings["chunk_size"],
        chunk_identity=settings["chunk_identity"],
        max_entries=settings["max_entries"],
    )


class ServeRouter(RequestRouter):  # type: ignore[misc]
    """Chooses replicas through the RoutingState; it never raises and never waits.

    Requests that the ingress has not opened in the state, such as health checks, go by power of two choices; so does
    everything when our own code fails, which is counted: an exception here would leave its request hanging.
    """

    def initialize_state(self, **settings: Any) -> None:
        self._state = routing_state(self._deployment_id.name, settings)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        try:
            return self._ranks(candidate_replicas, pending_request)
        except Exception:  # whatever it is: the request must go somewhere
            self._state.counters.faults += 1
            logger.exception("route_failed: power of two choices instead")
            return _two_of(candidate_replicas)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        try:
            self._state.set_replicas([replica.replica_id.unique_id for replica in replicas], time.time())
            for replica in replicas:
                if replica.routing_stats:
                    report = _REPORT.validate_python(replica.routing_stats)
                    self._state.report(replica.replica_id.unique_id, report)
        except Exception:  # as above
            self._state.counters.faults += 1
            logger.exception("replica_update_failed")

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._state.remove_replica(replica_id.unique_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (request := _request_of(pending_request)) is not None:
            self._state.rerouted(request.request_id, replica_id.unique_id, time.time())

    def _ranks(self, candidates: list[RunningReplica], pending: PendingRequest | None) -> list[list[RunningReplica]]:
        request = _request_of(pending)
        if request is None or pending is None:
            return _two_of(candidates)
        pending.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidates}
        route = self._state.route_open(request.request_id, request.sampling.max_tokens, time.time(), list(by_name))
        # Serve asks a replica for its queue length if it has not heard of it for a while: that would be a wait.
        lengths = self.replica_queue_len_cache
        for name in route.replicas:
            replica_id = by_name[name].replica_id
            lengths.update(replica_id, lengths.get(replica_id) or 0)
        return [[by_name[name]] for name in route.replicas]


def _request_of(pending: PendingRequest | None) -> Request | None:
    if pending is None or not pending.args:
        return None
    return pending.args[0] if isinstance(pending.args[0], Request) else None


def _two_of(candidates: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
    """Serve takes the one with the shorter queue."""
    return [random.sample(list(candidates), min(2, len(candidates)))]


class DeltaSource(Protocol):
    """Asks all replicas how their chunks changed: `chunk_delta` of replica/replica_actor.py."""

    def __call__(self, since: Mapping[str, tuple[int, int]]) -> Sequence[tuple[str, ChunkDelta | None]]: ...


async def follow_chunks(state: RoutingState, ask: DeltaSource, period_s: float = FEED_PERIOD_S) -> None:
    """Keep a state's index up to what replicas store and evict, until cancelled. Runs beside the requests."""
    while True:
        await asyncio.sleep(period_s)
        cursors = state.cursors()
        if not cursors:
            continue
        try:
            deltas = await asyncio.to_thread(ask, cursors)
        except Exception as error:  # noqa: BLE001 - replicas come and go; the next round asks again
            logger.warning("chunk_feed_failed error=%r", error)
            continue
        for name, delta in deltas:
            if delta is not None and name in cursors:
                state.apply(name, cursors[name], delta)
