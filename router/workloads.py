"""Streams of requests for simulation: a recorded trace, and generated ones. Equal seeds give equal streams."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from chunkserve.replica.chunk_hash import DIGEST_BYTES

from .simulated_replica import SimRequest

TRACE_CHUNK_TOKENS = 512


def digest_of(name: str) -> bytes:
    """Stands in for a chunk's digest."""
    return blake2b(name.encode(), digest_size=DIGEST_BYTES).digest()


def mooncake(path: Path, *, limit: int | None = None) -> list[SimRequest]:
    """Mooncake's trace format: one JSON object a line with `timestamp` (ms), lengths, and `hash_ids` per 512 tokens.

    Digests are of TRACE_CHUNK_TOKENS; ids name whole prefixes, so equal ids are equal chains.
    """
    requests = []
    with path.open() as lines:
        for line in itertools.islice(lines, limit):
            row = json.loads(line)
            full = row["input_length"] // TRACE_CHUNK_TOKENS
            requests.append(
                SimRequest(
                    at_s=row["timestamp"] / 1e3,
                    prompt_tokens=row["input_length"],
                    output_tokens=max(1, row["output_length"]),
                    digests=tuple(number.to_bytes(DIGEST_BYTES, "little") for number in row["hash_ids"][:full]),
                )
            )
    return requests


def shared_prompts(
    prompt_tokens: Sequence[int],
    *,
    num_requests: int,
    rate_rps: float,
    chunk_size: int,
    question_tokens: int = 60,
    output_tokens: int = 64,
    zipf: float = 1.0,
    common_tokens: int = 0,
    seed: int = 0,
) -> list[SimRequest]:
    """Applications with a long prompt each and a short question: prompts by Zipf's law, arrivals by a Poisson process.

    Args:
        prompt_tokens: length of each application's prompt, without the common part.
        zipf: popularity of the k-th prompt is k ** -zipf.
        common_tokens: a beginning that all prompts share.
    """
    draw = random.Random(seed)
    order = list(range(len(prompt_tokens)))
    draw.shuffle(order)
    weights = [(rank + 1.0) ** -zipf for rank in range(len(order))]
    requests, at_s = [], 0.0
    for number, prompt in enumerate(draw.choices(order, weights, k=num_requests)):
        at_s += draw.expovariate(rate_rps)
        length = common_tokens + prompt_tokens[prompt] + draw.randint(question_tokens // 2, question_tokens * 3 // 2)
        shared = common_tokens + prompt_tokens[prompt]
        digests = []
        for end in range(chunk_size, length + 1, chunk_size):
            owner = "common" if end <= common_tokens else f"prompt {prompt}" if end <= shared else f"request {number}"
            digests.append(digest_of(f"{seed} {owner} {end}"))
        requests.append(
            SimRequest(
                at_s=at_s,
                prompt_tokens=length,
                output_tokens=draw.randint(output_tokens // 2, output_tokens * 3 // 2),
                digests=tuple(digests),
                head=digest_of(f"{seed} prompt {prompt}"),
                head_tokens=shared,
            )
        )
    return requests


def unshared(
    *,
    num_requests: int,
    rate_rps: float,
    chunk_size: int,
    prompt_tokens: int = 1000,
    output_tokens: int = 64,
    seed: int = 0,
    begin_s: float = 0.0,
    name: str = "unshared",
) -> list[SimRequest]:
    """No two prompts begin alike; lengths are exponential."""
    draw = random.Random(f"{name} {seed}")
    requests, at_s = [], begin_s
    for number in range(num_requests):
        at_s += draw.expovariate(rate_rps)
        length = 1 + int(draw.expovariate(1 / prompt_tokens))
        digests = tuple(digest_of(f"{name} {seed} {number} {i}") for i in range(length // chunk_size))
        requests.append(
            SimRequest(
                at_s=at_s,
                prompt_tokens=length,
                output_tokens=1 + int(draw.expovariate(1 / output_tokens)),
                digests=digests,
            )
        )
    return requests


def merged(*streams: Sequence[SimRequest]) -> Iterator[SimRequest]:
    """Streams side by side, by time."""
    return iter(sorted(itertools.chain(*streams), key=lambda request: request.at_s))
