"""What does it cost to keep the ranks' trees equal?

A step's collectives with edits riding on them, against the same edits sent by a broadcast of their own, and against no
edits at all. Each rank is a process over gloo on loopback. A step is the collectives of a decoder (an all-reduce for
the embedding, 2 per layer, one gather of logits) without its arithmetic, which would bury what is compared. 30 layers
have as many collectives as SmolLM2-135M.

Modes take turns step by step, in another order each round, and a mode's time is divided by that of `none` in the same
round, so that a busy machine slows both. The median over all rounds has a 95 % interval (bootstrap). `none` itself runs
twice a round: its ratio, which would be 1 without noise, says what can be told apart. CPU time, of all ranks and all
their threads, says the same with less noise where other programs run.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from chunkserve.cluster.collectives import Collectives
from chunkserve.cluster.control_rows import ControlRows
from chunkserve.cluster.membership import Meeting, Membership, connect, join
from chunkserve.replica.protocol import Request, SamplingParams
from chunkserve.replica.rank_sync import STATUS_BYTES
from chunkserve.replica.tree_edit import EditReader, Join, Leave, TreeEdit, encode
from rows import write_rows

MODES = ("none", "control_rows", "broadcast_fixed", "broadcast_pickle")
_AGAIN = "none again"
_FIXED_BYTES = 4096


def churn_edits(step: int, prompt_tokens: int) -> list[TreeEdit]:
    """A join and a leave."""
    request = Request(
        request_id=f"arrival {step}",
        prompt_token_ids=tuple((step + i) % 49152 for i in range(prompt_tokens)),
        sampling=SamplingParams(max_tokens=64),
    )
    return [Join(arrival=step, request=request, seed=step), Leave(arrival=step)]


class Rank:
    """One rank's end of all modes."""

    def __init__(self, place: Membership, hidden: int, args: argparse.Namespace) -> None:
        group = self.group = place.group
        self.link, self.args, self.hidden = place.link, args, hidden
        self.status = bytes(STATUS_BYTES)
        self.control = ControlRows(
            rank=group.rank, num_ranks=group.num_ranks, num_carriers=1 + 2 * args.layers, hidden_size=hidden,
            status_bytes=STATUS_BYTES,
        )  # fmt: skip
        options = {"max_rows": args.rows, "hidden_size": hidden}
        self.carrying = Collectives(group, control=self.control, **options)
        self.plain = Collectives(group, **options)
        self.logits = torch.ones(args.rows, 1024)
        self.reader = EditReader()
        self.num_broadcasts = 0
        self.encode_s: list[float] = []
        self.apply_s: list[float] = []
        self.bytes = dict.fromkeys(MODES, 0)
        self.counts = dict.fromkeys(MODES, 0)
        self.turns = [*MODES, _AGAIN]
        self.order = random.Random(0)  # the same on all ranks

    def round(self, edits: list[TreeEdit]) -> dict[str, tuple[float, float]]:
        """Each mode once; seconds on the clock and of CPU."""
        self.order.shuffle(self.turns)
        times = {}
        for turn in self.turns:
            mode = "none" if turn == _AGAIN else turn
            before = self.count()
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            heard = self.step(mode, edits)
            times[turn] = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
            self.counts[mode] = self.count() - before
            if mode != "none" and [encode(edit) for edit in heard] != [encode(edit) for edit in edits]:
                raise SystemExit(f"{mode}: rank {self.group.rank} heard other edits than were sent")
        return times

    def count(self) -> int:
        """Collectives so far."""
        return self.num_broadcasts + sum(c.num_all_reduces + c.num_all_gathers for c in (self.carrying, self.plain))

    def step(self, mode: str, edits: list[TreeEdit]) -> list[TreeEdit]:
        """A step's collectives; the edits that this rank heard."""
        if mode == "control_rows":
            begin_s = time.perf_counter()
            payload = b"".join(map(encode, edits)) if self.group.rank == 0 else b""
            self.status = (int.from_bytes(self.status, "little") + 1).to_bytes(STATUS_BYTES, "little")
            self.control.write(self.status, payload)
            self.encode_s.append(time.perf_counter() - begin_s)
            if self.group.rank:
                self.link.report(self.status)
            self._model(self.carrying, self._await_reports if self.group.rank == 0 else None)
            begin_s = time.perf_counter()
            _, payload = self.control.read()
            heard = list(self.reader.feed(payload))
            self.apply_s.append(time.perf_counter() - begin_s)
            self.bytes[mode] += len(payload) + self.group.num_ranks * STATUS_BYTES + 8
            return heard
        heard = []
        if mode == "broadcast_pickle":
            # As engines do it: sizes, then a pickled list, in each step.
            raw = self.group.broadcast(pickle.dumps(edits) if self.group.rank == 0 else b"")
            heard = pickle.loads(raw)  # noqa: S301
            self.num_broadcasts += 2
            self.bytes[mode] += len(raw) + 8
        elif mode == "broadcast_fixed":
            payload = b"".join(map(encode, edits)) if self.group.rank == 0 else b""
            buffer = torch.zeros(_FIXED_BYTES, dtype=torch.uint8)
            if payload:
                buffer[: len(payload) + 4] = torch.frombuffer(
                    bytearray(len(payload).to_bytes(4, "little") + payload), dtype=torch.uint8
                )
            self.group.broadcast_tensor(buffer)
            self.num_broadcasts += 1
            raw = buffer.numpy().tobytes()
            heard = list(self.reader.feed(raw[4 : 4 + int.from_bytes(raw[:4], "little")]))
            self.bytes[mode] += _FIXED_BYTES
        self._model(self.plain)
        return heard

    def forget(self) -> None:
        """What was counted in the warm-up."""
        self.encode_s, self.apply_s, self.bytes = [], [], dict.fromkeys(MODES, 0)

    def apply_us(self) -> list[float]:
        """Of each rank, to read a step's edits."""
        own = torch.tensor([[1e6 * statistics.median(self.apply_s)]])
        return [float(value) for value in self.group.all_gather(own).flatten()]

    def _await_reports(self) -> None:
        if len(self.link.reports(lambda raw: raw == self.status, timeout_s=60)) < self.group.num_ranks - 1:
            raise SystemExit("a rank has not begun its step")

    def _model(self, collectives: Collectives, guard: Callable[[], None] | None = None) -> None:
        collectives.begin_step(guard)
        for _ in range(1 + 2 * self.args.layers):
            partial = collectives.rows(self.args.rows)
            partial.fill_(1.0)
            collectives.all_reduce(partial)
        collectives.gather_columns(self.logits, [1024] * self.group.num_ranks)


