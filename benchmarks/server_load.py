"""What the benchmarks of whole servers share: a right answer first, words of a load's own, what a server holds."""

import asyncio
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from chunkserve.deploy.bench import BenchResult, BenchSettings, run_bench
from chunkserve.deploy.client import Client
from chunkserve.deploy.local_server import LocalServer

OURS = "chunkserve"
# In the names of processes.
_TITLES = {
    "model": "ServeReplica:chunkserve:replica",
    "ingress": "ServeReplica:chunkserve:ingress",
    "proxy": "ProxyActor",
}
# Above what a load shares: of a chat's template, or a chunk that a peer's blocks round to.
_CACHED_MARGIN = 0.02
# Each look costs the server a request and a call to its replicas: 5 a second took a quarter of its rate.
_SAMPLE_PERIOD_S = 1.0


def check(label: str, url: str) -> None:
    """The server answers, and ours rightly, before anything is timed.

    Other engines round otherwise, and the first token of this answer is nearly a tie.
    """
    with Client(url) as client:
        text = client.chat("What is the capital of France?", max_tokens=16, temperature=0).text
    if not text or (label == OURS and text != "The capital of France is Paris."):
        raise SystemExit(f"{label} says that the capital of France is {text!r}; nothing is timed")


def seed_of(point: tuple[Any, ...]) -> int:
    """Of the words of one point of a benchmark: points with the same words would find each other's prompts cached."""
    return zlib.crc32(repr(point).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load that a server answered without an error.

    kv_bytes_peak, batch_peak: the most K and V bytes of running sequences, and the most of these; None for peers.
    cpu_s: CPU time of the server's processes by what they are: model, ingress, Serve's proxy, other; None for peers.
    """

    result: BenchResult
    kv_bytes_peak: int | None
    batch_peak: int | None
    cpu_s: Mapping[str, float] | None

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
            "cpu_outside_share": self._cpu_share("ingress", "proxy", "other"),
            "cpu_ingress_share": self._cpu_share("ingress"),
            "cpu_proxy_share": self._cpu_share("proxy"),
        }

    def _cpu_share(self, *kinds: str) -> float | None:
        if self.cpu_s is None:
            return None
        return sum(self.cpu_s[kind] for kind in kinds) / sum(self.cpu_s.values())


async def load(settings: BenchSettings, *, ours: LocalServer | None = None) -> Load:
    """Load a server; of our own, look at what it holds and takes meanwhile.

    Raises:
        SystemExit: requests failed, or found more of their prompts in the cache than they share: an earlier load had
            the same words, and the figures would be too good.
    """
    running = asyncio.create_task(run_bench(settings))
    if ours is None:
        kv_bytes = batch = cpu_s = None
    else:
        before_s = _cpu_seconds(ours)
        kv_bytes, batch = await _peaks(settings.url, running)
        cpu_s = {kind: after - before_s[kind] for kind, after in _cpu_seconds(ours).items()}
    result = await running
    if result.errors:
        raise SystemExit(f"{settings.label}: requests failed: {dict(result.errors)}")
    shared = settings.shared_tokens / (settings.shared_tokens + settings.own_tokens) if settings.share else 0.0
    if (cached := result.row()["cached_share"]) > shared + _CACHED_MARGIN:
        raise SystemExit(
            f"{settings.label}: {cached:.0%} of the prompts was cached, {shared:.0%} is shared: {settings}"
        )
    return Load(result=result, kv_bytes_peak=kv_bytes, batch_peak=batch, cpu_s=cpu_s)


def _cpu_seconds(server: LocalServer) -> dict[str, float]:
    """CPU time so far of the server's processes, by what they are."""
    out = dict.fromkeys((*_TITLES, "other"), 0.0)
    for process in server.processes():
        try:
            times, title = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:  # it has ended
            continue
        out[next((kind for kind, words in _TITLES.items() if words in title), "other")] += times.user + times.system
    return out


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
