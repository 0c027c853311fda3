"""What this machine has, and what of chunkserve works on it: the report of `chunkserve doctor`."""

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .small_model import NAME as SMALL_MODEL
from .small_model import is_cached, small_model_path

_PACKAGES = ("chunkserve", "torch", "transformers", "tokenizers", "ray", "triton", "numpy", "fastapi", "pydantic")
_CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
# Head sizes of the small model; what a backend can do rarely depends on more than device and dtype.
_HEADS = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "chunk_size": 64}


def examine() -> dict[str, Any]:
    """The report as plain data: machine, versions, devices, backends with the reasons against them, small model."""
    return {
        "machine": _machine(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "attention_backends": _backends(),
        "small_model": {"name": SMALL_MODEL, "folder": str(small_model_path()), "cached": is_cached()},
    }


def rendered(report: dict[str, Any]) -> RenderableType:
    """The report as tables for a terminal."""
    facts = Table(title="Machine", title_justify="left", show_header=False)
    for name, value in (*report["machine"].items(), *report["versions"].items()):
        facts.add_row(name, ", ".join(value) if isinstance(value, list) else str(value or "not installed"))
    for device in report["devices"]:
        facts.add_row(device["name"], device["what"])
    model = report["small_model"]
    facts.add_row(model["name"], f"in {model['folder']}" if model["cached"] else "fetched at the first start (98 MB)")
    backends = Table("backend", "device", "dtypes", "usable here", title="Attention backends", title_justify="left")
    verdicts: dict[tuple[str, str, str | None], list[str]] = {}
    for row in report["attention_backends"]:
        verdicts.setdefault((row["backend"], row["device"], row["reason"]), []).append(row["dtype"])
    for (backend, device, reason), dtypes in verdicts.items():
        verdict = Text("yes", "green") if reason is None else Text(f"no: {reason}", "yellow")
        backends.add_row(backend, device, ", ".join(dtypes), verdict)
    return Group(facts, backends)


def _machine() -> dict[str, Any]:
    from chunkserve.kernels import _cpu

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.MULTILINE)
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    memory = psutil.virtual_memory()
    return {
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": model[1] if model else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_features": [name for name in _CPU_FEATURES if flags and name in flags[1].split()],
        "cpu_kernels": f"{_cpu.isa()} (of {', '.join(_cpu.supported_isas())})",
        "memory_gib": round(memory.total / 2**30, 1),
        "memory_free_gib": round(memory.available / 2**30, 1),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, str]]:
    import torch

    devices = [{"name": "cpu", "what": f"{torch.get_num_threads()} threads by default in torch"}]
    for at in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(at)
        what = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
        devices.append({"name": f"cuda:{at}", "what": what})
    return devices


def _backends() -> list[dict[str, str | None]]:
    import torch

    from chunkserve.kernels.dispatch import FP8, AttentionProblem, backend_matrix

    rows: list[dict[str, str | None]] = []
    for device in ("cpu", "cuda"):
        if device == "cuda" and not torch.cuda.is_available():
            continue
        kinds = [(dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        for dtype, kv_dtype in (*kinds, (torch.bfloat16, FP8)):
            problem = AttentionProblem(device=device, dtype=dtype, kv_dtype=kv_dtype, **_HEADS)
            name = str(dtype).removeprefix("torch.") + (" with fp8 K and V" if kv_dtype == FP8 else "")
            for backend, reason in backend_matrix(problem):
                rows.append({"backend": backend, "device": device, "dtype": name, "reason": reason})
    return rows
