"""What the attention benchmarks share: shapes, batches, a pool of random K and V, the check, the clock and the floor.

Three systems are our kernel on other plans and pages:

    ours            shared chunks are read once for all sequences that hold them
    shared pages    sharing off, all sequences over the same physical chunks (the paper's PagedAttn*)
    separate pages  nothing shared physically (PagedAttn)

Systems run by turns, so that a busy machine slows them alike; the best time of each counts. Each begins with cold
caches, as a layer does whose K and V were last read one step and many layers ago. Otherwise a small case would find its
keys in the cache, or not, by what the system before it left there.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from chunkserve.kernels import _cpu
from chunkserve.kernels.cpu_ops import rounds_to_bfloat16
from chunkserve.kernels.cpu_tpp import MIN_SAVED_TOKENS
from chunkserve.kernels.dispatch import AttentionProblem, select_backend
from chunkserve.kernels.plan import AttentionPlan, Int32Array, PlanOptions, build_plan
from chunkserve.kernels.reference import TOLERANCE, oracle
from rows import write_rows

CHUNK = 64
DTYPES = (torch.float32, torch.bfloat16)
RANDOM_SLOTS = 61  # a prime: chunks of one sequence, and the same chunk of two, hold different numbers
COLD_BYTES = 96 << 20  # reading so much replaces what the caches hold
MIN_SECONDS = 0.3  # each case is repeated for so long at least, unless a benchmark says more
System = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = (
    Shape(name="llama2-7b", num_heads=32, num_kv_heads=32, head_dim=128),
    Shape(name="smollm2-135m", num_heads=9, num_kv_heads=3, head_dim=64),
)


PAPER_SHAPE = SHAPES[0].name


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What stays the same while batches change; K and V are of `dtype` where `kv_dtype` is None."""

    shape: Shape
    dtype: torch.dtype
    threads: int
    chunk_size: int = CHUNK
    kv_dtype: torch.dtype | None = None

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            device="cpu",
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            chunk_size=self.chunk_size,
        )

    @property
    def tolerance(self) -> float:
        """Largest error of our kernel at the instruction set in force."""
        rounds = self.problem.kv_dtype == torch.bfloat16 and rounds_to_bfloat16()
        return TOLERANCE[torch.bfloat16 if rounds else self.dtype]

    @property
    def columns(self) -> dict[str, Any]:
        return {"case": self.shape.name, "dtype": str(self.dtype).removeprefix("torch."), "threads": self.threads}


