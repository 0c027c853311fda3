"""The attention benchmarks on sizes of seconds: do they run, and do their rows have what readers of the JSON expect?"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import attention_cases
import fig3_decode_throughput
import fig4_batch_size
import ours_chunk_size
import ours_forest
import ours_kv_dtype
import ours_plan_cost
import plots
import table1_roofline
import table3_attention_latency
from chunkserve.kernels import _cpu

PROVENANCE = {"commit", "torch", "cpu", "cpus", "load_average", "warm_up", "repeats", "spread"}
PAGED = {"ours_us", "shared_pages_us", "separate_pages_us", "roofline_us", "serial_roofline_us"}
SETTING = {"case", "dtype", "threads"}
_ATTENTION = ("attention", "attention, all shared")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Benchmarks set numbers of threads."""
    threads = _cpu.num_threads(), torch.get_num_threads()
    yield
    _cpu.set_num_threads(threads[0])
    torch.set_num_threads(threads[1])


def tiny_settings() -> list[Any]:
    shape = attention_cases.Shape(name="tiny", num_heads=4, num_kv_heads=2, head_dim=16)
    return [attention_cases.Setting(shape=shape, dtype=dtype, threads=1) for dtype in attention_cases.DTYPES]


def rows_of(
    script: ModuleType, measured: Iterator[dict[str, Any]], path: Path, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Rows as written; the table and, last, the headline ratio are printed."""
    rows = attention_cases.collect(measured, path)
    capsys.readouterr()
    script.report(rows)
    assert capsys.readouterr().out.strip()
    written = json.loads(path.read_text())
    assert len(written) == len(rows)
    return written


def assert_columns(rows: list[dict[str, Any]], columns: set[str]) -> None:
    for row in rows:
        assert not columns - set(row)
        assert all(value is None or value > 0 for name, value in row.items() if name.endswith("_us"))


@pytest.mark.slow
def test_table3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = table3_attention_latency.run(tiny_settings(), (256,), 4, 1, 0.0, sdpa=True, flex=True)
    rows = rows_of(table3_attention_latency, measured, tmp_path / "rows.json", capsys)
    assert_columns(rows, PROVENANCE | SETTING | PAGED | {"batch", "n_p", "n_s", "sdpa_us", "sdpa_packed_us", "flex_us"})
    assert [row["n_s"] for row in rows] == [0, 128, 192, 256] * 2
    assert rows[0]["shared_pages_us"] is None
    assert rows[-1]["sdpa_packed_us"]
    assert len(table3_attention_latency.latency_panels(rows)) == 2


def test_table1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = table1_roofline.run(tiny_settings(), (1, 3), 2, widths={"tiny": (32, 48)}, context=128)
    rows = rows_of(table1_roofline, measured, tmp_path / "rows.json", capsys)
    assert_columns(rows, PROVENANCE | SETTING | {"batch", "module", "mflop", "moved_mb", "intensity", "ours_us"})
    assert [row["module"] for row in rows[:4]] == ["qkv", "attention", "attention, all shared", "mlp"]
    private, shared = (next(r for r in rows if r["batch"] == 3 and r["module"] == m) for m in _ATTENTION)
    assert shared["mflop"] == private["mflop"]
    assert shared["intensity"] > 2 * private["intensity"]


def test_kv_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = ours_kv_dtype.run([tiny_settings()[0].shape], (1,), 128, 1)
    rows = rows_of(ours_kv_dtype, measured, tmp_path / "rows.json", capsys)
    assert_columns(rows, PROVENANCE | {"case", "threads", "batch", "n_p", "n_s", "fp8_us", "bf16_us", "fp8_over_bf16"})
    assert [(row["batch"], row["n_s"]) for row in rows] == [(32, 128), (8, 0)]


@pytest.mark.slow
def test_fig3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = fig3_decode_throughput.run(tiny_settings(), (512,), 4, 1)
    rows = rows_of(fig3_decode_throughput, measured, tmp_path / "rows.json", capsys)
    rates = {"ours_tokens_per_s", "shared_pages_tokens_per_s", "separate_pages_tokens_per_s"}
    assert_columns(rows, PROVENANCE | SETTING | PAGED | rates | {"batch", "n_s", "n_c"})
    assert [row["n_c"] for row in rows] == [256, 512] * 2
    assert len(fig3_decode_throughput.throughput_panels(rows)) == 2


@pytest.mark.slow
def test_fig4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = fig4_batch_size.run(tiny_settings(), (128,), (1, 3), 1)
    rows = rows_of(fig4_batch_size, measured, tmp_path / "rows.json", capsys)
    rates = {"ours_tokens_per_s", "shared_pages_tokens_per_s", "separate_pages_tokens_per_s"}
    assert_columns(rows, PROVENANCE | SETTING | PAGED | rates | {"batch", "n_s", "n_c"})
    assert [row["batch"] for row in rows] == [1, 3] * 2


@pytest.mark.slow
def test_chunk_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = ours_chunk_size.run(tiny_settings(), 4, 100, 60, 1)
    rows = rows_of(ours_chunk_size, measured, tmp_path / "rows.json", capsys)
    assert_columns(rows, PROVENANCE | SETTING | {"ours_us", "shared_pages_us", "build_plan_us", "pool_tokens"})
    # 100 tokens end within a chunk of every size: the smallest shares most of them.
    assert [(row["chunk_size"], row["shared_tokens"]) for row in rows[:5]] == [
        (16, 96),
        (32, 96),
        (64, 64),
        (128, 0),
        (256, 0),
    ]


@pytest.mark.slow
def test_forest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = ours_forest.run(tiny_settings(), ours_forest.forests(128), 1)
    rows = rows_of(ours_forest, measured, tmp_path / "rows.json", capsys)
    assert_columns(rows, PROVENANCE | SETTING | PAGED | {"forest", "batch", "degree", "shared_percent", "items"})
    by_name = {row["forest"]: row for row in rows}
    assert by_name["1 x 32"]["items"] == 33
    # Runs of one chunk that only two sequences share, 2**4 of them, are read inside these (MIN_SAVED_TOKENS).
    assert by_name["binary tree"]["items"] == 2**6 - 1 - 2**4


@pytest.mark.slow
def test_plan_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = tiny_settings()[0].shape
    measured = ours_plan_cost.run([shape], (1, 2), 8, 20, 40)
    rows = rows_of(ours_plan_cost, measured, tmp_path / "rows.json", capsys)
    assert_columns(
        rows, PROVENANCE | {"case", "threads", "tree", "action", "caches", "best_us", "median_us", "target_us"}
    )
    assert {row["action"] for row in rows} == {"build", "grow", "decode", "churn"}
    assert {row["built_share"] for row in rows if row["action"] == "grow"} == {0.0}


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tiny_settings()[0]
    batch = attention_cases.one_prefix(3, 128, 64)
    pool = attention_cases.Pool(setting, num_slots=batch.num_slots, num_sequences=3)
    pool.check(batch)
    right = pool.attend
    monkeypatch.setattr(pool, "attend", lambda plan: right(plan) + 1e-3)
    with pytest.raises(RuntimeError, match=r"sequence 0 is off by 0\.00[0-9]+, allowed 1e-05; not timed"):
        pool.check(batch)


def test_batches_share_what_their_runs_name() -> None:
    batch = attention_cases.batch_of_runs([[("a", 128), ("x", 3)], [("a", 128), ("b", 64), ("y", 65)]])
    assert [path.tolist() for path in batch.paths] == [[0, 1, 2], [0, 1, 3, 4, 5]]
    assert batch.kv_lens == (131, 257)
    assert batch.token_counts() == {"shared_read": 128, "shared_rows": 256, "private": 3 + 64 + 65}
    assert np.concatenate(batch.separate().paths).tolist() == list(range(8))


def test_the_mean_step_interpolates_between_positions() -> None:
    # Steps 1 to 5 take 1, 2, 3, 4 and 5.
    assert attention_cases.mean_step_us([1, 5], [1.0, 5.0], 5) == pytest.approx(3.0)


def test_a_plot_without_matplotlib_ends_the_script_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plots.require_matplotlib(None)
    with pytest.raises(SystemExit, match="needs matplotlib"):
        plots.require_matplotlib(Path("figure.png"))


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = {"ours": [(1.0, 2.0), (2.0, 4.0)], "flex": []}
    panels = [plots.Panel(title=str(i), x_label="x", y_label="y", lines=lines) for i in range(3)]
    plots.draw(tmp_path / "figure.png", "a figure", panels)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
