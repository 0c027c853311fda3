"""`chunkserve top`: what each replica does now, as a table that keeps up."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_NAME_CHARS = 12
_NUM_PREFIXES = 8

Status = Mapping[str, Any]


class TopError(Exception):
    """The server cannot be asked; the text says why."""


def fetch(url: str, timeout_s: float = 10.0) -> Status:
    """What a server's /status says.

    Raises:
        TopError: no answer, or another server's.
    """
    try:
        answer = httpx.get(f"{url.rstrip('/')}/status", timeout=timeout_s)
        status = answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise TopError(f"{url}: {type(error).__name__}: {error}") from error
    if not isinstance(status, dict) or "replicas" not in status:
        raise TopError(f"{url}/status: expected what a chunkserve server says, got status {answer.status_code}")
    return status


def frame(status: Status, before: Status | None = None, seconds: float = 0.0) -> RenderableType:
    """One picture of a server.

    Args:
        before: an earlier status, from which rates are told; totals since the start without one.
        seconds: between the two.
    """
    replicas: Mapping[str, Status] = status["replicas"]
    table = Table("replica", "running", "waiting", "backlog s", "KV in use", "KV kept", "hit rate", "tokens/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, load in replicas.items():
        last = (before or {}).get("replicas", {}).get(name)
        table.add_row(
            name,
            f"{load['running_sequences']}",
            f"{load['waiting_sequences']}",
            "-" if load["backlog_s"] is None else f"{load['backlog_s']:.2f}",
            f"{load['chunks_in_use'] / load['chunks_total']:.0%}",
            f"{load['chunks_retained'] / load['chunks_total']:.0%}",
            _hit_rate(load, last),
            "-" if last is None else f"{(load['generated_tokens'] - last['generated_tokens']) / seconds:.1f}",
        )
    title = Text(f"{status['model']}, {len(replicas)} replica(s), policy {status['routing_policy']}")
    return Group(title, table, _prefixes(replicas))


def watch(url: str, console: Console, period_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show frame after frame until interrupted.

    Raises:
        TopError: the server cannot be asked.
    """
    before, before_s = fetch(url), time.monotonic()
    with Live(frame(before), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            sleep(period_s)
            status, now_s = fetch(url), time.monotonic()
            live.update(frame(status, before, now_s - before_s), refresh=True)
            before, before_s = status, now_s


def _hit_rate(load: Status, last: Status | None) -> str:
    """Of the prompts since the last frame, or since the start where there were none."""
    cached, computed = load["cached_prompt_tokens"], load["computed_prompt_tokens"]
    if last is not None and cached + computed > last["cached_prompt_tokens"] + last["computed_prompt_tokens"]:
        cached, computed = cached - last["cached_prompt_tokens"], computed - last["computed_prompt_tokens"]
    return f"{cached / (cached + computed):.1%}" if cached + computed else "-"


def _prefixes(replicas: Mapping[str, Status]) -> Table:
    table = Table("hottest prefixes", "tokens", "sharers", "replica")
    found = [(name, hot) for name, load in replicas.items() for hot in load["hot_prefixes"]]
    found.sort(key=lambda one: (1 - one[1]["sharers"]) * one[1]["tokens"])
    for name, hot in found[:_NUM_PREFIXES]:
        table.add_row(hot["name"][:_NAME_CHARS] or "-", f"{hot['tokens']}", f"{hot['sharers']}", name)
    if not found:
        table.add_row("none is shared now", "", "", "")
    return table
