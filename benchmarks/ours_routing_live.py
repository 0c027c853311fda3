"""Which routing policy serves prompts that begin alike best? On a real Ray Serve application of this machine.

Prompts: the 15 prompts and 2,530 questions of ../shared/workloads, prompts by Zipf's law, open-loop Poisson arrivals.
All of it is the real server (HTTP, ingress, tokenizer, router, engine, prefix tree, streams), twice:

- `simulated steps`: 4 replicas whose model computes nothing; each step takes the time of a cost model, since two cores
  do not compute for four. Tree, scheduler and everything else are real; answers mean nothing.
- `smollm2` (`--real`): the small real model, 2 replicas with a thread each.

Every policy is asked the same at the same times, in shuffled order, at each load under a cache_salt of its own: it
begins with cold caches, and each prompt is asked for once before the clock starts. Then the seeds come one after the
other, so later ones find what the earlier ones left. `ray_prefix` is Ray Serve LLM's PrefixCacheAffinityRouter. Load is
the offered work over what the replicas could do if all shared parts were cached.

`--validate` runs the simulator on what live arms were asked. What steps cost is the replicas' own fit; the way between
client and engine under load is fitted on other seeds of `prefix`, which run before, between and after the arms.
"""

import argparse
import asyncio
import itertools
import logging
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chunkserve.deploy.launcher import RAY_ENVIRONMENT

# Before Ray is imported.
os.environ.update(RAY_ENVIRONMENT)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import numpy as np
import ray
from live_arms import RAY_PREFIX, Arm, ArmRouter, Ask, Questions
from live_simulated import Fit, fitted_transit_s, simulated
from plots import Panel, draw, require_matplotlib
from ray import serve
from rich.console import Console
from rich.table import Table
from rows import write_rows

from chunkserve.deploy.app import application
from chunkserve.deploy.config import ServeConfig
from chunkserve.deploy.load_client import Connection, LoadError, Sample, Target
from chunkserve.deploy.local_server import loopback_port
from chunkserve.deploy.small_model import ensure_small_model
from chunkserve.replica.fake import FakeModelRunner
from chunkserve.replica.protocol import StepTime
from chunkserve.replica.tokenizer import Tokenizer
from chunkserve.router.policy import POLICIES
from chunkserve.router.simulator import SimResult

