"""What does sharing prefixes give a user? The same server twice, sharing on and off, under `chunkserve bench`.

Both servers run side by side and are loaded by turns, each turn with new words, so that its shared prompt is cold.
"""

import argparse
import asyncio
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rows import write_rows

from chunkserve.deploy.bench import BenchSettings, run_bench
from chunkserve.deploy.client import Client
from chunkserve.deploy.local_server import LocalServer, local_server


def check(servers: dict[str, LocalServer]) -> None:
    """Both servers say the same, before anything is timed."""
    texts = set()
    for server in servers.values():
        with Client(server.url) as client:
            texts.add(client.chat("What is the capital of France?", max_tokens=16, temperature=0).text)
    if texts != {"The capital of France is Paris."}:
        raise SystemExit(f"the servers' answers are wrong, nothing is timed: {texts}")


def measure(servers: dict[str, LocalServer], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for turn in range(args.repeats):
        for label, server in servers.items():
            settings = BenchSettings(
                url=server.url, label=label, concurrency=args.concurrency, num_requests=args.requests,
                shared_tokens=args.shared_tokens, new_tokens=args.new_tokens, seed=turn, warmup=0,
            )  # fmt: skip
            rows.append(asyncio.run(run_bench(settings)).row() | {"turn": turn})
            if rows[-1]["errors"]:
                raise SystemExit(f"{label}: {rows[-1]['errors']} requests failed")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short turn, under a minute once the servers run")
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
    with local_server(knobs) as on, local_server({**knobs, "prefix_sharing": False}) as off:
        servers = {"sharing on": on, "sharing off": off}
        check(servers)
        rows = measure(servers, args)
    if args.json:
        write_rows(args.json, rows)

    columns = ["output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p90", "tpot_ms_p50", "cached_share"]
    table = Table("", *columns)
    for label in servers:
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
