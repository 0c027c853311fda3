"""Flat JSON rows of a benchmark, each with where it was measured."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    """Versions, commit and machine, the same for all rows of a run."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    models = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "commit": git.stdout.strip() or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": models[0] if models else platform.processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as a JSON array; what provenance() says is added to each."""
    where = provenance()
    path.write_text(json.dumps([row | where for row in rows], indent=1) + "\n")
