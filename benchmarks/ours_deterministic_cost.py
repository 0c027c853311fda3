"""What does deterministic mode cost? Decode steps of the engine alone, with `deterministic` on and off, by turns.

Requests with one shared beginning decode together, no HTTP. With it on, a shared beginning is read once for all in
whole multiples of 256 tokens only, and longer sequences merge more partial results. Checked first: with it on, a
request has the tokens that it has alone, in every turn.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from chunkserve.deploy.small_model import ensure_small_model
from chunkserve.replica.options import ReplicaOptions
from engine_bursts import BurstEngine, random_prompt
from rows import write_rows


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per number of shared tokens and of sequences."""
    engines = {
        mode: BurstEngine(
            ReplicaOptions(
                model=str(ensure_small_model()), max_running=max(args.concurrency), deterministic=mode,
                max_sequence_tokens=max(args.shared_tokens) + args.own_tokens + args.new_tokens,
            ),
            args.new_tokens,
        )
        for mode in (False, True)
    }  # fmt: skip
    words, rows = torch.Generator().manual_seed(0), []
    for shared in args.shared_tokens:
        beginning = random_prompt(shared, words)
        for batch in args.concurrency:
            prompts = [beginning + random_prompt(args.own_tokens, words) for _ in range(batch)]
            alone = engines[True].decode(prompts[:1]).tokens[0]
            engines[False].decode(prompts)
            step_ms: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(args.repeats):
                for mode in (False, True) if turn % 2 else (True, False):
                    burst = engines[mode].decode(prompts)
                    step_ms[mode].append(burst.step_ms)
                    if mode and burst.tokens[0] != alone:
                        raise SystemExit(f"deterministic, {batch} sequences: other tokens than alone; nothing is timed")
            ratios = [on / off for off, on in zip(*step_ms.values(), strict=True)]
            rows.append(
                {
                    "shared_tokens": shared, "concurrency": batch, "repeats": args.repeats,
                    "step_ms": round(statistics.median(step_ms[False]), 2),
                    "deterministic_step_ms": round(statistics.median(step_ms[True]), 2),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratio_min": round(min(ratios), 3), "ratio_max": round(max(ratios), 3),
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one length, few steps and turns, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--shared-tokens", type=int, nargs="+", default=[1000, 2048])
    parser.add_argument("--own-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if args.quick:
        args.shared_tokens, args.concurrency, args.new_tokens, args.repeats = [300], [1, 8], 16, 2
    rows = run(args)
    if args.json:
        write_rows(args.json, rows)
    table = Table("shared", "sequences", "step, ms", "deterministic, ms", "ratio")
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("shared_tokens", "concurrency", "step_ms", "deterministic_step_ms")),
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})",
        )
    Console().print(table)
    last = rows[-1]
    print(
        f"deterministic over not, {last['shared_tokens']} shared tokens, {last['concurrency']} sequences: "
        f"{last['ratio']:.2f}x ({last['ratio_min']:.2f} to {last['ratio_max']:.2f}) the time of a step"
    )


if __name__ == "__main__":
    main()
