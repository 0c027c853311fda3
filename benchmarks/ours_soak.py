"""Does a server stay well under a long, mixed load? One server with a pool so small that sequences must give way.

Clients ask, stream, leave in the middle of a stream or while they wait, ask too much, for several choices, with seeds.
Looked for: an answer that does not come, or ends twice; chunks that stay in use when nobody runs; text that is another
when the server is quiet (deterministic mode, so it must be the same); processes that grow.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from pydantic_core import from_json

from chunkserve.deploy.local_server import LocalServer, local_server
from rows import write_rows

POOL_CHUNKS, MAX_TOKENS = 28, 320
KNOBS = {
    "deterministic": True, "chunk_size_tokens": 16, "kv_pool_chunks": POOL_CHUNKS, "max_sequence_tokens": MAX_TOKENS,
    "max_running_sequences": 16, "log_level": "warning",
}  # fmt: skip
CLIENTS = 12
SAMPLE_PERIOD_S = 5.0
IDLE_TIMEOUT_S = 60.0
# Growth of a group of processes that is none: allocators and Ray's own bookkeeping take some room at first.
ALLOWED_BYTES, ALLOWED_SHARE = 16 << 20, 0.03
# Below this a slope says nothing.
MIN_SLOPE_S = 600.0


@dataclass(slots=True)
class Soak:
    """What has been seen. `faults` are messages; `kept` a sample of (body, texts) of whole answers."""

    rng: random.Random
    sent_choices: int = 0
    answered_choices: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    kept: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def keep(self, body: dict[str, Any], texts: list[str], size: int) -> None:
        """Each answer has the same chance to stay (reservoir sampling)."""
        seen = self.outcomes["answered"] + self.outcomes["streamed"]
        if len(self.kept) < size:
            self.kept.append((body, texts))
        elif (at := self.rng.randrange(seen)) < size:
            self.kept[at] = (body, texts)


def body_of(rng: random.Random, stems: list[list[int]]) -> dict[str, Any]:
    """A request that can be served, with a beginning that others have too, cut anywhere."""
    stem = rng.choice(stems)
    prompt = stem[: rng.randrange(1, len(stem))] + [rng.randrange(1000, 40_000) for _ in range(rng.randrange(1, 30))]
    drawn = {"temperature": 0.9, "top_p": 0.95} if rng.random() < 0.5 else {"temperature": 0}
    return {
        "prompt": prompt, "max_tokens": rng.randrange(1, 100), "n": rng.choice([1, 1, 1, 2, 3]), "ignore_eos": True,
        "seed": rng.randrange(1 << 40), "cache_salt": rng.choice(["", "", "a tenant"]),
        "prefix_cache": rng.random() < 0.9, **drawn,
    }  # fmt: skip


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    """Texts of a whole answer."""
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    return [choice["text"] for choice in sorted(response.json()["choices"], key=lambda choice: choice["index"])]


async def stream(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> list[str] | None:
    """Texts of a stream, each choice of which ends once; None after `leave_after` events.

    Raises:
        ValueError: it is no whole stream.
    """
    texts, ends, done = [""] * body["n"], Counter[int](), 0
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done += 1
                continue
            for choice in from_json(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
                ends[choice["index"]] += choice["finish_reason"] is not None
            if leave_after is not None:
                leave_after -= 1
                if leave_after < 0:
                    return None
    if done != 1 or any(ends[choice] != 1 for choice in range(body["n"])):
        raise ValueError(f"a stream with {done} ends, and {dict(ends)} of its {body['n']} choices")
    return texts


async def one_client(soak: Soak, client: httpx.AsyncClient, stems: list[list[int]], until_s: float, keep: int) -> None:
    rng = random.Random(soak.rng.random())
    while time.monotonic() < until_s:
        kind = rng.choices(["answered", "streamed", "left_stream", "left_queue", "refused"], [4, 4, 3, 2, 1])[0]
        body = body_of(rng, stems)
        try:
            if kind == "refused":
                over = {**body, "prompt": body["prompt"] * (1 + MAX_TOKENS // len(body["prompt"]))}
                status = (await client.post("/v1/completions", json=over)).status_code
                if status != 400:
                    soak.faults.append(f"a prompt that is too long got status {status}")
                soak.outcomes[kind] += 1
                continue
            soak.sent_choices += body["n"]
            texts: list[str] | None = None
            if kind == "answered":
                texts = await answer(client, body)
            elif kind == "left_queue":
                try:
                    texts = await asyncio.wait_for(answer(client, body), rng.random() * 0.3)
                    kind = "answered"
                except TimeoutError:
                    pass
            else:
                texts = await stream(client, body, rng.randrange(20) if kind == "left_stream" else None)
                kind = "streamed" if texts is not None else kind
            soak.outcomes[kind] += 1
            if texts is not None:
                soak.answered_choices += body["n"]
                soak.keep(body, texts, keep)
        except (httpx.HTTPError, ValueError) as error:
            soak.faults.append(f"{kind}: {type(error).__name__}: {error}")


def memory_of(server: LocalServer) -> dict[str, int]:
    """Bytes that only the replica, the ingress, and all other processes of the server have."""
    out = {"replica": 0, "ingress": 0, "others": 0}
    for process in server.processes():
        try:
            title = " ".join(process.cmdline())
            group = next((name for name in ("replica", "ingress") if f"chunkserve:{name}" in title), "others")
            out[group] += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return out


async def watch(soak: Soak, server: LocalServer) -> None:
    start_s = time.monotonic()
    while True:
        soak.memory.append((time.monotonic() - start_s, await asyncio.to_thread(memory_of, server)))
        await asyncio.sleep(SAMPLE_PERIOD_S)


def growth(soak: Soak, group: str) -> tuple[float, float]:
    """Bytes per second after the first third, by least squares, and the mean there; (0, mean) of too few samples."""
    late = [(at, sizes[group]) for at, sizes in soak.memory if at >= soak.memory[-1][0] / 3]
    times, sizes = zip(*late, strict=True)
    if len(late) < 3:
        return 0.0, statistics.mean(sizes)
    return statistics.linear_regression(times, sizes).slope, statistics.mean(sizes)


async def replica_load(client: httpx.AsyncClient) -> dict[str, Any]:
    loads = list((await client.get("/status")).json()["replicas"].values())
    if len(loads) != 1:
        raise SystemExit(f"{len(loads)} replicas answer; expected one")
    return loads[0]


async def idle_load(client: httpx.AsyncClient) -> dict[str, Any]:
    """The replica's load once nothing runs or waits, or after IDLE_TIMEOUT_S."""
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        load = await replica_load(client)
        if not load["running_sequences"] + load["waiting_sequences"] or time.monotonic() > deadline_s:
            return load
        await asyncio.sleep(0.5)


