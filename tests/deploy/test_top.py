"""`chunkserve top` over a server whose replica says what it is told to."""

import copy
import json
from dataclasses import asdict

import pytest
from rich.console import Console
from typer.testing import CliRunner

from chunkserve.deploy.cli import app
from chunkserve.deploy.top import Status, TopError, fetch, frame, watch

from .conftest import LOAD


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["top", *arguments])


def status_of(**changes: object) -> Status:
    load = json.loads(json.dumps(asdict(LOAD))) | changes
    return {"model": "toy", "routing_policy": "prefix", "replicas": {"replica-0": load}}


def row_of(shown: object) -> list[str]:
    """Cells of the first replica."""
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(shown)
    (line,) = [line for line in console.export_text().splitlines() if "replica-0 " in line and "%" in line]
    return [cell.strip() for cell in line.strip("│ ").split("│")]


def test_once_prints_one_frame(live_url) -> None:
    result = run("--once", "--url", live_url + "/")
    assert result.exit_code == 0, result.output
    assert "toy, 1 replica(s), policy prefix" in result.stdout
    for words in ("1.25", "7%", "11%", "75.0%", "c0ffeec0ffee", "640"):
        assert words in result.stdout


def test_rates_are_those_since_the_last_frame() -> None:
    before, now = status_of(), status_of(generated_tokens=177, cached_prompt_tokens=1530, computed_prompt_tokens=570)
    assert row_of(frame(now)) == ["replica-0", "2", "1", "1.25", "7%", "11%", "72.9%", "-"]
    assert row_of(frame(now, before, 2.0)) == ["replica-0", "2", "1", "1.25", "7%", "11%", "30.0%", "50.0"]
    assert row_of(frame(now, now, 1.0))[-2:] == ["72.9%", "0.0"], "nothing new: the rate since the start"


def test_a_replica_that_has_done_nothing_and_one_that_is_new() -> None:
    idle = status_of(cached_prompt_tokens=0, computed_prompt_tokens=0, backlog_s=None, hot_prefixes=[])
    assert row_of(frame(idle))[3:] == ["-", "7%", "11%", "-", "-"]
    nobody = copy.deepcopy(idle) | {"replicas": {}}
    assert row_of(frame(idle, nobody, 1.0))[-1] == "-"


def test_it_goes_on_until_the_server_is_gone(live_url, replica) -> None:
    periods: list[float] = []

    def sleep(seconds: float) -> None:
        periods.append(seconds)
        if len(periods) == 3:
            raise KeyboardInterrupt

    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with pytest.raises(KeyboardInterrupt):
        watch(live_url, console, 0.5, sleep)
    assert periods == [0.5] * 3
    assert "replica-0" in console.export_text()


def test_who_does_not_answer_is_named(unused_tcp_port, live_url) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    result = run("--once", "--url", url)
    assert result.exit_code == 2
    assert "ConnectError" in result.stderr
    with pytest.raises(TopError, match="/v1/models/status: expected what a chunkserve server says, got status 404"):
        fetch(f"{live_url}/v1/models")
