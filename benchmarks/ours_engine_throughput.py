"""How many tokens a second does a server make when its requests begin alike? Ours, and peers that run beside it.

Loads `chunkserve serve` and any other OpenAI-compatible servers by turns with the same token ids: bursts of requests
with one shared beginning, which a warm-up request has put into each server's prefix cache. Start peers yourself and
name them: `--peer vllm=http://127.0.0.1:8001` (they serve the same model; docs/engine.md says how it was done).
"""

import argparse
import asyncio
import itertools
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chunkserve.deploy.bench import BenchSettings
from chunkserve.deploy.launcher import assigned_knobs
from chunkserve.deploy.local_server import LocalServer, local_server
from rows import write_rows
from server_load import OURS, check, load, seed_of

# Shared tokens, new tokens, concurrency.
Case = tuple[int, int, int]


def measure(label: str, url: str, ours: LocalServer, args: argparse.Namespace, case: Case, turn: int) -> dict[str, Any]:
    """One burst of a case."""
    shared, new, concurrency = case
    settings = BenchSettings(
        url=url, label=label, endpoint=args.endpoint, concurrency=concurrency,
        num_requests=concurrency * args.rounds, shared_tokens=shared, own_tokens=args.own_tokens, new_tokens=new,
        ignore_eos=args.ignore_eos, seed=seed_of((*case, turn)),
    )  # fmt: skip
    return asyncio.run(load(settings, ours=ours if label == OURS else None)).row() | {"turn": turn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small burst each, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="repeatable")
    parser.add_argument("--shared-tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--endpoint", choices=["token-ids", "completions"], default="token-ids",
        help="completions: prompts are text, for peers that take no token ids",
    )  # fmt: skip
    parser.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="off for peers that lack it"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", dest="knobs", help="of our server; repeatable"
    )
    parser.add_argument("--own-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2, help="requests of a burst, in multiples of its concurrency")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.shared_tokens, args.new_tokens, args.concurrency, args.rounds, args.repeats = [256], [16], [8], 1, 1
    peers = dict(peer.split("=", 1) for peer in args.peer)

    rows = []
    cases = list(itertools.product(args.shared_tokens, args.new_tokens, args.concurrency))
    with local_server({"max_sequence_tokens": 4096, **assigned_knobs(args.knobs)}) as ours:
        servers = {OURS: ours.url, **peers}
        for label, url in servers.items():
            check(label, url)
        for case in cases:
            for turn in range(args.repeats):
                rows += [measure(label, url, ours, args, case, turn) for label, url in servers.items()]
    if args.json:
        write_rows(args.json, rows)

    columns = ["output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "kv_bytes_peak"]
    columns += ["cpu_outside_share", "cpu_ingress_share", "cpu_proxy_share"]
    table = Table("shared", "new", "concurrency", "system", *columns)
    for shared, new, concurrency in cases:
        for label in servers:
            values = [
                [row[column] for row in rows if _is_of(row, label, (shared, new, concurrency))] for column in columns
            ]
            figures = [
                f"{statistics.median(v):.4g} ({min(v):.4g} to {max(v):.4g})" if None not in v else "-" for v in values
            ]
            table.add_row(str(shared), str(new), str(concurrency), label, *figures)
    Console(width=220).print(table)
    _print_headline(rows, cases[-1], list(peers))


def _print_headline(rows: list[dict[str, Any]], case: Case, peers: list[str]) -> None:
    def rates(label: str) -> list[float]:
        return [row["output_tokens_per_s"] for row in rows if _is_of(row, label, case)]

    where = f"{case[0]} shared tokens, {case[1]} new ones, concurrency {case[2]}"
    if not peers:
        print(f"{OURS}: {statistics.median(rates(OURS)):.1f} output tokens/s at {where}; no peer to compare with")
    for peer in peers:
        ratios = sorted(a / b for a, b in zip(rates(OURS), rates(peer), strict=True))
        print(
            f"{OURS} / {peer}, output tokens/s: {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f}) "
            f"at {where}"
        )


def _is_of(row: dict[str, Any], label: str, case: Case) -> bool:
    return row["system"] == label and (row["shared_tokens"], row["new_tokens"], row["concurrency"]) == case


if __name__ == "__main__":
    main()