def check_idle(soak: Soak, load: dict[str, Any]) -> None:
    finished = load["finished"]
    whole, all_ends = finished.get("stop", 0) + finished.get("length", 0), sum(finished.values())
    for wrong, words in [
        (load["running_sequences"] or load["waiting_sequences"], "sequences run or wait though all clients are done"),
        (load["chunks_in_use"], "chunks are in use though nothing runs"),
        (load["chunks_retained"] > load["chunks_total"], "more chunks are retained than there are"),
        (finished.get("error"), "choices ended with an error"),
        (whole < soak.answered_choices, "fewer choices ended than were answered"),
        (all_ends > soak.sent_choices, "more choices ended than were sent"),
        (not load["preemptions"], "nothing was preempted: the load is too small for this pool"),
        (not load["cancelled_requests"], "nothing was cancelled"),
    ]:
        if wrong:
            soak.faults.append(f"{words}: {load}")


async def run(args: argparse.Namespace, server: LocalServer) -> tuple[Soak, dict[str, Any]]:
    soak = Soak(rng=random.Random(args.seed))
    stems = [[soak.rng.randrange(1000, 40_000) for _ in range(length)] for length in (20, 64, 100, 150)]
    limits = httpx.Limits(max_connections=CLIENTS + 2)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        watching = asyncio.create_task(watch(soak, server))
        until_s = time.monotonic() + args.seconds
        await asyncio.gather(*[one_client(soak, client, stems, until_s, args.compare) for _ in range(CLIENTS)])
        load = await idle_load(client)
        watching.cancel()
        soak.memory.append((soak.memory[-1][0] + SAMPLE_PERIOD_S, memory_of(server)))
        check_idle(soak, load)
        for body, texts in soak.kept:
            quiet = await answer(client, body)
            if quiet != texts:
                soak.faults.append(f"other text when quiet: {body}: {texts} then, {quiet} now")
        after = await idle_load(client)
        if after["chunks_in_use"]:
            soak.faults.append(f"chunks are in use though nothing runs: {after}")
        if (status := (await client.get("/health")).status_code) != 200:
            soak.faults.append(f"/health says {status}")
    return soak, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="15 s of load, under a minute in all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=1200.0, help="of load")
    parser.add_argument("--compare", type=int, default=40, help="answers that are asked for again when all is quiet")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.compare = 15.0, 5

    with local_server(KNOBS) as server:
        soak, load = asyncio.run(run(args, server))
    slopes = {}
    for group in soak.memory[0][1] if args.seconds >= MIN_SLOPE_S else ():
        slope, mean = growth(soak, group)
        slopes[group] = slope * 3600 / 2**20
        grown = slope * args.seconds * 2 / 3
        print(f"memory of {group}: {mean / 2**20:.0f} MiB, {slopes[group]:+.1f} MiB/h after the first third")
        if grown > max(ALLOWED_BYTES, ALLOWED_SHARE * mean):
            soak.faults.append(f"{group} grew by {grown / 2**20:.0f} MiB")
    for fault in soak.faults[:20]:
        print(f"fault: {fault[:2000]}")
    if args.json:
        row = {"seconds": args.seconds, "faults": len(soak.faults), "answered_choices": soak.answered_choices,
               "preemptions": load["preemptions"], "cancelled_requests": load["cancelled_requests"],
               "compared": len(soak.kept), **{f"requests_{name}": count for name, count in soak.outcomes.items()},
               **{f"{group}_mib_per_hour": slope for group, slope in slopes.items()}}  # fmt: skip
        write_rows(args.json, [row])
    memory = f"replica {slopes['replica']:+.1f} MiB/h" if slopes else f"memory not judged below {MIN_SLOPE_S:g} s"
    print(
        f"soak of {args.seconds:g} s: {len(soak.faults)} faults; {soak.outcomes.total()} requests "
        f"{dict(soak.outcomes)}, {load['preemptions']} preemptions, {len(soak.kept)} answers compared, {memory}"
    )
    if soak.faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
