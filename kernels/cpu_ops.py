"""The decoder's work beside attention on CPUs: products with packed weights, RMSNorm, rotary embedding, SwiGLU.

Tensors are contiguous float32 or bfloat16 on the CPU; arithmetic is in float32 with one rounding to the output. A row
of a result has the same bits whatever rows are computed with it, at one instruction set (`_cpu.isa()`). What does not
fit raises ValueError with both sizes. T rows, N outputs, K inputs; H, G, D as in plan.py.
"""

import torch
from torch import Tensor

from . import _cpu


def set_num_threads(num_threads: int) -> int:
    """Sets the threads of all CPU kernels, attention included, and returns it; 0 means all CPUs of this process."""
    return _cpu.set_num_threads(num_threads)


def rounds_to_bfloat16() -> bool:
    """Whether kernels at the instruction set in force multiply pairs of bfloat16.

    What meets bfloat16 weights, K or V in a product (activations, queries, attention's weights) is rounded to it then.
    """
    return _cpu.isa() in ("avx512_bf16", "amx_bf16")


class PackedLinear:
    """y = x W^T + b with W [N, K] laid out for the kernels: in its dtype, float32 or bfloat16, or rounded to int8.

    Invariant: `weight` is the packed W, [N / 16 rounded up, (K rounded up to even) * 16]; for int8 the scale of each
    output, [N] float32; and the bias, [N] float32. Where W is bfloat16, x is rounded to it if `rounds_to_bfloat16()`;
    in all other cases W is widened and x is not rounded.
    """

    __slots__ = ("in_features", "out_features", "weight")

    def __init__(self, weight: tuple[Tensor, Tensor | None, Tensor | None], out_features: int, in_features: int):
        self.weight = weight
        self.out_features = out_features
        self.in_features = in_features

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> "PackedLinear":
        """Copies weight [N, K] into panels; bias [N] becomes float32. Neither argument is kept.

        Args:
            dtype: torch.int8 rounds each output's weights to multiples of their largest size over 127; None keeps them.
        Raises:
            ValueError: a size or type does not fit; or int8 is asked for and a weight is not finite.
        """
        if dtype not in (None, weight.dtype, torch.int8):
            raise ValueError(f"dtype is {dtype}; expected None, torch.int8, or the weight's {weight.dtype}")
        if weight.ndim != 2:
            raise ValueError(f"weight has {weight.ndim} dimensions; expected [N, K]")
        out_features, in_features = weight.shape
        if bias is not None:
            if bias.shape != (out_features,):
                raise ValueError(
                    f"bias is {list(bias.shape)}; expected [{out_features}]: weight is {list(weight.shape)}"
                )
            bias = bias.detach().to(torch.float32, copy=True)
        panels = -(-out_features // _cpu.LINEAR_PANEL)
        shape = (panels, (in_features + in_features % 2) * _cpu.LINEAR_PANEL)
        packed = torch.empty(shape, dtype=dtype or weight.dtype)
        _cpu.advise_large_pages(packed.data_ptr(), packed.nbytes)
        weight, scale = weight.detach().contiguous(), None
        if packed.dtype == torch.int8:
            scale = torch.empty(out_features)
            _cpu.pack_linear_int8(weight, packed, scale)
        else:
            _cpu.pack_linear(weight, packed)
        return cls((packed, scale, bias), out_features, in_features)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N], in the dtype of `out` where it is given, else of x."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x is {list(x.shape)}; this product takes [T, {self.in_features}]")
        if out is None:
            out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype)
        elif out.shape[-1] != self.out_features:
            raise ValueError(f"out is {list(out.shape)}; this product gives [T, {self.out_features}]")
        _cpu.linear(x, self.weight, out)
        return out

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weight if tensor is not None)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight by rows of x [T, K].

    Args:
        weight: [K] float32.
        residual: [T, K] in the dtype of x, added to x in place before; the norm is of the sum as x stores it.
        out: [T, K], may be x; without it the result has the dtype of x.
    """
    out = torch.empty_like(x) if out is None else out
    _cpu.rms_norm(x, residual, weight, eps, out)
    return out


def rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a product [T, (H + 2G) D] into q [T, H, D], k [T, G, D], both rotated, and v [T, G, D].

    Args:
        cos, sin: [T, D / 2] float32, of each row's position. Element d is paired with d + D / 2, as in transformers.
        dtype: of the results; that of qkv by default.
    """
    num_rows, width = qkv.shape
    head_dim, rest = divmod(width, num_heads + 2 * num_kv_heads)
    if rest:
        raise ValueError(f"qkv is {list(qkv.shape)}; {num_heads} + 2 * {num_kv_heads} heads do not divide {width}")
    dtype = dtype or qkv.dtype
    q = torch.empty((num_rows, num_heads, head_dim), dtype=dtype)
    k = torch.empty((num_rows, num_kv_heads, head_dim), dtype=dtype)
    v = torch.empty((num_rows, num_kv_heads, head_dim), dtype=dtype)
    _cpu.rope_qkv(qkv, cos, sin, q, k, v)
    return q, k, v


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up for gate_up [T, 2M], gate first -> [T, M], in the dtype of gate_up unless `out` is given."""
    if out is None:
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype)
    _cpu.silu_mul(gate_up, out)
    return out
