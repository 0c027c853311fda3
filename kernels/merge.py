"""Merging partial softmax results: the algebra that both phases share.

A partial result over some keys is (out, lse_ln): the softmax-weighted mean of their values and the natural logarithm
of the sum of their exponentials. The identity is (0, -inf); merging is associative and commutative up to rounding.
Derivation: kernels/README.md; ChunkAttention section 3.2, equations 2 and 3 (arXiv 2402.15220).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Attention over a part of the keys.

    Attributes:
        out: [..., D] fp32, normalised. Means nothing where lse_ln is -inf, and may hold anything there.
        lse_ln: [...] fp32, base e.
    """

    out: Tensor
    lse_ln: Tensor

    def __post_init__(self) -> None:
        if self.out.shape[:-1] != self.lse_ln.shape:
            raise ValueError(
                f"out is {tuple(self.out.shape)}, so lse_ln must be all but its last dim, not "
                f"{tuple(self.lse_ln.shape)}"
            )


def empty_partial(shape: Sequence[int], head_dim: int, device: torch.device | str = "cpu") -> Partial:
    """The identity: no keys."""
    return Partial(
        out=torch.zeros(*shape, head_dim, device=device),
        lse_ln=torch.full(tuple(shape), -torch.inf, device=device),
    )


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the keys of all parts, summed in the order given.

    A part with lse_ln of -inf has no keys and adds nothing, whatever its `out` holds; +inf, which some kernels report
    for a row without keys, means the same. Without any keys the result is the identity.
    """
    lse = torch.stack([p.lse_ln for p in parts]).float()
    lse = torch.where(torch.isposinf(lse), -torch.inf, lse)
    top = lse.amax(0)
    top = torch.where(torch.isneginf(top), 0.0, top)
    weight = torch.exp(lse - top)
    total = torch.zeros_like(top)
    out = torch.zeros_like(parts[0].out, dtype=torch.float32)
    for part, w in zip(parts, weight, strict=True):
        out += torch.where(w[..., None] > 0, part.out * w[..., None], 0.0)
        total += w
    # An empty row divides 0 by 1.
    return Partial(out=out / torch.where(total > 0, total, 1.0)[..., None], lse_ln=top + torch.log(total))
