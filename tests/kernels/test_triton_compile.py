"""The Triton kernels compiled to machine code without a GPU: registers, shared memory, prefetch, 64-bit offsets."""

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
import torch

from chunkserve.kernels.dispatch import FP8, AttentionProblem

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from chunkserve.kernels import triton_kernels, triton_tpp  # noqa: E402
from chunkserve.kernels.triton_tiles import tiles_for  # noqa: E402

pytestmark = [
    pytest.mark.skipif(triton_tpp.INTERPRETED, reason="TRITON_INTERPRET is set"),
    # Multiplications and additions are fused, as on the GPUs that we tune for; the default depends on the version.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

SHARED_KB = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", FP8: "*u8"}
FP32 = {"partial_out", "partial_lse_log2", "alibi_slopes", "sinks", "k_scale", "v_scale"}
FLOATS = {"logit_scale", "softcap_log2"}
INTS = {"window", "steps"}
STRIDES = {"q_token_stride", "q_head_stride", "k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"}


def _problem(dtype: torch.dtype, d: int, *, c: int = 64, **masks) -> AttentionProblem:
    return AttentionProblem(
        device="cuda",
        dtype=dtype,
        kv_dtype=dtype,
        num_heads=24,
        num_kv_heads=8,
        head_dim=d,
        chunk_size=c,
        **masks,
    )


def _compile(kernel, problem: AttentionProblem, constants: dict[str, int | bool], capability: int, warps: int = 4):
    """Compile with all pointers and strides aligned to 16, as the launcher finds them."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in FP32:
            signature[name] = "*fp32"
        elif name in FLOATS:
            signature[name] = "fp32"
        elif name in STRIDES | INTS:
            signature[name] = "i32"
        else:
            # What the pool holds, unless it is what comes into it (the append kernel has both).
            of_pool = name in ("k_pool", "v_pool") or (name in ("k", "v") and "k_pool" not in kernel.arg_names)
            pointer = POINTERS[problem.kv_dtype if of_pool else problem.dtype]
            signature[name] = "*i32" if name == "staged" else pointer
    aligned = [i for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*") or n in STRIDES]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def _check_resources(compiled, capability: int, folder: Path) -> None:
    assert compiled.metadata.shared <= SHARED_KB[capability] * 1024
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    assert re.search(r"REG:\d+", usage)
    assert re.findall(r"STACK:(\d+)", usage) == ["0"], f"spills registers: {usage}"


def _check_segment(problem: AttentionProblem, capability: int, folder: Path, *, alibi: bool, sinks: bool) -> None:
    block_d = triton.next_power_of_2(problem.head_dim)
    for tile_class, tile in enumerate(tiles_for(capability, block_d, problem.dtype, problem.kv_dtype)):
        constants = triton_tpp.segment_constants(problem, tile_class, tile, alibi=alibi, sinks=sinks)
        compiled = _compile(triton_kernels.segment_kernel, problem, constants, capability, tile.warps)
        _check_resources(compiled, capability, folder)
        # K and V of a later block are on their way while one is worked on.
        in_flight = [int(n) for n in re.findall(r"ttg\.async_wait.*num = (\d+)", compiled.asm["ttgir"])]
        assert max(in_flight) >= 2, f"tile class {tile_class} waits for all of its loads"
        ttir = compiled.asm["ttir"]
        for pointer in ("q", "k", "v", "out", "partial_out", "partial_lse_log2"):
            splat = re.findall(rf"(%\S+) = tt\.splat %{pointer} ", ttir)
            uses = [
                line
                for line in ttir.splitlines()
                if re.search(rf"tt\.addptr (%{pointer}|{'|'.join(splat) or '-'}),", line)
            ]
            assert uses
            assert all("i64" in line for line in uses), f"32-bit offset into {pointer}: {uses}"


@pytest.mark.parametrize(("capability", "d"), [(80, 64), (90, 128), (100, 64)])
def test_segment_kernel(capability: int, d: int, tmp_path: Path):
    _check_segment(_problem(torch.bfloat16, d), capability, tmp_path, alibi=False, sinks=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("capability", "d"),
    [(80, 32), (80, 80), (80, 256), (86, 128), (86, 256), (90, 256), (100, 256), (120, 128)],
)
def test_segment_kernel_on_more_devices(capability: int, d: int, tmp_path: Path):
    """The other tiles of these devices: above, and below with masks, which take more registers."""
    _check_segment(_problem(torch.float16, d), capability, tmp_path, alibi=False, sinks=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("capability", "d"), [(80, 64), (80, 128), (90, 64), (90, 128), (100, 128)])
def test_segment_kernel_with_all_masks(capability: int, d: int, tmp_path: Path):
    problem = _problem(torch.float16, d, window=4096, softcap=30.0)
    _check_segment(problem, capability, tmp_path, alibi=True, sinks=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dtype", "d", "c", "capability"),
    [
        (torch.float32, 64, 64, 80),
        (torch.float32, 128, 64, 80),
        (torch.float32, 128, 64, 90),
        (torch.float16, 128, 16, 90),
        (torch.bfloat16, 64, 256, 80),
    ],
)
def test_segment_kernel_of_other_dtypes_and_chunk_sizes(
    dtype: torch.dtype, d: int, c: int, capability: int, tmp_path: Path
):
    _check_segment(_problem(dtype, d, c=c), capability, tmp_path, alibi=False, sinks=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("capability", "d"), [(80, 64), (80, 128), (90, 128), (100, 128)])
def test_segment_kernel_over_fp8(capability: int, d: int, tmp_path: Path):
    problem = dataclasses.replace(_problem(torch.bfloat16, d), kv_dtype=FP8)
    _check_segment(problem, capability, tmp_path, alibi=False, sinks=False)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_small_kernels(kv_dtype: torch.dtype, capability: int, tmp_path: Path):
    problem = dataclasses.replace(_problem(torch.bfloat16, 128), kv_dtype=kv_dtype)
    for kernel, constants in (
        (triton_kernels.merge_kernel, triton_tpp.merge_constants(problem, sinks=True)),
        (triton_kernels.append_kernel, triton_tpp.append_constants(problem)),
        (triton_kernels.grow_kernel, {"BLOCK": 256}),
    ):
        _check_resources(_compile(kernel, problem, constants, capability), capability, tmp_path)
