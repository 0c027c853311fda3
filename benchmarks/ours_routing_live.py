"""Which routing policy serves prompts that begin alike best? On a real Ray Serve application of this machine.

Prompts: the 15 prompts and 2,530 questions of ../shared/workloads, prompts by Zipf's law, open-loop Poisson arrivals.
All of it is the real server (HTTP, ingress, tokenizer, router, engine, prefix tree, streams), twice:

- `simulated steps`: 4 replicas whose model computes nothing; each step takes the time of a cost model, since two cores
  do not compute for four. Tree, scheduler and everything else are real; answers mean nothing.
- `smollm2` (`--real`): the small real model, 2 replicas with a thread each.

Every policy is asked the same at the same times, in shuffled order, at each load under a cache_salt of its own: it
begins with cold caches, and each prompt is asked for once before the clock starts. Then the seeds come one after the
other, so later ones find what the earlier ones left. `ray_prefix` is Ray Serve LLM's PrefixCacheAffinityRouter. Load is
the offered work over what the replicas could do if all shared parts were cached; with `--unshared`, where no two
requests share anything, over what they could do at all.

`--validate` runs the simulator on what live arms were asked. What steps cost is the replicas' own fit; the way between
client and engine under load is fitted on other seeds of `prefix`, which run before, between and after the arms.
"""

import argparse
import itertools
import logging
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chunkserve.deploy.launcher import RAY_ENVIRONMENT

# Before Ray is imported.
os.environ.update(RAY_ENVIRONMENT)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console

from chunkserve.deploy.small_model import ensure_small_model
from chunkserve.replica.protocol import StepTime
from chunkserve.replica.tokenizer import Tokenizer
from chunkserve.router.simulator import SimResult
from live_arms import Arm, Questions
from live_report import ALL_POLICIES, COLUMNS, headline, panels, row_of, simulated_row, summary, verdict
from live_server import OUTPUT_TOKENS, REAL, SIMULATED, Fleet, Run, Server, deployed, ray_session
from live_simulated import Fit, fitted_transit_s, simulated
from plots import draw, require_matplotlib
from rows import write_rows

# Seeds of the arms that the way is fitted on.
CALIBRATION_SEEDS = (1000, 1001, 1002)


def arm_of(fleet: Fleet, questions: Questions, args: argparse.Namespace, policy: str, load: float, seed: int) -> Arm:
    """Arms of one load and seed ask the same."""
    rate_rps = fleet.rate_rps(load, questions.mean_tokens) if args.unshared else fleet.rate_rps(load)
    warmup = () if args.unshared else questions.warmup(seed=seed, output_tokens=OUTPUT_TOKENS)
    asks = questions.asks(rate_rps=rate_rps, seconds=args.seconds, seed=seed, output_tokens=OUTPUT_TOKENS)
    return Arm(policy=policy, load=load, seed=seed, warmup=warmup, asks=asks)


def measure(
    server: Server, questions: Questions, args: argparse.Namespace, loads: Sequence[float], policies: Sequence[str]
) -> list[dict[str, Any]]:
    """Policies and loads in shuffled order; a policy's seeds at one load come together, over one cache."""
    rows, draw = [], random.Random(0)
    cases = list(itertools.product(policies, loads))
    for policy, load in draw.sample(cases, len(cases)):
        salt = None
        for seed in draw.sample(range(args.seeds), args.seeds):
            arm = arm_of(server.fleet, questions, args, policy, load, seed)
            is_first = salt is None
            if salt is None or args.unshared:
                salt = server.salt(arm)
            run = server.run(arm, salt, warm_up=is_first)
            rows.append(row_of(server.fleet, run, "unshared" if args.unshared else "prompts"))
            print(" ".join(str(rows[-1][column]) for column in COLUMNS), flush=True)
    return rows


