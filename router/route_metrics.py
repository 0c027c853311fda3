"""What a router did and knows, for Ray's dashboard and Prometheus. Brought up to date beside the requests."""

from collections.abc import Mapping

import numpy as np
from ray.util import metrics

from .routing_state import RoutingState

# Totals: metric name -> field of RouteCounters and help.
_TOTALS: Mapping[str, tuple[str, str]] = {
    "chunkserve_route_faults": ("faults", "Decisions that failed and went by power of two choices."),
    "chunkserve_route_prompt_tokens": ("prompt_tokens", "Prompt tokens of requests with a first token."),
    "chunkserve_route_predicted_cached_tokens": ("predicted_cached_tokens", "Of those, expected to be cached."),
    "chunkserve_route_actual_cached_tokens": ("actual_cached_tokens", "Of those, found cached."),
    "chunkserve_route_stale_hits": ("stale_hits", "Requests that found at least a chunk less than expected."),
    "chunkserve_route_first_tokens": ("first_tokens", "Requests with a first token."),
    "chunkserve_index_gaps": ("gaps", "Snapshots taken since a log did not reach back."),
}
_GAUGES: Mapping[str, str] = {
    "chunkserve_index_entries": "Chunks that the router knows.",
    "chunkserve_index_evictions": "Chunks dropped from the index to make room, since the start.",
    "chunkserve_route_open_requests": "Requests between arrival and end.",
    "chunkserve_route_phantom_load": "Reservations without an open request; always 0.",
    "chunkserve_load_imbalance_ratio": "Largest work of a replica over the mean.",
}
_REPLICA_GAUGE = "chunkserve_replica_queued_seconds"
_DECISIONS = "chunkserve_route_decisions"

METRIC_NAMES = (*_TOTALS, *_GAUGES, _REPLICA_GAUGE, _DECISIONS)


class RouteMetrics:
    """One router's metrics, tagged with its policy."""

    def __init__(self, policy: str) -> None:
        tags = {"policy": policy}
        self._totals = {name: metrics.Counter(name, text, tag_keys=("policy",)) for name, (_, text) in _TOTALS.items()}
        self._gauges = {name: metrics.Gauge(name, text, tag_keys=("policy",)) for name, text in _GAUGES.items()}
        self._decisions = metrics.Counter(_DECISIONS, "Decisions by reason.", tag_keys=("policy", "reason"))
        self._queued = metrics.Gauge(
            _REPLICA_GAUGE, "Seconds until a replica has computed its prompts.", tag_keys=("policy", "replica")
        )
        for metric in (*self._totals.values(), *self._gauges.values(), self._decisions, self._queued):
            metric.set_default_tags(tags)
        self._told: dict[str, int] = {}

    def update(self, state: RoutingState, now_s: float) -> None:
        """Tell what has changed. now_s: of the state's clock."""
        for name, (field, _) in _TOTALS.items():
            self._count(self._totals[name], name, getattr(state.counters, field), {})
        for reason, total in list(state.counters.decisions.items()):
            self._count(self._decisions, f"{_DECISIONS} {reason}", total, {"reason": reason})
        work = state.work_s(now_s)
        for replica, seconds in work.items():
            self._queued.set(seconds, tags={"replica": replica})
        mean = float(np.mean(list(work.values()))) if work else 0.0
        values = {
            "chunkserve_index_entries": len(state.index),
            "chunkserve_index_evictions": state.index.num_evictions,
            "chunkserve_route_open_requests": state.num_open,
            "chunkserve_route_phantom_load": max(0, state.loads.num_open - state.num_open),
            "chunkserve_load_imbalance_ratio": max(work.values()) / mean if mean else 1.0,
        }
        for name, value in values.items():
            self._gauges[name].set(value)

    def _count(self, counter: metrics.Counter, key: str, total: int, tags: dict[str, str]) -> None:
        new = total - self._told.get(key, 0)
        if new > 0:
            counter.inc(new, tags=tags)
            self._told[key] = total
