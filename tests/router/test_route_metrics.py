from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from chunkserve.replica.protocol import RoutingReport, StepTime
from chunkserve.router import route_metrics
from chunkserve.router.route_metrics import METRIC_NAMES, RouteMetrics
from chunkserve.router.routing_state import RoutingState


class Recorded:
    """Stands in for a metric of Ray: keeps what it is told, by name."""

    values: dict[str, dict[tuple[str, ...], float]]

    def __init__(self, name: str, text: str, tag_keys: tuple[str, ...], boundaries: list[float] | None = None) -> None:
        assert text
        assert boundaries is None or boundaries == sorted(boundaries)
        self._into = self.values.setdefault(name, {})

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert tags == {"policy": "prefix"}

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self._into[tuple((tags or {}).values())] = value

    def observe(self, value: float) -> None:
        self._into[()] = self._into.get((), 0) + 1

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        key = tuple((tags or {}).values())
        self._into[key] = self._into.get(key, 0) + value


def report_of(backlog_s: float) -> RoutingReport:
    return RoutingReport(
        epoch=1,
        taken_at_s=10.0,
        backlog_s=backlog_s,
        running_sequences=0,
        waiting_sequences=0,
        chunks_total=100,
        chunks_in_use=25,
        chunks_retained=0,
        step=StepTime(fixed_s=0.01, per_token_s=1e-3),
        max_step_tokens=512,
        chunk_identity="",
    )


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(Recorded, "values", {}, raising=False)
    monkeypatch.setattr(route_metrics.metrics, "Counter", Recorded)
    monkeypatch.setattr(route_metrics.metrics, "Gauge", Recorded)
    monkeypatch.setattr(route_metrics.metrics, "Histogram", Recorded)
    return Recorded.values


def test_totals_are_told_once_and_gauges_as_they_are(recorded: dict[str, Any]) -> None:
    state = RoutingState(policy="prefix", chunk_size=16)
    state.set_replicas(["a", "b"], 0.0)
    told = RouteMetrics("prefix")
    for number, cached in enumerate((0, 16)):
        state.open(f"{number}", 40, (b"1" * 16, b"2" * 16))
        state.route_open(f"{number}", 10, 1.0)
        state.first_token(f"{number}", cached)
        told.update(state, 1.0)
    told.update(state, 1.0)
    assert set(recorded) == set(METRIC_NAMES)
    assert recorded["chunkserve_route_prompt_tokens"] == {(): 80}
    assert recorded["chunkserve_route_predicted_cached_tokens"] == {(): 32}
    assert recorded["chunkserve_route_actual_cached_tokens"] == {(): 16}
    assert sum(recorded["chunkserve_route_decisions"].values()) == 2
    assert recorded["chunkserve_route_prediction_error_tokens"] == {(): 16}
    assert recorded["chunkserve_route_stale_hit"] == {(): 1}
    assert recorded["chunkserve_index_entries"] == {("stored",): 2, ("expected",): 0}
    assert recorded["chunkserve_index_bytes"][()] > 200
    assert recorded["chunkserve_route_open_requests"] == {(): 2}
    assert recorded["chunkserve_phantom_load"] == {(): 0}
    assert recorded["chunkserve_route_hit_rate"] == {(): 16 / 40}
    assert set(recorded["chunkserve_replica_queued_seconds"]) == {("a",), ("b",)}
    assert recorded["chunkserve_hot_prefix_copies"] == {(): 1}
    assert recorded["chunkserve_hot_prefix_share"] == {(): 1.0}
    assert recorded["chunkserve_route_degraded"] == {(): 0}


def test_times_are_told_once_and_compared_with_what_was_expected(recorded: dict[str, Any]) -> None:
    state = RoutingState(policy="prefix", chunk_size=16)
    state.set_replicas(["a", "b"], 0.0)
    for name, backlog_s in (("a", 0.0), ("b", 0.5)):
        state.report(name, report_of(backlog_s))
    told = RouteMetrics("prefix")
    state.open("1", 100, (b"1" * 16,))
    assert state.route_open("1", 10, 10.0).replicas[0] == "a"
    state.decided("1", 0.001)
    # 100 tokens of 1 ms each, and 10 ms a step; b would have taken half a second more.
    state.first_token("1", 0, 10.0 + 0.7)
    told.samples.ttft_s.append(0.7)
    for _ in range(2):
        told.update(state, 10.7)
    assert recorded["chunkserve_route_decision_seconds"] == {(): 1}
    assert recorded["chunkserve_route_ttft_seconds"] == {(): 1}
    assert recorded["chunkserve_route_regret_seconds"] == {(): 1}
    assert recorded["chunkserve_route_cost_model_error_ratio"][()] == pytest.approx(0.59 / 0.7)
    assert state.samples.regret_s == told.samples.ttft_s == deque()
    assert recorded["chunkserve_stats_age_seconds"][()] == pytest.approx(0.7)
    assert recorded["chunkserve_replica_kv_used_ratio"] == {("a",): 0.25, ("b",): 0.25}


def test_regret_is_what_another_replica_would_have_saved() -> None:
    state = RoutingState(policy="prefix", chunk_size=16)
    state.set_replicas(["a", "b"], 0.0)
    for name, backlog_s in (("a", 0.0), ("b", 0.5)):
        state.report(name, report_of(backlog_s))
    for key, ttft_s in (("quick", 0.11), ("slow", 2.0)):
        state.open(key, 100, ())
        assert state.route_open(key, 10, 10.0).replicas[0] == "a"
        state.first_token(key, 0, 10.0 + ttft_s)
        state.close(key)
    assert list(state.samples.regret_s) == pytest.approx([0.0, 2.0 - 0.61])


def test_a_replica_that_names_chunks_otherwise_and_an_index_without_them_show(
    recorded: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = RoutingState(policy="prefix", chunk_size=16, chunk_identity="ours")
    state.set_replicas(["a", "b"], 0.0)
    told = RouteMetrics("prefix")
    state.report("a", replace(report_of(0.0), chunk_identity="ours"))
    state.report("b", replace(report_of(0.0), chunk_identity="other/64"))
    told.update(state, 10.0)
    assert recorded["chunkserve_replica_trust"] == {("a",): True, ("b",): False}
    assert recorded["chunkserve_route_degraded"] == {(): False}
    state.report("a", replace(report_of(0.0), taken_at_s=11.0, chunk_identity="other/64"))
    for _ in range(2):
        told.update(state, 11.0)
    assert recorded["chunkserve_route_degraded"] == {(): True}
    assert caplog.text.count("routing_degraded: no replica names its chunks") == 1


def test_an_index_that_is_never_filled_shows(recorded: dict[str, Any]) -> None:
    state = RoutingState(policy="prefix", chunk_size=16)
    state.set_replicas(["a"], 0.0)
    told = RouteMetrics("prefix")
    state.index.store = state.index.expect = lambda *_, **__: None  # type: ignore[method-assign]
    for number in range(20):
        assert state.degraded is None
        state.open(f"{number}", 40, (bytes([number]) * 16,))
        state.route_open(f"{number}", 10, 1.0)
        state.first_token(f"{number}", 0)
    told.update(state, 1.0)
    assert recorded["chunkserve_route_degraded"] == {(): True}
    assert state.degraded == "nothing is known of the chunks of 20 prompts"