def validate(
    server: Server, questions: Questions, args: argparse.Namespace, loads: Sequence[float], policies: Sequence[str]
) -> list[dict[str, Any]]:
    """Live arms and the simulator on the same requests, a row each."""
    config, rows = server.fleet.config(), []

    def simulate(run: Run, fit: Fit) -> SimResult:
        return simulated(
            run.arm, run.begin_s, fit, replicas=server.fleet.replicas, chunk_size=config.chunk_size_tokens,
            chunks=config.kv_pool_chunks or 0, max_step_tokens=int(config.max_step_tokens),
        )  # fmt: skip

    def run_of(policy: str, load: float, seed: int) -> Run:
        arm = arm_of(server.fleet, questions, args, policy, load, seed)
        return server.run(arm, server.salt(arm), warm_up=True)

    draw = random.Random(0)
    for load in loads:
        cases = list(itertools.product(policies, range(args.first_seed, args.first_seed + args.seeds)))
        draw.shuffle(cases)
        runs, calibration = [], [run_of("prefix", load, CALIBRATION_SEEDS[0])]
        for half, seed in zip((cases[: len(cases) // 2], cases[len(cases) // 2 :]), CALIBRATION_SEEDS[1:], strict=True):
            runs += [run_of(policy, load, seed) for policy, seed in half]
            calibration.append(run_of("prefix", load, seed))
        step = server.step()
        medians_s = [
            float(np.median([answer.sample.ttft_s for answer in run.answers if answer.sample is not None]))
            for run in calibration
        ]

        def simulated_runs(transit_s: float, step: StepTime = step, runs: list[Run] = calibration) -> list[SimResult]:
            return [simulate(run, Fit(step=step, transit_s=transit_s)) for run in runs]

        transit_s = fitted_transit_s(medians_s, simulated_runs)
        print(f"load {load:g}, fitted: {step}; one way between client and engine {transit_s:.4f} s")
        for run in runs:
            result, live = simulate(run, Fit(step=step, transit_s=transit_s)), row_of(server.fleet, run, "prompts")
            rows += [live, simulated_row(result, live, len(run.answers))]
            for row in rows[-2:]:
                print(" ".join(str(row[column]) for column in COLUMNS), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="two replicas, one load, one seed, two policies, under a minute"
    )
    parser.add_argument("--real", action="store_true", help="the small real model as well")
    parser.add_argument("--only-real", action="store_true", help="the small real model alone")
    parser.add_argument(
        "--unshared", action="store_true", help="a cache_salt for each request; load is that of whole prompts"
    )
    parser.add_argument("--validate", action="store_true", help="run the simulator on the same requests, and compare")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write flat rows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG, SVG or PDF; needs matplotlib")
    parser.add_argument("--replicas", type=int, default=SIMULATED.replicas, help="with simulated steps")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.8])
    parser.add_argument("--policies", nargs="+", choices=ALL_POLICIES, default=list(ALL_POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="of --validate, to repeat it on new ones")
    parser.add_argument("--seconds", type=float, default=4.0, help="of arrivals for each seed")
    parser.add_argument("--prompts", type=int, default=15, help="how many of the prompts are used")
    args = parser.parse_args()
    require_matplotlib(args.plot)
    if args.unshared and args.validate:
        parser.error("--unshared: the simulator knows shared prompts only, so there is nothing to --validate")
    if args.quick:
        args.loads, args.seeds, args.seconds, args.prompts = [0.3], 1, 1.5, 2
        args.policies, args.replicas = ["prefix", "least_loaded"], 2
    # A line per request is too much.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    tokenizer = Tokenizer(ensure_small_model())
    questions = Questions(tokenizer, args.prompts)
    rows: list[dict[str, Any]] = []
    with ray_session() as url:
        fleets = [] if args.only_real else [replace(SIMULATED, replicas=args.replicas)]
        for fleet in [*fleets, *([REAL] if args.real or args.only_real else [])]:
            print(f"{fleet.replicas} replicas, {fleet.kind}" + (f": {fleet.step}" if fleet.is_simulated else ""))
            print(" ".join(COLUMNS))
            with deployed(fleet, url, unshared=args.unshared) as server:
                server.check(questions, tokenizer)
                run = validate if args.validate else measure
                rows += run(server, questions, args, args.loads, args.policies)
    if args.json:
        write_rows(args.json, rows)
    if args.validate:
        print(verdict(rows))
        return
    if args.plot:
        draw(args.plot, "Routing policies on a live server", panels(rows))
    Console(width=250).print(summary(rows))
    print(headline(rows))


if __name__ == "__main__":
    main()
