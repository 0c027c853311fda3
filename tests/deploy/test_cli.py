import json

import pytest
from typer.testing import CliRunner

from chunkserve.deploy import cli
from chunkserve.deploy.config import DEFAULT_FILE
from chunkserve.kernels import _cpu

QUICK = ["--num-requests", "4", "--shared-tokens", "60", "--own-tokens", "12", "--new-tokens", "3"]


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, arguments)


def test_bench_prints_a_table_and_writes_a_row(live_url, tmp_path) -> None:
    file = tmp_path / "row.json"
    result = run("bench", "--url", live_url, *QUICK, "--json", str(file), "--label", "ours", "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert "time to first token" in result.stdout
    (row,) = json.loads(file.read_text())
    assert (row["system"], row["model"], row["num_requests"], row["errors"]) == ("ours", "toy", 4, 0)
    assert not any(isinstance(value, list | dict) for value in row.values())
    assert "secret" not in file.read_text()


def test_bench_says_why_it_cannot_start(unused_tcp_port) -> None:
    result = run("bench", "--url", f"http://127.0.0.1:{unused_tcp_port}")
    assert result.exit_code == 2
    assert "ConnectionRefusedError" in result.stderr


def test_bench_fails_when_requests_fail(live_url, replica) -> None:
    replica.words = 1
    replica.fail_with, replica.fail_at = RuntimeError("ours"), 0
    result = run("bench", "--url", live_url, *QUICK, "--endpoint", "token-ids", "--warmup", "0")
    assert result.exit_code == 1
    assert "4 x status" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--num-replicas", "0"], "num_replicas: expected greater than or equal to 1, got 0"),
        (["--set", "chunk_size=64"], "chunk_size: no such knob; did you mean chunk_size_tokens?"),
        (["--set", "chunk_size_tokens"], "expected KNOB=VALUE"),
        (["no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_serve_refuses_a_wrong_knob_before_it_starts_anything(arguments, says) -> None:
    result = run("serve", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_serve_passes_options_on(monkeypatch) -> None:
    calls = []

    def run_blocking(*arguments, until_stdin_closes) -> int:
        assert not until_stdin_closes
        calls.append(arguments)
        return 3

    monkeypatch.setattr(cli, "run_blocking", run_blocking)
    options = ["--port", "9000", "--model", "folder", "--set", "retain_prefixes=false", "--set", "kv_pool_bytes=1GiB"]
    assert run("serve", *options).exit_code == 3
    ((path, overrides, _),) = calls
    assert path == DEFAULT_FILE
    assert overrides == {"port": 9000, "model": "folder", "retain_prefixes": False, "kv_pool_bytes": "1GiB"}


def test_doctor() -> None:
    report = json.loads(run("doctor", "--json").stdout)
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["cpu_kernels"].split()[0] in _cpu.supported_isas()
    assert report["versions"]["ray"]
    reference = [row for row in report["attention_backends"] if row["backend"] == "reference"]
    assert reference
    assert all(row["reason"] is None for row in reference)
    assert all(row["reason"] is None or len(row["reason"]) > 5 for row in report["attention_backends"])
    table = run("doctor").stdout
    assert "reference" in table
    assert "smollm2-135m-instruct" in table
