"""The algebra of partial softmax results, over its edges."""

import math

import pytest
import torch
from torch import Tensor

from chunkserve.kernels.merge import Partial, empty_partial, merge


def _partial(logits: Tensor, values: Tensor) -> Partial:
    """Attention of one row over keys [n] and values [n, D], in float64 and then fp32."""
    lse = torch.logsumexp(logits.double(), 0)
    out = torch.exp(logits.double() - lse) @ values.double()
    return Partial(out=out.float(), lse_ln=lse.float())


@pytest.mark.parametrize("sizes", [[64], [3072, 64], [1, 1, 1, 1], [7, 0, 200, 5]])
def test_merge_equals_one_pass(sizes: list[int]):
    torch.manual_seed(len(sizes))
    logits, values = torch.randn(sum(sizes)) * 4, torch.randn(sum(sizes), 8)
    parts = [
        _partial(a, b) if len(a) else empty_partial((), 8)
        for a, b in zip(logits.split(sizes), values.split(sizes), strict=True)
    ]
    merged, want = merge(parts), _partial(logits, values)
    torch.testing.assert_close(merged.out, want.out, atol=1e-6, rtol=0)
    torch.testing.assert_close(merged.lse_ln, want.lse_ln, atol=2e-6, rtol=0)


def test_only_empty_parts_give_the_identity():
    merged = merge([empty_partial((2, 3), 4)] * 3)
    assert (merged.out == 0).all()
    assert (merged.lse_ln == -math.inf).all()


@pytest.mark.parametrize("empty_lse", [-math.inf, math.inf])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 7.0])
def test_empty_part_adds_nothing_whatever_it_holds(empty_lse: float, garbage: float):
    torch.manual_seed(0)
    part = Partial(out=torch.randn(5, 4), lse_ln=torch.randn(5))
    empty = Partial(out=torch.full((5, 4), garbage), lse_ln=torch.full((5,), empty_lse))
    for parts in ([part, empty], [empty, part], [empty, part, empty]):
        merged = merge(parts)
        assert torch.equal(merged.out, part.out)
        assert torch.equal(merged.lse_ln, part.lse_ln)


def test_far_apart_logits_do_not_overflow():
    low = Partial(out=torch.ones(1, 2), lse_ln=torch.tensor([-1e4]))
    high = Partial(out=torch.full((1, 2), 3.0), lse_ln=torch.tensor([1e4]))
    merged = merge([low, high])
    assert (merged.out == 3).all()
    assert merged.lse_ln.item() == 1e4
    twice_low = merge([low, Partial(out=torch.full((1, 2), 3.0), lse_ln=torch.tensor([-1e4]))])
    assert (twice_low.out == 2).all()


def test_non_contiguous_lse_is_read_by_shape_not_by_memory():
    torch.manual_seed(0)
    a, b = (Partial(out=torch.randn(3, 5, 4), lse_ln=torch.randn(3, 5)) for _ in range(2))
    turned = Partial(out=a.out, lse_ln=a.lse_ln.t().contiguous().t())
    assert torch.equal(merge([turned, b]).out, merge([a, b]).out)


def test_transposed_lse_is_refused():
    with pytest.raises(ValueError, match=r"must be all but its last dim, not \(5, 3\)"):
        Partial(out=torch.zeros(3, 5, 4), lse_ln=torch.zeros(5, 3))
