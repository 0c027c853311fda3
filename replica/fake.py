"""A model that is no model: it proves what the engine does, in no time or in a given time.

Its K and V are fingerprints of all tokens up to a row, so that a chunk shared, copied, evicted or read wrongly shows at
once; its next token is a function of them. For tests, simulation and load tests of what surrounds the model.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from chunkserve.kernels.plan import AttentionPlan

from .protocol import StepTime
from .scheduler import Batch
from .sequence import Sequence


class FakeModelError(AssertionError):
    """The engine let a sequence read keys that are not its own."""


class FakeModelRunner:
    """Stands in for ModelRunner.

    Args:
        vocab_size: of the logits; token 0 is never chosen.
        num_slots, chunk_size: of the pool.
        step: how long a step takes; None is no time.
        sleep: waits so long; a virtual clock's, for simulation.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        num_slots: int,
        chunk_size: int,
        step: StepTime | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.vocab_size = vocab_size
        self._memory = np.zeros((num_slots, chunk_size), np.int64)
        self._chunk_size = chunk_size
        self._step = step
        self._sleep = sleep
        self._known: dict[Sequence, _Fingerprints] = {}  # of the sequences of the last step
        self.computed_tokens = 0

    def next_token(self, salt: str, token_ids: list[int]) -> int:
        """What the model says after these tokens."""
        return 1 + int(_Fingerprints(salt).of(token_ids)[-1]) % (self.vocab_size - 1)

    def run(self, batch: Batch, plan: AttentionPlan) -> Tensor:
        """Logits of the rows that sample, as ModelRunner.run.

        Raises:
            FakeModelError: an item of the plan holds other keys than those of its rows' sequences.
        """
        plan.validate(len(self._memory))
        for copy in batch.copies:
            self._memory[copy.dst_slot, : copy.num_rows] = self._memory[copy.src_slot, : copy.num_rows]
        known = self._known
        self._known = {s: known.get(s) or _Fingerprints(s.request.cache_salt) for s in (r.sequence for r in batch.rows)}
        wanted = [self._known[row.sequence].of(row.sequence.token_ids)[: row.end] for row in batch.rows]
        flat = np.concatenate([w[-row.num_tokens :] for w, row in zip(wanted, batch.rows, strict=True)])
        writes = plan.write_slot >= 0
        self._memory[plan.write_slot[writes], plan.write_offset[writes]] = flat[writes]
        self._check_keys(batch, plan, wanted)
        self.computed_tokens += batch.num_tokens
        if self._step is not None:
            self._sleep(_seconds(self._step, batch))
        rows = [w for w, row in zip(wanted, batch.rows, strict=True) if row.samples]
        logits = torch.zeros(len(rows), self.vocab_size)
        for i, fingerprints in enumerate(rows):
            logits[i, 1 + int(fingerprints[-1]) % (self.vocab_size - 1)] = 50.0
        return logits

    def _check_keys(self, batch: Batch, plan: AttentionPlan, wanted: list[np.ndarray]) -> None:
        for item in range(plan.num_items):
            chunks = plan.slots_of(item)
            begin, length = int(plan.item_kv_begin[item]), int(plan.item_kv_len[item])
            keys = self._memory[chunks].reshape(-1)[:length]
            first = int(np.searchsorted(plan.seq_q_indptr, plan.item_q_begin[item], side="right")) - 1
            last = int(np.searchsorted(plan.seq_q_indptr, plan.item_q_end[item], side="left"))
            for i in range(first, last):
                own = wanted[i][begin : begin + length]
                if not np.array_equal(keys[: len(own)], own):
                    request_id = batch.rows[i].sequence.request.request_id
                    raise FakeModelError(f"request {request_id} reads foreign keys at {begin} to {begin + length}")


class _Fingerprints:
    """One number per token of a sequence, that depends on the salt and on all tokens up to there."""

    def __init__(self, salt: str) -> None:
        self._state = 1 + sum((i + 1) * byte for i, byte in enumerate(salt.encode()))
        self._values = np.zeros(0, np.int64)

    def of(self, token_ids: list[int]) -> np.ndarray:
        """[T] of all tokens; those that were there the last time are not computed again."""
        new = np.empty(len(token_ids) - len(self._values), np.int64)
        state = self._state
        for i, token in enumerate(token_ids[len(self._values) :]):
            state = (state * 6364136223846793005 + token * 2654435761 + 1442695040888963407) & 0x7FFFFFFFFFFFFFFF
            new[i] = state >> 7
        self._state = state
        self._values = np.concatenate([self._values, new])
        return self._values


def _seconds(step: StepTime, batch: Batch) -> float:
    context = sum(row.num_tokens * (row.end - 0.5 * row.num_tokens) for row in batch.rows)
    return (
        step.fixed_s
        + step.per_token_s * batch.num_tokens
        + step.per_context_s * context
        + (step.per_sequence_s * len(batch.rows))
    )
