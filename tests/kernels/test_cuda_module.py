"""Building csrc/tpp.cu without a GPU: what the compilers say of each instantiation, the cache, and the messages."""

import ctypes
import dataclasses
import logging
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chunkserve.kernels import cuda_module
from chunkserve.kernels.cuda_module import (
    KERNELS,
    SOURCE_FOLDER,
    Build,
    CudaBuildError,
    DeviceKernels,
    build_cubin,
    compiler_missing,
    find_nvcc,
    find_nvrtc,
)

from .cuda_host_kernels import HOST_FOLDER, SM_80, SM_90

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not found")
BUILD = Build(value="Half", kv_value="Half", head_dim=64, arch="sm_80", shared_limit=SM_80)


def _usage(build: Build, tmp_path: Path) -> dict[str, tuple[int, int, int]]:
    """Registers, bytes of stack, bytes of spills of each kernel."""
    run = subprocess.run(
        [str(find_nvcc()), "-cubin", "-Xptxas", "-v", *build.flags(), "-o", tmp_path / "x", SOURCE_FOLDER / "tpp.cu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "warning" not in run.stderr, run.stderr
    out = {}
    for part in run.stderr.split("Compiling entry function '")[1:]:
        spills = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert registers is not None
        assert len(spills) == 3
        stack = int(spills[0][0])
        out[part.split("'")[0]] = int(registers[1]), stack, int(spills[1][0]) + int(spills[2][0])
    assert set(out) == set(KERNELS)
    return out


# The largest head dim of each use of registers and shared memory (tpp.cu, Segment), and the common ones.
INSTANTIATIONS = [
    *(("Half", "Half", d) for d in (64, 80, 128, 192, 256)),
    ("Bfloat", "Bfloat", 128),
    *(("float", "float", d) for d in (64, 128, 256)),
    *(("Half", "E4m3", d) for d in (80, 128, 192, 256)),
    ("Bfloat", "E4m3", 128),
    *(("float", "E4m3", d) for d in (128, 256)),
]


@needs_nvcc
@pytest.mark.parametrize(("arch", "limit"), [("sm_80", SM_80), ("sm_90", SM_90)])
@pytest.mark.parametrize(
    ("value", "kv_value", "head_dim"),
    [pytest.param(*one, marks=[] if one == ("Half", "Half", 128) else pytest.mark.slow) for one in INSTANTIATIONS],
)
def test_nothing_spills(tmp_path: Path, arch: str, limit: int, value: str, kv_value: str, head_dim: int):
    """Shared memory is a static_assert of the source."""
    build = Build(value=value, kv_value=kv_value, head_dim=head_dim, arch=arch, shared_limit=limit)
    usage = _usage(build, tmp_path)
    assert all(stack == spills == 0 for _, stack, spills in usage.values()), usage
    # A multiprocessor has 65536 registers: three blocks of 128 threads at the small head dims, two above.
    assert usage["tpp_segment"][0] <= (168 if head_dim <= 80 else 255)
    # 8 blocks of 128 threads.
    assert max(usage["tpp_merge"][0], usage["tpp_append"][0]) <= 64


@needs_nvcc
def test_nvcc_builds_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(cuda_module, "find_nvrtc", lambda: None)
    with caplog.at_level(logging.INFO):
        cubin = build_cubin(BUILD, tmp_path)
    assert cubin.startswith(b"\x7fELF")
    assert all(name.encode() in cubin for name in (*KERNELS, "tpp_segment_shape"))
    assert [r.getMessage().split()[3] for r in caplog.records] == ["compiler=nvcc"]
    monkeypatch.setattr(cuda_module, "find_nvcc", lambda: None)
    assert build_cubin(BUILD, tmp_path) == cubin
    with pytest.raises(CudaBuildError, match="no CUDA compiler"):
        build_cubin(dataclasses.replace(BUILD, head_dim=32), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@needs_nvcc
def test_a_block_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_module, "find_nvrtc", lambda: None)
    build = dataclasses.replace(BUILD, head_dim=128, shared_limit=48 * 1024)
    with pytest.raises(CudaBuildError, match=r"(?s)nvcc refuses tpp.cu for .*does not fit shared memory"):
        build_cubin(build, tmp_path)


@pytest.mark.skipif(find_nvrtc() is None, reason="NVRTC is not found")
def test_nvrtc_builds(tmp_path: Path):
    cubin = build_cubin(BUILD, tmp_path)
    assert cubin.startswith(b"\x7fELF")
    assert all(name.encode() in cubin for name in (*KERNELS, "tpp_segment_shape"))
    with pytest.raises(CudaBuildError, match=r"(?s)NVRTC refuses tpp.cu for .*does not fit shared memory"):
        build_cubin(dataclasses.replace(BUILD, head_dim=128, shared_limit=48 * 1024), tmp_path)


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_module, "find_nvrtc", lambda: None)
    monkeypatch.setattr(cuda_module, "find_nvcc", lambda: None)
    assert "neither libnvrtc" in (compiler_missing() or "")
    monkeypatch.setattr(cuda_module, "find_nvcc", lambda: Path("nvcc"))
    assert compiler_missing() is None


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """cuda_host/fake_driver.cpp in the place of libcuda, under a device of 108 multiprocessors."""
    library = tmp_path / "driver.so"
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, str(HOST_FOLDER / "fake_driver.cpp"), "-o", str(library)], check=True)
    monkeypatch.setattr(cuda_module, "_DRIVER", str(library))
    properties = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0xABCDEF0123456789))
    fake = ctypes.CDLL(str(library))
    fake.last_launch.restype = ctypes.c_char_p
    return fake


class _Params(ctypes.Structure):
    _fields_ = (("plan", ctypes.c_void_p),)


def test_launches_through_the_driver(driver: ctypes.CDLL):
    kernels = DeviceKernels(b"\x7fELF and more", torch.device("cuda", 0))
    assert (kernels.warps, kernels.num_blocks) == (4, 216)
    params = _Params(plan=0x123456789ABCDEF0)
    kernels.launch("tpp_segment", params)
    assert driver.last_launch() == b"tpp_segment 216 128 147456 0xabcdef0123456789 0x123456789abcdef0"
    kernels.launch("tpp_merge", params)
    assert driver.last_launch() == b"tpp_merge 864 128 0 0xabcdef0123456789 0x123456789abcdef0"


@pytest.mark.usefixtures("driver")
def test_names_what_the_driver_refuses():
    with pytest.raises(CudaBuildError, match="cuModuleLoadData fails with 1: invalid argument"):
        DeviceKernels(b"no cubin", torch.device("cuda", 0))


def test_no_driver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_module, "_DRIVER", "libnotthere.so.1")
    with pytest.raises(CudaBuildError, match=r"no CUDA driver: libnotthere.so.1"):
        DeviceKernels(b"", torch.device("cuda", 0))
