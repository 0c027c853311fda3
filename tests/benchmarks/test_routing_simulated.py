"""The simulated routing benchmark on sizes of a second: its cases, rows, table and verdicts."""

import pytest
from rich.console import Console

import ours_routing_simulated as script


def test_rows_of_each_workload_and_what_came_of_the_targets(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for name in ("prompts", "unshared", "hot", "flood", "churn"):
        case = script.generated(name, 0.5, 8, 1, 0, 800 if name == "prompts" else 120)
        rows += [script.row_of(case, policy) for policy in script.FEW]
    rows += [script.row_of(script.generated("prompts", 0.4, 16, routers, 0, 100), "prefix") for routers in (1, 4)]
    for row in rows:
        assert row["failed_share"] <= (0.1 if row["workload"] == "churn" else 0)
        assert 0 < row["ttft_s_p50"] <= row["ttft_s_p95"] <= row["ttft_s_p99"]
        assert 0 <= row["hit_rate"] < 1
    assert {row["hit_rate"] for row in rows if row["workload"] == "unshared"} == {0}
    Console(width=200).print(script.summary(rows))
    assert "flood" in capsys.readouterr().out
    lines = list(script.verdicts(rows))
    assert len(lines) == 6
    assert all(line.endswith((": met", ": MISSED")) for line in lines)


def test_a_flood_is_beside_the_others_and_its_times_are_not_counted() -> None:
    calm, flood = (script.generated(name, 0.3, 8, 1, 0, 1000) for name in ("prompts", "flood"))
    others = [request for request in flood.requests if not request.is_background]
    assert others == calm.requests
    assert len(flood.requests) > len(others) + 3
    end_s = calm.requests[-1].at_s
    assert all(end_s / 3 <= request.at_s <= end_s for request in flood.requests if request.is_background)


def test_larger_fleets_have_more_prompts() -> None:
    def prompts(replicas: int) -> int:
        return len({request.head for request in script.generated("prompts", 0.5, replicas, 1, 0, 3000).requests})

    assert prompts(8) == prompts(16) == 15
    assert 150 < prompts(100) <= 180
