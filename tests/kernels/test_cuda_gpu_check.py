"""benchmarks/gpu_check.py as far as it goes without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_runs_up_to_the_first_gpu_call(tmp_path: Path):
    run = subprocess.run([sys.executable, SCRIPT, "--quick"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert "plans are valid" in run.stdout
    assert "finds no CUDA device, so no kernel ran and nothing is written" in run.stdout
    assert not list(tmp_path.iterdir())
