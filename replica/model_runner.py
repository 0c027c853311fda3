"""Runs a step on this rank: batch and plan in, logits out."""

from typing import Protocol

import torch
from torch import Tensor

from chunkserve.cluster.collectives import Collectives
from chunkserve.kernels.plan import AttentionPlan

from .decode_graphs import DecodeGraphs
from .kv_store import KVStore
from .model_config import ModelConfig
from .scheduler import Batch


class Model(Protocol):
    """Our own decoder, or a model of transformers."""

    collectives: Collectives | None

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> str: ...

    @property
    def activation_dtype(self) -> torch.dtype: ...

    def forward(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, kv: KVStore, logit_rows: Tensor
    ) -> Tensor:
        """One step.

        Args:
            token_ids, positions: [T] int64, rows in plan order.
            plan: of this step.
            kv: K and V of earlier tokens; those of this step are appended.
            logit_rows: [R] int64, rows whose logits are wanted.
        Returns:
            [R, V] float32, the same on all ranks.
        """
        ...


class ModelRunner:
    """The model and its KV memory; with `graphs` for the steps that only decode."""

    def __init__(self, model: Model, kv: KVStore, graphs: DecodeGraphs | None = None) -> None:
        self.model = model
        self.kv = kv
        self.graphs = graphs

    @torch.inference_mode()
    def run(self, batch: Batch, plan: AttentionPlan) -> Tensor:
        """Compute one step.

        Returns:
            [R, V] float32: logits of the rows that sample, in the batch's order.
        """
        self.kv.copy(batch.copies)
        token_ids: list[int] = []
        last_rows: list[int] = []
        for row in batch.rows:
            sequence = row.sequence
            token_ids += sequence.token_ids[sequence.num_computed : row.end]
            if row.samples:
                last_rows.append(len(token_ids) - 1)
        if self.graphs is not None:
            self.graphs.make_room(plan)
            decodes = len(token_ids) == len(last_rows) == len(batch.rows)
            if decodes and (logits := self.graphs.run(token_ids, plan)) is not None:
                return logits
        device = self.model.device
        return self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.from_numpy(plan.row_pos).to(device, torch.int64),
            plan,
            self.kv,
            torch.tensor(last_rows, device=device, dtype=torch.int64),
        )
