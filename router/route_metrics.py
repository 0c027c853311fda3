"""What a router did and knows, for Ray's dashboard and Prometheus. Brought up to date beside the requests."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from ray.util import metrics

from .routing_state import RoutingState

logger = logging.getLogger(__name__)

_MICRO_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05, 0.25)
_WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_MAX_SAMPLES = 10_000

# Totals: metric name -> field of RouteCounters and help. Ray adds `ray_` before all names, and `_total` after these.
_TOTALS: Mapping[str, tuple[str, str]] = {
    "chunkserve_route_faults": ("faults", "Decisions that failed and went by power of two choices."),
    "chunkserve_route_prompt_tokens": ("prompt_tokens", "Prompt tokens of requests with a first token."),
    "chunkserve_route_predicted_cached_tokens": ("predicted_cached_tokens", "Of those, expected to be cached."),
    "chunkserve_route_actual_cached_tokens": ("actual_cached_tokens", "Of those, found cached."),
    "chunkserve_route_prediction_error_tokens": ("prediction_error_tokens", "Cached tokens too many or too few."),
    "chunkserve_route_stale_hit": ("stale_hits", "Requests that found at least a chunk less than expected."),
    "chunkserve_route_first_tokens": ("first_tokens", "Requests with a first token."),
    "chunkserve_index_gaps": ("gaps", "Snapshots taken since a log did not reach back."),
    "chunkserve_index_resyncs": ("resyncs", "Snapshots taken for whatever reason; one for each new replica."),
    "chunkserve_stream_broken": ("broken_streams", "Streams that ended since their replica was lost."),
    "chunkserve_cancel": ("cancels", "Requests whose client went away, or whose time was over."),
}
# Labelled totals: name -> label and help.
_LABELLED: Mapping[str, tuple[str, str]] = {
    "chunkserve_route_decisions": ("reason", "Decisions by reason."),
    "chunkserve_retries": ("phase", "Requests sent once more, elsewhere."),
}
_GAUGES: Mapping[str, str] = {
    "chunkserve_index_bytes": "Memory of the index, about.",
    "chunkserve_index_event_lag_seconds": "How long ago a replica reported changes that the index lacks; 0 if none.",
    "chunkserve_stats_age_seconds": "Age of the oldest last report of a replica; idle ones do not renew theirs.",
    "chunkserve_route_open_requests": "Requests between arrival and end.",
    "chunkserve_phantom_load": "Reservations without an open request; always 0.",
    "chunkserve_load_imbalance_ratio": "Largest work of a replica over the mean.",
    "chunkserve_load_imbalance_seconds": "Largest work of a replica less the mean.",
    "chunkserve_route_hit_rate": "Of the prompt tokens since the last report, found cached.",
    "chunkserve_route_cost_model_error_ratio": "Error of expected times to the first token, over the actual ones.",
    "chunkserve_route_degraded": "1 if prompts are routed as if nothing were cached anywhere.",
    "chunkserve_hot_prefix_copies": "Replicas that hold what most open requests begin with.",
    "chunkserve_hot_prefix_share": "Of the open requests, those that begin with it.",
}
# By state: `stored`, a replica told us; `expected`, it was sent to one.
_ENTRIES = "chunkserve_index_entries"
_EVICTIONS = "chunkserve_index_evictions"
_REPLICA_GAUGES: Mapping[str, str] = {
    "chunkserve_replica_queued_seconds": "Seconds until a replica has computed its prompts.",
    "chunkserve_replica_kv_used_ratio": "Of a replica's chunks, in use by running sequences.",
    "chunkserve_replica_trust": "0 for a replica that names chunks otherwise: it is routed to by load only.",
}
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "chunkserve_route_decision_seconds": ("Choosing a replica.", _MICRO_S),
    "chunkserve_route_hash_seconds": ("Naming the chunks of a prompt.", _MICRO_S),
    "chunkserve_route_regret_seconds": ("Time to the first token beyond what another replica promised.", _WAIT_S),
    "chunkserve_route_ttft_seconds": ("From the router to the first token.", _WAIT_S),
    "chunkserve_route_time_per_output_token_seconds": ("First to last token, per token.", _TOKEN_S),
}

HISTOGRAM_NAMES = tuple(_HISTOGRAMS)
METRIC_NAMES = (*_TOTALS, *_LABELLED, *_GAUGES, _ENTRIES, _EVICTIONS, *_REPLICA_GAUGES, *_HISTOGRAMS)


def _samples() -> deque[float]:
    return deque(maxlen=_MAX_SAMPLES)


@dataclass(slots=True)
class RequestSamples:
    """What the ingress measured of requests since the last update; seconds."""

    hash_s: deque[float] = field(default_factory=_samples)
    ttft_s: deque[float] = field(default_factory=_samples)
    token_s: deque[float] = field(default_factory=_samples)


class RouteMetrics:
    """One router's metrics, tagged with its policy. `samples` may be filled from any thread."""

    def __init__(self, policy: str) -> None:
        def counter(name: str, text: str, *labels: str) -> metrics.Counter:
            return metrics.Counter(name, text, tag_keys=("policy", *labels))

        def gauge(name: str, text: str, *labels: str) -> metrics.Gauge:
            return metrics.Gauge(name, text, tag_keys=("policy", *labels))

        self.samples = RequestSamples()
        self._counters = {name: counter(name, text) for name, (_, text) in _TOTALS.items()}
        self._counters[_EVICTIONS] = counter(_EVICTIONS, "Chunks dropped from the index to make room.")
        self._counters |= {name: counter(name, text, label) for name, (label, text) in _LABELLED.items()}
        self._gauges = {name: gauge(name, text) for name, text in _GAUGES.items()}
        self._gauges[_ENTRIES] = gauge(_ENTRIES, "Chunks that the router knows.", "state")
        self._gauges |= {name: gauge(name, text, "replica") for name, text in _REPLICA_GAUGES.items()}
        self._histograms = {
            name: metrics.Histogram(name, text, boundaries=list(bounds), tag_keys=("policy",))
            for name, (text, bounds) in _HISTOGRAMS.items()
        }
        for metric in (*self._counters.values(), *self._gauges.values(), *self._histograms.values()):
            metric.set_default_tags({"policy": policy})
        self._told: dict[str, float] = {}
        self._degraded: str | None = None

    def update(self, state: RoutingState, now_s: float) -> None:
        """Tell what has changed. now_s: of the state's clock."""
        counters = state.counters
        new_prompt = self._new("prompt", counters.prompt_tokens)
        new_cached = self._new("cached", counters.actual_cached_tokens)
        if new_prompt:
            self._gauges["chunkserve_route_hit_rate"].set(new_cached / new_prompt)
        actual_s, error_s = self._new("actual", counters.actual_s), self._new("error", counters.time_error_s)
        if actual_s:
            self._gauges["chunkserve_route_cost_model_error_ratio"].set(error_s / actual_s)
        for name, (total, _) in _TOTALS.items():
            self._count(name, getattr(counters, total))
        self._count(_EVICTIONS, state.index.num_evictions)
        for reason, decisions in list(counters.decisions.items()):
            self._count("chunkserve_route_decisions", decisions, reason=reason)
        for phase, retries in list(counters.retries.items()):
            self._count("chunkserve_retries", retries, phase=f"{phase}_first_token")
        self._set_replicas(state, now_s)
        stored = state.index.num_stored
        self._gauges[_ENTRIES].set(stored, tags={"state": "stored"})
        self._gauges[_ENTRIES].set(len(state.index) - stored, tags={"state": "expected"})
        self._gauges["chunkserve_index_bytes"].set(state.index.num_bytes)
        self._gauges["chunkserve_route_open_requests"].set(state.num_open)
        self._gauges["chunkserve_phantom_load"].set(max(0, state.loads.num_open - state.num_open))
        hottest = state.hottest_prefix(now_s)
        self._gauges["chunkserve_hot_prefix_copies"].set(hottest.copies if hottest else 0)
        self._gauges["chunkserve_hot_prefix_share"].set(hottest.share if hottest else 0)
        self._say_degraded(state.degraded)
        mine = self.samples
        self._observe("chunkserve_route_decision_seconds", state.samples.decision_s)
        self._observe("chunkserve_route_regret_seconds", state.samples.regret_s)
        self._observe("chunkserve_route_hash_seconds", mine.hash_s)
        self._observe("chunkserve_route_ttft_seconds", mine.ttft_s)
        self._observe("chunkserve_route_time_per_output_token_seconds", mine.token_s)

    def _set_replicas(self, state: RoutingState, now_s: float) -> None:
        views = state.replica_views(now_s)
        for name, view in views.items():
            tags = {"replica": name}
            self._gauges["chunkserve_replica_queued_seconds"].set(view.queued_s, tags=tags)
            self._gauges["chunkserve_replica_trust"].set(view.is_trusted, tags=tags)
            if view.kv_used_ratio is not None:
                self._gauges["chunkserve_replica_kv_used_ratio"].set(view.kv_used_ratio, tags=tags)
        work = [view.queued_s for view in views.values()]
        mean = float(np.mean(work)) if work else 0.0
        self._gauges["chunkserve_load_imbalance_ratio"].set(max(work) / mean if mean else 1.0)
        self._gauges["chunkserve_load_imbalance_seconds"].set(max(work) - mean if work else 0.0)
        self._set_oldest("chunkserve_stats_age_seconds", (view.report_age_s for view in views.values()))
        self._set_oldest("chunkserve_index_event_lag_seconds", (view.index_lag_s for view in views.values()))

    def _set_oldest(self, name: str, ages_s: Iterable[float | None]) -> None:
        known = [age_s for age_s in ages_s if age_s is not None]
        if known:
            self._gauges[name].set(max(0.0, *known))

    def _say_degraded(self, why: str | None) -> None:
        self._gauges["chunkserve_route_degraded"].set(why is not None)
        if why is not None and self._degraded is None:
            logger.error("routing_degraded: %s", why)
        self._degraded = why

    def _observe(self, name: str, samples: deque[float]) -> None:
        histogram = self._histograms[name]
        while samples:
            histogram.observe(samples.popleft())

    def _count(self, name: str, total: int, **tags: str) -> None:
        new = self._new(" ".join((name, *tags.values())), total)
        if new > 0:
            self._counters[name].inc(new, tags=tags)

    def _new(self, key: str, total: float) -> float:
        new = total - self._told.get(key, 0)
        self._told[key] = total
        return new
