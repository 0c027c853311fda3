"""What a decoder's layers in one call refuse; that they compute right is seen where they are used (test_model.py)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from chunkserve.kernels.cpu_decoder import DecoderLayers, LayerWeights
from chunkserve.kernels.cpu_ops import PackedLinear
from chunkserve.kernels.dispatch import AttentionProblem, BackendError, LayerKV, get_backend
from chunkserve.kernels.plan import AttentionPlan, PlanError, build_plan

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, CHUNK, SLOTS = 24, 3, 1, 16, 20, 16, 4


def pool(backend: str = "cpu", dtype: torch.dtype = torch.float32) -> LayerKV:
    problem = AttentionProblem(
        device="cpu", dtype=dtype, kv_dtype=dtype, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        chunk_size=CHUNK,
    )  # fmt: skip
    return get_backend(backend).allocate(problem, SLOTS)


def weights() -> LayerWeights:
    def product(n: int, k: int) -> PackedLinear:
        return PackedLinear.pack(torch.randn(n, k))

    return LayerWeights(
        qkv=product((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), q_norm=None, k_norm=None,
        output=product(HIDDEN, HEADS * HEAD_DIM), mlp_norm=torch.ones(HIDDEN), gate_up=product(2 * WIDTH, HIDDEN),
        down=product(HIDDEN, WIDTH), next_norm=torch.ones(HIDDEN),
    )  # fmt: skip


def layers(kv: LayerKV | None = None, **changes: Any) -> DecoderLayers:
    return DecoderLayers([replace(weights(), **changes)], [kv or pool()], eps=1e-5, scale=0.25)


def plan(rows: int = 2, slots: tuple[int, ...] = (2,), chunk_size: int = CHUNK) -> AttentionPlan:
    return build_plan(
        paths=[np.array(slots, dtype=np.int32)], kv_lens=[rows], q_lens=[rows], kv_present=[0], chunk_size=chunk_size
    )  # fmt: skip


def step(rows: int = 2, half: int = HEAD_DIM // 2) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN), torch.ones(rows, half), torch.zeros(rows, half)


def test_a_step_overwrites_both_tensors_with_numbers() -> None:
    x, h, cos, sin = step()
    before = x.clone(), h.clone()
    layers()(x, h, cos, sin, plan())
    assert x.isfinite().all()
    assert h.isfinite().all()
    assert not torch.equal(x, before[0])
    assert not torch.equal(h, before[1])


def test_a_plan_that_does_not_fit_is_refused() -> None:
    run = layers()
    for bad, words in (
        (plan(rows=3), "k has 2 rows, the plan 3"),
        (plan(slots=(SLOTS,)), f"writes to slot {SLOTS}"),
        (plan(chunk_size=32), "chunks of 32 tokens, kv has 16"),
    ):
        with pytest.raises(PlanError, match=words):
            run(*step(), bad)
    with pytest.raises(PlanError, match="cos is"):
        run(*step(half=4), plan())


def test_a_pool_or_a_weight_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BackendError, match="backend reference"):
        layers(pool("reference"))
    with pytest.raises(BackendError, match="bfloat16"):
        layers(pool(dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="packed is"):
        layers(down=PackedLinear.pack(torch.randn(HIDDEN + 16, WIDTH)))
    with pytest.raises(ValueError, match="mlp_norm is"):
        layers(mlp_norm=torch.ones(HIDDEN + 1))
