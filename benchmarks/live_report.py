"""What the live routing benchmark says of its arms: rows, tables, panels, verdicts."""

import statistics
from typing import Any

import numpy as np
from rich.table import Table

from chunkserve.router.policy import POLICIES
from chunkserve.router.simulator import SimResult
from live_arms import RAY_PREFIX
from live_server import Fleet, Run
from plots import Panel

ALL_POLICIES = (*POLICIES, RAY_PREFIX)
SLO_TTFT_S = 1.0
# How near the simulator must come.
TTFT_TOLERANCE = 0.15
HIT_TOLERANCE_POINTS = 2.0
REFUSED = "status 429"
COLUMNS = (
    "kind", "policy", "load", "seed", "requests", "goodput_rps", "rejected_share", "ttft_s_mean", "ttft_s_p50",
    "ttft_s_p95", "ttft_s_p99", "tpot_s_p50", "tpot_s_p95", "tpot_s_p99", "computed_tokens_per_request", "hit_rate",
    "max_over_mean_work", "decision_us_p99",
)  # fmt: skip


def row_of(fleet: Fleet, run: Run, workload: str) -> dict[str, Any]:
    arm, measured = run.arm, run.answers
    samples = [answer.sample for answer in measured if answer.sample is not None]
    end_s = max((answer.ask.at_s + answer.sample.latency_s for answer in measured if answer.sample), default=0.0)
    prompt_tokens = sum(sample.prompt_tokens for sample in samples)
    work = dict.fromkeys(range(fleet.replicas), 0.0)
    names = sorted({sample.headers["x-chunkserve-replica"] for sample in samples})
    for sample in samples:
        new = sample.prompt_tokens - sample.cached_tokens
        seconds = fleet.step.prefill_s(new, sample.cached_tokens, int(fleet.config().max_step_tokens))
        work[names.index(sample.headers["x-chunkserve-replica"])] += seconds
    decisions = [int(sample.headers["x-chunkserve-decision-us"]) for sample in samples]
    ttft = [sample.ttft_s for sample in samples]
    tpot = [sample.tpot_s for sample in samples if sample.tpot_s is not None]
    refused = sum(answer.error.startswith(REFUSED) for answer in measured)
    return {
        "kind": fleet.kind,
        "workload": workload,
        "policy": arm.policy,
        "replicas": fleet.replicas,
        "routers": 1,
        "load": arm.load,
        "seed": arm.seed,
        "requests": len(measured),
        "rate_rps": round(len(measured) / max(1e-9, measured[-1].ask.at_s), 3),
        "goodput_rps": round(sum(t <= SLO_TTFT_S for t in ttft) / max(1e-9, end_s), 3),
        "slo_ttft_s": SLO_TTFT_S,
        "rejected_share": round(refused / max(1, len(measured)), 4),
        "failed_share": round((len(measured) - len(samples) - refused) / max(1, len(measured)), 4),
        "ttft_s_mean": _figure(np.mean(ttft)),
        "ttft_s_p50": _figure(np.percentile(ttft, 50)),
        "ttft_s_p95": _figure(np.percentile(ttft, 95)),
        "ttft_s_p99": _figure(np.percentile(ttft, 99)),
        "tpot_s_p50": _figure(np.percentile(tpot, 50)),
        "tpot_s_p95": _figure(np.percentile(tpot, 95)),
        "tpot_s_p99": _figure(np.percentile(tpot, 99)),
        "computed_tokens_per_request": round(
            sum(sample.prompt_tokens - sample.cached_tokens for sample in samples) / len(samples), 1
        ),
        "hit_rate": _figure(sum(sample.cached_tokens for sample in samples) / prompt_tokens),
        "max_over_mean_work": _figure(max(work.values()) * fleet.replicas / sum(work.values())),
        "decision_us_p50": int(np.percentile(decisions, 50)),
        "decision_us_p99": int(np.percentile(decisions, 99)),
    }


def _figure(value: Any) -> float:
    return round(float(value), 4)


