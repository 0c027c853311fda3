"""What does sharing prefixes give a user? The same requests with and without it, by turns, as `chunkserve bench` sends.

Without: each request has a cache_salt of its own. Each turn has new words, so that its shared prompt is cold.
"""

import argparse
import asyncio
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chunkserve.deploy.bench import BenchSettings
from chunkserve.deploy.local_server import LocalServer, local_server
from rows import write_rows
from server_load import OURS, check, load

SHARING = {"sharing on": True, "sharing off": False}


def measure(server: LocalServer, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for turn in range(args.repeats):
        for label, share in SHARING.items():
            settings = BenchSettings(
                url=server.url, label=label, concurrency=args.concurrency, num_requests=args.requests, share=share,
                shared_tokens=args.shared_tokens, new_tokens=args.new_tokens, seed=turn, warmup=0,
            )  # fmt: skip
            rows.append(asyncio.run(load(settings, ours=server)).row() | {"turn": turn})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short turn, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.requests, args.shared_tokens, args.new_tokens, args.repeats = 16, 256, 16, 1
    knobs = {"max_sequence_tokens": 2048, "max_running_sequences": args.concurrency}
    with local_server(knobs) as server:
        check(OURS, server.url)
        rows = measure(server, args)
    if args.json:
        write_rows(args.json, rows)

    columns = ["output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p90", "tpot_ms_p50", "cached_share", "kv_bytes_peak"]
    table = Table("", *columns)
    for label in SHARING:
        values = [[row[column] for row in rows if row["system"] == label] for column in columns]
        table.add_row(label, *(f"{statistics.median(v):.3g} ({min(v):.3g} to {max(v):.3g})" for v in values))
    Console(width=140).print(table)
    ratios = [
        [row["output_tokens_per_s"] for row in rows if row["turn"] == turn] for turn in range(args.repeats)
    ]  # on, off
    gains = sorted(on_rate / off_rate for on_rate, off_rate in ratios)
    print(
        f"sharing on / off, output tokens/s: {statistics.median(gains):.2f}x ({gains[0]:.2f} to {gains[-1]:.2f}) at "
        f"concurrency {args.concurrency}, {args.shared_tokens} shared tokens, {args.new_tokens} new ones"
    )


if __name__ == "__main__":
    main()
