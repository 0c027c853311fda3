"""Which routing policy serves prompts that begin alike best? On a virtual clock, by the live router's own policy code.

All figures are simulated: the model of the engine is that of router/simulator.py. Workloads: `conversation` (Mooncake's
trace, at its own times), `prompts` (15 prompts of 250 to 2,700 tokens, the lengths of ../shared/workloads, by Zipf's
law), `unshared` (no two prompts begin alike), `hot` (one prompt for everybody), `churn` (a replica dies, one joins).

Load is the offered prompt work over what the replicas could compute if nothing were cached, for `conversation` and
`unshared`, and over what they could compute if all shared prompts were cached, for the others.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rows import write_rows

from chunkserve.replica.protocol import StepTime
from chunkserve.router.policy import POLICIES
from chunkserve.router.simulated_replica import SimConfig, SimRequest
from chunkserve.router.simulator import Simulator
from chunkserve.router.workloads import TRACE_CHUNK_TOKENS, mooncake, shared_prompts, unshared

SHARED = Path(__file__).resolve().parents[1] / "../shared"
# A small model on a small GPU; 12,800 tokens of cache per replica.
STEP = StepTime(fixed_s=0.008, per_token_s=1e-4, per_context_s=1e-9, per_sequence_s=1e-4)
CHUNK = 64
CACHE_CHUNKS = 200
QUESTION_TOKENS = 60
SLO_TTFT_S = 1.0


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
        seed=seed,
        max_entries=200_000,
    )
    new_tokens = 1000 if name == "unshared" else QUESTION_TOKENS + CHUNK / 2
    steps = math.ceil(new_tokens / config.max_step_tokens)
    rate = load * replicas / (steps * STEP.fixed_s + STEP.per_token_s * new_tokens)
    common = {"num_requests": num_requests, "rate_rps": rate, "chunk_size": CHUNK, "seed": seed}
    if name == "unshared":
        requests = unshared(**common)
    elif name == "hot":
        requests = shared_prompts([2000], question_tokens=QUESTION_TOKENS, **common)
    else:
        requests = shared_prompts(prompt_lengths(), question_tokens=QUESTION_TOKENS, **common)
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
        report_period_s=0.5 if routers == 1 else 1.0,
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
    for load in (0.25, 0.4, 0.5):
        for seed in range(3):
            yield generated("prompts", load, 8, 1, seed, 6000), every
    for seed in range(3):
        yield generated("unshared", 0.8, 8, 1, seed, 4000), ["prefix", "least_loaded", "random"]
    yield generated("hot", 0.8, 8, 1, 0, 6000), every
    yield generated("churn", 0.4, 8, 1, 0, 6000), ["prefix", "threshold", "least_loaded"]
    yield generated("prompts", 0.5, 100, 1, 0, 20_000), ["prefix", "threshold"]
    for routers in (1, 4, 16):
        yield generated("prompts", 0.4, 16, routers, 0, 8000), ["prefix"]
    if trace:
        for replicas in (8, 32):
            for load in (0.5, 1.06):
                yield conversation(load, replicas, 1, None), [p for p in every if p != "bounded_hash"]
        for routers in (1, 16):
            yield conversation(0.94, 16, routers, None), ["prefix"]


def row_of(case: Case, policy: str) -> dict[str, Any]:
    sim = Simulator(replace(case.config, policy=policy), time.perf_counter)
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


def headline(rows: list[dict[str, Any]]) -> str:
    """Mean time to the first token of `prefix` over that of the others, on the prompts near saturation."""
    load = max(row["load"] for row in rows if row["workload"] == "prompts" and row["replicas"] == 8)

    def mean(policy: str) -> float:
        chosen = [
            row["ttft_s_mean"]
            for row in rows
            if (row["workload"], row["replicas"], row["load"], row["policy"]) == ("prompts", 8, load, policy)
        ]
        return sum(chosen) / len(chosen)

    ours = mean("prefix")
    ratios = ", ".join(f"{ours / mean(other):.2f} of {other}" for other in ("threshold", "least_loaded", "random"))
    return f"simulated, prompts, 8 replicas, load {load}: mean TTFT of prefix is {ours:.3f} s; {ratios}"


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
    print(headline(rows))


if __name__ == "__main__":
    main()
