"""csrc/tpp.cu compiled for this machine's processor by g++, with cuda_host/cuda_host_shim.h in the place of a GPU."""

import ctypes
import hashlib
import itertools
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from chunkserve.kernels.cuda_module import KERNELS, SOURCE_FOLDER, SOURCES
from chunkserve.kernels.dispatch import FP8, AttentionProblem

from ..file_lock import locked  # noqa: TID252

HOST_FOLDER = Path(__file__).parent / "cuda_host"
VALUES = {torch.float16: "Half", torch.bfloat16: "Bfloat", torch.float32: "float", FP8: "E4m3"}
# Bytes of shared memory that a block may have.
SM_80, SM_86, SM_90 = 166912, 101376, 232448
SANITIZERS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")


@pytest.fixture(scope="session", name="folder")
def host_folder(pytestconfig: pytest.Config) -> Path:
    """Where compiled kernels stay until their source changes."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("cuda_host")


class HostKernels:
    """Few blocks, so that each takes several units; every launch has another order."""

    def __init__(self, library: Path, *, num_blocks: int = 3, seed: int = 0) -> None:
        self._library = ctypes.CDLL(str(library))
        self._num_blocks = num_blocks
        self._seeds = itertools.count(seed)

    @property
    def warps(self) -> int:
        return self._library.tpp_host_threads() // 32

    @property
    def stages(self) -> int:
        return self._library.tpp_host_stages()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def launch(self, kernel: str, params: ctypes.Structure) -> None:
        assert kernel in KERNELS
        getattr(self._library, kernel)(ctypes.byref(params), self._num_blocks, next(self._seeds))


def host_loader(
    folder: Path,
    *,
    shared_limit: int = SM_80,
    flags: Sequence[str] = (),
    mutation: tuple[str, str] | None = None,
    num_blocks: int = 3,
    seed: int = 0,
) -> Callable[[AttentionProblem, torch.device], HostKernels]:
    """For CudaBackend(load=...): compiles into `folder` what it does not hold yet.

    Args:
        folder: of shared libraries, named by all that went into them.
        shared_limit: bytes of shared memory of the device that is played.
        flags: more for g++.
        mutation: text of the source that occurs once, and what to compile instead.
        num_blocks: that run at once.
        seed: of the order of threads, blocks and copies.
    """

    def load(problem: AttentionProblem, device: torch.device) -> HostKernels:
        assert device.type == "cpu"
        sources = {name: (SOURCE_FOLDER / name).read_text() for name in SOURCES}
        if mutation is not None:
            right, wrong = mutation
            assert sum(text.count(right) for text in sources.values()) == 1
            sources = {name: text.replace(right, wrong) for name, text in sources.items()}
        command = [
            *("g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-clobbered"),
            *("-shared", "-fPIC", f"-I{HOST_FOLDER}"),
            *(f"-DTPP_VALUE={VALUES[problem.dtype]}", f"-DTPP_KV_VALUE={VALUES[problem.kv_dtype]}"),
            *(f"-DTPP_HEAD_DIM={problem.head_dim}", f"-DTPP_SHARED_LIMIT={shared_limit}"),
            *flags,
        ]
        inputs = [*sources.values(), *(p.read_text() for p in sorted(HOST_FOLDER.iterdir())), *command]
        key = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
        library = folder / f"{key}.so"
        with locked(folder / f"{key}.lock"):
            if not library.exists():
                copies = folder / key
                copies.mkdir(exist_ok=True)
                for name, text in sources.items():
                    (copies / name).write_text(text)
                building = folder / f"{key}.building.so"
                driver = HOST_FOLDER / "driver.cpp"
                subprocess.run([*command, f"-I{copies}", str(driver), "-o", str(building)], check=True)
                building.rename(library)
        return HostKernels(library, num_blocks=num_blocks, seed=seed)

    return load
