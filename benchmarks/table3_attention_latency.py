"""Table 3 of the paper on a CPU: latency of one decode step of attention, over context and shared part.

Paper: batch 32, 32 heads, head dim 128, chunk 64, n_p prompt tokens of which n_s are shared. The second shape is that
of SmolLM2-135M. Every case is first checked against the float64 oracle; a wrong kernel is not timed. Baselines:

    shared pages    our kernel with sharing off, all sequences over the same physical chunks (the paper's PagedAttn*)
    separate pages  our kernel, nothing shared physically (PagedAttn)
    sdpa            torch's scaled_dot_product_attention, one call per sequence, K and V of its own
    sdpa packed     one such call with the batch as query rows over one K and V; only where all is shared

Systems run by turns, so that a busy machine slows them alike; the best time of each counts. The roofline is measured
in the same run: bytes at the streaming bandwidth or operations at the multiply-add peak, whichever takes longer; the
serial one adds up the shared and the private part.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rows import write_rows
from torch import Tensor

from chunkserve.kernels import _cpu
from chunkserve.kernels.dispatch import AttentionProblem, Backend, LayerKV, select_backend
from chunkserve.kernels.plan import AttentionPlan, Int32Array, PlanOptions, build_plan
from chunkserve.kernels.reference import TOLERANCE, oracle

CHUNK = 64
SDPA_COPIES = 4  # K and V of so many sequences exceed every cache; sequences take them by turns


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: Shape
    dtype: torch.dtype
    threads: int
    batch: int
    n_p: int
    n_s: int

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            device="cpu",
            dtype=self.dtype,
            kv_dtype=self.dtype,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            chunk_size=CHUNK,
        )

    def paths(self, *, shared: bool = True) -> list[Int32Array]:
        """Slots of each sequence; `shared` puts the first n_s tokens into the same ones."""
        chunks, common = self.n_p // CHUNK, self.n_s // CHUNK if shared else 0
        own = np.arange(self.batch * chunks, dtype=np.int32).reshape(self.batch, chunks)
        own[:, :common] = own[0, :common]
        return list(own)

    def plan(self, *, share: bool, shared_pages: bool = True) -> AttentionPlan:
        lens = [self.n_p] * self.batch
        return build_plan(
            paths=self.paths(shared=shared_pages),
            kv_lens=lens,
            q_lens=[1] * self.batch,
            kv_present=lens,
            chunk_size=CHUNK,
            options=PlanOptions(share=share, num_workers=self.threads, heads_per_worker_item=self.shape.num_kv_heads),
        )

    def rooflines_us(self, gb_per_s: float, gflop_per_s: float) -> tuple[float, float]:
        """Time of the whole at the machine's limits, and the sum of those of the shared and the private part."""

        def limits(read_tokens: int, row_tokens: int) -> tuple[float, float]:
            kv_bytes = 2 * read_tokens * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize
            operations = 4 * row_tokens * self.shape.num_heads * self.shape.head_dim
            return kv_bytes / gb_per_s / 1e3, operations / gflop_per_s / 1e3

        own = self.batch * (self.n_p - self.n_s)
        shared, private = limits(self.n_s, self.batch * self.n_s), limits(own, own)
        return max(shared[0] + private[0], shared[1] + private[1]), max(shared) + max(private)


def check(case: Case, backend: Backend, kv: LayerKV, q: Tensor) -> None:
    """Raises RuntimeError when the first or the last sequence differs from the oracle."""
    out = backend.attend(q, kv, case.plan(share=True), scale=case.shape.head_dim**-0.5)
    paths = case.paths()
    for i in (0, case.batch - 1):
        want = oracle(q[i : i + 1], kv, backend, paths=paths[i : i + 1], kv_lens=[case.n_p], q_lens=[1])
        error = float((out[i : i + 1].double() - want).abs().max())
        if not error <= TOLERANCE[case.dtype]:
            raise RuntimeError(f"{case}: sequence {i} is off by {error}, allowed {TOLERANCE[case.dtype]}; not timed")


def systems(case: Case, backend: Backend, kv: LayerKV, q: Tensor, *, sdpa: bool) -> dict[str, Callable[[], Any]]:
    scale = case.shape.head_dim**-0.5
    # Plans hold on to nothing, so each system has its own.
    ours, pages, separate = (
        case.plan(share=True),
        case.plan(share=False),
        case.plan(share=False, shared_pages=False),
    )
    out: dict[str, Callable[[], Any]] = {"ours_us": lambda: backend.attend(q, kv, ours, scale=scale)}
    if case.n_s:
        out["shared_pages_us"] = lambda: backend.attend(q, kv, pages, scale=scale)
        out["separate_pages_us"] = lambda: backend.attend(q, kv, separate, scale=scale)
    if not sdpa:
        return out
    size = (SDPA_COPIES, 1, case.shape.num_kv_heads, case.n_p, case.shape.head_dim)
    k, v = (torch.randn(size, dtype=case.dtype) for _ in range(2))
    rows = q[:, :, None]  # [B, H, 1, D]
    gqa = case.shape.num_heads != case.shape.num_kv_heads

    def per_sequence() -> None:
        for i in range(case.batch):
            F.scaled_dot_product_attention(rows[i : i + 1], k[i % SDPA_COPIES], v[i % SDPA_COPIES], enable_gqa=gqa)

    out["sdpa_us"] = per_sequence
    if case.n_s == case.n_p:
        packed = q.transpose(0, 1)[None].contiguous()  # [1, H, B, D]
        out["sdpa_packed_us"] = lambda: F.scaled_dot_product_attention(packed, k[0], v[0], enable_gqa=gqa)
    return out


