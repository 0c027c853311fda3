"""The paper's Figure 5: normalised latency over arrival rate, with prompts that are shared wholly or not at all.

Normalised latency is the time from sending a request to its last token over its new tokens, mean of the requests, in
milliseconds per token; arrivals are Poisson and the same for all systems. The paper measures ChunkLlama, vLLM and TGI
on an A100 with 512 new tokens; here `chunkserve` and any peers that you started (`--peer NAME=URL`, the same model).
"chunkserve, not shared" sends the shared prompts with a cache_salt of each request's own.
"""

import argparse
import asyncio
import itertools
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chunkserve.deploy.bench import BenchSettings
from chunkserve.deploy.local_server import LocalServer, local_server
from plots import Panel, draw, require_matplotlib
from rows import write_rows
from server_load import OURS, check, load, seed_of

NOT_SHARED = f"{OURS}, not shared"


def measure(
    system: str, url: str, ours: LocalServer, args: argparse.Namespace, point: tuple[int, int, float, int]
) -> dict[str, Any]:
    prompt_tokens, shared_percent, rate, turn = point
    shared = prompt_tokens * shared_percent // 100
    settings = BenchSettings(
        url=url, label=system, endpoint="token-ids", rate_rps=rate,
        num_requests=max(args.min_requests, round(rate * args.seconds)), shared_tokens=shared,
        own_tokens=prompt_tokens - shared, new_tokens=args.new_tokens, share=system != NOT_SHARED,
        seed=seed_of(point),
    )  # fmt: skip
    row = asyncio.run(load(settings, ours=ours if system in (OURS, NOT_SHARED) else None)).row()
    return row | {"prompt_tokens": prompt_tokens, "shared_percent": shared_percent, "turn": turn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short prompt at two rates, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw latency over rate; needs matplotlib")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="repeatable")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.125, 0.25, 0.5, 1.0, 2.0], help="requests/s")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each rate")
    parser.add_argument("--min-requests", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.prompt_tokens, args.rates, args.new_tokens, args.seconds, args.repeats = [256], [1.0, 4.0], 8, 2.0, 1
    require_matplotlib(args.plot)
    peers = dict(peer.split("=", 1) for peer in args.peer)

    rows: list[dict[str, Any]] = []
    with local_server({"max_sequence_tokens": 4096, "max_running_sequences": 64}) as ours:
        for label, url in {OURS: ours.url, **peers}.items():
            check(label, url)
        for prompt_tokens, percent in itertools.product(args.prompt_tokens, (0, 100)):
            # Without anything to share the two kinds of ours are one.
            systems = {OURS: ours.url, **({NOT_SHARED: ours.url} if percent else {}), **peers}
            for rate, turn in itertools.product(args.rates, range(args.repeats)):
                point = (prompt_tokens, percent, rate, turn)
                rows += [measure(system, url, ours, args, point) for system, url in systems.items()]
    if args.json:
        write_rows(args.json, rows)
    if args.plot:
        draw(args.plot, "Normalised latency over arrival rate", _panels(rows))

    columns = ("latency_ms_per_token", "ttft_ms_p50", "output_tokens_per_s", "batch_peak", "kv_bytes_peak")
    table = Table("prompt", "shared %", "requests/s", "turn", "system", *columns)
    for row in rows:
        figures = [f"{row[column]:.4g}" if row[column] is not None else "-" for column in columns]
        place = (row["prompt_tokens"], row["shared_percent"], row["rate_rps"], row["turn"])
        table.add_row(*map(str, place), row["system"], *figures)
    Console(width=150).print(table)
    _print_headline(rows, args)


def _panels(rows: list[dict[str, Any]]) -> list[Panel]:
    lines: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        panel = lines.setdefault((row["prompt_tokens"], row["shared_percent"]), {})
        panel.setdefault(row["system"], []).append((row["rate_rps"], row["latency_ms_per_token"]))
    return [
        Panel(
            title=f"prompts of {prompt_tokens} tokens, {percent} % shared",
            x_label="requests per second",
            y_label="ms per new token",
            lines={system: sorted(points) for system, points in systems.items()},
        )
        for (prompt_tokens, percent), systems in lines.items()
    ]


def _print_headline(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The paper's claim: so many times the rate at the latency that others have."""
    prompt_tokens, rate = args.prompt_tokens[-1], args.rates[-1]
    here = [r for r in rows if (r["prompt_tokens"], r["shared_percent"], r["rate_rps"]) == (prompt_tokens, 100, rate)]
    of = {system: [r["latency_ms_per_token"] for r in here if r["system"] == system] for system in _systems(here)}
    for system, latencies in of.items():
        if system == OURS:
            continue
        ratios = sorted(other / own for other, own in zip(latencies, of[OURS], strict=True))
        print(
            f"{system} / {OURS}, normalised latency: {ratios[len(ratios) // 2]:.2f}x ({ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}) at {rate:g} requests/s, prompts of {prompt_tokens} tokens, all shared"
        )


def _systems(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["system"] for row in rows))


if __name__ == "__main__":
    main()
