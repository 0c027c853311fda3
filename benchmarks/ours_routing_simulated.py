"""Which routing policy serves prompts that begin alike best? On a virtual clock, by the live router's own policy code.

All figures are simulated: the model of the engine is that of router/simulator.py. Workloads: `conversation` (Mooncake's
trace, at its own times), `prompts` (15 prompts of 250 to 2,700 tokens, the lengths of ../shared/workloads, by Zipf's
law; above 16 replicas 15 more for each 8 replicas), `unshared` (no two prompts begin alike), `hot` (one prompt for
everybody), `flood` (a tenant sends long prompts of its own beside `prompts`; times are those of the others), `churn`
(`prompts`; a replica dies, one joins).

Load is the offered prompt work over what the replicas could compute if nothing were cached, for `conversation` and
`unshared`, and over what they could compute if all shared prompts were cached, for the others; with a step for each
request, which requests that wait together share. With several routers reports come once a second, else twice.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chunkserve.replica.protocol import StepTime
from chunkserve.router.policy import POLICIES
from chunkserve.router.simulated_replica import SimConfig, SimRequest
from chunkserve.router.simulator import Simulator
from chunkserve.router.workloads import TRACE_CHUNK_TOKENS, merged, mooncake, shared_prompts, unshared
from rows import write_rows

SHARED = Path(__file__).resolve().parents[1] / "../shared"
# A small model on a small GPU; 12,800 tokens of cache per replica.
STEP = StepTime(fixed_s=0.008, per_token_s=1e-4, per_context_s=1e-9, per_sequence_s=1e-4)
CHUNK = 64
CACHE_CHUNKS = 200
QUESTION_TOKENS = 60
FLOOD_TOKENS = 8000
SLO_TTFT_S = 1.0
# Of one router, and of several.
REPORT_PERIOD_S = (0.5, 1.0)
SEEDS = range(3)
# Policies that look at the cache, and the two ends of those that do not.
FEW = ["prefix", "threshold", "product", "least_loaded", "random"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload on one cluster, for several policies. config.policy is put in later."""

    workload: str
    load: float
    seed: int
    config: SimConfig
    requests: list[SimRequest]
    slo_ttft_s: float = SLO_TTFT_S


def prompt_lengths() -> list[int]:
    """Tokens of the 15 real prompts, at 3.7 characters a token; those lengths as they are where the file is not."""
    path = SHARED / "workloads/prompts.jsonl"
    if not path.exists():
        return [2541, 790, 760, 776, 932, 700, 1050, 1852, 887, 700, 517, 1744, 2112, 1489, 244]
    return [int(len(json.loads(line)["text"]) / 3.7) for line in path.read_text().splitlines()]


