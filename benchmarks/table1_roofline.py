"""The paper's Table 1: arithmetic intensity and time of one layer's QKV product, attention and MLP, by batch.

Operations and bytes are the paper's: multiplications and additions count one each, weights, inputs, results, K and V
are moved once. One token is decoded per sequence after 2,048 tokens of context, nothing shared; the last row of a batch
shows the same attention when all of the context is shared, which is what ChunkAttention changes.

The paper, Llama 2 7B in fp16 on an A100: attention has 0.99 operations per byte at any batch, QKV and MLP 1.00 at batch
1 and 31.7 at batch 32, where attention takes 688 of 988 us.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attention_cases import (
    CHUNK,
    SHAPES,
    Limits,
    Pool,
    Setting,
    all_settings,
    benchmark_parser,
    collect,
    empty_caches,
    one_prefix,
    print_table,
    thread_counts,
)
from chunkserve.kernels.cpu_ops import PackedLinear

# Hidden size and MLP width of each shape's model.
WIDTHS = {"llama2-7b": (4096, 11008), "smollm2-135m": (576, 1536)}
BATCHES = (1, 32, 64)
CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One part of a layer: what it computes, what it moves, and how to run it."""

    name: str
    operations: int
    moved_bytes: int
    run: Callable[[], Any]


def product_module(name: str, weights: Sequence[PackedLinear], sizes: Sequence[tuple[int, int]], x: Tensor) -> Module:
    """Products of x [B, K] with weights of these sizes (N, K), one after the other."""
    inputs = [torch.randn(len(x), k).to(x.dtype) for _, k in sizes]
    moved = sum(n * k + len(x) * (n + k) for n, k in sizes) * x.element_size()
    operations = sum(2 * len(x) * n * k for n, k in sizes)

    def run() -> None:
        for weight, given in zip(weights, inputs, strict=True):
            weight(given)

    return Module(name=name, operations=operations, moved_bytes=moved, run=run)


def packed(sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[PackedLinear]:
    return [PackedLinear.pack(torch.randn(size).to(dtype)) for size in sizes]


def check(weights: Sequence[PackedLinear], sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
    """A product with the identity gives back the weights' columns: not a number and a wrong size would show."""
    for weight, (n, k) in zip(weights, sizes, strict=True):
        out = weight(torch.ones(1, k).to(dtype))
        if out.shape != (1, n) or not out.isfinite().all():
            raise RuntimeError(f"a product [{n}, {k}] is wrong; not timed")


def attention_module(name: str, pool: Pool, batch: int, context: int, shared_tokens: int) -> Module:
    setting, sequences = pool.setting, one_prefix(batch, context, shared_tokens)
    shape, counts = setting.shape, sequences.token_counts()
    kv_bytes = 2 * (counts["shared_read"] + counts["private"]) * shape.num_kv_heads * shape.head_dim
    q_and_out = 2 * batch * shape.num_heads * shape.head_dim
    pool.check(sequences)
    return Module(
        name=name,
        operations=4 * (counts["shared_rows"] + counts["private"]) * shape.num_heads * shape.head_dim,
        moved_bytes=(kv_bytes + q_and_out) * setting.dtype.itemsize,
        run=pool.system(sequences),
    )


def run(
    settings: Sequence[Setting],
    batches: Sequence[int],
    repeats: int,
    *,
    widths: Mapping[str, tuple[int, int]] = WIDTHS,
    context: int = CONTEXT,
) -> Iterator[dict[str, Any]]:
    for setting in settings:
        shape = setting.shape
        hidden, width = widths[shape.name]
        qkv = [((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, hidden)]
        mlp = [(2 * width, hidden), (hidden, width)]
        pool = Pool(setting, num_slots=max(batches) * context // CHUNK, num_sequences=max(batches))
        qkv_weights, mlp_weights = packed(qkv, setting.dtype), packed(mlp, setting.dtype)
        check([*qkv_weights, *mlp_weights], [*qkv, *mlp], setting.dtype)
        limits = Limits.measure(setting.dtype)
        for batch in batches:
            x = torch.empty(batch, hidden, dtype=setting.dtype)
            modules = [
                product_module("qkv", qkv_weights, qkv, x),
                attention_module("attention", pool, batch, context, 0),
                attention_module("attention, all shared", pool, batch, context, context),
                product_module("mlp", mlp_weights, mlp, x),
            ]
            times: dict[str, list[float]] = {module.name: [] for module in modules}
            for _, module in product(range(repeats + 1), modules):
                empty_caches()
                begin = time.perf_counter()
                module.run()
                times[module.name].append((time.perf_counter() - begin) * 1e6)
            for module in modules:
                measured = times[module.name][1:]
                floor_us = max(
                    module.moved_bytes / limits.read_gb_per_s / 1e3,
                    module.operations / limits.multiply_gflop_per_s / 1e3,
                )
                yield {
                    **setting.columns,
                    "batch": batch,
                    "context": context,
                    "module": module.name,
                    "mflop": round(module.operations / 1e6, 2),
                    "moved_mb": round(module.moved_bytes / 1e6, 2),
                    "intensity": round(module.operations / module.moved_bytes, 2),
                    "ours_us": round(min(measured), 1),
                    "roofline_us": round(floor_us, 1),
                    **limits.columns,
                    "warm_up": 1,
                    "repeats": repeats,
                    "spread": round(statistics.median(measured) / min(measured), 2),
                }


def main() -> None:
    args = benchmark_parser(__doc__, quick="SmolLM2's shape alone, one thread, fewer turns").parse_args()
    settings = all_settings(thread_counts(args))
    if args.quick:
        settings = [setting for setting in settings if setting.shape is SHAPES[1]]
    report(collect(run(settings, BATCHES, 5 if args.quick else 15), args.json))


def report(rows: Sequence[dict[str, Any]]) -> None:
    shown = [row | {"% floor": round(100 * row["roofline_us"] / row["ours_us"])} for row in rows]
    print_table(
        f"one layer, one new token per sequence, {rows[0]['context']} tokens of context",
        shown,
        (
            *("case", "dtype", "threads", "batch", "module", "mflop", "moved_mb", "intensity"),
            *("ours_us", "roofline_us", "% floor", "spread"),
        ),
    )
    batch = sorted({row["batch"] for row in rows})[len({row["batch"] for row in rows}) // 2]
    here = [row for row in rows if row["batch"] == batch and row["dtype"] == rows[-1]["dtype"]]
    of = {row["module"]: row for row in here[-4:]}
    layer_us = sum(of[name]["ours_us"] for name in ("qkv", "attention", "mlp"))
    print(
        f"{here[-1]['case']}, {here[-1]['dtype']}, {here[-1]['threads']} thread(s), batch {batch}: attention has "
        f"{of['attention']['intensity']:.2f} operations per byte and takes {of['attention']['ours_us'] / layer_us:.0%} "
        f"of the layer; all shared {of['attention, all shared']['intensity']:.1f}, "
        f"{of['attention']['ours_us'] / of['attention, all shared']['ours_us']:.1f}x faster"
    )


if __name__ == "__main__":
    main()
