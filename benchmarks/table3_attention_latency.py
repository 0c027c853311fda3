"""Table 3 of the paper on a CPU: latency of one decode step of attention, over context and shared part.

Paper: batch 32, 32 heads, head dim 128, chunk 64, n_p prompt tokens of which n_s are shared. The second shape is that
of SmolLM2-135M. Every case is first checked against the float64 oracle; a wrong kernel is not timed. Baselines:

    shared pages    our kernel with sharing off, all sequences over the same physical chunks (the paper's PagedAttn*)
    separate pages  our kernel, nothing shared physically (PagedAttn)
    sdpa            torch's scaled_dot_product_attention, one call per sequence, K and V of its own
    sdpa packed     one such call with the batch as query rows over one K and V; only where all is shared
    flex            torch's FlexAttention, compiled for these sizes: four sequences a call, K and V of their own

Systems run by turns, so that a busy machine slows them alike; the best time of each counts. The roofline is measured
in the same run: bytes at the streaming bandwidth or operations at the multiply-add peak, whichever takes longer; the
serial one adds up the shared and the private part.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from attention_cases import (
    MIN_SECONDS,
    Limits,
    Pool,
    Setting,
    System,
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
from chunkserve.kernels.reference import TOLERANCE
from plots import Panel, draw, panels, require_matplotlib

COPIES = 4  # K and V of so many sequences exceed every cache; sequences take them by turns
SYSTEMS = ("ours_us", "shared_pages_us", "separate_pages_us", "sdpa_us", "sdpa_packed_us", "flex_us")


class TorchBaselines:
    """Torch's own attention at one setting and context; K and V do not depend on what is shared."""

    def __init__(self, setting: Setting, q: Tensor, n_p: int) -> None:
        size = (COPIES, setting.shape.num_kv_heads, n_p, setting.shape.head_dim)
        self.k, self.v = (torch.randn(size, dtype=setting.dtype) for _ in range(2))
        self.rows = q[:, :, None]  # [B, H, 1, D]
        self.packed = q.transpose(0, 1)[None].contiguous()  # [1, H, B, D]
        self.gqa = setting.shape.num_heads != setting.shape.num_kv_heads
        self.tolerance = TOLERANCE[setting.dtype]

    def sdpa(self) -> None:
        for i in range(len(self.rows)):
            copy = slice(i % COPIES, i % COPIES + 1)
            F.scaled_dot_product_attention(self.rows[i : i + 1], self.k[copy], self.v[copy], enable_gqa=self.gqa)

    def sdpa_packed(self) -> None:
        F.scaled_dot_product_attention(self.packed, self.k[:1], self.v[:1], enable_gqa=self.gqa)

    def compiled_flex(self) -> System | None:
        """All sequences, COPIES per call; None, with the reason printed, where FlexAttention does not compile.

        Raises:
            RuntimeError: it is wrong, by the same measure as ours.
        """
        # What was compiled before may be for another number of threads.
        torch.compiler.reset()
        attention = torch.compile(flex_attention, dynamic=False)
        first = self.rows[:COPIES]
        try:
            with torch.inference_mode():
                out = attention(first, self.k[: len(first)], self.v[: len(first)], enable_gqa=self.gqa)
        # The compiler has no narrower class for "not on this machine".
        except Exception as reason:  # noqa: BLE001
            print(f"flex left out: {type(reason).__name__}: {str(reason).splitlines()[0][:100]}")
            return None
        q, k, v = (x.double() for x in (first, self.k[: len(first)], self.v[: len(first)]))
        error = float((out - F.scaled_dot_product_attention(q, k, v, enable_gqa=self.gqa)).abs().max())
        if not error <= self.tolerance:
            raise RuntimeError(f"FlexAttention is off by {error}, allowed {self.tolerance}; not timed")

        def all_sequences() -> None:
            with torch.inference_mode():
                for begin in range(0, len(self.rows), COPIES):
                    rows = self.rows[begin : begin + COPIES]
                    attention(rows, self.k[: len(rows)], self.v[: len(rows)], enable_gqa=self.gqa)

        return all_sequences


def run(
    settings: Sequence[Setting],
    contexts: Sequence[int],
    batch: int,
    repeats: int,
    seconds: float,
    *,
    sdpa: bool,
    flex: bool,
) -> Iterator[dict[str, Any]]:
    for setting in settings:
        for n_p in contexts:
            pool = Pool(setting, num_slots=batch * n_p // setting.chunk_size, num_sequences=batch)
            limits = Limits.measure(setting.dtype)
            baselines = TorchBaselines(setting, pool.q, n_p)
            compiled = baselines.compiled_flex() if flex else None
            for n_s in (0, n_p // 2, n_p * 3 // 4, n_p):
                sequences = one_prefix(batch, n_p, n_s)
                pool.check(sequences)
                systems = pool.systems(sequences) if n_s else {"ours_us": pool.system(sequences)}
                if sdpa:
                    systems["sdpa_us"] = baselines.sdpa
                if sdpa and n_s == n_p:
                    systems["sdpa_packed_us"] = baselines.sdpa_packed
                if compiled:
                    systems["flex_us"] = compiled
                timing = take_turns(systems, repeats, seconds)
                yield {
                    **setting.columns,
                    "batch": batch,
                    "n_p": n_p,
                    "n_s": n_s,
                    **dict.fromkeys(SYSTEMS),
                    **figures(setting, sequences, limits, timing),
                }


def latency_panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    return panels(
        rows,
        context="n_p",
        x="n_s",
        x_label="shared tokens, n_s",
        y_label="ms per step",
        lines={name.removesuffix("_us").replace("_", " "): name for name in (*SYSTEMS, "roofline_us")},
    )


def report(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        f"decode attention, batch {rows[0]['batch']}, microseconds (best of repeats)",
        [floor_percent(row) for row in rows],
        ("case", "dtype", "threads", "n_p", "n_s", "ours_us", "% floor", "% serial", *SYSTEMS[1:]),
    )
    longest = max(row["n_p"] for row in rows)
    top = next(r for r in rows if r["n_p"] == longest and r["n_s"] == longest and r["dtype"] == "bfloat16")
    print(
        f"{top['case']} bf16, {top['n_p']} tokens all shared, {top['threads']} thread(s): "
        f"{top['shared_pages_us'] / top['ours_us']:.2f}x faster than shared pages, "
        f"{100 * top['roofline_us'] / top['ours_us']:.0f} % of the roofline"
    )


def main() -> None:
    parser = benchmark_parser(__doc__, quick="1024 tokens, one thread, few repeats, no flex", plot=True)
    parser.add_argument("--no-sdpa", action="store_true", help="leave SDPA out: it takes most of the time")
    parser.add_argument(
        "--flex", action=argparse.BooleanOptionalAction, help="compile FlexAttention, 10-60 s a context (not --quick)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=MIN_SECONDS,
        help="of repeats of each case, at least (%(default)s)",
    )
    args = parser.parse_args()
    require_matplotlib(args.plot)
    torch.manual_seed(0)
    measured = run(
        all_settings(thread_counts(args)),
        (1024,) if args.quick else (1024, 2048, 4096),
        32,
        3 if args.quick else 9,
        args.seconds,
        sdpa=not args.no_sdpa,
        flex=not args.quick if args.flex is None else args.flex,
    )
    rows = collect(measured, args.json)
    if args.plot:
        draw(
            args.plot,
            "Table 3: latency of one decode step of attention",
            latency_panels(rows),
            columns=2 if args.quick else 3,
        )
    report(rows)


if __name__ == "__main__":
    main()