def all_settings(threads: Sequence[int]) -> list[Setting]:
    return [Setting(shape=s, dtype=d, threads=t) for s in SHAPES for t in threads for d in DTYPES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences that decode one token each, in depth-first order; the chunks of equal slots are shared.

    A path may be longer than its sequence: room for the tokens of later steps.
    """

    paths: tuple[Int32Array, ...]
    kv_lens: tuple[int, ...]
    chunk_size: int = CHUNK

    @property
    def num_slots(self) -> int:
        """Slots of a pool that holds these chunks and also, instead, those of `separate`."""
        return sum(len(path) for path in self.paths)

    def separate(self) -> "Batch":
        """The same lengths with no chunk in common."""
        borders = np.cumsum([len(path) for path in self.paths])[:-1]
        return replace(self, paths=tuple(np.split(np.arange(self.num_slots, dtype=np.int32), borders)))

    def at(self, kv_len: int) -> "Batch":
        return replace(self, kv_lens=(kv_len,) * len(self.paths))

    def plan(self, setting: Setting, *, share: bool = True) -> AttentionPlan:
        return build_plan(
            paths=self.paths,
            kv_lens=self.kv_lens,
            q_lens=[1] * len(self.paths),
            kv_present=self.kv_lens,
            chunk_size=self.chunk_size,
            options=PlanOptions(
                share=share,
                min_saved_tokens=MIN_SAVED_TOKENS,
                num_workers=setting.threads,
                heads_per_worker_item=setting.shape.num_kv_heads,
            ),
        )

    def token_counts(self) -> dict[str, int]:
        """Tokens to read when a chunk is read once, and (row, token) pairs; of shared chunks and of private ones."""
        tokens, slots = [], []
        for path, kv_len in zip(self.paths, self.kv_lens, strict=True):
            begins = np.arange(0, kv_len, self.chunk_size)
            tokens.append(np.minimum(kv_len - begins, self.chunk_size))
            slots.append(path[: len(begins)])
        all_tokens, all_slots = np.concatenate(tokens), np.concatenate(slots)
        holders = np.bincount(all_slots)[all_slots]
        shared = holders > 1
        return {
            "shared_read": round(float((all_tokens / holders)[shared].sum())),
            "shared_rows": int(all_tokens[shared].sum()),
            "private": int(all_tokens[~shared].sum()),
        }


def batch_of_runs(sequences: Sequence[Sequence[tuple[str, int]]], chunk_size: int = CHUNK) -> Batch:
    """Each sequence as runs (name, tokens), root first; equal names are the same chunks.

    A run that another one follows must be whole chunks.
    """
    slots: dict[str, Int32Array] = {}
    used = 0
    for runs in sequences:
        for name, tokens in runs:
            if name not in slots:
                end = used - (-tokens // chunk_size)
                slots[name] = np.arange(used, end, dtype=np.int32)
                used = end
    return Batch(
        paths=tuple(np.concatenate([slots[name] for name, _ in runs]) for runs in sequences),
        kv_lens=tuple(sum(tokens for _, tokens in runs) for runs in sequences),
        chunk_size=chunk_size,
    )


def one_prefix(batch: int, n_p: int, n_s: int) -> Batch:
    """The paper's workload: n_p tokens each, of which the first n_s, whole chunks, are shared by all."""
    return batch_of_runs([[("shared", n_s), (f"own {i}", n_p - n_s)] for i in range(batch)])


class Pool:
    """K and V of one layer, full of random numbers, and queries for as many sequences as any batch has.

    Sets the threads of our kernels and of torch.
    """

    def __init__(self, setting: Setting, *, num_slots: int, num_sequences: int) -> None:
        _cpu.set_num_threads(setting.threads)
        torch.set_num_threads(setting.threads)
        self.setting = setting
        self.backend = select_backend(setting.problem, "cpu")
        self.kv = self.backend.allocate(setting.problem, num_slots)
        for tiles, scales in ((self.kv.k, self.kv.k_scale), (self.kv.v, self.kv.v_scale)):
            # Drawing gigabytes of random numbers would take longer than measuring.
            tiles[:RANDOM_SLOTS] = torch.randn(tiles[:RANDOM_SLOTS].shape).to(tiles.dtype)
            if scales is not None:
                scales.fill_(1.0)
            for begin in range(RANDOM_SLOTS, num_slots, RANDOM_SLOTS):
                tiles[begin : begin + RANDOM_SLOTS] = tiles[: min(RANDOM_SLOTS, num_slots - begin)]
        shape = setting.shape
        self.q = torch.randn(num_sequences, shape.num_heads, shape.head_dim).to(setting.dtype)

    def attend(self, plan: AttentionPlan) -> Tensor:
        scale = self.setting.shape.head_dim**-0.5
        return self.backend.attend(self.q[: plan.num_rows], self.kv, plan, scale=scale)

    def system(self, batch: Batch, *, share: bool = True) -> System:
        plan = batch.plan(self.setting, share=share)
        return lambda: self.attend(plan)

    def systems(self, batch: Batch) -> dict[str, System]:
        return {
            "ours_us": self.system(batch),
            "shared_pages_us": self.system(batch, share=False),
            "separate_pages_us": self.system(batch.separate(), share=False),
        }

    def check(self, batch: Batch) -> None:
        """Raises RuntimeError when one of four sequences differs from the oracle: a wrong kernel is not timed."""
        out = self.attend(batch.plan(self.setting))
        limit = self.setting.tolerance
        for i in sorted(set(np.linspace(0, len(batch.paths) - 1, 4).astype(int).tolist())):
            want = oracle(
                self.q[i : i + 1],
                self.kv,
                self.backend,
                paths=batch.paths[i : i + 1],
                kv_lens=batch.kv_lens[i : i + 1],
                q_lens=[1],
            )
            error = float((out[i : i + 1].double() - want).abs().max())
            if not error <= limit:
                raise RuntimeError(f"{self.setting}: sequence {i} is off by {error}, allowed {limit}; not timed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Best time of each system after one warm-up; `spread` is median over best of the first."""

    best_us: dict[str, float]
    repeats: int
    spread: float

    @property
    def columns(self) -> dict[str, Any]:
        return {"warm_up": 1, "repeats": self.repeats, "spread": round(self.spread, 2)}


def empty_caches() -> None:
    _probe_buffer()[: COLD_BYTES // 4].sum()


def take_turns(systems: dict[str, System], repeats: int, seconds: float = MIN_SECONDS) -> Timing:
    """At least so many turns with cold caches, and more while they are short: a busy machine disturbs those most."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for system in systems.values():
        system()
    end = time.perf_counter() + seconds
    turns = 0
    while turns < repeats or time.perf_counter() < end:
        for name, system in systems.items():
            empty_caches()
            begin = time.perf_counter()
            system()
            times[name].append((time.perf_counter() - begin) * 1e6)
        turns += 1
    first = next(iter(times.values()))
    return Timing(
        best_us={name: min(t) for name, t in times.items()}, repeats=turns, spread=statistics.median(first) / min(first)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this machine can do at most, measured at the current number of threads."""

    read_gb_per_s: float
    multiply_gflop_per_s: float

    @classmethod
    def measure(cls, dtype: torch.dtype) -> "Limits":
        return cls(
            read_gb_per_s=max(_cpu.probe_read_gb_per_s(_probe_buffer()) for _ in range(3)),
            multiply_gflop_per_s=max(_cpu.probe_multiply_gflop_per_s(dtype == torch.bfloat16) for _ in range(3)),
        )

    @property
    def columns(self) -> dict[str, Any]:
        return {
            "isa": _cpu.isa(),
            "read_gb_per_s": round(self.read_gb_per_s, 2),
            "multiply_gflop_per_s": round(self.multiply_gflop_per_s, 1),
        }

    def rooflines_us(self, setting: Setting, batch: Batch) -> dict[str, float]:
        """Time of the whole at these limits; the serial one adds up the times of the shared and the private part."""
        shape, counts = setting.shape, batch.token_counts()

        def times_us(read_tokens: int, row_tokens: int) -> tuple[float, float]:
            kv_bytes = 2 * read_tokens * shape.num_kv_heads * shape.head_dim * setting.problem.kv_dtype.itemsize
            operations = 4 * row_tokens * shape.num_heads * shape.head_dim
            return kv_bytes / self.read_gb_per_s / 1e3, operations / self.multiply_gflop_per_s / 1e3

        shared = times_us(counts["shared_read"], counts["shared_rows"])
        private = times_us(counts["private"], counts["private"])
        return {
            "roofline_us": max(shared[0] + private[0], shared[1] + private[1]),
            "serial_roofline_us": max(shared) + max(private),
        }


def figures(setting: Setting, batch: Batch, limits: Limits, timing: Timing) -> dict[str, Any]:
    """Columns of a row: times, what the machine allows, and how steady they are."""
    times_us = timing.best_us | limits.rooflines_us(setting, batch)
    return {**rounded(times_us), **limits.columns, **timing.columns}


@cache
def _probe_buffer() -> Tensor:
    return torch.ones(64 << 20)


def mean_step_us(positions: Sequence[int], latencies_us: Sequence[float], n_c: int) -> float:
    """Mean latency of the decode steps 1 to n_c from those measured at some positions.

    Work is linear in the context, so what lies between two positions is interpolated.
    """
    return float(np.interp(np.arange(1, n_c + 1), positions, latencies_us).mean())


def benchmark_parser(doc: str | None, *, quick: str, plot: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write flat rows")
    parser.add_argument("--threads", type=int, nargs="+", help="thread counts (1 and 2; --quick: 1)")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a .png, .svg or .pdf (needs matplotlib)")
    return parser


def thread_counts(args: argparse.Namespace) -> list[int]:
    return args.threads or ([1] if args.quick else [1, 2])


def rounded(times: dict[str, float]) -> dict[str, float]:
    return {name: round(us, 1) for name, us in times.items()}


def collect(rows: Iterable[dict[str, Any]], json_file: Path | None) -> list[dict[str, Any]]:
    """All rows; each is shown and written as it comes, so that a run that is cut short leaves what it has."""
    out: list[dict[str, Any]] = []
    for row in rows:
        out.append(row)
        print(f"{len(out)}:", " ".join(f"{name}={value}" for name, value in list(row.items())[:8]), flush=True)
        if json_file:
            write_rows(json_file, out)
    return out


def print_table(title: str, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Baselines, in microseconds like ours, also show how many times longer they take."""
    table = Table(title=title)
    for name in names:
        table.add_column(name.removesuffix("_us").replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row, name) for name in names))
    Console(width=180).print(table)


def _cell(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    text = f"{value:,.1f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"
    if name.endswith("_us") and name.startswith(("shared_pages", "separate_pages", "sdpa", "flex")):
        return f"{text} ({value / row['ours_us']:.1f}x)"
    return text


def floor_percent(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its percent of the roofline and of the serial roofline."""
    ours = row["ours_us"]
    return row | {
        "% floor": round(100 * row["roofline_us"] / ours),
        "% serial": round(100 * row["serial_roofline_us"] / ours),
    }
