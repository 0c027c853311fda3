"""What stops a start before Ray runs, and what is noticed while it does."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from chunkserve.deploy.config import DEFAULT_FILE, ConfigError
from chunkserve.deploy.launcher import _interrupts_heeded, _Output, base_url, load_document, run_blocking
from chunkserve.deploy.local_server import loopback_port


def test_overrides_reach_the_knobs_and_the_http_options() -> None:
    document = load_document(DEFAULT_FILE, {"port": 8123, "dtype": "float32"})
    assert base_url(document) == "http://127.0.0.1:8123"
    assert document["applications"][0]["args"]["dtype"] == "float32"


def test_a_server_on_all_interfaces_is_reached_by_loopback() -> None:
    assert base_url({"http_options": {"host": "0.0.0.0", "port": 9}}) == "http://127.0.0.1:9"
    assert base_url({}) == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "cannot be read as YAML"),
        ("applications: []", "expected one with import_path"),
        ("applications: [{import_path: other:app}]", "got 1 others"),
        ("nothing", "expected one with import_path"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        run_blocking(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        run_blocking(tmp_path / "missing.yaml")


@pytest.mark.model
@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"max_sequence_tokens": 9000}, "max_sequence_tokens is 9000; the model's context has 8192"),
        ({"kv_pool_bytes": 4096}, "kv_pool_bytes is 4096"),
        ({"kv_pool_chunks": 5}, "kv_pool_chunks is 5"),
        ({"device": "cuda"}, "device is cuda"),
        ({"attention_backend": "triton"}, "backend triton cannot serve"),
        ({"model": "no/such/folder"}, "expected smollm2-135m-instruct or a folder"),
    ],
)
def test_sizes_that_do_not_fit_the_model_stop_the_start(
    small_model: Path, knobs: dict[str, object], words: str
) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match=words):
        run_blocking(DEFAULT_FILE, knobs, said.append)
    assert not any("Starting Ray" in line for line in said)


@pytest.mark.model
def test_a_port_that_has_a_server_stops_the_start(small_model: Path) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: {port} on 127.0.0.1 has a server already"):
            run_blocking(DEFAULT_FILE, {"port": port}, said.append)
    assert not any("Starting Ray" in line for line in said)


def test_a_loopback_port_is_held_until_its_block_ends() -> None:
    with loopback_port() as port:
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port), reuse_port=True):
            pass
    socket.create_server(("127.0.0.1", port)).close()


def test_what_a_background_job_starts_heeds_interrupts() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _interrupts_heeded():
            said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == "True\n"


def test_a_failed_deployment_is_noticed_and_output_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["all is well", "(ServeController) ERROR -- Deploying app 'chunkserve' failed with exception:", "why"]
    code = f"import yaml; [print(line) for line in yaml.safe_load({yaml.safe_dump(lines)!r})]"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    output = _Output(process)
    process.wait()
    deadline = time.monotonic() + 10
    while not output.failed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert output.failed
    time.sleep(0.1)
    assert capfd.readouterr().err.splitlines() == lines