def simulated_row(result: SimResult, live: dict[str, Any], num_asks: int) -> dict[str, Any]:
    """As row_of, of the simulator's run."""
    return live | {
        "kind": f"simulator of {live['kind']}",
        "goodput_rps": None,
        "rejected_share": result.rejected / num_asks,
        "ttft_s_mean": _figure(result.ttft_s_mean),
        **{f"ttft_s_p{q}": _figure(np.percentile(result.ttft_s, q)) for q in (50, 95, 99)},
        **{f"tpot_s_p{q}": _figure(np.percentile(result.token_s, q)) for q in (50, 95, 99)},
        "computed_tokens_per_request": round((result.prompt_tokens - result.cached_tokens) / len(result.ttft_s), 1),
        "hit_rate": _figure(result.hit_rate),
        "max_over_mean_work": _figure(result.max_over_mean_work),
        "decision_us_p50": None,
        "decision_us_p99": None,
    }


def verdict(rows: list[dict[str, Any]]) -> str:
    """How far the simulator is from the live run, by case; means over the seeds."""
    lines = []
    live = [row for row in rows if not row["kind"].startswith("simulator")]
    for policy, load in sorted({(row["policy"], row["load"]) for row in live}):
        where = {"policy": policy, "load": load}
        kinds = [f"{prefix}{live[0]['kind']}" for prefix in ("", "simulator of ")]
        ttft, hits = (
            [mean_of(rows, column, kind=kind, **where) for kind in kinds] for column in ("ttft_s_p50", "hit_rate")
        )
        off, points = ttft[1] / ttft[0] - 1, 100 * (hits[1] - hits[0])
        holds = abs(off) <= TTFT_TOLERANCE and abs(points) <= HIT_TOLERANCE_POINTS
        lines.append(
            f"{policy}, load {load:g}: TTFT p50 live {ttft[0]:.3f} s, simulator {ttft[1]:.3f} s ({off:+.0%}); hit rate "
            f"{hits[0]:.3f}, {hits[1]:.3f} ({points:+.1f} points): {'holds' if holds else 'DOES NOT HOLD'}"
        )
    return "\n".join(lines)


def mean_of(rows: list[dict[str, Any]], column: str, **where: Any) -> float:
    return statistics.mean(row[column] for row in rows if all(row[name] == value for name, value in where.items()))


def summary(rows: list[dict[str, Any]]) -> Table:
    """Means over the seeds."""
    columns = COLUMNS[5:]
    table = Table("kind", "load", "policy", *columns)
    cases = sorted({(row["kind"], row["load"], row["policy"]) for row in rows})
    for kind, load, policy in sorted(cases, key=lambda case: (*case[:2], ALL_POLICIES.index(case[2]))):
        figures = [mean_of(rows, column, kind=kind, load=load, policy=policy) for column in columns]
        table.add_row(kind, f"{load:g}", policy, *(f"{figure:.4g}" for figure in figures))
    return table


def panels(rows: list[dict[str, Any]]) -> list[Panel]:
    """Time to the first token and goodput over load, for each kind; means over the seeds."""
    made = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        loads = sorted({row["load"] for row in rows if row["kind"] == kind})
        policies = [p for p in ALL_POLICIES if any(row["kind"] == kind and row["policy"] == p for row in rows)]
        for column, label in (("ttft_s_mean", "mean TTFT, s"), ("goodput_rps", f"answers/s within {SLO_TTFT_S:g} s")):
            lines = {
                policy: [(load, mean_of(rows, column, kind=kind, load=load, policy=policy)) for load in loads]
                for policy in policies
            }
            made.append(Panel(title=kind, x_label="load", y_label=label, lines=lines))
    return made


def headline(rows: list[dict[str, Any]]) -> str:
    """Mean time to the first token of `prefix` over that of each other, at the highest load of the first kind."""
    kind = rows[0]["kind"]
    load = max(row["load"] for row in rows if row["kind"] == kind)
    where = {"kind": kind, "load": load}
    policies = sorted({row["policy"] for row in rows if row["kind"] == kind} - {"prefix"}, key=ALL_POLICIES.index)
    ours = mean_of(rows, "ttft_s_mean", policy="prefix", **where)
    ratios = ", ".join(f"{ours / mean_of(rows, 'ttft_s_mean', policy=p, **where):.2f} of {p}" for p in policies)
    replicas = next(row["replicas"] for row in rows)
    return f"live, {kind}, {replicas} replicas, load {load:g}: mean TTFT of prefix is {ours:.3f} s; {ratios}"
