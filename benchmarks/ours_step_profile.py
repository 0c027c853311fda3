"""Where does a decode step's time go? The engine alone with the small model, no HTTP, by parts of a step.

Requests with one shared beginning are decoded together; each part of a step is timed where it is called, so the sum of
parts is the step. Where the layers run as one native call they are one part; `--pieces` has them run piece by piece
from Python, as they do on several ranks, to see inside. The floor is what reading weights, K and V once takes at the
memory bandwidth that is measured in the same run.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attention_cases import Limits
from chunkserve.deploy.small_model import ensure_small_model
from chunkserve.kernels import cpu_ops
from chunkserve.kernels.cpu_ops import PackedLinear
from chunkserve.replica.engine import Engine
from chunkserve.replica.model import Decoder
from chunkserve.replica.model_runner import ModelRunner
from chunkserve.replica.options import ReplicaOptions
from engine_bursts import BurstEngine, random_prompt
from rows import write_rows

ENGINE = ("schedule", "plan", "sample", "commit and text")


class Clock:
    """Adds up what each part of a step takes; a part within another is taken off the outer one."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self._inner_s = [0.0]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner_s.append(0.0)
            begin_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took_s = time.perf_counter() - begin_s
                self.spent_s[part] += took_s - self._inner_s.pop()
                self._inner_s[-1] += took_s

        return run

    @contextmanager
    def into(self, spent_s: dict[str, float]) -> Iterator[None]:
        """What the parts within take goes into spent_s."""
        self.spent_s.clear()
        yield
        spent_s.update(self.spent_s)

    def watch(self, owner: Any, parts: dict[str, str]) -> None:
        for name, part in parts.items():
            setattr(owner, name, self.timed(part, getattr(owner, name)))


def watch_engine(engine: Engine, clock: Clock, pieces: bool) -> None:
    """Every part of a step goes through the clock from now on."""
    core = engine._core
    runner = core._runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.model, Decoder)
    model = runner.model
    clock.watch(core.scheduler, {"schedule": "schedule"})
    clock.watch(core._planner, {"plan": "plan"})
    clock.watch(runner, {"run": "rest of the model"})
    native = None if pieces else model._native_layers(runner.kv)
    timed = clock.timed("layers", native) if native is not None else None
    setattr(model, "_native_layers", lambda kv: timed)  # noqa: B010
    clock.watch(model._ops, {"rms_norm": "norms", "rope_qkv": "rotary", "silu_mul": "SwiGLU"})
    clock.watch(runner.kv.backend, {"append": "append", "attend": "attention"})
    model._layers = [
        replace(
            layer,
            qkv=clock.timed("qkv", layer.qkv),
            output=clock.timed("output", layer.output),
            gate_up=clock.timed("gate and up", layer.gate_up),
            down=clock.timed("down", layer.down),
        )
        for layer in model._layers
    ]
    model._head = clock.timed("head", model._head)
    clock.watch(core, {"compute": "sample", "settle": "commit and text"})
    clock.watch(engine, {"step": "commit and text"})


def weight_bytes(model: Decoder) -> int:
    """What one step reads of the weights: all products."""
    products = [p for layer in model._layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return sum(p.nbytes for p in [*products, model._head] if isinstance(p, PackedLinear))


def run(
    folder: Path, concurrency: Sequence[int], shared: int, own: int, new: int, repeats: int, pieces: bool
) -> Iterator[dict[str, Any]]:
    options = ReplicaOptions(model=str(folder), max_running=max(concurrency), max_sequence_tokens=shared + own + new)
    bursts = BurstEngine(options, new)
    engine = bursts.engine
    runner = engine._core._runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.model, Decoder)
    step_weight_bytes = weight_bytes(runner.model)
    limits = Limits.measure(torch.bfloat16)
    clock = Clock()
    watch_engine(engine, clock, pieces)
    words = torch.Generator().manual_seed(0)

    beginning = random_prompt(shared, words)
    turns: dict[int, list[tuple[dict[str, float], int, float]]] = defaultdict(list)
    for _ in range(repeats + 1):
        for batch in concurrency:
            prompts = [beginning + random_prompt(own, words) for _ in range(batch)]
            spent_s: dict[str, float] = {}
            burst = bursts.decode(prompts, clock.into(spent_s))
            turns[batch].append((spent_s, burst.steps, burst.seconds))
    for batch, measured in turns.items():
        kv_bytes = (shared + batch * (own + new // 2)) * engine.config.chunk_bytes // engine.config.chunk_size
        floor_ms = (step_weight_bytes + kv_bytes) / limits.read_gb_per_s / 1e6
        parts = {part for spent, _, _ in measured[1:] for part in spent}
        step_ms = [1e3 * total_s / steps for _, steps, total_s in measured[1:]]
        for part in parts:
            part_ms = [1e3 * spent.get(part, 0.0) / steps for spent, steps, _ in measured[1:]]
            yield {
                "concurrency": batch,
                "shared_tokens": shared,
                "pieces": pieces,
                "part": part,
                "ms": round(statistics.median(part_ms), 3),
                "share": round(statistics.median(p / s for p, s in zip(part_ms, step_ms, strict=True)), 4),
                "step_ms": round(statistics.median(step_ms), 2),
                "step_ms_min": round(min(step_ms), 2),
                "step_ms_max": round(max(step_ms), 2),
                "floor_ms": round(floor_ms, 2),
                "threads": cpu_ops.set_num_threads(0),
            }
    engine.stop()


def report(rows: Sequence[dict[str, Any]]) -> None:
    batches = sorted({row["concurrency"] for row in rows})
    of = {(row["concurrency"], row["part"]): row for row in rows}
    table = Table(title=f"a decode step over {rows[0]['shared_tokens']} shared tokens, ms (share)")
    table.add_column("part")
    for batch in batches:
        table.add_column(f"{batch} sequences", justify="right")
    parts = sorted({row["part"] for row in rows}, key=lambda part: -of[batches[0], part]["ms"])
    for part in parts:
        cells = [of[batch, part] for batch in batches]
        table.add_row(part, *(f"{cell['ms']:.2f} ({cell['share']:.1%})" for cell in cells))
    steps = [of[batch, parts[0]] for batch in batches]
    table.add_row("step", *(f"{s['step_ms']:.1f} ({s['step_ms_min']:.1f} to {s['step_ms_max']:.1f})" for s in steps))
    table.add_row("floor", *(f"{s['floor_ms']:.1f}" for s in steps))
    Console().print(table)
    last = batches[-1]
    engine = sum(of[last, part]["share"] for part in ENGINE)
    print(f"{last} sequences: {engine:.1%} of a step is the engine's, outside of the model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and turns")
    parser.add_argument("--pieces", action="store_true", help="layers piece by piece, from Python")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--shared-tokens", type=int, default=1024)
    args = parser.parse_args()
    new, repeats = (24, 2) if args.quick else (64, 5)
    rows = list(run(ensure_small_model(), args.concurrency, args.shared_tokens, 32, new, repeats, args.pieces))
    if args.json:
        write_rows(args.json, rows)
    report(rows)


if __name__ == "__main__":
    main()
