"""What the host build of the CUDA kernels can show: that it sees races and wrong fragments, and what sanitizers see."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chunkserve.kernels.cuda_tpp import CudaBackend
from chunkserve.kernels.dispatch import FP8, AttentionProblem
from chunkserve.kernels.reference import TOLERANCE, oracle

from .attention_case import fill, random_q, tree_case, worst_error
from .cuda_host_kernels import host_folder, host_loader

folder = host_folder
pytestmark = pytest.mark.slow

MUTATIONS = [
    pytest.param("copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();", id="waits for too few copies"),
    pytest.param("team_sync(team, team_warps);  // all", "// all", id="no barrier before the tiles are read"),
    pytest.param("team_sync(team, team_warps);  // the", "// the", id="no barrier before the next unit"),
    pytest.param(
        "copy_async16(to + kKeys * kStageStride, v_pool + from, valid);",
        "copy_async16(to + kKeys * kStageStride, v_pool + at + i * kVector, true);",
        id="values after the last key",
    ),
    pytest.param("mma(T{}, s[2 * n], a, b[0], b[1]);", "mma(T{}, s[2 * n], a, b[0], b[2]);", id="wrong fragment"),
    pytest.param("const i64 slot = shuffle(held,", "const i64 slot = shuffle(0 * lane + held,", id="nothing wrong"),
]
FP8_MUTATIONS = [
    pytest.param(
        "team_sync(team, team_warps);  // a whole", "// a whole", id="no barrier before the wide tile is read"
    ),
    pytest.param("scales[n * 8 / kRun * 2]", "scales[0]", id="one scale for all chunks of a step"),
    pytest.param("seen ? v_scale : 0.0f", "0 * lane == 0 && seen ? v_scale : 0.0f", id="nothing wrong"),
]


@pytest.mark.parametrize(
    ("right", "wrong", "kv_dtype"),
    [pytest.param(*one.values, dtype, id=f"{one.id}, {dtype}") for dtype, mutations in
     ((torch.float16, MUTATIONS), (FP8, FP8_MUTATIONS)) for one in mutations],
)  # fmt: skip
def test_mutations_are_seen(
    folder: Path, request: pytest.FixtureRequest, right: str, wrong: str, kv_dtype: torch.dtype
):
    backend = CudaBackend(load=host_loader(folder, mutation=(right, wrong), num_blocks=1))
    problem = AttentionProblem(
        device="cpu",
        dtype=torch.float16,
        kv_dtype=kv_dtype,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        chunk_size=16,
    )
    case = tree_case([(1, 9)], [70, 3, 40, 9, 20, 31, 8, 1], chunk_size=16)
    kv = backend.allocate(problem, case.num_slots)
    fill(backend, kv, case)
    q = random_q(case, problem)
    want = oracle(q, kv, backend, paths=case.paths, kv_lens=case.kv_lens, q_lens=case.q_lens)
    errors = [worst_error(backend.attend(q, kv, case.plan(), scale=0.125), want) for _ in range(4)]
    assert (max(errors) <= TOLERANCE[torch.float16]) == ("nothing wrong" in request.node.name)


def _run_sanitized(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The sanitizers' run-time library must be loaded first, so that it also sees the memory of torch."""
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    # Nothing that Python or torch leaks is ours. The stack of a fiber is not the one that ASan knows.
    options = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0", "LD_PRELOAD": runtime.stdout.strip()}
    return subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda_sanitized_cases", str(folder), *arguments],
        env=os.environ | options,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def test_sanitizers_find_nothing(folder: Path):
    run = _run_sanitized(folder)
    assert run.returncode == 0, run.stderr[-5000:]
    assert run.stdout.count("right") == 4


def test_sanitizers_are_at_work(folder: Path):
    run = _run_sanitized(folder, "beyond-the-pool")
    assert "AddressSanitizer" in run.stderr
    assert run.returncode
