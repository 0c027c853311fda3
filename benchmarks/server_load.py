"""What the benchmarks of whole servers share: a first answer that must be right, and what a server holds under load."""

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import httpx

from chunkserve.deploy.bench import BenchResult, BenchSettings, run_bench
from chunkserve.deploy.client import Client

OURS = "chunkserve"
_SAMPLE_PERIOD_S = 0.2


def check(label: str, url: str) -> None:
    """The server answers, and ours rightly, before anything is timed.

    Other engines round otherwise, and the first token of this answer is nearly a tie.
    """
    with Client(url) as client:
        text = client.chat("What is the capital of France?", max_tokens=16, temperature=0).text
    if not text or (label == OURS and text != "The capital of France is Paris."):
        raise SystemExit(f"{label} says that the capital of France is {text!r}; nothing is timed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load that a server answered without an error.

    kv_bytes_peak, batch_peak: the most K and V bytes of running sequences, and the most of these; None for peers.
    """

    result: BenchResult
    kv_bytes_peak: int | None
    batch_peak: int | None

    @property
    def latency_ms_per_token(self) -> float:
        """The paper's normalised latency: from sending to the last token over new tokens, mean of the requests."""
        samples = self.result.samples
        return sum(s.latency_s / s.completion_tokens for s in samples) / len(samples) * 1e3

    def row(self) -> dict[str, Any]:
        return self.result.row() | {
            "latency_ms_per_token": self.latency_ms_per_token,
            "kv_bytes_peak": self.kv_bytes_peak,
            "batch_peak": self.batch_peak,
        }


async def load(settings: BenchSettings, *, watch: bool) -> Load:
    """Load a server; with `watch`, for ours, look at what it holds meanwhile."""
    running = asyncio.create_task(run_bench(settings))
    kv_bytes, batch = await _peaks(settings.url, running) if watch else (None, None)
    result = await running
    if result.errors:
        raise SystemExit(f"{settings.label}: requests failed: {dict(result.errors)}")
    return Load(result=result, kv_bytes_peak=kv_bytes, batch_peak=batch)


async def _peaks(url: str, running: "asyncio.Task[Any]") -> tuple[int, int]:
    peaks = [0, 0]
    async with httpx.AsyncClient(timeout=60) as client:
        while not running.done():
            text = (await client.get(f"{url}/metrics")).text
            for i, name in enumerate(("kv_bytes_in_use", "running_sequences")):
                values = re.findall(rf"^chunkserve_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
                peaks[i] = max(peaks[i], int(sum(map(float, values))))
            await asyncio.wait([running], timeout=_SAMPLE_PERIOD_S)
    return peaks[0], peaks[1]
