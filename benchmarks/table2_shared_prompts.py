"""The paper's Table 2: how many tokens of a prompt do the requests of a real application share?

Each family's requests (a prompt of ../shared/workloads as the system's message, a question as the user's) go into our
own prefix tree, in random order, and what the tree finds is counted: tokens that an earlier request had computed, and
chunks held once, not once per request. `shared_tokens` is the mean over requests but each prompt's first.

The paper's means: 1,324 shared tokens in Chameleon (ScienceQA and TabMWP, its 11 prompts), 1,432 in ToolQA. Ours differ
by the tokenizer, and by the chat template, which is shared too.
"""

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chunkserve.deploy.small_model import ensure_small_model
from chunkserve.replica.chunk_pool import ChunkPool
from chunkserve.replica.prefix_tree import PrefixTree
from chunkserve.replica.tokenizer import Tokenizer
from rows import write_rows

WORKLOADS = Path(__file__).resolve().parents[1] / "../shared/workloads"
CHUNK = 64


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (WORKLOADS / name).read_text().splitlines()]


def requests_of(family: str, prompts: list[str], num_requests: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of requests, prompts and questions evenly drawn."""
    draw = random.Random(family)
    questions = [q["question"] for q in read("questions.jsonl") if q["family"] == family] or ["What is the answer?"]
    out = []
    for number in range(num_requests):
        question = questions[number % len(questions)] if len(questions) > 1 else f"{questions[0]} ({number})"
        messages = [
            {"role": "system", "content": prompts[number % len(prompts)]},
            {"role": "user", "content": question},
        ]
        out.append(tokenizer.render_chat(messages))
    draw.shuffle(out)
    return out


def measure(family: str, prompts: list[str], requests: list[list[int]]) -> dict[str, Any]:
    """Requests one after the other through the tree, as if each were computed at once, and all of them running."""
    chunks_apart = sum(-(-len(token_ids) // CHUNK) for token_ids in requests)
    tree = PrefixTree(ChunkPool(chunks_apart), CHUNK)
    found: list[int] = []
    for token_ids in requests:
        match = tree.match("", token_ids)
        joined = tree.join(match)
        want = max((_common(token_ids, other) for other in requests[: len(found)]), default=0)
        if joined.num_cached != min(want, len(token_ids) - 1):
            raise SystemExit(f"the tree found {joined.num_cached} tokens, {want} are there: nothing is reported")
        tree.commit(joined.path, joined.num_cached, len(token_ids))
        found.append(joined.num_cached)
    tree.check()
    held = tree.pool.num_slots - tree.pool.num_free
    # The first request of each prompt finds what all prompts begin with, no more.
    later = sorted(found)[len(prompts) :]
    return {
        "family": family,
        "prompts": len(prompts),
        "requests": len(requests),
        "prompt_tokens": round(statistics.fmean(map(len, requests)), 1),
        "shared_tokens": round(statistics.fmean(later), 1),
        "shared_share": round(sum(found) / sum(map(len, requests)), 4),
        "chunks": held,
        "chunks_unshared": chunks_apart,
        "memory_ratio": round(held / chunks_apart, 4),
    }


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 requests of each family")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--requests", type=int, default=256, help="of each family")
    args = parser.parse_args()
    if not WORKLOADS.is_dir():
        raise SystemExit(f"{WORKLOADS} is not there: this benchmark counts in its real prompts")
    tokenizer = Tokenizer(ensure_small_model())
    families: dict[str, list[str]] = {}
    for prompt in read("prompts.jsonl"):
        families.setdefault(prompt["id"].split("-")[0], []).append(prompt["text"])
    rows = [
        measure(name, prompts, requests_of(name, prompts, 32 if args.quick else args.requests, tokenizer))
        for name, prompts in families.items()
    ]
    if args.json:
        write_rows(args.json, rows)
    table = Table(*(name.replace("_", " ") for name in rows[0]), title="shared tokens, found by the prefix tree")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)
    held, apart = sum(row["chunks"] for row in rows), sum(row["chunks_unshared"] for row in rows)
    print(f"chunks held, all requests running, against one copy per request: {held / apart:.3f}x")


if __name__ == "__main__":
    main()