SLO_TTFT_S = 1.0
# Until routers have heard of all: a report, and a delta.
SETTLE_S = 1.1
# Seeds of the arms that the way is fitted on.
CALIBRATION_SEEDS = (1000, 1001, 1002)
# How near the simulator must come.
TTFT_TOLERANCE = 0.15
HIT_TOLERANCE_POINTS = 2.0
# A prompt's own part: the question, the end of the template, and what lies behind the last full chunk.
OWN_TOKENS = 90
OUTPUT_TOKENS = (8, 24)
REFUSED = "status 429"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Replicas of one kind. step: what their steps cost; simulated, or about what they take."""

    kind: str
    replicas: int
    step: StepTime
    is_simulated: bool

    def config(self) -> ServeConfig:
        return ServeConfig(
            num_replicas=self.replicas, num_threads=1, max_sequence_tokens=4096, kv_pool_chunks=200,
            max_step_tokens=256 if self.is_simulated else 128, log_level="warning",
        )  # fmt: skip

    def rate_rps(self, load: float) -> float:
        step, output = self.step, statistics.mean(OUTPUT_TOKENS)
        seconds = step.fixed_s + step.per_token_s * OWN_TOKENS + output * (step.per_token_s + step.per_sequence_s)
        return load * self.replicas / seconds


SIMULATED = Fleet(
    kind="simulated steps",
    replicas=4,
    step=StepTime(fixed_s=0.04, per_token_s=8e-4, per_sequence_s=3e-4),
    is_simulated=True,
)
REAL = Fleet(
    kind="smollm2", replicas=2, step=StepTime(fixed_s=0.03, per_token_s=1.5e-3, per_sequence_s=5e-3), is_simulated=False
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of an Ask: a sample, or why there is none."""

    ask: Ask
    sample: Sample | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of an arm. begin_s: from the first warm-up request to the begin of the measured ones."""

    arm: Arm
    answers: list[Answer]
    begin_s: float


class Server:
    """A deployed fleet, and the arms that have run on it."""

    def __init__(self, fleet: Fleet, url: str) -> None:
        self.fleet = fleet
        self.url = url
        self._target = replace(Target.parse(url), headers={"x-chunkserve-explain": "1"})
        self._numbers = itertools.count()

    def status(self) -> dict[str, dict[str, Any]]:
        """ReplicaLoad of each replica."""
        return httpx.get(f"{self.url}/status", timeout=30).json()["replicas"]

    def total(self, *fields: str) -> int:
        return sum(load[field] for load in self.status().values() for field in fields)

    def salt(self, arm: Arm) -> str:
        """One that is nobody else's."""
        return arm.salt(next(self._numbers))

    def run(self, arm: Arm, salt: str, *, warm_up: bool) -> Run:
        """Ask, and see that the server counted what was asked."""
        prompts, generated = ("computed_prompt_tokens", "cached_prompt_tokens"), ("generated_tokens",)
        before = self.total(*prompts), self.total(*generated)
        warmup, run = asyncio.run(self._run(arm, salt, arm.warmup if warm_up else ()))
        answers = [*warmup, *run.answers]
        samples = [(answer.ask, answer.sample) for answer in answers if answer.sample is not None]
        for ask, sample in samples:
            got = sample.prompt_tokens, sample.completion_tokens
            if got != (len(ask.token_ids), ask.output_tokens) or sample.cached_tokens >= sample.prompt_tokens:
                raise SystemExit(
                    f"{arm.policy}: {sample} does not fit {len(ask.token_ids)}, {ask.output_tokens} tokens"
                )
            if (seen := int(sample.headers["x-chunkserve-cached-tokens"])) != sample.cached_tokens:
                raise SystemExit(
                    f"{arm.policy}: {seen} cached tokens in the headers, {sample.cached_tokens} in the usage"
                )
        if len(samples) == len(answers):
            asked = sum(len(ask.token_ids) for ask, _ in samples), sum(ask.output_tokens for ask, _ in samples)
            counted = self.total(*prompts) - before[0], self.total(*generated) - before[1]
            if counted != asked:
                raise SystemExit(f"{arm.policy}: the replicas count {counted} tokens, asked were {asked}")
        return run

    async def _run(self, arm: Arm, salt: str, first: Sequence[Ask]) -> tuple[list[Answer], Run]:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        warmup = await self._ask(first, salt)
        if warmup:
            await asyncio.sleep(SETTLE_S)
        begin_s = loop.time() - start_s
        return warmup, Run(arm=arm, answers=await self._ask(arm.asks, salt), begin_s=begin_s)

    async def _ask(self, asks: Sequence[Ask], salt: str) -> list[Answer]:
        idle: list[Connection] = []
        loop = asyncio.get_running_loop()
        start_s = loop.time()

        async def one(ask: Ask) -> Answer:
            await asyncio.sleep(start_s + ask.at_s - loop.time())
            connection = idle.pop() if idle else Connection(self._target)
            try:
                return Answer(ask=ask, sample=await connection.stream("/v1/chat/completions", _body(ask, salt)))
            except LoadError as error:
                return Answer(ask=ask, error=str(error))
            finally:
                idle.append(connection)

        answers = await asyncio.gather(*map(one, asks))
        for connection in idle:
            await connection.close()
        return list(answers)

    def step(self) -> StepTime:
        """What steps cost, by the replicas' own fits."""
        found = [load["step"] for load in self.status().values() if load["steps"]]
        return StepTime(**{name: statistics.mean(one[name] for one in found) for name in found[0]})

    def check(self, questions: Questions, tokenizer: Tokenizer) -> None:
        """Answers are right, cold and warm, before anything is timed."""
        asks = questions.warmup(seed=-1, output_tokens=OUTPUT_TOKENS)[:3]
        if not self.fleet.is_simulated:
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            ids = tokenizer.render_chat(messages)
            asks = [Ask(at_s=0, messages=messages, prompt=0, token_ids=ids, output_tokens=7)]
        model = FakeModelRunner(vocab_size=tokenizer.vocab_size, num_slots=1, chunk_size=16)
        for ask, policy in zip(asks, ("prefix", "round_robin", RAY_PREFIX), strict=False):
            salt = f"{policy}/check"
            ids = list(ask.token_ids)
            for _ in range(ask.output_tokens):
                ids.append(model.next_token(salt, ids))
            wanted = tokenizer.decode(ids[len(ask.token_ids) :])
            for _ in ("cold", "warm"):
                body = _body(ask, salt) | {"stream": False, "stream_options": None}
                reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120).json()
                text = reply["choices"][0]["message"]["content"]
                if text != (wanted if self.fleet.is_simulated else "The capital of France is Paris."):
                    raise SystemExit(
                        f"{self.fleet.kind}: the answer is {text!r}, expected {wanted!r}; nothing is timed"
                    )


