"""Figure 3 of the paper on a CPU: token rate of decode attention over the length of the completion.

Paper: batch 32, 32 heads, head dim 128, chunk 64, a prompt of n_s tokens that all sequences share, then n_c completion
tokens of each; the rate is n_c * batch over the time of all n_c steps. The second shape is that of SmolLM2-135M.
Latency is measured at a few completion lengths and interpolated between them; the largest is first checked against
the float64 oracle. `shared_pages` and `separate_pages` are the paper's PagedAttn* and PagedAttn, see
attention_cases.py; the roofline is the mean over the same steps.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attention_cases import (
    PAPER_SHAPE,
    Batch,
    Limits,
    Pool,
    Setting,
    Timing,
    all_settings,
    benchmark_parser,
    collect,
    floor_percent,
    mean_step_us,
    one_prefix,
    print_table,
    take_turns,
    thread_counts,
)
from plots import Panel, draw, grouped, panels, require_matplotlib

SYSTEMS = ("ours", "shared_pages", "separate_pages")
# Thousand tokens/s of ChunkAttn and PagedAttn on an A100 in fp16, by (n_s, n_c).
PAPER_K_PER_S = {
    (1024, 256): (241.93, 76.35),
    (1024, 512): (186.44, 69.15),
    (1024, 1024): (127.85, 58.12),
    (2048, 512): (145.41, 39.85),
    (2048, 1024): (107.37, 36.18),
    (2048, 2048): (70.33, 30.17),
    (4096, 512): (101.69, 21.04),
    (4096, 1024): (81.69, 19.85),
    (4096, 2048): (58.33, 17.98),
    (4096, 4096): (37.05, 15.12),
}


def completion_lengths(n_s: int) -> list[int]:
    """Doubling up to the length of the prompt, from an eighth of it and at least 256."""
    return [n_c for n_c in (n_s // 8, n_s // 4, n_s // 2, n_s) if n_c >= min(256, n_s)]


def paper_k_per_s(setting: Setting, n_s: int, n_c: int) -> tuple[float | None, float | None]:
    """ChunkAttn and PagedAttn, where the paper has this case."""
    if setting.shape.name != PAPER_SHAPE:
        return None, None
    return PAPER_K_PER_S.get((n_s, n_c), (None, None))


def measure(
    pool: Pool, limits: Limits, longest: Batch, n_s: int, positions: Sequence[int], repeats: int
) -> tuple[dict[str, list[float]], Timing]:
    """Latencies of every system, and rooflines, at each position of the completion; and the least steady timing."""
    latencies: dict[str, list[float]] = {}
    timings = []
    for position in positions:
        sequences = longest.at(n_s + position)
        timings.append(take_turns(pool.systems(sequences), repeats))
        for name, us in (timings[-1].best_us | limits.rooflines_us(pool.setting, sequences)).items():
            latencies.setdefault(name, []).append(us)
    return latencies, max(timings, key=lambda timing: timing.spread)


def throughput_row(
    setting: Setting, batch: int, n_s: int, n_c: int, positions: Sequence[int], latencies: dict[str, list[float]]
) -> dict[str, Any]:
    mean_us = {name: mean_step_us(positions, us, n_c) for name, us in latencies.items()}
    return {
        **setting.columns,
        "batch": batch,
        "n_s": n_s,
        "n_c": n_c,
        **{f"{name}_tokens_per_s": round(batch / mean_us[f"{name}_us"] * 1e6) for name in SYSTEMS},
        **{name: round(us, 1) for name, us in mean_us.items()},
    }


def run(settings: Sequence[Setting], prompts: Sequence[int], batch: int, repeats: int) -> Iterator[dict[str, Any]]:
    for setting in settings:
        for n_s in prompts:
            lengths = completion_lengths(n_s)
            positions = [1, *lengths]
            longest = one_prefix(batch, n_s + lengths[-1], n_s)
            pool = Pool(setting, num_slots=longest.num_slots, num_sequences=batch)
            pool.check(longest)
            limits = Limits.measure(setting.dtype)
            latencies, timing = measure(pool, limits, longest, n_s, positions, repeats)
            for n_c in lengths:
                ours, paged = paper_k_per_s(setting, n_s, n_c)
                yield {
                    **throughput_row(setting, batch, n_s, n_c, positions, latencies),
                    "paper_ours_k_per_s": ours,
                    "paper_separate_pages_k_per_s": paged,
                    **limits.columns,
                    **timing.columns,
                }


def throughput_panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    return panels(
        rows,
        context="n_s",
        x="n_c",
        x_label="completion tokens, n_c",
        y_label="thousand tokens/s",
        lines={name.replace("_", " "): f"{name}_tokens_per_s" for name in SYSTEMS},
    )


def report(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        f"decode attention, batch {rows[0]['batch']}: tokens/s, and microseconds per step; the paper's on an A100",
        [floor_percent(row) for row in rows],
        (
            *("case", "dtype", "threads", "n_s", "n_c", "ours_tokens_per_s", "ours_us", "% floor", "shared_pages_us"),
            *("separate_pages_us", "paper_ours_k_per_s", "paper_separate_pages_k_per_s"),
        ),
    )
    for (case, dtype, threads), group in grouped(rows, "case", "dtype", "threads").items():
        ratios = [
            f"{row['ours_tokens_per_s'] / row['shared_pages_tokens_per_s']:.2f}x shared pages and "
            f"{row['ours_tokens_per_s'] / row['separate_pages_tokens_per_s']:.2f}x separate pages at "
            f"n_s={row['n_s']}, n_c={row['n_c']}"
            for row in (group[0], group[-1])
        ]
        print(f"{case} {dtype}, {threads} thread(s): {'; '.join(ratios)}")


def main() -> None:
    parser = benchmark_parser(__doc__, quick="a prompt of 1024 tokens, one thread, few repeats", plot=True)
    args = parser.parse_args()
    require_matplotlib(args.plot)
    torch.manual_seed(0)
    prompts = (1024,) if args.quick else (1024, 2048, 4096)
    rows = collect(run(all_settings(thread_counts(args)), prompts, 32, 2 if args.quick else 5), args.json)
    if args.plot:
        draw(
            args.plot,
            "Figure 3: token rate over the length of the completion",
            throughput_panels(rows),
            columns=2 if args.quick else len(prompts),
        )
    report(rows)


if __name__ == "__main__":
    main()
