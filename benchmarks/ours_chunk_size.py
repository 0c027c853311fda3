"""Which chunk size? The paper uses 64 throughout; here 16 to 256, what the CPU kernel can do.

A small chunk shares more of a prompt that ends within one and leaves less memory unused; a large one has fewer slots
to plan and longer streams to read. Batch 32, a shared prompt of 1,000 tokens (no multiple of any of these sizes), then
1 to 400 tokens of each sequence. All sizes run by turns over the same lengths, each checked against the float64
oracle first. `shared_pages` is our kernel with sharing off; `unused` is the part of the pool that no token fills.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from attention_cases import (
    Batch,
    Limits,
    Pool,
    Setting,
    System,
    all_settings,
    batch_of_runs,
    benchmark_parser,
    collect,
    floor_percent,
    print_table,
    rounded,
    take_turns,
    thread_counts,
)
from plots import grouped

CHUNK_SIZES = (16, 32, 64, 128, 256)


def sequences_of(chunk_size: int, batch: int, prompt: int, longest_tail: int) -> Batch:
    """Whole chunks of the prompt are shared; what is left of it begins each sequence's own run."""
    shared = prompt // chunk_size * chunk_size
    tails = np.linspace(1, longest_tail, batch).astype(int).tolist()
    return batch_of_runs(
        [[("prompt", shared), (f"own {i}", prompt - shared + tail)] for i, tail in enumerate(tails)], chunk_size
    )


def pool_use(batch: Batch) -> dict[str, Any]:
    slots = len(np.unique(np.concatenate(batch.paths)))
    counts = batch.token_counts()
    tokens = counts["shared_read"] + counts["private"]
    return {
        "shared_tokens": counts["shared_read"],
        "pool_tokens": slots * batch.chunk_size,
        "unused_percent": round(100 - 100 * tokens / (slots * batch.chunk_size), 1),
    }


def run(
    settings: Sequence[Setting], batch: int, prompt: int, longest_tail: int, repeats: int
) -> Iterator[dict[str, Any]]:
    for setting in settings:
        limits = Limits.measure(setting.dtype)
        batches = {size: sequences_of(size, batch, prompt, longest_tail) for size in CHUNK_SIZES}
        systems: dict[str, System] = {}
        plan_us: dict[int, float] = {}
        for size, sequences in batches.items():
            sized = replace(setting, chunk_size=size)
            slots = 1 + max(int(path.max()) for path in sequences.paths)
            pool = Pool(sized, num_slots=slots, num_sequences=batch)
            pool.check(sequences)
            systems[f"ours {size}"] = pool.system(sequences)
            systems[f"shared pages {size}"] = pool.system(sequences, share=False)
            plan_us[size] = take_turns({"plan": partial(sequences.plan, sized)}, 1).best_us["plan"]
        timing = take_turns(systems, repeats)
        for size, sequences in batches.items():
            yield {
                **setting.columns,
                "chunk_size": size,
                "batch": batch,
                **pool_use(sequences),
                "ours_us": round(timing.best_us[f"ours {size}"], 1),
                "shared_pages_us": round(timing.best_us[f"shared pages {size}"], 1),
                "build_plan_us": round(plan_us[size], 1),
                **rounded(limits.rooflines_us(setting, sequences)),
                **limits.columns,
                **timing.columns,
            }


def report(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        f"decode attention, batch {rows[0]['batch']}, by chunk size; microseconds (best of repeats)",
        [floor_percent(row) for row in rows],
        (
            *("case", "dtype", "threads", "chunk_size", "shared_tokens", "pool_tokens", "unused_percent"),
            *("build_plan_us", "ours_us", "% floor", "shared_pages_us"),
        ),
    )
    for (case, dtype, threads), group in grouped(rows, "case", "dtype", "threads").items():
        default = next(row for row in group if row["chunk_size"] == 64)
        ratios = [
            f"{row['chunk_size']}: {row['ours_us'] / default['ours_us']:.2f}x, "
            f"{row['pool_tokens'] / default['pool_tokens']:.2f}x"
            for row in group
        ]
        print(f"{case} {dtype}, {threads} thread(s), time and pool against chunks of 64: {'; '.join(ratios)}")


def main() -> None:
    args = benchmark_parser(__doc__, quick="one thread, few repeats").parse_args()
    torch.manual_seed(0)
    rows = collect(run(all_settings(thread_counts(args)), 32, 1000, 400, 4 if args.quick else 15), args.json)
    report(rows)


if __name__ == "__main__":
    main()
