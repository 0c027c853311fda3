"""csrc/tpp.cu for one head dim and its dtypes: built on first use by NVRTC or nvcc, kept on disk, run by the driver.

No CUDA package is needed at install time. NVRTC comes with CUDA builds of torch, so that a compiler is there wherever
this backend can run; nvcc is taken where NVRTC is not found. The source includes no CUDA header.
"""

import ctypes
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import torch

logger = logging.getLogger(__name__)

SOURCE_FOLDER: Final = Path(__file__).parent / "csrc"
SOURCES: Final = ("tpp.cu", "tpp_device.cuh", "tpp_products.cuh")
KERNELS: Final = ("tpp_segment", "tpp_merge", "tpp_append")

_DRIVER: Final = "libcuda.so.1"
# Threads per block of tpp_merge and tpp_append, and their blocks per multiprocessor.
_ROW_THREADS: Final = 128
_ROW_BLOCKS_PER_SM: Final = 8
_MAX_DYNAMIC_SHARED_SIZE: Final = 8  # CUfunction_attribute


class CudaBuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here."""


class Kernels(Protocol):
    """The compiled kernels of one head dim and dtype on one device."""

    @property
    def warps(self) -> int:
        """Per block of tpp_segment: the largest team."""
        ...

    @property
    def num_blocks(self) -> int:
        """Of tpp_segment that run at once."""
        ...

    def launch(self, kernel: str, params: ctypes.Structure) -> None:
        """Run one of `KERNELS` on the current stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One instantiation.

    Attributes:
        value: C++ type of queries and products: "Half", "Bfloat" or "float".
        kv_value: of K and V in the pool: the same, or "E4m3".
        head_dim: D, a multiple of 16 up to 256.
        arch: as "sm_90".
        shared_limit: bytes of shared memory that a block may have.
    """

    value: str
    kv_value: str
    head_dim: int
    arch: str
    shared_limit: int

    def flags(self) -> list[str]:
        """For nvcc and NVRTC alike."""
        return [
            f"-arch={self.arch}",
            "-std=c++17",
            f"-DTPP_VALUE={self.value}",
            f"-DTPP_KV_VALUE={self.kv_value}",
            f"-DTPP_HEAD_DIM={self.head_dim}",
            f"-DTPP_SHARED_LIMIT={self.shared_limit}",
        ]


@cache
def find_nvcc() -> Path | None:
    """On the path, or where CUDA installs it."""
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    return Path(found) if found else None


@cache
def find_nvrtc() -> ctypes.CDLL | None:
    """Already loaded (by torch), on the library path, or in the packages that torch depends on."""
    folders: list[str] = []
    if (spec := importlib.util.find_spec("nvidia")) is not None:
        folders = list(spec.submodule_search_locations or ())
    names = [f"libnvrtc.so.{version}" for version in (13, 12)]
    names += [str(p) for folder in folders for p in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"), reverse=True)]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compiler_missing() -> str | None:
    """Why nothing can be compiled here; None when it can."""
    if find_nvrtc() is None and find_nvcc() is None:
        return "no CUDA compiler: neither libnvrtc (comes with CUDA builds of torch) nor nvcc (on the PATH) is found"
    return None


def build_cubin(build: Build, cache_folder: Path) -> bytes:
    """The compiled instantiation, from the cache folder if it was built before.

    Raises:
        CudaBuildError: there is no compiler, or it refuses; with its messages.
    """
    sources = [(SOURCE_FOLDER / name).read_bytes() for name in SOURCES]
    key = hashlib.sha256(b"\0".join([*sources, *(flag.encode() for flag in build.flags())])).hexdigest()[:16]
    values = "-".join(dict.fromkeys([build.value, build.kv_value])).lower()
    path = cache_folder / f"tpp-{build.arch}-{values}-{build.head_dim}-{key}.cubin"
    if path.exists():
        return path.read_bytes()
    if (nvrtc := find_nvrtc()) is not None:
        compiler, cubin = "nvrtc", _compile_with_nvrtc(nvrtc, build)
    elif (nvcc := find_nvcc()) is not None:
        compiler, cubin = "nvcc", _compile_with_nvcc(nvcc, build)
    else:
        raise CudaBuildError(str(compiler_missing()))
    cache_folder.mkdir(parents=True, exist_ok=True)
    # Other processes may build the same file: each writes its own, the last rename wins.
    with tempfile.NamedTemporaryFile(dir=cache_folder, delete=False) as file:
        file.write(cubin)
    os.replace(file.name, path)
    logger.info(
        "built CUDA kernels compiler=%s arch=%s values=%s head_dim=%d", compiler, build.arch, values, build.head_dim
    )
    return cubin


def _compile_with_nvcc(nvcc: Path, build: Build) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tpp.cubin"
        command = [str(nvcc), "-cubin", *build.flags(), "-o", str(out), str(SOURCE_FOLDER / SOURCES[0])]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise CudaBuildError(f"nvcc refuses {SOURCES[0]} for {build}:\n{run.stderr}")
        return out.read_bytes()


def _compile_with_nvrtc(nvrtc: ctypes.CDLL, build: Build) -> bytes:
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()
    source, *headers = ((SOURCE_FOLDER / name).read_bytes() for name in SOURCES)
    include_names = [name.encode() for name in SOURCES[1:]]

    def check(result: int, what: str) -> None:
        if result:
            raise CudaBuildError(f"{what}: {nvrtc.nvrtcGetErrorString(result).decode()}")

    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            source,
            SOURCES[0].encode(),
            len(headers),
            (ctypes.c_char_p * len(headers))(*headers),
            (ctypes.c_char_p * len(headers))(*include_names),
        ),
        "nvrtcCreateProgram",
    )
    try:
        flags = [flag.encode() for flag in build.flags()]
        if nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags)):
            size = ctypes.c_size_t()
            check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
            log = ctypes.create_string_buffer(size.value)
            check(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
            raise CudaBuildError(f"NVRTC refuses {SOURCES[0]} for {build}:\n{log.value.decode()}")
        size = ctypes.c_size_t()
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class DeviceKernels:
    """A cubin on a device of this process, in the context that torch uses."""

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        """
        Args:
            cubin: from `build_cubin`, for this device.
            device: with an index.
        Raises:
            CudaBuildError: the driver is missing or refuses the cubin.
        """
        self._device = device
        self._driver = _Driver()
        self._context = self._driver.primary_context(device.index)
        module = self._driver.load_module(self._context, cubin)
        self._functions = {
            name: self._driver.function(module, name) for name in ("tpp_segment", "tpp_merge", "tpp_append")
        }
        self._threads, self._shared_bytes = self._driver.read_ints(module, "tpp_segment_shape", 2)
        segment = self._functions["tpp_segment"]
        self._driver.call("cuFuncSetAttribute", segment, _MAX_DYNAMIC_SHARED_SIZE, self._shared_bytes)
        per_sm = ctypes.c_int()
        self._driver.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(per_sm),
            segment,
            self._threads,
            ctypes.c_size_t(self._shared_bytes),
        )
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._num_blocks = self._num_sms * per_sm.value

    @property
    def warps(self) -> int:
        return self._threads // 32

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def launch(self, kernel: str, params: ctypes.Structure) -> None:
        if kernel == "tpp_segment":
            blocks, threads, shared_bytes = self._num_blocks, self._threads, self._shared_bytes
        else:
            blocks, threads, shared_bytes = self._num_sms * _ROW_BLOCKS_PER_SM, _ROW_THREADS, 0
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._driver.launch(self._context, self._functions[kernel], blocks, threads, shared_bytes, stream, params)


class _Driver:
    """The few functions of libcuda that a launch needs."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_DRIVER)
        except OSError as error:
            raise CudaBuildError(f"no CUDA driver: {error}") from error
        self.call("cuInit", 0)

    def call(self, name: str, *args: object) -> None:
        result = getattr(self._library, name)(*args)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(text))
            raise CudaBuildError(f"{name} fails with {result}: {(text.value or b'unknown error').decode()}")

    def primary_context(self, device_index: int) -> ctypes.c_void_p:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), device_index)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def load_module(self, context: ctypes.c_void_p, cubin: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def read_ints(self, module: ctypes.c_void_p, name: str, count: int) -> Sequence[int]:
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), module, name.encode())
        out = (ctypes.c_int * count)()
        self.call("cuMemcpyDtoH_v2", out, address, ctypes.c_size_t(ctypes.sizeof(out)))
        return list(out)

    def launch(
        self,
        context: ctypes.c_void_p,
        function: ctypes.c_void_p,
        blocks: int,
        threads: int,
        shared_bytes: int,
        stream: int,
        params: ctypes.Structure,
    ) -> None:
        # A thread that torch has not run on yet has no current context.
        self.call("cuCtxSetCurrent", context)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self.call(
            "cuLaunchKernel",
            function,
            *(blocks, 1, 1),
            *(threads, 1, 1),
            shared_bytes,
            ctypes.c_void_p(stream),
            arguments,
            None,
        )
