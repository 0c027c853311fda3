"""Decode steps as CUDA graphs: one per number of rows, captured once, replayed over changing trees.

A step of few rows is hundreds of small kernels, and launching them takes longer than running them. The graph of a step
reads its tokens, positions and plan from memory that stays; the plan's own kernels find in it how many rows, items and
chunks there are (kernels/triton_plan.py), so that joins, leaves and growth need no new graph.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from chunkserve.kernels.dispatch import GraphBackend, LayerKV
from chunkserve.kernels.plan import AttentionPlan, build_plan

from .kv_store import KVStore

logger = logging.getLogger(__name__)

# Steps of more rows are bound by their work, and not by launches.
_MOST_ROWS: Final = 512


class Graph(Protocol):
    """torch.cuda.CUDAGraph, as far as it is used."""

    def replay(self) -> None: ...


# Runs a function once to warm up, and captures what it launches; the graph, and the result that replays overwrite.
Capture = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]
# Model.forward.
Forward = Callable[[Tensor, Tensor, AttentionPlan, KVStore, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A graph of a step of `rows` rows, and the memory that it reads and writes."""

    graph: Graph
    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    logits: Tensor  # [rows, V] float32


class DecodeGraphs:
    """Graphs of decode steps of up to `max_rows` rows.

    A step uses the graph of the next larger number of rows; rows beyond the plan's compute what nobody reads.

    Args:
        forward: of the model.
        kv: over a backend for GPUs.
        device: where the model is.
        max_rows: sequences in one step.
        capture: how; kernels/cuda_graph.py on GPUs.
    """

    def __init__(self, forward: Forward, kv: KVStore, *, device: str, max_rows: int, capture: Capture) -> None:
        self.num_replays = 0
        self._forward = forward
        self._kv = kv
        assert isinstance(kv.backend, GraphBackend)
        self._backend = kv.backend
        self._device = device
        self._capture = capture
        self._sizes = graph_sizes(min(max_rows, _MOST_ROWS))
        # One layer of each problem: plans are staged by problem.
        self._kinds: list[LayerKV] = list({layer.problem: layer for layer in kv.layers}.values())
        self._graphs: dict[int, _Captured] = {}
        self._plan_ints = self._partials = 0

    def capture_all(self) -> None:
        """Capture every size now, the largest first, so that the smaller ones find its memory."""
        begin_s = time.monotonic()
        for size in reversed(self._sizes):
            self._captured(size)
        logger.info("graphs captured sizes=%d seconds=%.1f", len(self._sizes), time.monotonic() - begin_s)

    def make_room(self, plan: AttentionPlan) -> None:
        """To be called before any step: graphs that hold too little memory for its plan are given up."""
        plan_ints, partials = 2 * len(plan.data) + 4096, plan.num_partials
        if plan_ints <= self._plan_ints and partials <= self._partials:
            return
        if self._graphs:
            logger.info("graphs dropped plan_ints=%d partials=%d", plan_ints, partials)
            self._graphs.clear()
        self._plan_ints = max(self._plan_ints, 2 * plan_ints)
        self._partials = max(self._partials, 2 * partials)
        for layer in self._kinds:
            self._backend.release(layer)
            self._backend.reserve(layer, plan_ints=self._plan_ints, partials=self._partials)

    def run(self, token_ids: Sequence[int], plan: AttentionPlan) -> Tensor | None:
        """A step of one new token per sequence.

        Args:
            token_ids: one per row of the plan, in its order.
        Returns:
            [rows, V] float32, overwritten by the next step; None where there are more rows than graphs serve.
        """
        rows = len(token_ids)
        size = next((size for size in self._sizes if size >= rows), None)
        if size is None or not rows:
            return None
        self.make_room(plan)
        captured = self._captured(size)
        captured.token_ids[:rows].copy_(self._pinned(token_ids), non_blocking=True)
        captured.positions[:rows].copy_(self._pinned(plan.row_pos), non_blocking=True)
        for layer in self._kinds:
            self._backend.stage(layer, plan)
        captured.graph.replay()
        self.num_replays += 1
        return captured.logits[:rows]

    def _captured(self, size: int) -> _Captured:
        if size not in self._graphs:
            plan = _plan_without_writes(size, self._kinds[0].problem.chunk_size)
            self.make_room(plan)
            token_ids, positions, rows = (torch.zeros(size, dtype=torch.int64, device=self._device) for _ in range(3))
            torch.arange(size, out=rows)
            for layer in self._kinds:
                self._backend.stage(layer, plan)
            graph, logits = self._capture(lambda: self._forward(token_ids, positions, plan, self._kv, rows))
            self._graphs[size] = _Captured(graph=graph, token_ids=token_ids, positions=positions, logits=logits)
        return self._graphs[size]

    def _pinned(self, values: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]) -> Tensor:
        """On the host, where a copy to the device does not wait. torch keeps such memory until the copy is done."""
        tensor = torch.as_tensor(values, dtype=torch.int64)
        return tensor.pin_memory() if self._device == "cuda" else tensor


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that have a graph: 1, 2, 4, and multiples of 8, the last not below max_rows."""
    return (*(size for size in (1, 2, 4) if size < max_rows), *range(min(8, max_rows), max_rows + 7, 8))


def _plan_without_writes(rows: int, chunk_size: int) -> AttentionPlan:
    """Sequences of one token each that is there already: a step over it reads the first slot and writes nothing."""
    return build_plan(
        paths=[np.zeros(1, dtype=np.int32)] * rows,
        kv_lens=[1] * rows,
        q_lens=[1] * rows,
        kv_present=[1] * rows,
        chunk_size=chunk_size,
    )
