"""What does a plan cost? Time to build one, and to keep it up while sequences decode, join and leave.

The paper leaves planning out of its kernel times. 64 sequences of 1,000 chunks; four things are timed, through Python
as the engine calls them:

    build   a plan from nothing
    grow    one token more for each sequence, in place, inside their last chunks
    decode  steps of one token each with nobody joining: grow, into spare places at chunk borders, else build
    churn   a sequence leaves and another joins in each step, so that every step builds

Each with warm caches, over and over, and with cold ones, as after the weights of a model went through them.

A sequence that joins or leaves moves the rows of all others, so churn builds anew. Plans are compared with the planner
in Python, number for number, and validated.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from attention_cases import (
    CHUNK,
    SHAPES,
    Batch,
    Shape,
    batch_of_runs,
    benchmark_parser,
    collect,
    empty_caches,
    print_table,
    thread_counts,
)
from chunkserve.kernels.plan import AttentionPlan, Int32Array, PlanOptions, build_plan
from chunkserve.kernels.plan_builder import build_plan_in_python
from plots import grouped

TARGET_US = {"build": 200.0, "grow": 20.0, "decode": 20.0, "churn": 200.0}


class LiveBatch:
    """Sequences that grow, join and leave, as lists that the planner takes; paths have room for what they will grow."""

    def __init__(self, batch: Batch, options: PlanOptions) -> None:
        self.paths: list[Int32Array] = list(batch.paths)
        self.kv_lens = list(batch.kv_lens)
        self.options = options
        self.next_slot = 1 + max(int(path.max()) for path in batch.paths)

    def build(self, builder: Callable[..., AttentionPlan] = build_plan) -> AttentionPlan:
        return builder(
            paths=self.paths,
            kv_lens=self.kv_lens,
            q_lens=[1] * len(self.paths),
            kv_present=[kv_len - 1 for kv_len in self.kv_lens],
            chunk_size=CHUNK,
            options=self.options,
        )

    def decode(self) -> dict[int, int]:
        """One token more for each; a full chunk is followed by a slot of its own: which, by sequence."""
        new_chunks = {}
        for i in range(len(self.paths)):
            self.kv_lens[i] += 1
            if self.kv_lens[i] > len(self.paths[i]) * CHUNK:
                self.paths[i] = np.append(self.paths[i], np.int32(self.next_slot))
                new_chunks[i] = self.next_slot
                self.next_slot += 1
        return new_chunks

    def replace(self, leaving: int, own_chunks: int) -> None:
        """A sequence leaves; one with the same prefix and chunks of its own takes its place."""
        path = self.paths[leaving].copy()
        path[-own_chunks:] = np.arange(self.next_slot, self.next_slot + own_chunks, dtype=np.int32)
        self.next_slot += own_chunks
        self.paths[leaving] = path


def check(live: LiveBatch, plan: AttentionPlan) -> None:
    """Raises RuntimeError unless the plan is what the planner in Python says, PlanError where it is no plan at all."""
    if not np.array_equal(plan.data, live.build(build_plan_in_python).data):
        raise RuntimeError("the plan differs from that of the planner in Python; not reported")
    plan.validate(live.next_slot)


def check_grown(live: LiveBatch, plan: AttentionPlan) -> None:
    """As `check` for a plan that may have grown: rows as in a new plan, whose items may be cut at other places."""
    new = live.build()
    check(live, new)
    plan.validate(live.next_slot)
    for name in ("row_pos", "write_slot", "write_offset"):
        if not np.array_equal(getattr(plan, name), getattr(new, name)):
            raise RuntimeError(f"{name} of the grown plan differs from that of a new one; not reported")


def trees(sequences: int, chunks: int) -> dict[str, Batch]:
    """The same numbers of chunks: nothing shared, nine tenths shared by all, eight prompts, and a deep binary tree.

    Last chunks are filled to random degrees, as those of sequences that began at different times.
    """
    unused = np.random.default_rng(0).integers(0, CHUNK, sequences).tolist()
    own, levels = max(chunks // 10, 1), int(np.log2(sequences))
    prefix = chunks - own
    tails = [(f"own {i}", own * CHUNK - unused[i]) for i in range(sequences)]
    per_level = prefix // levels
    prefixes: dict[str, list[list[tuple[str, int]]]] = {
        "nothing shared": [[(f"prefix {i}", prefix * CHUNK)] for i in range(sequences)],
        "one prefix": [[("prefix", prefix * CHUNK)] for _ in range(sequences)],
        "eight prefixes": [[(f"prefix {i * 8 // sequences}", prefix * CHUNK)] for i in range(sequences)],
        "binary tree": [
            [(f"level {d} {i >> (levels - d)}", per_level * CHUNK) for d in range(levels)] for i in range(sequences)
        ],
    }
    return {
        name: batch_of_runs([[*runs, tail] for runs, tail in zip(all_runs, tails, strict=True)])
        for name, all_runs in prefixes.items()
    }


def timed_us(function: Callable[[], Any], before: Callable[[], Any]) -> float:
    before()
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e6


def build_times(live: LiveBatch, repeats: int, before: Callable[[], Any]) -> list[float]:
    check(live, live.build())
    return [timed_us(live.build, before) for _ in range(repeats)]


def grow_times(live: LiveBatch, repeats: int, before: Callable[[], Any]) -> list[float]:
    """Of sequences whose last chunks have room; where it is used up, the plan is taken back to its beginning."""
    live.kv_lens = [(kv_len - 1) // CHUNK * CHUNK + 1 for kv_len in live.kv_lens]
    begin = live.build().data.copy()
    plan = AttentionPlan.from_data(begin.copy())

    times = []
    for _ in range(repeats):
        if plan.full_sequences():
            plan.data[:] = begin
        times.append(timed_us(plan.grow, before))
    plan.data[:] = begin
    plan.grow()
    live.decode()
    check_grown(live, plan)
    return times


def decode_times(live: LiveBatch, steps: int, before: Callable[[], Any]) -> tuple[list[float], int]:
    """Times of steps, and how many of them had to build."""
    times, built = [], 0
    plan = live.build()

    def move_on() -> None:
        nonlocal plan, built
        if not plan.grow({i: new_chunks[i] for i in plan.full_sequences()}):
            plan = live.build()
            built += 1

    for _ in range(steps):
        new_chunks = live.decode()
        times.append(timed_us(move_on, before))
    check_grown(live, plan)
    return times, built


def churn_times(live: LiveBatch, own_chunks: int, steps: int, before: Callable[[], Any]) -> list[float]:
    rng = np.random.default_rng(0)
    times = []
    for _ in range(steps):
        live.decode()
        live.replace(int(rng.integers(len(live.paths))), own_chunks)
        times.append(timed_us(live.build, before))
    check(live, live.build())
    return times


def measure(
    batch: Batch, options: PlanOptions, own_chunks: int, repeats: int, before: Callable[[], Any]
) -> dict[str, tuple[list[float], float]]:
    """Times of each action, and the share of them that built."""
    decode, built = decode_times(LiveBatch(batch, options), repeats, before)
    return {
        "build": (build_times(LiveBatch(batch, options), repeats, before), 1.0),
        "grow": (grow_times(LiveBatch(batch, options), repeats, before), 0.0),
        "decode": (decode, built / repeats),
        "churn": (churn_times(LiveBatch(batch, options), own_chunks, repeats, before), 1.0),
    }


def run(
    shapes: Sequence[Shape], threads: Sequence[int], sequences: int, chunks: int, repeats: int
) -> Iterator[dict[str, Any]]:
    # Emptying the caches takes a hundred times as long as what is measured.
    caches = {"warm": (repeats, lambda: None), "cold": (max(repeats // 8, 5), empty_caches)}
    for shape, num_workers, (state, (count, before)) in product(shapes, threads, caches.items()):
        options = PlanOptions(num_workers=num_workers, heads_per_worker_item=shape.num_kv_heads)
        for name, batch in trees(sequences, chunks).items():
            measured = measure(batch, options, max(chunks // 10, 1), count, before)
            for action, (times, built_share) in measured.items():
                yield {
                    "case": shape.name,
                    "threads": num_workers,
                    "tree": name,
                    "action": action,
                    "caches": state,
                    "batch": sequences,
                    "chunks": chunks,
                    "items": LiveBatch(batch, options).build().num_items,
                    "best_us": round(min(times), 1),
                    "median_us": round(statistics.median(times), 1),
                    "mean_us": round(statistics.fmean(times), 1),
                    "p99_us": round(float(np.quantile(times, 0.99)), 1),
                    "built_share": round(built_share, 2),
                    "target_us": TARGET_US[action],
                    "warm_up": 1,
                    "repeats": count,
                    "spread": round(statistics.median(times) / min(times), 2),
                }


def report(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        f"plans of {rows[0]['batch']} sequences x {rows[0]['chunks']} chunks, microseconds",
        rows,
        (
            *("case", "threads", "tree", "action", "caches", "items", "best_us", "median_us", "mean_us", "p99_us"),
            *("built_share", "target_us"),
        ),
    )
    for (caches, action), group in grouped(rows, "caches", "action").items():
        medians, target = [row["median_us"] for row in group], TARGET_US[action]
        reached = sum(us < target for us in medians)
        print(
            f"{caches} caches, {action}: median {min(medians):.0f} to {max(medians):.0f} us, at most "
            f"{max(medians) / target:.1f}x the target of {target:.0f} us, reached in {reached} of {len(group)} cases"
        )


def main() -> None:
    args = benchmark_parser(__doc__, quick="fewer steps, one thread").parse_args()
    rows = collect(run(SHAPES, thread_counts(args), 64, 1000, 200 if args.quick else 2000), args.json)
    report(rows)


if __name__ == "__main__":
    main()
