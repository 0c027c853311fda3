"""Does sharing pay beyond one prompt? 1 to 32 distinct prefixes, unequal lengths, deep branching.

The paper measures one prefix that all sequences share. Here, after a check against the float64 oracle:

    P x n        P prefixes of equal length, each shared by n sequences that go on alone for 64 tokens
    unequal      8 prefixes of 64 to 1,024 tokens, shared by 1 to 8 sequences, 1 to 256 tokens of each one's own
    binary tree  32 leaves; every level of five is a run of chunks shared by half as many as the one above
    comb         32 sequences that leave one long path one after another, a chunk apart

`shared_pages` and `separate_pages` are our kernel with sharing off, over the same chunks and over copies, see
attention_cases.py. `degree` is the mean number of sequences that read a token.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from attention_cases import (
    CHUNK,
    Batch,
    Limits,
    Pool,
    Setting,
    all_settings,
    batch_of_runs,
    benchmark_parser,
    collect,
    figures,
    floor_percent,
    print_table,
    take_turns,
    thread_counts,
)
from plots import grouped

OWN = 64
GRID = ((1, 2), (1, 8), (1, 32), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2))


def equal_prefixes(prefixes: int, degree: int, tokens: int) -> Batch:
    return batch_of_runs(
        [[(f"prefix {p}", tokens), (f"own {p} {i}", OWN)] for p in range(prefixes) for i in range(degree)]
    )


def unequal_prefixes(longest: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    sequences = []
    for p in range(8):
        # As many prompts between 64 and 128 tokens as between 512 and 1,024.
        chunks = round(2 ** rng.uniform(0, np.log2(longest / CHUNK)))
        sequences += [
            [(f"prefix {p}", chunks * CHUNK), (f"own {p} {i}", int(rng.integers(1, 257)))]
            for i in range(rng.integers(1, 9))
        ]
    return batch_of_runs(sequences)


def binary_tree(levels: int, tokens: int) -> Batch:
    """2 ** levels leaves; a run of each level below the root, which all share."""
    chunks = max(tokens // (levels + 1) // CHUNK, 1)
    return batch_of_runs(
        [
            [(f"level {d} {leaf >> (levels - d)}", chunks * CHUNK) for d in range(levels)] + [(f"own {leaf}", OWN)]
            for leaf in range(2**levels)
        ]
    )


def comb(sequences: int) -> Batch:
    return batch_of_runs(
        [[(f"tooth {j}", CHUNK) for j in range(i + 1)] + [(f"own {i}", OWN)] for i in range(sequences)]
    )


def forests(tokens: int) -> dict[str, Batch]:
    named = {f"{p} x {n}": equal_prefixes(p, n, tokens) for p, n in GRID}
    return named | {
        "unequal": unequal_prefixes(max(tokens, 1024)),
        "binary tree": binary_tree(5, tokens),
        "comb": comb(32),
    }


def run(settings: Sequence[Setting], named: Mapping[str, Batch], repeats: int) -> Iterator[dict[str, Any]]:
    for setting in settings:
        pool = Pool(
            setting,
            num_slots=max(batch.num_slots for batch in named.values()),
            num_sequences=max(len(batch.paths) for batch in named.values()),
        )
        limits = Limits.measure(setting.dtype)
        for name, batch in named.items():
            pool.check(batch)
            timing = take_turns(pool.systems(batch), repeats)
            counts = batch.token_counts()
            pairs = counts["shared_rows"] + counts["private"]
            yield {
                **setting.columns,
                "forest": name,
                "batch": len(batch.paths),
                "degree": round(pairs / (counts["shared_read"] + counts["private"]), 2),
                "tokens": pairs,
                "shared_percent": round(100 * counts["shared_rows"] / pairs),
                "items": batch.plan(setting).num_items,
                **figures(setting, batch, limits, timing),
            }


def report(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "decode attention over forests of prefixes; microseconds (best of repeats)",
        [floor_percent(row) for row in rows],
        (
            *("case", "dtype", "threads", "forest", "batch", "degree", "shared_percent", "items"),
            *("ours_us", "% floor", "% serial", "shared_pages_us", "separate_pages_us"),
        ),
    )
    for (case, dtype, threads), group in grouped(rows, "case", "dtype", "threads").items():
        gains = {row["forest"]: row["shared_pages_us"] / row["ours_us"] for row in group}
        low, high = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
        mean = float(np.exp(np.mean(np.log(list(gains.values())))))
        print(
            f"{case} {dtype}, {threads} thread(s): ours over shared pages {gains[low]:.2f}x ({low}) to "
            f"{gains[high]:.2f}x ({high}), {mean:.2f}x on average (geometric)"
        )


def main() -> None:
    args = benchmark_parser(__doc__, quick="prefixes of 512 tokens, not 2,048; one thread").parse_args()
    torch.manual_seed(0)
    named = forests(512 if args.quick else 2048)
    report(collect(run(all_settings(thread_counts(args)), named, 2 if args.quick else 7), args.json))


if __name__ == "__main__":
    main()
