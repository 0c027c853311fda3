"""The benchmarks of whole servers, as far as they go without one: what they make of what they measured."""

import asyncio
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import engine_bursts
import fig5_latency_vs_rate
import server_load
import table2_shared_prompts
import table4_memory_latency
from chunkserve.deploy.bench import BenchResult, BenchSettings
from chunkserve.deploy.load_client import Sample
from chunkserve.replica.options import ReplicaOptions


def _row(system: str, shared: int, rate: float, latency: float, kv_bytes: int | None = None) -> dict[str, Any]:
    return {
        "system": system, "prompt_tokens": 1024, "shared_tokens": shared, "shared_percent": shared * 100 // 1024,
        "rate_rps": rate, "latency_ms_per_token": latency, "kv_bytes_peak": kv_bytes,
    }  # fmt: skip


def test_fig5_compares_at_the_highest_rate(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        _row("chunkserve", 1024, 1.0, 10), _row("peer", 1024, 1.0, 50),
        _row("chunkserve", 1024, 2.0, 20), _row("peer", 1024, 2.0, 60), _row("chunkserve", 0, 2.0, 90),
    ]  # fmt: skip
    fig5_latency_vs_rate._print_headline(rows, Namespace(prompt_tokens=[1024], rates=[1.0, 2.0]))
    assert "peer / chunkserve, normalised latency: 3.00x (3.00 to 3.00) at 2 requests/s" in capsys.readouterr().out
    panels = fig5_latency_vs_rate._panels(rows)
    assert [panel.lines for panel in panels] == [
        {"chunkserve": [(1.0, 10), (2.0, 20)], "peer": [(1.0, 50), (2.0, 60)]},
        {"chunkserve": [(2.0, 90)]},
    ]


@pytest.mark.parametrize(
    ("shared_tokens", "share", "cached_tokens", "holds"),
    [(0, True, 0, True), (0, True, 50, False), (60, True, 60, True), (60, True, 100, False), (60, False, 60, False)],
)
def test_a_load_that_finds_the_words_of_an_earlier_one_gives_no_figures(
    monkeypatch: pytest.MonkeyPatch, shared_tokens: int, share: bool, cached_tokens: int, holds: bool
) -> None:
    settings = BenchSettings(url="", shared_tokens=shared_tokens, own_tokens=100 - shared_tokens, share=share)
    sample = Sample(
        ttft_s=0.1, last_token_s=0.2, latency_s=0.2, prompt_tokens=100, cached_tokens=cached_tokens, completion_tokens=2
    )

    async def answered(settings: BenchSettings) -> BenchResult:
        return BenchResult(settings=settings, model="m", samples=(sample,), errors=Counter(), wall_s=1.0)

    monkeypatch.setattr(server_load, "run_bench", answered)
    if holds:
        assert asyncio.run(server_load.load(settings)).latency_ms_per_token == 100
    else:
        with pytest.raises(SystemExit, match=f"{cached_tokens}% of the prompts was cached"):
            asyncio.run(server_load.load(settings))


def test_points_of_a_benchmark_have_words_of_their_own() -> None:
    points = [(tokens, rate, turn) for tokens in (1024, 2048) for rate in (0.25, 0.5, 1.0) for turn in range(3)]
    assert len({server_load.seed_of(point) for point in points}) == len(points)


def test_table4_gives_what_sharing_saves() -> None:
    rows = [_row("chunkserve", 0, 1.0, 40, 1000), _row("chunkserve", 1024, 1.0, 10, 150)]
    text = table4_memory_latency._headline(rows, 1024)
    assert "peak K and V bytes 0.150x (0.150 to 0.150), normalised latency 0.250x (0.250 to 0.250)" in text


def test_table2_counts_what_the_tree_finds() -> None:
    prompt = list(range(200))
    row = table2_shared_prompts.measure("family", ["one"], [[*prompt, 1000 + i, 7] for i in range(4)])
    # Three of four find the prompt; 200 tokens are 3 whole chunks, the fourth is each request's own.
    assert (row["shared_tokens"], row["chunks"], row["chunks_unshared"]) == (200, 3 + 4, 4 * 4)
    assert row["shared_share"] == pytest.approx(600 / 808, abs=1e-4)


@pytest.mark.model
def test_a_burst_is_timed_while_all_of_it_decodes(small_model: Path) -> None:
    options = ReplicaOptions(model=str(small_model), max_running=4, max_sequence_tokens=64, num_threads=1)
    engine = engine_bursts.BurstEngine(options, new_tokens=6)
    watched = []

    @contextmanager
    def watch() -> Iterator[None]:
        watched.append(len(engine.engine._scheduler.running))
        yield
        watched.append(len(engine.engine._scheduler.running))

    burst = engine.decode([tuple(range(5)), tuple(range(9))], watch())
    assert [len(tokens) for tokens in burst.tokens] == [6, 6]
    assert watched[0] == 2 > watched[1]
    assert 0 < burst.steps < 6
