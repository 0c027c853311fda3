"""The paper's Table 4: latency, peak K and V bytes and peak batch, with prompts that are shared wholly or not at all.

The paper: one A100, Llama 2 7B, 512 new tokens, Poisson arrivals at 1 request a second; "-" is what it does not give.
Ours: the small model on this machine, arrivals as set. What should agree is the ratios: n_s = n_p against n_s = 0.
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
from chunkserve.deploy.local_server import LocalServer, local_server
from rows import write_rows
from server_load import OURS, check, load, seed_of


def measure(
    system: str, url: str, ours: LocalServer, args: argparse.Namespace, point: tuple[int, int, int]
) -> dict[str, Any]:
    prompt_tokens, shared, turn = point
    settings = BenchSettings(
        url=url, label=system, endpoint="token-ids", rate_rps=args.rate, num_requests=args.requests,
        shared_tokens=shared, own_tokens=prompt_tokens - shared, new_tokens=args.new_tokens,
        seed=seed_of(point),
    )  # fmt: skip
    row = asyncio.run(load(settings, ours=ours if system == OURS else None)).row()
    return row | {"prompt_tokens": prompt_tokens, "turn": turn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short prompt, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="repeatable")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1.0, help="Poisson arrivals per second")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.prompt_tokens, args.new_tokens, args.rate, args.requests, args.repeats = [256], 16, 8.0, 16, 1
    peers = dict(peer.split("=", 1) for peer in args.peer)

    rows: list[dict[str, Any]] = []
    longest = max(args.prompt_tokens) + args.new_tokens
    # Room for all prompts at once, so that the peak is what the load asks for and not what the pool has.
    knobs = {
        "max_sequence_tokens": longest,
        "max_running_sequences": args.requests,
        "kv_pool_chunks": args.requests * (longest // 64 + 1),
    }
    with local_server(knobs) as ours:
        servers = {OURS: ours.url, **peers}
        for label, url in servers.items():
            check(label, url)
        for prompt_tokens, turn in itertools.product(args.prompt_tokens, range(args.repeats)):
            for shared, (label, url) in itertools.product((0, prompt_tokens), servers.items()):
                rows.append(measure(label, url, ours, args, (prompt_tokens, shared, turn)))
    if args.json:
        write_rows(args.json, rows)

    columns = ("latency_ms_per_token", "ttft_ms_p50", "kv_bytes_peak", "batch_peak", "output_tokens_per_s")
    table = Table("system", "n_p", "n_s", *columns)
    for prompt_tokens, (label, _) in itertools.product(args.prompt_tokens, servers.items()):
        for shared in (0, prompt_tokens):
            values = [_values(rows, label, prompt_tokens, shared, column) for column in columns]
            figures = [f"{statistics.median(v):.4g}" if None not in v else "-" for v in values]
            table.add_row(label, str(prompt_tokens), str(shared), *figures)
    Console(width=140).print(table)
    for prompt_tokens in args.prompt_tokens:
        print(_headline(rows, prompt_tokens))


def _headline(rows: list[dict[str, Any]], prompt_tokens: int) -> str:
    parts = []
    for column, name in (("kv_bytes_peak", "peak K and V bytes"), ("latency_ms_per_token", "normalised latency")):
        ratios = sorted(
            with_sharing / without
            for with_sharing, without in zip(
                _values(rows, OURS, prompt_tokens, prompt_tokens, column),
                _values(rows, OURS, prompt_tokens, 0, column),
                strict=True,
            )
        )
        parts.append(f"{name} {statistics.median(ratios):.3f}x ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    return f"{OURS}, n_s = n_p against n_s = 0 at n_p = {prompt_tokens}: {', '.join(parts)}"


def _values(rows: list[dict[str, Any]], system: str, prompt_tokens: int, shared: int, column: str) -> list[Any]:
    place = (system, prompt_tokens, shared)
    return [row[column] for row in rows if (row["system"], row["prompt_tokens"], row["shared_tokens"]) == place]


if __name__ == "__main__":
    main()
