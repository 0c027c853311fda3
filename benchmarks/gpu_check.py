"""Are the GPU backends right, and how near to the hardware's limit? One script for a machine with an NVIDIA GPU.

1. Each backend against the float64 oracle at real sizes, with masks, and bit for bit alone and in a batch.
2. One CUDA graph, captured once and replayed over changing trees.
3. The paper's Table 3 (32 heads, d 128, batch 32, chunk 64) and the same with 8 KV heads, against the floor that this
   GPU's bandwidth and matrix peak set (both measured in the same run), torch SDPA, and FlashInfer where importable.

Times are medians of graph replays with a cold L2. Without a GPU it builds all plans, says so, and ends with code 2.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chunkserve.kernels.cuda_graph import captured
from chunkserve.kernels.dispatch import (
    FP8,
    AttentionProblem,
    GraphBackend,
    LayerKV,
    backend_matrix,
    select_backend,
)
from chunkserve.kernels.plan import AttentionPlan, Int32Array, PlanOptions, build_plan
from chunkserve.kernels.reference import TOLERANCE, oracle
from rows import write_rows

BACKENDS = ("cuda", "triton")
CHUNK = 64
# Microseconds on an A100 80GB, by (n_p, n_s): ChunkAttention, Table 3.
PAPER_US = {
    (1024, 0): 332.50,
    (1024, 512): 198.87,
    (1024, 768): 131.21,
    (1024, 1024): 56.00,
    (2048, 0): 655.44,
    (2048, 1024): 384.37,
    (2048, 1536): 247.14,
    (2048, 2048): 110.48,
    (4096, 0): 1301.78,
    (4096, 2048): 747.56,
    (4096, 3072): 477.66,
    (4096, 4096): 206.22,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences that share `shared` tokens, then go on alone for `private[i]`; the last `q_len` tokens are new."""

    shared: int
    private: tuple[int, ...]
    q_len: int = 1
    seed: int = 0

    @property
    def kv_lens(self) -> list[int]:
        return [self.shared + tokens for tokens in self.private]

    @property
    def num_slots(self) -> int:
        return self.shared // CHUNK + sum(-(-tokens // CHUNK) for tokens in self.private)

    def paths(self) -> list[Int32Array]:
        slots = np.random.default_rng(self.seed).permutation(self.num_slots).astype(np.int32)
        prefix, rest = np.split(slots, [self.shared // CHUNK])
        borders = np.cumsum([-(-tokens // CHUNK) for tokens in self.private])
        return [np.concatenate([prefix, own]) for own in np.split(rest, borders[:-1])]

    def plan(self, options: PlanOptions) -> AttentionPlan:
        return build_plan(
            paths=self.paths(),
            kv_lens=self.kv_lens,
            q_lens=[self.q_len] * len(self.private),
            kv_present=self.kv_lens,
            chunk_size=CHUNK,
            options=options,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    name: str
    bytes_per_s: float
    flop_per_s: float

    def floor_us(self, batch: Batch, problem: AttentionProblem) -> float:
        size = torch.empty(0, dtype=problem.dtype).element_size()
        tokens = batch.shared + sum(batch.private)
        num_bytes = 2 * tokens * problem.num_kv_heads * problem.head_dim * size
        num_bytes += 2 * len(batch.private) * problem.num_heads * problem.head_dim * size
        flop = 4 * sum(batch.kv_lens) * problem.num_heads * problem.head_dim
        return 1e6 * max(num_bytes / self.bytes_per_s, flop / self.flop_per_s)


def problem_of(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, *, kv_dtype: torch.dtype | None = None, **masks: Any
) -> AttentionProblem:
    return AttentionProblem(
        device="cuda",
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        chunk_size=CHUNK,
        **masks,
    )


CORRECTNESS: list[tuple[AttentionProblem, Batch]] = [
    *(
        (problem_of(dtype, heads, kv_heads, d), batch)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for heads, kv_heads, d in ((32, 32, 128), (28, 4, 128), (9, 3, 64), (16, 8, 80), (8, 4, 256))
        # fp32 is for tests; each of its head dims takes seconds to compile.
        if dtype != torch.float32 or d <= 64
        for batch in (
            Batch(shared=2048, private=(1, 63, 64, 65, 500) * 7),
            Batch(shared=0, private=(1, 4000, 77)),
            Batch(shared=1024, private=(300, 500), q_len=257),
        )
    ),
    (problem_of(torch.float16, 32, 8, 128, window=700), Batch(shared=1024, private=(5, 900, 64) * 3)),
    (problem_of(torch.float16, 32, 8, 128, softcap=30.0), Batch(shared=1024, private=(5, 900, 64) * 3)),
    *(
        (problem_of(dtype, 32, 8, d, kv_dtype=FP8), Batch(shared=1024, private=(5, 900, 64) * 8))
        for dtype in (torch.float16, torch.bfloat16)
        for d in (64, 128)
    ),
]
TABLE = [
    (problem_of(torch.float16, 32, kv_heads, 128), n_p, n_s, Batch(shared=n_s, private=(n_p - n_s,) * 32))
    for kv_heads in (32, 8)
    for n_p, n_s in PAPER_US
]
REPLAYED = [
    Batch(shared=1024, private=(100,) * 32),
    Batch(shared=0, private=tuple(range(1, 1600, 50)), seed=1),
    Batch(shared=4096, private=(1,) * 32, seed=2),
    Batch(shared=64, private=(4000, *(3,) * 31), seed=3),
]


def filled(backend: GraphBackend, problem: AttentionProblem, num_slots: int) -> LayerKV:
    """Every slot holds random numbers."""
    kv = backend.allocate(problem, num_slots)
    generator = torch.Generator(problem.device).manual_seed(0)
    for pool, scales in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        if scales is None:
            pool.normal_(generator=generator)
        else:
            numbers = pool.view(torch.uint8).random_(0, 256, generator=generator)
            numbers.masked_fill_((numbers & 0x7F) == 0x7F, 0)  # no NaN
            scales.fill_(2.0**-8)
    return kv


def queries(problem: AttentionProblem, batch: Batch) -> Tensor:
    generator = torch.Generator(problem.device).manual_seed(1)
    shape = (len(batch.private) * batch.q_len, problem.num_heads, problem.head_dim)
    return torch.randn(shape, generator=generator, device=problem.device).to(problem.dtype)


def options_for(backend: GraphBackend, problem: AttentionProblem) -> PlanOptions:
    return PlanOptions(
        num_workers=backend.num_workers(problem), heads_per_worker_item=problem.num_kv_heads, min_split_tokens=128
    )


def attend(backend: GraphBackend, q: Tensor, kv: LayerKV, plan: AttentionPlan, **extra: Tensor) -> Tensor:
    return backend.attend(q, kv, plan, scale=kv.problem.head_dim**-0.5, **extra)


def error_of(backend: GraphBackend, kv: LayerKV, q: Tensor, out: Tensor, batch: Batch, **extra: Any) -> float:
    """Largest absolute error; infinite for NaN."""
    q_lens = [batch.q_len] * len(batch.private)
    want = oracle(q, kv, backend, paths=batch.paths(), kv_lens=batch.kv_lens, q_lens=q_lens, **extra)
    error = (out.double() - want).abs()
    return float(torch.where(error.isnan(), torch.inf, error).max())


def check_correctness(backend: GraphBackend, cases: list[tuple[AttentionProblem, Batch]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for problem, batch in cases:
        if reason := backend.reject(problem):
            rows.append({"case": "correctness", "problem": str(problem), "refused": reason})
            continue
        kv = filled(backend, problem, batch.num_slots)
        q = queries(problem, batch)
        slopes = torch.logspace(-8, -1, problem.num_heads, base=2.0, device=problem.device)
        for extra in ({}, {"alibi_slopes": slopes, "sinks": 8 * slopes}):
            out = attend(backend, q, kv, batch.plan(options_for(backend, problem)), **extra)
            error = error_of(backend, kv, q, out, batch, **extra)
            row = {"case": "correctness", "problem": str(problem), "batch": str(batch), "biases": bool(extra)}
            rows.append(
                row | {"error": error, "limit": TOLERANCE[problem.dtype], "right": error <= TOLERANCE[problem.dtype]}
            )
    return rows


def check_deterministic(backend: GraphBackend) -> dict[str, Any]:
    """A sequence alone gives the bits that it has in a batch, with sharing on."""
    problem = problem_of(torch.float16, 32, 8, 128)
    batch = Batch(shared=2048, private=(1, 63, 64, 65, 500) * 4)
    options = PlanOptions(fixed_split_tokens=256)
    kv, q = filled(backend, problem, batch.num_slots), queries(problem, batch)
    together = attend(backend, q, kv, batch.plan(options))
    same = True
    for i, path in enumerate(batch.paths()):
        n = batch.kv_lens[i : i + 1]
        alone = build_plan(paths=[path], kv_lens=n, q_lens=[1], kv_present=n, chunk_size=CHUNK, options=options)
        same &= torch.equal(attend(backend, q[i : i + 1], kv, alone)[0], together[i])
    return {"case": "same bits alone and in a batch", "right": same}


def check_graph(backend: GraphBackend) -> dict[str, Any]:
    """One graph serves trees of other shapes and lengths: the same bits as a plain call."""
    problem = problem_of(torch.float16, 32, 8, 128)
    kv = filled(backend, problem, max(batch.num_slots for batch in REPLAYED))
    plans = [batch.plan(options_for(backend, problem)) for batch in REPLAYED]
    q = queries(problem, REPLAYED[0])
    backend.reserve(
        kv, plan_ints=max(2 * len(p.data) for p in plans) + 4096, partials=max(p.num_partials for p in plans)
    )
    backend.stage(kv, plans[0])
    graph, out = captured(lambda: attend(backend, q, kv, plans[0]))
    right = True
    for plan in [*plans, *reversed(plans)]:
        backend.stage(kv, plan)
        graph.replay()
        replayed = out.clone()
        right &= torch.equal(replayed, attend(backend, q, kv, plan))
    return {"case": "one graph over changing trees", "replays": 2 * len(plans), "right": right}


def measure_us(run: Callable[[], Tensor], repeats: int) -> float:
    """Median of graph replays, each after 256 MiB of other writes: K and V come from memory, as in a model's step."""
    graph, _ = captured(run)
    other = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        other.zero_()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measure_machine(repeats: int) -> Machine:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device="cuda").half()
    return Machine(
        name=torch.cuda.get_device_name(),
        bytes_per_s=2 * source.nbytes / measure_us(lambda: target.copy_(source), repeats) * 1e6,
        flop_per_s=2 * 8192**3 / measure_us(lambda: a @ a, repeats) * 1e6,
    )


def sdpa_us(problem: AttentionProblem, batch: Batch, repeats: int) -> float:
    """torch's own attention with separate K and V per sequence, all of one length."""
    n = batch.kv_lens[0]
    q = queries(problem, batch)[:, :, None]  # [B, H, 1, D]
    shape = (len(q), problem.num_kv_heads, n, problem.head_dim)
    k, v = (torch.randn(shape, dtype=problem.dtype, device="cuda") for _ in range(2))
    return measure_us(
        lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=problem.group > 1), max(repeats // 4, 3)
    )


def flashinfer_us(problem: AttentionProblem, batch: Batch, repeats: int) -> dict[str, float]:
    """FlashInfer's decode over shared pages, and its two-level cascade where there is anything shared and private."""
    import flashinfer  # type: ignore[import-not-found]

    def on_gpu(values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.int32, device="cuda")

    shape = (batch.num_slots, problem.num_kv_heads, CHUNK, problem.head_dim)
    pages = tuple(torch.randn(shape, dtype=problem.dtype, device="cuda") for _ in range(2))
    q, paths, lens = queries(problem, batch), batch.paths(), batch.kv_lens
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    sizes = (problem.num_heads, problem.num_kv_heads, problem.head_dim, CHUNK)

    def page_table(parts: list[Int32Array], tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        indptr = np.cumsum([0, *(len(part) for part in parts)])
        return on_gpu(indptr), on_gpu(np.concatenate(parts)), on_gpu([(n - 1) % CHUNK + 1 for n in tokens])

    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=problem.group > 1)
    decode.plan(*page_table(paths, lens), *sizes, q_data_type=problem.dtype, kv_data_type=problem.dtype)
    out = {"flashinfer_us": measure_us(lambda: decode.run(q, pages), repeats)}
    if batch.shared and min(batch.private):
        prefix = batch.shared // CHUNK
        levels = [
            (on_gpu([0, len(q)]), *page_table([paths[0][:prefix]], [batch.shared])),
            (on_gpu(np.arange(len(q) + 1)), *page_table([p[prefix:] for p in paths], list(batch.private))),
        ]
        cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "HND")
        cascade.plan(*(list(column) for column in zip(*levels, strict=True)), *sizes, q_data_type=problem.dtype)
        out["flashinfer_cascade_us"] = measure_us(lambda: cascade.run(q, pages), repeats)
    return out


def table_rows(
    backends: list[GraphBackend], machine: Machine, repeats: int, *, with_flashinfer: bool
) -> list[dict[str, Any]]:
    rows = []
    for problem, n_p, n_s, batch in TABLE:
        row: dict[str, Any] = {
            "case": "table3" if problem.group == 1 else "gqa",
            "dtype": "float16",
            "batch": len(batch.private),
            "n_p": n_p,
            "n_s": n_s,
            "floor_us": machine.floor_us(batch, problem),
            "paper_a100_us": PAPER_US[n_p, n_s] if problem.group == 1 else None,
        }
        for backend in backends:
            kv, q = filled(backend, problem, batch.num_slots), queries(problem, batch)
            plan = batch.plan(options_for(backend, problem))
            out = attend(backend, q, kv, plan)
            if (error := error_of(backend, kv, q, out, batch)) > TOLERANCE[problem.dtype]:
                raise SystemExit(f"{backend.name} is wrong in {row}: error {error:.3g}; not timed")
            shared_pages = batch.plan(dataclasses.replace(options_for(backend, problem), share=False))
            for name, timed in (("", plan), ("_shared_pages", shared_pages)):
                backend.stage(kv, timed)
                us = measure_us(lambda b=backend, q=q, kv=kv, p=timed: attend(b, q, kv, p), repeats)  # type: ignore[misc]
                row[f"{backend.name}{name}_us"] = us
            row[f"{backend.name}_percent_of_floor"] = 100 * row["floor_us"] / row[f"{backend.name}_us"]
        row["sdpa_us"] = sdpa_us(problem, batch, repeats)
        if with_flashinfer:
            row |= flashinfer_us(problem, batch, repeats)
        rows.append(row)
        print(" ".join(f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    return rows


def write_markdown(path: Path, machine: Machine, checks: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    wrong = [check for check in checks if not check.get("right", True)]
    refused = [check for check in checks if "refused" in check]
    lines = [
        f"# {machine.name}: {machine.bytes_per_s / 1e12:.2f} TB/s, {machine.flop_per_s / 1e12:.0f} TFLOP/s measured",
        "",
        f"{len(checks)} checks: {len(wrong)} wrong, {len(refused)} refused.",
        *(f"- wrong: {check}" for check in wrong),
    ]
    for case in ("table3", "gqa"):
        part = [row for row in rows if row["case"] == case]
        columns = [key for key in part[0] if key not in ("case", "dtype")] if part else []
        lines += ["", f"## {case}, microseconds", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in part:
            cells = [row.get(key) for key in columns]
            text = ["" if c is None else f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells]
            lines.append("| " + " | ".join(text) + " |")
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="flat rows")
    parser.add_argument("--markdown", type=Path, default=Path("gpu_check.md"), help="the tables")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    arguments = parser.parse_args()
    repeats = 10 if arguments.quick else 50
    cases = CORRECTNESS[::5] if arguments.quick else CORRECTNESS

    for batch in [*(batch for _, batch in cases), *(batch for *_, batch in TABLE), *REPLAYED]:
        batch.plan(PlanOptions(num_workers=528, heads_per_worker_item=8)).validate(batch.num_slots)
    print(f"plans are valid: {len(cases)} cases, {len(TABLE)} table rows, {len(REPLAYED)} trees of the graph")
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} finds no CUDA device, so no kernel ran and nothing is written")
        return 2

    backends: list[GraphBackend] = []
    for name, reason in backend_matrix(TABLE[0][0]):
        print(f"backend {name}: {reason or 'usable'}")
        if name in BACKENDS and reason is None:
            backends.append(select_backend(TABLE[0][0], name))  # type: ignore[arg-type]
    checks = []
    for backend in backends:
        for row in [*check_correctness(backend, cases), check_deterministic(backend), check_graph(backend)]:
            checks.append({"backend": backend.name} | row)
        wrong = [row for row in checks if row["backend"] == backend.name and not row.get("right", True)]
        print(f"backend {backend.name}: {len(wrong)} wrong of its checks", *wrong, sep="\n  ", flush=True)
    machine = measure_machine(repeats)
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        with_flashinfer = False
        print(f"flashinfer is left out: {error}")
    else:
        with_flashinfer = True
    right = [b for b in backends if all(row.get("right", True) for row in checks if row["backend"] == b.name)]
    rows = table_rows(right, machine, repeats, with_flashinfer=with_flashinfer)
    write_rows(arguments.json, [row | {"gpu": machine.name} for row in [*checks, *rows]])
    write_markdown(arguments.markdown, machine, checks, rows)
    print(f"written: {arguments.json} {arguments.markdown}")
    return 0 if right == backends and backends else 1


if __name__ == "__main__":
    sys.exit(main())
