from typing import Any

import pytest

from chunkserve.router import route_metrics
from chunkserve.router.route_metrics import METRIC_NAMES, RouteMetrics
from chunkserve.router.routing_state import RoutingState


class Recorded:
    """Stands in for a metric of Ray: keeps what it is told, by name."""

    values: dict[str, dict[tuple[str, ...], float]]

    def __init__(self, name: str, text: str, tag_keys: tuple[str, ...]) -> None:
        self._into = self.values.setdefault(name, {})

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert tags == {"policy": "prefix"}

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self._into[tuple((tags or {}).values())] = value

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        key = tuple((tags or {}).values())
        self._into[key] = self._into.get(key, 0) + value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(Recorded, "values", {}, raising=False)
    monkeypatch.setattr(route_metrics.metrics, "Counter", Recorded)
    monkeypatch.setattr(route_metrics.metrics, "Gauge", Recorded)
    return Recorded.values


def test_totals_are_told_once_and_gauges_as_they_are(recorded: dict[str, Any]) -> None:
    state = RoutingState(policy="prefix", chunk_size=16)
    state.set_replicas(["a", "b"], 0.0)
    told = RouteMetrics("prefix")
    for number, cached in enumerate((0, 32)):
        state.open(f"{number}", 40, (b"1" * 16, b"2" * 16))
        state.route_open(f"{number}", 10, 1.0)
        state.first_token(f"{number}", cached)
        told.update(state, 1.0)
    told.update(state, 1.0)
    assert set(recorded) == set(METRIC_NAMES)
    assert recorded["chunkserve_route_prompt_tokens"] == {(): 80}
    assert recorded["chunkserve_route_predicted_cached_tokens"] == {(): 32}
    assert recorded["chunkserve_route_actual_cached_tokens"] == {(): 32}
    assert sum(recorded["chunkserve_route_decisions"].values()) == 2
    assert recorded["chunkserve_index_entries"] == {(): 2}
    assert recorded["chunkserve_route_open_requests"] == {(): 2}
    assert recorded["chunkserve_route_phantom_load"] == {(): 0}
    assert set(recorded["chunkserve_replica_queued_seconds"]) == {("a",), ("b",)}
