"""The benchmark of the ranks' sync, run as a user would; its figures are not looked at."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/ours_tree_sync.py"


def test_rows_of_each_mode_and_the_headline(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--seconds", "1", "--layers", "2", "--warmup", "2", "--hidden", "576"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--json", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert [(row["churn"], row["mode"]) for row in rows] == [
        (churn, mode)
        for churn in ("quiet", "heavy")
        for mode in ("none", "control_rows", "broadcast_fixed", "broadcast_pickle")
    ]
    for row in rows:
        # 5 all-reduces and a gather; edits that ride on them cost none.
        extra = {"broadcast_fixed": 1, "broadcast_pickle": 2}.get(row["mode"], 0)
        assert row["collectives_per_step"] == 6 + extra
        assert (row["bytes_per_step"] > 0) == (row["mode"] != "none")
    assert done.stdout.splitlines()[-1].startswith("step with control rows over one without sync: ")
