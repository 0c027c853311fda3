"""Prometheus metrics of one ingress, and of the replicas behind it. No label ever holds a request id."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chunkserve.replica.protocol import ReplicaLoad

from .fair_queue import FairQueue

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_LATENCY_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Metric -> ReplicaLoad field and help. `chunkserve_` comes before each name, and `_total` after those of counters.
_GAUGES = {
    "running_sequences": ("running_sequences", "Sequences in the engine's steps."),
    "waiting_sequences": ("waiting_sequences", "Sequences in the engine's queue."),
    "pool_chunks": ("chunks_total", "Chunks in the KV pool."),
    "chunks_in_use": ("chunks_in_use", "Chunks of running sequences."),
    "chunks_retained": ("chunks_retained", "Chunks kept after their last sequence ended."),
    "last_step_age_seconds": ("last_step_age_s", "Seconds since the engine loop last went round."),
}
_COUNTERS = {
    "steps": ("steps", "Engine steps."),
    "preemptions": ("preemptions", "Sequences put back into the queue when the pool was full."),
    "computed_prompt_tokens": ("computed_prompt_tokens", "Prompt tokens computed."),
    "cached_prompt_tokens": ("cached_prompt_tokens", "Prompt tokens found in the prefix tree."),
    "generated_tokens": ("generated_tokens", "Tokens generated."),
    "cancelled_requests": ("cancelled_requests", "Requests cancelled before their end."),
}
_MAX_TENANT_LABELS = 20
_REPLICA_LABELS = ("model", "replica")


class IngressMetrics:
    """What this ingress has seen, on a registry of its own."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._loads = _LoadCollector(model)
        self._registry = CollectorRegistry()
        self._registry.register(self._loads)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"chunkserve_{name}", text, ("model", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"chunkserve_{name}", text, ("model",), registry=self._registry, buckets=buckets)

        self._http = counter("http_requests", "HTTP requests by path and status.", "path", "status")
        self._finished = counter("finished_choices", "Choices by what ended them.", "finish_reason")
        self._rejected = counter("rejected", "Requests refused since too many wait, by where.", "why")
        self._prompt = counter("request_prompt_tokens", "Prompt tokens of answered requests.").labels(model)
        self._cached = counter("request_cached_tokens", "Prompt tokens found in a prefix tree.").labels(model)
        self._new = counter("request_generated_tokens", "Tokens generated for answered requests.").labels(model)
        self._tokenize = histogram(
            "route_tokenize_seconds", "Rendering and tokenising a request's prompts.", _PER_TOKEN_S
        ).labels(model)
        self._ttft = histogram("ttft_seconds", "Arrival to first token.", _TTFT_S).labels(model)
        self._tpot = histogram(
            "time_per_output_token_seconds", "First to last token, per token of the longest choice.", _PER_TOKEN_S
        ).labels(model)
        self._latency = histogram("request_latency_seconds", "Arrival to last token.", _LATENCY_S).labels(model)

    def watch_queue(self, queue: FairQueue) -> None:
        """Report what waits in front of the replicas."""
        for name, text, value in (
            ("queued_requests", "Requests that wait for a replica, at this ingress.", lambda: queue.num_waiting),
            ("dispatched_sequences", "Sequences that this ingress has with replicas.", lambda: queue.in_flight),
        ):
            gauge = Gauge(f"chunkserve_{name}", text, ("model",), registry=self._registry)
            gauge.labels(self._model).set_function(value)
        self._registry.register(_TenantCollector(self._model, queue))

    def count_http(self, path: str, status: int) -> None:
        self._http.labels(self._model, path, str(status)).inc()

    def count_rejected(self, why: str) -> None:
        self._rejected.labels(self._model, why).inc()

    def observe_tokenizing(self, seconds: float) -> None:
        self._tokenize.observe(seconds)

    def observe_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def observe_answer(self, *, latency_s: float, decode_s: float, longest_choice_tokens: int) -> None:
        """A finished answer: arrival to last token, first to last token, tokens of its longest choice."""
        self._latency.observe(latency_s)
        if longest_choice_tokens > 1:
            self._tpot.observe(decode_s / (longest_choice_tokens - 1))

    def count_tokens(self, *, prompt: int, cached: int, generated: int) -> None:
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._new.inc(generated)

    def count_finish(self, reason: str) -> None:
        self._finished.labels(self._model, reason).inc()

    def text(self, loads: Mapping[str, ReplicaLoad]) -> bytes:
        """Everything in Prometheus' text format; `loads` maps a replica's name to what it does now."""
        self._loads.loads = loads
        return generate_latest(self._registry)


class _LoadCollector(Collector):
    def __init__(self, model: str) -> None:
        self.loads: Mapping[str, ReplicaLoad] = {}
        self._model = model

    def collect(self) -> Iterable[Metric]:
        for family_of, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (load_field, text) in table.items():
                family = family_of(f"chunkserve_{name}", text, labels=_REPLICA_LABELS)
                for replica, load in self.loads.items():
                    family.add_metric((self._model, replica), getattr(load, load_field))
                yield family
        kv = GaugeMetricFamily(
            "chunkserve_kv_bytes_in_use", "K and V bytes of running sequences.", labels=_REPLICA_LABELS
        )
        finished = CounterMetricFamily(
            "chunkserve_sequences_finished", "Sequences by what ended them.", labels=(*_REPLICA_LABELS, "finish_reason")
        )
        for replica, load in self.loads.items():
            kv.add_metric((self._model, replica), load.chunks_in_use * load.chunk_bytes)
            for reason, count in load.finished.items():
                finished.add_metric((self._model, replica, reason), count)
        yield kv
        yield finished


class _TenantCollector(Collector):
    """What tenants got. They go by a hash of their names, and only the largest have lines of their own."""

    def __init__(self, model: str, queue: FairQueue) -> None:
        self._model = model
        self._queue = queue

    def collect(self) -> Iterable[Metric]:
        labels = ("model", "tenant")
        served = CounterMetricFamily("chunkserve_tenant_served_tokens", "Tokens computed for a tenant.", labels=labels)
        deficit = GaugeMetricFamily(
            "chunkserve_tenant_deficit", "Tokens that a tenant is behind the one that leads.", labels=labels
        )
        jain = GaugeMetricFamily(
            "chunkserve_jain_index", "Jain's index of the tokens that tenants got: 1 if all alike.", labels=("model",)
        )
        shares = self._queue.shares()
        tokens = [share.served_tokens for share in shares.values() if share.served_tokens]
        squares = sum(number * number for number in tokens)
        jain.add_metric((self._model,), sum(tokens) ** 2 / (len(tokens) * squares) if squares else 1.0)
        largest = sorted(shares.items(), key=lambda item: -item[1].served_tokens)[:_MAX_TENANT_LABELS]
        for name, share in largest:
            label = blake2b(name.encode(), digest_size=4).hexdigest()
            served.add_metric((self._model, label), share.served_tokens)
            deficit.add_metric((self._model, label), share.deficit_tokens)
        yield from (served, deficit, jain)
