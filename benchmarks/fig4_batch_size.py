"""Figure 4 of the paper on a CPU: token rate of decode attention over the size of the batch.

Paper: 32 heads, head dim 128, chunk 64, n_s shared prompt tokens, 64 completion tokens; batch 1 to 96. There the
systems without sharing stop gaining at batch 16, while ChunkAttention goes on. The second shape is that of
SmolLM2-135M. One step is measured, in the middle of the completion, after a check against the float64 oracle.
`shared_pages` and `separate_pages` are the paper's PagedAttn* and PagedAttn, see attention_cases.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attention_cases import (
    PAPER_SHAPE,
    Limits,
    Pool,
    Setting,
    all_settings,
    benchmark_parser,
    collect,
    figures,
    floor_percent,
    one_prefix,
    print_table,
    take_turns,
    thread_counts,
)
from plots import Panel, draw, grouped, panels, require_matplotlib

COMPLETION = 64
SYSTEMS = ("ours", "shared_pages", "separate_pages")
# Thousand tokens/s of ChunkAttn on an A100 in fp16, read off the figure, by (n_s, batch).
PAPER_K_PER_S = {(1024, 16): 155, (1024, 96): 224, (2048, 16): 145, (2048, 96): 200}


def run(
    settings: Sequence[Setting], prompts: Sequence[int], batches: Sequence[int], repeats: int
) -> Iterator[dict[str, Any]]:
    for setting in settings:
        for n_s in prompts:
            kv_len = n_s + COMPLETION // 2
            largest = one_prefix(max(batches), kv_len, n_s)
            pool = Pool(setting, num_slots=largest.num_slots, num_sequences=max(batches))
            limits = Limits.measure(setting.dtype)
            for batch in batches:
                sequences = one_prefix(batch, kv_len, n_s)
                pool.check(sequences)
                timing = take_turns(pool.systems(sequences), repeats)
                paper = PAPER_K_PER_S.get((n_s, batch)) if setting.shape.name == PAPER_SHAPE else None
                yield {
                    **setting.columns,
                    "n_s": n_s,
                    "n_c": COMPLETION,
                    "batch": batch,
                    **{f"{name}_tokens_per_s": round(batch / timing.best_us[f"{name}_us"] * 1e6) for name in SYSTEMS},
                    "paper_ours_k_per_s": paper,
                    **figures(setting, sequences, limits, timing),
                }


def throughput_panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    return panels(
        rows,
        context="n_s",
        x="batch",
        x_label="batch",
        y_label="thousand tokens/s",
        lines={name.replace("_", " "): f"{name}_tokens_per_s" for name in SYSTEMS},
    )


def report(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        f"decode attention, {COMPLETION} completion tokens: tokens/s, microseconds per step; the paper's on an A100",
        [floor_percent(row) for row in rows],
        (
            *("case", "dtype", "threads", "n_s", "batch", "ours_tokens_per_s", "ours_us", "% floor"),
            *("shared_pages_us", "separate_pages_us", "paper_ours_k_per_s"),
        ),
    )
    for (case, dtype, threads, n_s), group in grouped(rows, "case", "dtype", "threads", "n_s").items():
        middle = min(group, key=lambda row: abs(row["batch"] - 16))
        last = group[-1]
        gains = [f"{last[f'{name}_tokens_per_s'] / middle[f'{name}_tokens_per_s']:.2f}x" for name in SYSTEMS]
        print(
            f"{case} {dtype}, {threads} thread(s), n_s={n_s}: from batch {middle['batch']} to {last['batch']} the rate "
            f"of ours grows {gains[0]}, of shared pages {gains[1]}, of separate pages {gains[2]}; at {last['batch']} "
            f"ours is {last['shared_pages_us'] / last['ours_us']:.2f}x shared pages"
        )


def main() -> None:
    parser = benchmark_parser(__doc__, quick="a prompt of 1024 tokens, fewer batches, one thread", plot=True)
    args = parser.parse_args()
    require_matplotlib(args.plot)
    torch.manual_seed(0)
    prompts = (1024,) if args.quick else (1024, 2048)
    batches = (1, 4, 16, 48, 96) if args.quick else (1, 2, 4, 8, 16, 32, 48, 64, 80, 96)
    rows = collect(run(all_settings(thread_counts(args)), prompts, batches, 2 if args.quick else 7), args.json)
    if args.plot:
        title = "Figure 4: token rate over the size of the batch"
        draw(args.plot, title, throughput_panels(rows), columns=2 if args.quick else len(prompts))
    report(rows)


if __name__ == "__main__":
    main()
