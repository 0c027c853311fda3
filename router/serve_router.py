"""Our policies as a request router of Ray Serve: an adapter around one RoutingState per process and deployment."""

import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from chunkserve.replica.protocol import FeedRequest, Request

from .shared_state import report_from_stats, shared_state

logger = logging.getLogger(__name__)

# Of the class below, for RequestRouterConfig.
ROUTER_CLASS = "chunkserve.router.serve_router:ServeRouter"


class ServeRouter(RequestRouter):
    """Chooses replicas through the RoutingState; it never raises and never waits.

    A FeedRequest goes where it says. Requests that the ingress has not opened in the state, such as health checks, go
    by power of two choices; so does everything when our own code fails, which is counted: an exception here would leave
    its request hanging.
    """

    def initialize_state(self, **settings: Any) -> None:
        self._state = shared_state(self._deployment_id.name, settings)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        begin_s = time.perf_counter()
        try:
            return self._ranks(candidate_replicas, pending_request)
        except Exception:  # whatever it is: the request must go somewhere
            self._state.fault()
            logger.exception("route_failed: power of two choices instead")
            return _two_of(candidate_replicas)
        finally:
            if (request := request_of(pending_request)) is not None:
                self._state.decided(request.request_id, time.perf_counter() - begin_s)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        try:
            self._state.set_replicas([replica.replica_id.unique_id for replica in replicas], time.time())
            for replica in replicas:
                if replica.routing_stats:
                    self._state.report(replica.replica_id.unique_id, report_from_stats(replica.routing_stats))
        except Exception:  # as above
            self._state.counters.faults += 1
            logger.exception("replica_update_failed")

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._state.remove_replica(replica_id.unique_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (request := request_of(pending_request)) is not None:
            self._state.rerouted(request.request_id, replica_id.unique_id, time.time())

    def _ranks(self, candidates: list[RunningReplica], pending: PendingRequest | None) -> list[list[RunningReplica]]:
        subject = pending.args[0] if pending is not None and pending.args else None
        if isinstance(subject, FeedRequest):
            return [[one] for one in candidates if one.replica_id.unique_id == subject.replica] or _two_of(candidates)
        request = request_of(pending)
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


def request_of(pending: PendingRequest | None) -> Request | None:
    """The request that Serve wants a replica for; None for other calls."""
    if pending is None or not pending.args:
        return None
    return pending.args[0] if isinstance(pending.args[0], Request) else None


def _two_of(candidates: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
    """Serve takes the one with the shorter queue."""
    return [random.sample(list(candidates), min(2, len(candidates)))]
