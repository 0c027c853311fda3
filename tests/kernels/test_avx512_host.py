"""The AVX-512 and AMX levels on a CPU without them, built as AVX2 code (avx512_host_shim.h), under the CPU tests.

On CPUs that have them too: a fault of the shim would else be seen on others alone.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from chunkserve.kernels import _cpu

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/kernels/test_cpu_{name}.py" for name in ("ops", "tpp", "decoder")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_avx512_and_amx_levels_pass_the_tests_of_the_cpu_kernels(tmp_path: Path) -> None:
    if "avx2" not in _cpu.supported_isas():
        pytest.skip("the levels are emulated by AVX2, which this CPU lacks")
    options = ["-C", f"build-dir={tmp_path / 'build'}", "-C", "cmake.define.CHUNKSERVE_EMULATE_AVX512=ON"]
    wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", *options, "-w", str(tmp_path), str(ROOT)]
    built = subprocess.run([sys.executable, "-m", "pip", *wheel], capture_output=True, text=True, cwd=tmp_path)
    assert built.returncode == 0, built.stderr[-4000:]
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        (name,) = (name for name in archive.namelist() if "/_cpu." in name and name.endswith(".so"))
        module = archive.extract(name, tmp_path)
    plugins = ["-p", "tests.kernels.emulated_cpu", "-p", "no:cacheprovider", "-n", "0"]
    passed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *TESTS, "-k", "avx512 or amx"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}, "EMULATED_CPU": module},
    )
    assert passed.returncode == 0, passed.stdout[-4000:]
    count = re.search(r"(\d+) passed", passed.stdout)
    assert count is not None
    assert int(count[1]) > 500, passed.stdout[-500:]
