"""The torch backend against the float64 oracle, and the oracle against torch's own attention."""

import math

import pytest
import torch

from chunkserve.kernels.dispatch import AttentionProblem, attend, select_backend
from chunkserve.kernels.plan import PlanOptions
from chunkserve.kernels.reference import TOLERANCE, dense_attention, oracle

from .attention_case import fill, random_q, tree_case, worst_error


def test_oracle_equals_torch():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 6, 16).double(), torch.randn(40, 2, 16).double(), torch.randn(40, 2, 16).double()
    mask = torch.arange(40) <= torch.arange(35, 40)[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(dense_attention(q, k, v, scale=0.3), want.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [PlanOptions(), PlanOptions(share=False), PlanOptions(fixed_split_tokens=32)])
def test_reference_runs_the_plan(dtype: torch.dtype, options: PlanOptions):
    case = tree_case([(1, 2), (2, 1)], [0, 5, 16, 33], [1, 4, 20, 1], chunk_size=16)
    problem = AttentionProblem(
        device="cpu", dtype=dtype, kv_dtype=dtype, num_heads=6, num_kv_heads=2, head_dim=20, chunk_size=16
    )
    backend = select_backend(problem, "reference")
    kv = backend.allocate(problem, case.num_slots)
    fill(backend, kv, case)
    q = random_q(case, problem)
    out = backend.attend(q, kv, case.plan(options), scale=0.25)
    want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens, scale=0.25)
    assert out.dtype == dtype
    assert worst_error(out, want) <= TOLERANCE[dtype]


def test_oracle_masks_equal_a_loop_over_keys():
    """Window, soft-cap, ALiBi and sinks, one logit at a time."""
    torch.manual_seed(0)
    n, m, heads = 3, 12, 2
    q, k, v = (torch.randn(x, heads, 4).double() for x in (n, m, m))
    slopes, sinks = torch.tensor([0.5, 0.1]), torch.tensor([0.3, -1.0])
    out = dense_attention(q, k, v, scale=0.5, window=4, softcap=2.0, alibi_slopes=slopes, sinks=sinks)
    for row in range(n):
        for head in range(heads):
            position, total, want = m - n + row, math.exp(sinks[head]), torch.zeros(4).double()
            for key in range(position - 3, position + 1):
                logit = 2.0 * math.tanh(float(q[row, head] @ k[key, head]) * 0.5 / 2.0)
                weight = math.exp(logit + float(slopes[head]) * (key - position))
                total += weight
                want += weight * v[key, head]
            torch.testing.assert_close(out[row, head], want / total)


@pytest.mark.parametrize(("window", "softcap"), [(20, None), (None, 3.0), (5, 3.0)])
def test_reference_masks(window: int | None, softcap: float | None):
    case = tree_case([(1, 2), (2, 1)], [0, 5, 16, 33], [1, 4, 20, 1], chunk_size=16)
    problem = AttentionProblem(
        device="cpu",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        num_heads=6,
        num_kv_heads=2,
        head_dim=20,
        chunk_size=16,
        window=window,
        softcap=softcap,
    )
    backend = select_backend(problem, "reference")
    kv = backend.allocate(problem, case.num_slots)
    fill(backend, kv, case)
    q, slopes, sinks = random_q(case, problem), torch.rand(6), torch.randn(6)
    want = oracle(
        q,
        kv,
        backend,
        paths=case.paths,
        kv_lens=case.kv_lens,
        q_lens=case.q_lens,
        alibi_slopes=slopes,
        sinks=sinks,
    )
    for options in (PlanOptions(), PlanOptions(share=False), PlanOptions(fixed_split_tokens=16)):
        out = attend(q, kv, case.plan(options), alibi_slopes=slopes, sinks=sinks)
        assert worst_error(out, want) <= TOLERANCE[torch.float32]
