"""The decoder's arithmetic beside attention, by device: native packed code on CPUs, torch elsewhere."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from chunkserve.kernels import cpu_ops


class Linear(Protocol):
    """A product with a weight that it holds: [T, in] -> [T, out], into `out` where it is given."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


class DecoderOps(Protocol):
    """Rows T, hidden size K, query heads H, KV heads G, head dim D."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A product with weight [N, K]; the weight may be laid out anew."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """RMSNorm of x [T, K], once the residual is added to x in place."""
        ...

    def rope_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split [T, (H + 2G) D] into rotated q [T, H, D] and k [T, G, D], and v [T, G, D]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [T, 2M], gate first."""
        ...


class CpuOps:
    """Native code; activations are float32, weights of products are kept as they come or rounded to int8."""

    def __init__(self, weight_dtype: torch.dtype | None = None) -> None:
        self._weight_dtype = weight_dtype

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return cpu_ops.PackedLinear.pack(weight, bias, dtype=self._weight_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        return cpu_ops.rms_norm(x, weight, eps, residual=residual)

    def rope_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return cpu_ops.rope_qkv(qkv, cos, sin, num_heads, num_kv_heads)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return cpu_ops.silu_mul(gate_up)


class TorchOps:
    """Plain torch, rounding where transformers' Llama rounds."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        def product(x: Tensor, out: Tensor | None = None) -> Tensor:
            if out is None:
                return F.linear(x, weight, bias)
            torch.mm(x, weight.t(), out=out)
            return out if bias is None else out.add_(bias)

        return product

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            x += residual
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def rope_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
        heads = qkv.view(len(qkv), -1, head_dim)
        cos, sin = (table.repeat(1, 2)[:, None].to(qkv.dtype) for table in (cos, sin))

        def rotate(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-second, first), dim=-1) * sin

        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return rotate(q), rotate(k), v

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def norm_heads(
    ops: DecoderOps, qkv: Tensor, norms: tuple[Tensor, Tensor], num_heads: int, num_kv_heads: int, eps: float
) -> None:
    """RMSNorm of each head of q and of k, in place in a product [T, (H + 2G) D]; `norms` of q and of k, [D] each."""
    q_norm, k_norm = norms
    q, k, _ = qkv.view(len(qkv), -1, len(q_norm)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    for heads, norm in ((q, q_norm), (k, k_norm)):
        heads.copy_(ops.rms_norm(heads.contiguous().view(-1, len(norm)), norm, eps).view_as(heads))
