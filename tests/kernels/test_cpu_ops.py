"""Packed products and row-wise work against float64, at every instruction set that this CPU has."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from chunkserve.kernels import _cpu
from chunkserve.kernels.cpu_ops import PackedLinear, rms_norm, rope_qkv, rounds_to_bfloat16, set_num_threads, silu_mul

from .int8_weights import int8_values

DTYPES = (torch.float32, torch.bfloat16)
# What one rounding to the output costs, and the sums in float32 before it.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-8}


@pytest.fixture(params=_cpu.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _cpu.isa()
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(before)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def poison(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_close(got: Tensor, expected: Tensor, scale: Tensor | float = 1.0) -> None:
    """Within the dtype's tolerance of |expected| or, where terms cancel, of their size `scale`."""
    error = (got.double() - expected).abs()
    allowed = TOLERANCE[got.dtype] * expected.abs() + TOLERANCE[torch.float32] * torch.as_tensor(scale)
    assert torch.isfinite(got).all()
    assert (error <= allowed).all(), f"error {error.max():.3g}, allowed {allowed.flatten()[error.argmax()]:.3g}"


@pytest.mark.parametrize("weight_dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(3, 0), (1, 1), (16, 2), (17, 33), (40, 255), (31, 257), (96, 576), (33, 769)])
def test_linear_is_right_and_ignores_the_batch(
    isa: str, rng: torch.Generator, n: int, k: int, x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    rows = 300  # more than one block of rows
    weight = torch.randn(n, k, generator=rng).to(torch.float32 if weight_dtype == torch.int8 else weight_dtype)
    bias = torch.randn(n, generator=rng)
    x = torch.randn(rows, k, generator=rng).to(x_dtype)
    linear = PackedLinear.pack(weight, bias, dtype=weight_dtype)
    if weight_dtype == torch.int8:
        weight = int8_values(weight)
    whole = linear(x, poison(rows, n, dtype=torch.float32))
    if rounds_to_bfloat16() and weight_dtype == torch.bfloat16:
        x = x.bfloat16()
    terms = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    expected = x.double() @ weight.double().T + bias.double()
    assert_close(whole, expected, terms)
    assert_close(linear(x, poison(rows, n, dtype=torch.bfloat16)), expected, terms)
    for batch in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 33, 63, 96, 128, 200):
        for first in (0, rows - batch):
            part = linear(x[first : first + batch], poison(batch, n, dtype=torch.float32))
            assert torch.equal(part, whole[first : first + batch]), f"batch {batch} at {first}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_keeps_each_output_in_the_scale_of_its_largest_weight(rng: torch.Generator, dtype: torch.dtype) -> None:
    weight = torch.randn(37, 50, generator=rng) * torch.logspace(-38, 30, 37)[:, None]
    weight[5] = 0
    # Below what a float's exponent reaches: 190 and 20 units of the smallest number there is.
    weight[6] = 0
    weight[6, :2] = torch.tensor([190, 20]) * 2.0**-149
    weight = weight.to(dtype)
    linear = PackedLinear.pack(weight, dtype=torch.int8)
    kept = linear(torch.eye(50), poison(50, 37, dtype=torch.float32)).T.double()
    assert torch.isfinite(kept).all()
    steps = weight.double().abs().amax(1, keepdim=True) / 127
    usual = [row for row in range(37) if row != 6]
    assert ((kept - weight.double()).abs() <= 0.5001 * steps)[usual].all()
    assert (kept[5] == 0).all()
    packed, scale, _ = linear.weight
    assert packed.dtype == torch.int8
    assert scale is not None
    assert linear.nbytes == packed.numel() + 37 * 4


def test_int8_refuses_what_it_cannot_stand_for() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for dtype in DTYPES:
            weight = torch.ones(20, 8, dtype=dtype)
            weight[17, 3] = bad
            with pytest.raises(ValueError, match="not finite"):
                PackedLinear.pack(weight, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"dtype is torch\.float16; expected None, torch\.int8"):
        PackedLinear.pack(torch.ones(20, 8), dtype=torch.float16)
    packed, scale, _ = PackedLinear.pack(torch.ones(20, 8), dtype=torch.int8).weight
    x, out = torch.ones(2, 8), torch.ones(2, 20)
    for wrong in ((packed, None, None), (packed.float(), scale, None)):
        with pytest.raises(ValueError, match="int8 has a scale, and no other has"):
            _cpu.linear(x, wrong, out)
    with pytest.raises(ValueError, match=r"scale is \[19\]; expected \[20\]"):
        _cpu.linear(x, (packed, torch.ones(19), None), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_linear_does_not_depend_on_threads(isa: str, rng: torch.Generator, dtype: torch.dtype) -> None:
    linear = PackedLinear.pack(torch.randn(500, 64, generator=rng).bfloat16(), dtype=dtype)
    x = torch.randn(70, 64, generator=rng)
    before = _cpu.num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            assert set_num_threads(num_threads) == num_threads
            results.append(linear(x))
    finally:
        set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_linear_without_bias_rows_or_dtype(isa: str, rng: torch.Generator) -> None:
    weight = torch.randn(20, 8, generator=rng)
    linear = PackedLinear.pack(torch.nn.Parameter(weight))
    x = torch.randn(5, 8, generator=rng).bfloat16()
    assert linear(x).dtype == torch.bfloat16
    assert_close(linear(x), x.double() @ weight.double().T, 10.0)
    assert linear(x[:0]).shape == (0, 20)


def test_a_nan_or_infinity_stays_in_its_row(isa: str) -> None:
    for dtype in DTYPES:
        linear = PackedLinear.pack(torch.ones(17, 33, dtype=dtype))
        x = torch.ones(7, 33, dtype=dtype)
        x[2, 32], x[4, 0] = torch.nan, torch.inf
        y = linear(x)
        assert y[2].isnan().all()
        assert (y[4] == torch.inf).all()
        assert (y[[0, 1, 3, 5, 6]] == 33).all()


def test_linear_names_both_sizes() -> None:
    linear = PackedLinear.pack(torch.ones(20, 8))
    with pytest.raises(ValueError, match=r"x is \[2, 9\]; this product takes \[T, 8\]"):
        linear(torch.ones(2, 9))
    with pytest.raises(ValueError, match=r"out is \[3, 20\]; expected \[2, 20\]: x is \[2, 8\]"):
        linear(torch.ones(2, 8), torch.ones(3, 20))
    with pytest.raises(ValueError, match=r"out is \[2, 21\]; this product gives \[T, 20\]"):
        linear(torch.ones(2, 8), torch.ones(2, 21))
    with pytest.raises(ValueError, match=r"bias is \[19\]; expected \[20\]"):
        PackedLinear.pack(torch.ones(20, 8), torch.ones(19))
    with pytest.raises(ValueError, match="weight must be float32 or bfloat16"):
        PackedLinear.pack(torch.ones(20, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="x must be contiguous"):
        linear(torch.ones(8, 2).T)
    with pytest.raises(ValueError, match="x has 1 dimensions; expected 2"):
        linear(torch.ones(8), torch.ones(1, 20))
    with pytest.raises(TypeError):
        _cpu.linear([[1.0]], linear.weight, torch.ones(1, 20))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 577])
def test_rms_norm(isa: str, rng: torch.Generator, size: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    weight = torch.randn(size, generator=rng)
    for rows in (0, 1, 6, 33):
        x = (3 * torch.randn(rows, size, generator=rng)).to(dtype)
        y = torch.randn(rows, size, generator=rng).to(dtype)

        def expected(v: Tensor) -> Tensor:
            v = v.double()
            return v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

        assert_close(rms_norm(x, weight, 1e-5, out=poison(rows, size, dtype=out_dtype)), expected(x))
        total = (x.float() + y.float()).to(dtype)
        got = rms_norm(x, weight, 1e-5, residual=y, out=poison(rows, size, dtype=out_dtype))
        assert torch.equal(x, total)
        assert_close(got, expected(total))
        alone = [rms_norm(row[None], weight, 1e-5, out=poison(1, size, dtype=out_dtype)) for row in x]
        assert torch.equal(got, torch.cat(alone) if alone else got)
        in_place = expected(x)
        assert_close(rms_norm(x, weight, 1e-5, out=x), in_place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(("h", "g", "d"), [(9, 3, 64), (4, 4, 6), (8, 1, 80)])
def test_rope_qkv(
    isa: str, rng: torch.Generator, h: int, g: int, d: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    for rows in (0, 1, 33):
        qkv = torch.randn(rows, (h + 2 * g) * d, generator=rng).to(dtype)
        angles = 100 * torch.rand(rows, d // 2, generator=rng)
        cos, sin = angles.cos(), angles.sin()
        q, k, v = rope_qkv(qkv, cos, sin, h, g, dtype=out_dtype)
        heads = qkv.double().view(rows, h + 2 * g, d)
        half = torch.cat((-heads[..., d // 2 :], heads[..., : d // 2]), -1)
        rotated = heads * cos.double().repeat(1, 2)[:, None] + half * sin.double().repeat(1, 2)[:, None]
        assert_close(q, rotated[:, :h], 4.0)
        assert_close(k, rotated[:, h : h + g], 4.0)
        assert torch.equal(v, heads[:, h + g :].to(out_dtype))


def test_rope_names_both_sizes() -> None:
    tables = torch.ones(2, 4), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"qkv is \[2, 33\]; 2 \+ 2 \* 1 heads do not divide 33"):
        rope_qkv(torch.ones(2, 33), *tables, 2, 1)
    with pytest.raises(ValueError, match=r"cos is \[2, 4\]; expected \[3, 4\]"):
        rope_qkv(torch.ones(3, 32), *tables, 2, 1)
    with pytest.raises(ValueError, match="head_dim is 3; expected an even number"):
        rope_qkv(torch.ones(2, 12), *tables, 2, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_silu_mul(isa: str, rng: torch.Generator, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for rows, size in ((0, 5), (1, 1), (3, 37), (33, 1536)):
        x = (10 * torch.randn(rows, 2 * size, generator=rng)).to(dtype)
        gate, up = x.double().split(size, -1)
        expected = torch.nn.functional.silu(gate) * up
        assert_close(silu_mul(x, poison(rows, size, dtype=out_dtype)), expected, expected.abs())
    edges = torch.tensor([[-torch.inf, -1e30, -200.0, -90.0, 0.0, 90.0, 1e30, torch.inf, torch.nan]])
    got = silu_mul(torch.cat((edges, torch.ones_like(edges)), -1))
    torch.testing.assert_close(got, torch.nn.functional.silu(edges), rtol=1e-6, atol=1e-30, equal_nan=True)


def test_silu_mul_names_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"gate_up is \[2, 7\]; expected \[2, 6\]: out is \[2, 3\]"):
        silu_mul(torch.ones(2, 7))