def run_rank(rank: int, meeting: Meeting, args: argparse.Namespace, say: Callable[[str], None]) -> None:
    if rank == 0:
        place = meeting.join()
    else:
        meeting.close()
        link = connect(meeting.rendezvous, rank, on_lost=lambda *_: os._exit(0))
        place = join(meeting.rendezvous, link, host="127.0.0.1", device="cpu")
    torch.set_num_threads(1)
    for hidden in args.hidden:
        for churn in ("quiet", "heavy"):
            one = Rank(place, hidden, args)

            def edits_of(step: int, churn: str = churn) -> list[TreeEdit]:
                return churn_edits(step, args.prompt_tokens) if churn == "heavy" else []

            begin_s = time.perf_counter()
            for step in range(args.warmup):
                one.round(edits_of(step))
            one.forget()
            wanted = int(args.seconds / (time.perf_counter() - begin_s) * args.warmup)
            num_rounds = max(10, int.from_bytes(place.group.broadcast(wanted.to_bytes(4, "little")), "little"))
            rounds = [one.round(edits_of(step)) for step in range(num_rounds)]
            times = np.array([[times[turn] for turn in [*MODES, _AGAIN]] for times in rounds])
            cpu = torch.from_numpy(times[:, :, 1].copy())
            place.group.all_reduce(cpu)
            times[:, :, 1] = cpu.numpy()
            apply_us = one.apply_us()
            if rank == 0:
                for mode in MODES:
                    say(json.dumps(_row(one, mode, hidden, churn, times, apply_us, args)))
    place.group.smallest(0)
    if rank == 0:
        place.leave()


