"""What the Triton backend serves, how it cuts a plan into tasks, and its kernels, run in processes of their own."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from chunkserve.kernels.dispatch import AttentionProblem, BackendError
from chunkserve.kernels.plan import PlanOptions

from .attention_case import tree_case

triton_tpp = pytest.importorskip("chunkserve.kernels.triton_tpp")

PROBLEM = AttentionProblem(
    device="cuda",
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    chunk_size=64,
)


def _run_cases(*arguments: str, interpret: bool) -> None:
    """Run triton_cases.py by pytest; Triton decides at its import whether to interpret."""
    done = subprocess.run(
        [Path(sys.executable).with_name("pytest"), Path(__file__).with_name("triton_cases.py"), "-q", *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1" if interpret else "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Two processes each, which may run side by side.
halves = pytest.mark.parametrize("half", ["random_plans", "not random_plans"])


@pytest.mark.timeout(900)
@halves
def test_kernels_under_the_interpreter(half: str):
    _run_cases("-m", "not slow", "-k", half, interpret=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@halves
def test_more_kernels_under_the_interpreter(half: str):
    _run_cases("-m", "slow", "-k", half, interpret=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_kernels_on_a_gpu():
    _run_cases(interpret=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu"}, "TRITON_INTERPRET=1 runs the kernels there"),
        ({"device": "tpu"}, "device is tpu"),
        ({"dtype": torch.float64, "kv_dtype": torch.float64}, "not one of float16, bfloat16, float32"),
        ({"kv_dtype": torch.float16}, "not one of"),
        ({"head_dim": 512}, "head_dim 512 is not in 8 to 256"),
        ({"chunk_size": 24}, "chunk_size 24 is no multiple of 16 up to 256"),
    ],
)
def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch, change: dict[str, object], reason: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    backend = triton_tpp.TritonBackend()
    assert backend.reject(PROBLEM) is None
    assert reason in backend.reject(dataclasses.replace(PROBLEM, **change))


def test_old_and_absent_devices_are_refused(monkeypatch: pytest.MonkeyPatch):
    backend = triton_tpp.TritonBackend()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.reject(PROBLEM) == "torch finds no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert backend.reject(PROBLEM) == "compute capability is 7.5, the kernels need 8.0"


def test_tasks_cover_each_row_once_in_the_smallest_class_that_fits():
    from chunkserve.kernels.triton_plan import tasks_of

    plan = tree_case([(1, 2), (2, 1)], [3] * 12, [1, 30, 2], chunk_size=64).plan(PlanOptions(num_workers=4))
    class_rows, group = (16, 64, 128), 3
    covered = np.zeros(plan.num_items, np.int64)
    for rows_per_tile, smaller, tasks in zip(
        class_rows, (0, *class_rows), tasks_of(plan, class_rows, group), strict=False
    ):
        assert len(np.unique(tasks, axis=0)) == len(tasks)
        for item, tile in tasks.tolist():
            rows = int(plan.item_q_end[item] - plan.item_q_begin[item]) * group
            assert smaller < rows
            assert rows <= rows_per_tile or rows_per_tile == class_rows[-1]
            covered[item] += min(rows_per_tile, rows - tile * rows_per_tile)
    assert covered.tolist() == ((plan.item_q_end - plan.item_q_begin) * group).tolist()


def test_a_staged_plan_finds_its_sections_and_keeps_its_place():
    from chunkserve.kernels import triton_kernels as kernels
    from chunkserve.kernels.triton_plan import StagedPlan

    staged = StagedPlan(torch.device("cpu"), (16, 64), 4)
    plan = tree_case([(1, 2)], [3, 70], [1, 20], chunk_size=64).plan()
    staged.stage(plan)
    array = staged.array.numpy()
    for field in ("row_pos", "write_slot", "item_kv_len", "item_partial", "chunk_slots", "tail_items", "row_partials"):
        want, place = getattr(plan, field), array[getattr(kernels, field.upper()).value]
        assert array[place : place + len(want)].tolist() == want.tolist()
    assert array[kernels.NUM_ROWS.value] == plan.num_rows
    tasks = array[kernels.TASKS.value :][:4].reshape(2, 2)
    assert tuple(tasks[:, 0]) == staged.num_tasks == (1, 4)
    assert array[tasks[1, 1] :][:8].reshape(4, 2)[:, 1].tolist() == [0, 1, 0, 1]

    staged.reserve(10_000)
    staged.freeze()
    address = staged.array.data_ptr()
    staged.stage(tree_case([(1, 2)], [5] * 9, chunk_size=64).plan())
    assert staged.array.data_ptr() == address
    with pytest.raises(BackendError, match=r"a captured CUDA graph holds 10000 \(reserve plan_ints\)"):
        staged.stage(tree_case([], [5] * 1000, chunk_size=64).plan())


def test_tiles_are_of_the_newest_class_that_the_device_has():
    from chunkserve.kernels.triton_tiles import tiles_for

    for capability in (80, 86, 89, 90, 100, 103, 120, 121):
        for block_d in (16, 32, 64, 128, 256):
            for dtype in (torch.float16, torch.float32):
                tiles = tiles_for(capability, block_d, dtype, dtype)
                assert [t.rows for t in tiles] == sorted({t.rows for t in tiles})
                assert tiles[0].rows == 16
    half, bf16 = torch.float16, torch.bfloat16
    assert tiles_for(89, 128, half, half) == tiles_for(86, 128, bf16, bf16) != tiles_for(80, 128, half, half)
    with pytest.raises(KeyError, match="no tiles for capability 80, head dim 512"):
        tiles_for(80, 512, half, half)
