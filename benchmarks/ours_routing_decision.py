"""What does a routing decision cost? The live router's own code, in CPU time of its thread: others do not count.

Each case opens, routes, answers and closes requests on one router whose replicas report while it goes on. Prompts share
beginnings: a part of each is known somewhere, the rest is new and is entered into the index. `hash` is the chain of
digests, which the ingress computes once per request beside the decision. `match` alone reads the index. The index of
1 million chunks is filled with chains of 64 over 100 replicas; its memory is what tracemalloc counts.
"""

import argparse
import gc
import itertools
import random
import time
import tracemalloc
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from chunkserve.replica.chunk_hash import DIGEST_BYTES, ChunkScheme
from chunkserve.replica.protocol import RoutingReport, StepTime
from chunkserve.router.prefix_index import PrefixIndex
from chunkserve.router.routing_state import RoutingState
from rows import write_rows

SCHEME = ChunkScheme(model="m", dtype="bfloat16", chunk_size=64)
STEP = StepTime(fixed_s=0.008, per_token_s=1e-4, per_context_s=1e-9, per_sequence_s=1e-4)
# (prompt tokens, replicas) -> bound of the 99th percentile, in microseconds.
TARGETS_US = {(4_000, 100): 1_000, (240_000, 100): 5_000}
INDEX_TARGET_BYTES = 300e6


def report(at_s: float, draw: random.Random) -> RoutingReport:
    return RoutingReport(
        epoch=1, taken_at_s=at_s, backlog_s=draw.random(), running_sequences=draw.randrange(30), waiting_sequences=0,
        chunks_total=10_000, chunks_in_use=draw.randrange(5_000), chunks_retained=draw.randrange(5_000), step=STEP,
        max_step_tokens=2048, chunk_identity=SCHEME.identity,
    )  # fmt: skip


def decisions(prompt_tokens: int, replicas: int, count: int, policy: str, seed: int = 0) -> dict[str, Any]:
    draw = random.Random(seed)
    names = [f"replica-{i}" for i in range(replicas)]
    state = RoutingState(policy=policy, chunk_size=64, chunk_identity=SCHEME.identity, seed=seed)
    state.set_replicas(names, 0.0)
    heads = [array("i", [draw.randrange(50_000) for _ in range(prompt_tokens)]) for _ in range(8)]
    seconds: dict[str, list[float]] = {"hash": [], "match": [], "decision": []}
    open_keys: list[str] = []
    for number in range(count + count // 10):
        now_s = 0.005 * number
        state.report(names[number % replicas], report(now_s, draw))
        # It leaves the known beginning anywhere, so that any part of it may be new.
        head = draw.choice(heads)
        left_at = draw.randrange(prompt_tokens)
        prompt = head[:left_at] + array("i", [draw.randrange(50_000) for _ in range(min(500, prompt_tokens - left_at))])
        prompt += head[len(prompt) :]
        begin_s = time.thread_time()
        digests = SCHEME.digests("", prompt)
        hashed_s = time.thread_time()
        state.index.match(digests, now_s, replicas)
        matched_s = time.thread_time()
        key = f"{number}"
        state.open(key, len(prompt), digests)
        route_s = time.thread_time()
        state.route_open(key, 64, now_s, names)
        end_s = time.thread_time()
        open_keys.append(key)
        if len(open_keys) > 4 * replicas:
            state.first_token(open_keys[0], 0)
            state.close(open_keys.pop(0))
        if number >= count // 10:
            for name, value in (
                ("hash", hashed_s - begin_s),
                ("match", matched_s - hashed_s),
                ("decision", end_s - route_s),
            ):
                seconds[name].append(value)
    return {
        "case": "decision",
        "policy": policy,
        "prompt_tokens": prompt_tokens,
        "replicas": replicas,
        "index_entries": len(state.index),
        **{f"{name}_us_p50": round(float(np.percentile(values, 50)) * 1e6) for name, values in seconds.items()},
        **{f"{name}_us_p99": round(float(np.percentile(values, 99)) * 1e6) for name, values in seconds.items()},
        "target_us_p99": TARGETS_US.get((prompt_tokens, replicas)),
        "warm_up": count // 10,
        "repeats": count,
    }


def index_memory(entries: int, replicas: int = 100, chain: int = 64) -> dict[str, Any]:
    def chains() -> Iterator[list[bytes]]:
        numbers = iter(range(entries))
        while part := list(itertools.islice(numbers, chain)):
            yield [blake2b(number.to_bytes(8, "little"), digest_size=DIGEST_BYTES).digest() for number in part]

    index = PrefixIndex(entries)
    for row in range(replicas):
        index.add_replica(row)
    gc.collect()
    tracemalloc.start()
    for number, digests in enumerate(chains()):
        # Two replicas hold each; masks of different replicas are numbers of their own.
        index.store(digests, number % replicas)
        index.store(digests, (number * 7 + 1) % replicas)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"case": "index", "replicas": replicas, "index_entries": len(index), "index_bytes": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer decisions, a tenth of the index")
    parser.add_argument("--policies", nargs="+", default=["prefix"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write flat rows")
    args = parser.parse_args()
    count, entries = (300, 100_000) if args.quick else (2000, 1_000_000)
    table = Table("policy", "prompt tokens", "replicas", "hash p50", "match p50", "decision p50", "p99", "target p99")
    rows = []
    for (prompt_tokens, replicas), policy in itertools.product([*TARGETS_US, (4_000, 1000)], args.policies):
        row = decisions(prompt_tokens, replicas, count if prompt_tokens < 10_000 else count // 4, policy)
        rows.append(row)
        names = ("hash_us_p50", "match_us_p50", "decision_us_p50", "decision_us_p99", "target_us_p99")
        table.add_row(policy, f"{prompt_tokens}", f"{replicas}", *(f"{row[name] or '-'}" for name in names))
    Console(width=120).print(table, "microseconds")
    rows.append(index_memory(entries))
    bytes_each = rows[-1]["index_bytes"] / rows[-1]["index_entries"]
    print(
        f"index: {bytes_each:.0f} bytes a chunk, {bytes_each:.0f} MB for 1 million "
        f"(target: {INDEX_TARGET_BYTES / 1e6:.0f} MB)"
    )
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