def generated(name: str, load: float, replicas: int, routers: int, seed: int, num_requests: int) -> Case:
    config = SimConfig(
        policy="prefix",
        num_replicas=replicas,
        num_routers=routers,
        chunk_size=CHUNK,
        chunks_per_replica=CACHE_CHUNKS,
        step=STEP,
        max_waiting=256,
        report_period_s=REPORT_PERIOD_S[routers > 1],
        seed=seed,
        max_entries=200_000,
    )
    new_tokens = 1000 if name == "unshared" else QUESTION_TOKENS + CHUNK / 2
    steps = math.ceil(new_tokens / config.max_step_tokens)
    rate = load * replicas / (steps * STEP.fixed_s + STEP.per_token_s * new_tokens)
    common: dict[str, Any] = {"num_requests": num_requests, "rate_rps": rate, "chunk_size": CHUNK, "seed": seed}
    if name == "unshared":
        requests = unshared(**common)
    elif name == "hot":
        requests = shared_prompts([2000], question_tokens=QUESTION_TOKENS, **common)
    else:
        lengths = prompt_lengths() * max(1, replicas // 8 if replicas > 16 else 1)
        requests = shared_prompts(lengths, question_tokens=QUESTION_TOKENS, **common)
    if name == "flood":
        # Half of what the replicas can compute, for the middle third of the time.
        third_s = requests[-1].at_s / 3
        flood_rps = 0.5 * replicas / (FLOOD_TOKENS * STEP.per_token_s)
        flood = unshared(
            num_requests=int(flood_rps * third_s), rate_rps=flood_rps, chunk_size=CHUNK, prompt_tokens=FLOOD_TOKENS,
            seed=seed, begin_s=third_s, name="flood",
        )  # fmt: skip
        requests = list(merged(requests, [replace(request, is_background=True) for request in flood]))
    return Case(workload=name, load=load, seed=seed, config=config, requests=requests)


def conversation(load: float, replicas: int, routers: int, limit: int | None) -> Case:
    requests = mooncake(SHARED / "traces/mooncake/conversation_trace.jsonl", limit=limit)
    tokens_per_s = sum(request.prompt_tokens for request in requests) / requests[-1].at_s
    config = SimConfig(
        policy="prefix",
        num_replicas=replicas,
        num_routers=routers,
        chunk_size=TRACE_CHUNK_TOKENS,
        chunks_per_replica=1500,
        step=StepTime(fixed_s=0.0, per_token_s=load * replicas / tokens_per_s),
        max_step_tokens=8192,
        decode_token_s=0.02,
        report_period_s=REPORT_PERIOD_S[routers > 1],
        max_entries=200_000,
    )
    return Case(workload="conversation", load=load, seed=0, config=config, requests=requests, slo_ttft_s=10.0)


def cases(quick: bool) -> Iterator[tuple[Case, list[str]]]:
    every = list(POLICIES)
    trace = (SHARED / "traces/mooncake/conversation_trace.jsonl").exists()
    if quick:
        yield generated("prompts", 0.5, 8, 1, 0, 3000), every
        yield generated("unshared", 0.8, 8, 1, 0, 1000), ["prefix", "least_loaded"]
        if trace:
            yield conversation(1.06, 8, 1, 2500), ["prefix", "threshold", "least_loaded"]
        return
    for seed in SEEDS:
        for load in (0.25, 0.5, 0.6):
            yield generated("prompts", load, 8, 1, seed, 4000), every
        yield generated("unshared", 0.8, 8, 1, seed, 4000), ["prefix", "least_loaded", "random"]
        yield generated("hot", 0.8, 8, 1, seed, 4000), every
        yield generated("flood", 0.3, 8, 1, seed, 3000), FEW
        yield generated("churn", 0.4, 8, 1, seed, 4000), FEW
        for routers in (1, 4, 16, 64):
            yield generated("prompts", 0.4, 16, routers, seed, 6000), ["prefix"]
        yield generated("prompts", 0.5, 100, 1, seed, 10_000), ["prefix", "threshold"]
        yield generated("prompts", 0.5, 1000, 1, seed, 10_000), ["prefix", "threshold"]
    yield generated("prompts", 0.5, 5000, 1, 0, 10_000), ["prefix", "threshold"]
    if trace:
        yield conversation(0.5, 8, 1, None), FEW
        for replicas in (8, 32):
            yield conversation(1.06, replicas, 1, None), FEW
        for routers in (1, 16):
            yield conversation(0.94, 16, routers, None), ["prefix"]


def row_of(case: Case, policy: str) -> dict[str, Any]:
    sim = Simulator(replace(case.config, policy=policy), time.thread_time)
    if case.workload == "churn":
        middle_s = case.requests[len(case.requests) // 2].at_s
        sim.at(middle_s, sim.kill_replica, "replica-1")
        sim.at(1.25 * middle_s, sim.add_replica, "replica-new")
    begin_s = time.perf_counter()
    result = sim.run(case.requests)
    decisions = sorted(sim.decision_s)
    within = sum(ttft <= case.slo_ttft_s for ttft in result.ttft_s)
    token_s = sorted(result.token_s)
    return {
        "kind": "simulated",
        "workload": case.workload,
        "policy": policy,
        "replicas": case.config.num_replicas,
        "routers": case.config.num_routers,
        "load": case.load,
        "seed": case.seed,
        "requests": len(case.requests),
        "goodput_rps": round(within / sim.now_s, 3),
        "slo_ttft_s": case.slo_ttft_s,
        "rejected_share": result.rejected / len(case.requests),
        "failed_share": result.failed / len(case.requests),
        "ttft_s_mean": round(result.ttft_s_mean, 4),
        "ttft_s_p50": round(result.ttft_s_at(0.5), 4),
        "ttft_s_p95": round(result.ttft_s_at(0.95), 4),
        "ttft_s_p99": round(result.ttft_s_at(0.99), 4),
        "tpot_s_p50": round(token_s[len(token_s) // 2], 5) if token_s else None,
        "computed_tokens_per_request": round(
            (result.prompt_tokens - result.cached_tokens) / max(1, len(result.ttft_s)), 1
        ),
        "hit_rate": round(result.hit_rate, 4),
        "stale_share": result.stale_hits / len(case.requests),
        "max_over_mean_work": round(result.max_over_mean_work, 3),
        "decision_us_p50": round(decisions[len(decisions) // 2] * 1e6),
        "decision_us_p99": round(decisions[int(0.99 * (len(decisions) - 1))] * 1e6),
        "wall_s": round(time.perf_counter() - begin_s, 1),
    }


def mean_of(rows: list[dict[str, Any]], column: str, **where: Any) -> float:
    """Over the seeds."""
    return statistics.mean(row[column] for row in rows if all(row[name] == value for name, value in where.items()))


def summary(rows: list[dict[str, Any]]) -> Table:
    """Means over the seeds."""
    case = ("workload", "replicas", "routers", "load", "policy")
    columns = (
        "goodput_rps", "rejected_share", "ttft_s_mean", "ttft_s_p50", "ttft_s_p95", "hit_rate", "max_over_mean_work",
        "decision_us_p99",
    )  # fmt: skip
    table = Table(*case, *columns)
    for key in dict.fromkeys(tuple(row[name] for name in case) for row in rows):
        where = dict(zip(case, key, strict=True))
        table.add_row(*map(str, key), *(f"{mean_of(rows, column, **where):.4g}" for column in columns))
    return table


def verdicts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What was aimed at, and what came; means over the seeds."""

    def line(text: str, value: float, bound: float, holds: bool) -> str:
        return f"{text}: {value:.3g} (target {bound:g}): {'met' if holds else 'MISSED'}"

    eight = {"workload": "prompts", "replicas": 8, "routers": 1}
    for load in sorted({row["load"] for row in rows if row["workload"] == "prompts" and row["replicas"] == 8})[-2:]:
        ours = mean_of(rows, "ttft_s_mean", policy="prefix", load=load, **eight)
        for other, bound in (("threshold", 0.6), ("random", 0.25)):
            ratio = ours / mean_of(rows, "ttft_s_mean", policy=other, load=load, **eight)
            yield line(f"prompts, load {load:g}: mean TTFT over that of {other}, at most", ratio, bound, ratio <= bound)
        goodput = mean_of(rows, "goodput_rps", policy="prefix", load=load, **eight)
        ratio = goodput / mean_of(rows, "goodput_rps", policy="threshold", load=load, **eight)
        yield line(f"prompts, load {load:g}: goodput over that of threshold, at least", ratio, 1, ratio >= 1)
    ratio = mean_of(rows, "ttft_s_mean", workload="unshared", policy="prefix")
    ratio /= mean_of(rows, "ttft_s_mean", workload="unshared", policy="least_loaded")
    yield line("no sharing: mean TTFT over that of least_loaded, at most", ratio, 1.02, ratio <= 1.02)
    many = [row for row in rows if row["workload"] == "prompts" and row["replicas"] == 16]
    for routers in sorted({row["routers"] for row in many} - {1}):
        ratio = mean_of(many, "hit_rate", routers=routers) / mean_of(many, "hit_rate", routers=1)
        yield line(f"{routers} routers: hit rate over that of one, at least", ratio, 0.95, ratio >= 0.95)
    # Where a replica dies the others have more to do, and with few requests each some have more by chance.
    steady = [row for row in rows if row["policy"] == "prefix" and row["workload"] != "churn"]
    worst = max(row["max_over_mean_work"] for row in steady if row["requests"] >= 100 * row["replicas"])
    yield line("most work of a replica over the mean, in any run of 100 requests a replica", worst, 1.3, worst <= 1.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write flat rows")
    args = parser.parse_args()
    columns = (
        "workload", "policy", "replicas", "routers", "load", "seed", "goodput_rps", "rejected_share", "ttft_s_mean",
        "ttft_s_p50", "ttft_s_p95", "hit_rate", "max_over_mean_work", "decision_us_p50", "decision_us_p99", "wall_s",
    )  # fmt: skip
    print(" ".join(columns))
    rows = []
    for case, policies in cases(args.quick):
        for policy in policies:
            rows.append(row_of(case, policy))
            print(" ".join(str(rows[-1][column]) for column in columns), flush=True)
    if args.json:
        write_rows(args.json, rows)
    Console(width=200).print(summary(rows))
    for line in verdicts(rows):
        print(f"simulated, {line}")


if __name__ == "__main__":
    main()