def best_us(functions: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, float], float]:
    """Best time of each function over `repeats` turns after one warm-up, and median over best of the first."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if turn:
                times[name].append((time.perf_counter() - begin) * 1e6)
    first = times["ours_us"]
    return {name: min(t) for name, t in times.items()}, statistics.median(first) / min(first)


def run(cases: list[Case], repeats: int, *, sdpa: bool) -> Iterator[dict[str, Any]]:
    buffer = torch.ones(64 << 20)
    for case in cases:
        _cpu.set_num_threads(case.threads)
        torch.set_num_threads(case.threads)
        gb_per_s = max(_cpu.probe_read_gb_per_s(buffer) for _ in range(3))
        gflop_per_s = max(_cpu.probe_multiply_gflop_per_s(case.dtype == torch.bfloat16) for _ in range(3))
        backend = select_backend(case.problem, "cpu")
        kv = backend.allocate(case.problem, case.batch * case.n_p // CHUNK)
        kv.k.normal_()
        kv.v.normal_()
        q = torch.randn(case.batch, case.shape.num_heads, case.shape.head_dim).to(case.dtype)
        check(case, backend, kv, q)
        times, spread = best_us(systems(case, backend, kv, q, sdpa=sdpa), repeats)
        roofline, serial = case.rooflines_us(gb_per_s, gflop_per_s)
        names = ("ours_us", "shared_pages_us", "separate_pages_us", "sdpa_us", "sdpa_packed_us", "flex_us")
        yield {
            "case": case.shape.name,
            "dtype": str(case.dtype).removeprefix("torch."),
            "threads": case.threads,
            "batch": case.batch,
            "n_p": case.n_p,
            "n_s": case.n_s,
            **{name: round(times[name], 1) if name in times else None for name in names},
            "roofline_us": round(roofline, 1),
            "serial_roofline_us": round(serial, 1),
            "isa": _cpu.isa(),
            "read_gb_per_s": round(gb_per_s, 2),
            "multiply_gflop_per_s": round(gflop_per_s, 1),
            "warm_up": 1,
            "repeats": repeats,
            "spread": round(spread, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1024 tokens, one thread, few repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write flat rows")
    parser.add_argument("--threads", type=int, nargs="+", help="thread counts (1 and 2)")
    parser.add_argument("--no-sdpa", action="store_true", help="leave torch out: it takes most of the time")
    args = parser.parse_args()
    torch.manual_seed(0)
    contexts = (1024,) if args.quick else (1024, 2048, 4096)
    cases = [
        Case(shape=shape, dtype=dtype, threads=threads, batch=32, n_p=n_p, n_s=int(n_p * part))
        for shape in SHAPES
        for threads in args.threads or ((1,) if args.quick else (1, 2))
        for dtype in (torch.float32, torch.bfloat16)
        for n_p in contexts
        for part in (0.0, 0.5, 0.75, 1.0)
    ]

    console = Console(width=140)
    table = Table(title="decode attention, batch 32, microseconds (best of repeats)")
    for column in ("shape", "dtype", "thr", "n_p", "n_s", "ours", "% floor", "% serial", "shared pages", "separate"):
        table.add_column(column, justify="right")
    for column in ("sdpa", "sdpa packed"):
        table.add_column(column, justify="right")
    rows = []
    for row in run(cases, 3 if args.quick else 9, sdpa=not args.no_sdpa):
        rows.append(row)
        ours = row["ours_us"]
        baselines = [
            f"{row[name]:,.0f} ({row[name] / ours:.1f}x)" if row[name] else "-"
            for name in ("shared_pages_us", "separate_pages_us", "sdpa_us", "sdpa_packed_us")
        ]
        table.add_row(
            row["case"],
            row["dtype"],
            str(row["threads"]),
            str(row["n_p"]),
            str(row["n_s"]),
            f"{ours:,.0f}",
            f"{100 * row['roofline_us'] / ours:.0f}",
            f"{100 * row['serial_roofline_us'] / ours:.0f}",
            *baselines,
        )
        if args.json:
            write_rows(args.json, rows)
        console.print(f"{len(rows)}/{len(cases)} {row['case']} {row['dtype']} n_p={row['n_p']} n_s={row['n_s']}")
    console.print(table)
    top = next(r for r in rows if r["n_p"] == contexts[-1] and r["n_s"] == r["n_p"] and r["dtype"] == "bfloat16")
    console.print(
        f"{top['case']} bf16, {top['n_p']} tokens all shared, {top['threads']} thread(s): "
        f"{top['shared_pages_us'] / top['ours_us']:.2f}x faster than shared pages, "
        f"{100 * top['roofline_us'] / top['ours_us']:.0f} % of the roofline"
    )


if __name__ == "__main__":
    main()
