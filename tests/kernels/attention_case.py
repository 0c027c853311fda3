"""A random tree of chunks, filled through a backend, with the arguments that its plan is built from."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chunkserve.kernels.dispatch import FP8, AttentionProblem, Backend, LayerKV
from chunkserve.kernels.plan import AttentionPlan, Int32Array, PlanOptions, build_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sequences over a pool: `paths[i]` holds the slots of sequence i, its last `q_lens[i]` keys are new."""

    paths: list[Int32Array]
    kv_lens: list[int]
    q_lens: list[int]
    chunk_size: int
    num_slots: int

    def plan(self, options: PlanOptions | None = None, *, kv_present: list[int] | None = None) -> AttentionPlan:
        plan = build_plan(
            paths=self.paths,
            kv_lens=self.kv_lens,
            q_lens=self.q_lens,
            kv_present=[n - q for n, q in zip(self.kv_lens, self.q_lens, strict=True)]
            if kv_present is None
            else kv_present,
            chunk_size=self.chunk_size,
            options=options,
        )
        plan.validate(self.num_slots)
        return plan

    @property
    def num_rows(self) -> int:
        return sum(self.q_lens)


def tree_case(
    levels: list[tuple[int, int]], private: list[int], q_lens: list[int] | int = 1, *, chunk_size: int, seed: int = 0
) -> Case:
    """A tree with `children` branches of `chunks` chunks on each level, then a private tail per sequence.

    Args:
        levels: (children, chunks) from the root down; [(1, 4)] is one prefix of 4 chunks that all share.
        private: tokens of each sequence's own tail, cycled over the leaves of the tree.
        q_lens: new tokens of each sequence, cycled.
        chunk_size: C.
        seed: of the order of the slots.
    """
    paths: list[list[int]] = [[]]
    next_slot = 0
    for children, chunks in levels:
        grown = []
        for path in paths:
            for _ in range(children):
                grown.append(path + list(range(next_slot, next_slot + chunks)))
                next_slot += chunks
        paths = grown
    sequences, lens = [], []
    per_leaf = max(len(private) // len(paths), 1)
    for i, tokens in enumerate(private):
        path = paths[min(i // per_leaf, len(paths) - 1)]
        own = -(-tokens // chunk_size)
        sequences.append(path + list(range(next_slot, next_slot + own)))
        next_slot += own
        lens.append(len(path) * chunk_size + tokens)
    order = np.random.default_rng(seed).permutation(next_slot + 2).astype(np.int32)
    q = [q_lens] * len(lens) if isinstance(q_lens, int) else [q_lens[i % len(q_lens)] for i in range(len(lens))]
    return Case(
        paths=[order[np.array(p, np.int64)] for p in sequences],
        kv_lens=lens,
        q_lens=[min(a, b) for a, b in zip(q, lens, strict=True)],
        chunk_size=chunk_size,
        num_slots=next_slot + 2,
    )


def fill(backend: Backend, kv: LayerKV, case: Case, *, seed: int = 0, poison: bool = True, spread: float = 1.0) -> None:
    """Write every key of the case through `append`; the rest of the pool is NaN.

    In an fp8 pool each (chunk, KV head) is 1 to 8 times smaller than `spread` says, so that its scale is its own.
    """
    generator = torch.Generator().manual_seed(seed)
    p = kv.problem
    if poison:
        kv.k.view(torch.uint8).fill_(0xFF)
        kv.v.view(torch.uint8).fill_(0xFF)
        for scales in (kv.k_scale, kv.v_scale):
            if scales is not None:
                scales.fill_(torch.nan)
    tokens: dict[int, int] = {}
    for path, kv_len in zip(case.paths, case.kv_lens, strict=True):
        for i, slot in enumerate(path[: -(-kv_len // case.chunk_size)].tolist()):
            tokens.setdefault(slot, min(case.chunk_size, kv_len - i * case.chunk_size))
    if not tokens:
        return
    plan = build_plan(
        paths=[np.array([slot], np.int32) for slot in tokens],
        kv_lens=list(tokens.values()),
        q_lens=list(tokens.values()),
        kv_present=[0] * len(tokens),
        chunk_size=case.chunk_size,
    )
    k, v = (torch.randn(plan.num_rows, p.num_kv_heads, p.head_dim, generator=generator) * spread for _ in range(2))
    if p.kv_dtype == FP8:
        lens = torch.tensor(list(tokens.values()))
        sizes = 0.5 ** torch.randint(4, (2, len(lens), p.num_kv_heads, 1), generator=generator)
        k, v = (x * size.repeat_interleave(lens, 0) for x, size in zip((k, v), sizes, strict=True))
    backend.append(kv, k.to(p.device, p.dtype), v.to(p.device, p.dtype), plan)


def random_q(case: Case, problem: AttentionProblem, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(case.num_rows, problem.num_heads, problem.head_dim, generator=generator)
    return q.to(problem.dtype).to(problem.device)


def worst_error(out: Tensor, want: Tensor) -> float:
    """Largest absolute difference; infinite when the result has a NaN."""
    error = (out.double() - want).abs()
    return float(torch.where(error.isnan(), torch.inf, error).amax()) if error.numel() else 0.0