def _body(ask: Ask, salt: str) -> dict[str, Any]:
    return {
        "messages": ask.messages, "max_tokens": ask.output_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt,
    }  # fmt: skip


@contextmanager
def ray_session() -> Iterator[str]:
    """Ray and Serve of one's own; the URL of their proxy. They end with the block."""
    # Names of Unix sockets are short, and Ray's lie deep in its folder.
    with (
        loopback_port() as port,
        tempfile.TemporaryDirectory(prefix="cs", dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        ray.init(_temp_dir=folder, include_dashboard=False, log_to_driver=False, logging_level="warning", num_cpus=64)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def deployed(fleet: Fleet, url: str) -> Iterator[Server]:
    step = fleet.step if fleet.is_simulated else None
    serve.run(application(fleet.config(), router_class=ArmRouter, simulated_step=step), name="live", route_prefix="/")
    yield Server(fleet, url)
    serve.delete("live")


def row_of(fleet: Fleet, run: Run) -> dict[str, Any]:
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
        "workload": "prompts",
        "policy": arm.policy,
        "replicas": fleet.replicas,
        "routers": 1,
        "load": arm.load,
        "seed": arm.seed,
        "requests": len(measured),
        "rate_rps": round(fleet.rate_rps(arm.load), 3),
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


def arm_of(fleet: Fleet, questions: Questions, args: argparse.Namespace, policy: str, load: float, seed: int) -> Arm:
    """Arms of one load and seed ask the same."""
    warmup = questions.warmup(seed=seed, output_tokens=OUTPUT_TOKENS)
    asks = questions.asks(
        rate_rps=fleet.rate_rps(load), seconds=args.seconds, seed=seed, output_tokens=OUTPUT_TOKENS
    )  # fmt: skip
    return Arm(policy=policy, load=load, seed=seed, warmup=warmup, asks=asks)


COLUMNS = (
    "kind", "policy", "load", "seed", "requests", "goodput_rps", "rejected_share", "ttft_s_mean", "ttft_s_p50",
    "ttft_s_p95", "ttft_s_p99", "tpot_s_p50", "tpot_s_p95", "tpot_s_p99", "computed_tokens_per_request", "hit_rate",
    "max_over_mean_work", "decision_us_p99",
)  # fmt: skip


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
            salt = salt or server.salt(arm)
            rows.append(row_of(server.fleet, server.run(arm, salt, warm_up=is_first)))
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
        transit_s = fitted_transit_s(
            medians_s,
            lambda transit_s, step=step, runs=calibration: [
                simulate(run, Fit(step=step, transit_s=transit_s)) for run in runs
            ],
        )
        print(f"load {load:g}, fitted: {step}; one way between client and engine {transit_s:.4f} s")
        for run in runs:
            result, live = simulate(run, Fit(step=step, transit_s=transit_s)), row_of(server.fleet, run)
            rows += [live, simulated_row(result, live, len(run.answers))]
            for row in rows[-2:]:
                print(" ".join(str(row[column]) for column in COLUMNS), flush=True)
    return rows


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


ALL_POLICIES = (*POLICIES, RAY_PREFIX)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="two replicas, one load, one seed, two policies, under a minute"
    )
    parser.add_argument("--real", action="store_true", help="the small real model as well")
    parser.add_argument("--only-real", action="store_true", help="the small real model alone")
    parser.add_argument("--validate", action="store_true", help="run the simulator on the same requests, and compare")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write flat rows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG, SVG or PDF; needs matplotlib")
    parser.add_argument("--replicas", type=int, default=SIMULATED.replicas, help="with simulated steps")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.15, 0.3, 0.45])
    parser.add_argument("--policies", nargs="+", choices=ALL_POLICIES, default=list(ALL_POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="of --validate, to repeat it on new ones")
    parser.add_argument("--seconds", type=float, default=4.0, help="of arrivals for each seed")
    parser.add_argument("--prompts", type=int, default=15, help="how many of the prompts are used")
    args = parser.parse_args()
    require_matplotlib(args.plot)
    if args.quick:
        args.loads, args.seeds, args.seconds, args.prompts = [0.3], 1, 3.0, 4
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
            with deployed(fleet, url) as server:
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