def _row(
    one: Rank, mode: str, hidden: int, churn: str, times: Any, apply_us: list[float], args: argparse.Namespace
) -> dict[str, Any]:  # fmt: skip
    """times: [rounds, modes and `none` again, (clock, CPU)], seconds."""
    own, base = MODES.index(mode), MODES.index("none")
    ratios, cpu_ratios = (times[:, len(MODES) if own == base else own] / times[:, base]).T
    (low, high), (cpu_low, cpu_high) = _interval(ratios), _interval(cpu_ratios)
    step_s, cpu_s = np.median(times[:, own], axis=0)
    row = {
        "hidden": hidden, "churn": churn, "mode": mode, "ranks": args.ranks, "layers": args.layers, "rows": args.rows,
        "rounds": len(times), "warmup": args.warmup,
        "step_ms": 1e3 * float(step_s), "step_ms_min": 1e3 * float(times[:, own, 0].min()),
        "over_none": float(np.median(ratios)), "over_none_low": low, "over_none_high": high,
        "over_none_p25": float(np.quantile(ratios, 0.25)), "over_none_p75": float(np.quantile(ratios, 0.75)),
        "cpu_ms": 1e3 * float(cpu_s), "cpu_over_none": float(np.median(cpu_ratios)),
        "cpu_over_none_low": cpu_low, "cpu_over_none_high": cpu_high,
        "collectives_per_step": one.counts[mode], "bytes_per_step": one.bytes[mode] / len(times),
    }  # fmt: skip
    if mode == "control_rows":
        row["encode_us"] = 1e6 * statistics.median(one.encode_s)
        row["apply_us"] = max(apply_us)
        row |= {f"apply_us_rank_{rank}": value for rank, value in enumerate(apply_us)}
    return row


def headline(rows: list[dict[str, Any]]) -> str:
    """Over all hidden sizes, quiet and with churn: the geometric mean of the medians, and its 95 % interval."""

    def pooled(mode: str) -> str:
        logs = np.log(
            [[row[f"over_none{end}"] for end in ("", "_low", "_high")] for row in rows if row["mode"] == mode]
        )
        mean = logs[:, 0].mean()
        half = np.sqrt(((logs[:, 2] - logs[:, 1]) ** 2).sum()) / 2 / len(logs)
        return f"{np.exp(mean):.3f} ({np.exp(mean - half):.3f} to {np.exp(mean + half):.3f})"

    ours = [row for row in rows if row["mode"] == "control_rows"]
    share = max((row["encode_us"] + row["apply_us"]) / 1e3 / row["step_ms"] for row in ours)
    return (
        f"step with control rows over one without sync: {pooled('control_rows')}; without over itself: "
        f"{pooled('none')}; writing and reading them takes at most {share:.1%} of a step"
    )


def _interval(ratios: Any) -> tuple[float, float]:
    """Of the median, 95 %."""
    draw = np.random.default_rng(0)
    medians = [np.median(draw.choice(ratios, len(ratios))) for _ in range(1000)]
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps of a few layers, under a minute")
    parser.add_argument("--seconds", type=float, default=75.0, help="for each of 2 hidden sizes, quiet and with churn")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="+", default=[576, 4096])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rows", type=int, default=16, help="sequences that decode in a step")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of a join")
    parser.add_argument("--warmup", type=int, default=20, help="rounds")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.layers, args.warmup = 4.0, 8, 3
    context = multiprocessing.get_context("fork")
    meeting = Meeting(args.ranks)
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=run_rank, args=(rank, meeting, args, sender.send)) for rank in range(args.ranks)
    ]
    for process in processes:
        process.start()
    meeting.close()
    rows: list[dict[str, Any]] = []
    while len(rows) < 2 * len(MODES) * len(args.hidden):
        if receiver.poll(1):
            rows.append(json.loads(receiver.recv()))
        elif any(process.exitcode not in (None, 0) for process in processes):
            raise SystemExit("a rank has failed")
    for process in processes:
        process.join()
    if args.json:
        write_rows(args.json, rows)
    columns = ["step_ms", "over_none", "cpu_over_none"]
    table = Table("hidden", "churn", "mode", "rounds", *columns, "collectives", "bytes", "encode_us", "apply_us")
    for row in rows:
        table.add_row(
            str(row["hidden"]), row["churn"], row["mode"], str(row["rounds"]),
            f"{row['step_ms']:.2f}",
            *(f"{row[c]:.3f} ({row[f'{c}_low']:.3f} to {row[f'{c}_high']:.3f})" for c in columns[1:]),
            str(row["collectives_per_step"]), f"{row['bytes_per_step']:.0f}",
            *(f"{row[name]:.3g}" if name in row else "" for name in ("encode_us", "apply_us")),
        )  # fmt: skip
    Console(width=160).print(table)
    print(headline(rows))


if __name__ == "__main__":
    main()
