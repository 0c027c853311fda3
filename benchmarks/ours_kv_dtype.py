"""What do K and V of one byte cost and save in attention? fp8 against bf16, under float32 queries, as on CPUs.

32 sequences with all of their context shared, and 8 with none: reading then is most of the work. Where the hardware
has no instruction for e4m3, each number is converted before it is multiplied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from attention_cases import (
    CHUNK,
    SHAPES,
    Pool,
    Setting,
    Shape,
    benchmark_parser,
    collect,
    one_prefix,
    print_table,
    rounded,
    take_turns,
    thread_counts,
)
from chunkserve.kernels.dispatch import FP8


def run(shapes: Sequence[Shape], threads: Sequence[int], tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        for num_threads in threads:
            bf16 = Setting(shape=shape, dtype=torch.float32, threads=num_threads, kv_dtype=torch.bfloat16)
            settings = {"fp8_us": replace(bf16, kv_dtype=FP8), "bf16_us": bf16}
            slots = 8 * tokens // CHUNK
            pools = {name: Pool(s, num_slots=slots, num_sequences=32) for name, s in settings.items()}
            for batch, n_s in ((32, tokens), (8, 0)):
                sequences = one_prefix(batch, tokens, n_s)
                for pool in pools.values():
                    pool.check(sequences)
                timing = take_turns({name: pool.system(sequences) for name, pool in pools.items()}, repeats)
                times = timing.best_us
                yield {
                    "case": shape.name,
                    "threads": num_threads,
                    "batch": batch,
                    "n_p": tokens,
                    "n_s": n_s,
                    **rounded(times),
                    "fp8_over_bf16": round(times["fp8_us"] / times["bf16_us"], 2),
                    **timing.columns,
                }


def report(rows: Sequence[dict[str, Any]]) -> None:
    print_table("attention over fp8 and bf16 pools", rows, (*tuple(rows[0])[:8], "spread"))
    for title, n_s in (("all shared", rows[0]["n_p"]), ("nothing shared", 0)):
        ratios = [row["fp8_over_bf16"] for row in rows if row["n_s"] == n_s]
        print(f"{title}: fp8 takes {min(ratios):.2f}x to {max(ratios):.2f}x the time of bf16")


def main() -> None:
    args = benchmark_parser(__doc__, quick="shorter contexts, fewer turns, one thread").parse_args()
    report(collect(run(SHAPES, thread_counts(args), 1024 if args.quick else 2048, 3 if args.quick else 9), args.json))


if __name__ == "__main__":
    main()
