"""Starts the Serve application and stays with it: what `chunkserve serve` and `make serve` do."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from .config import ConfigError, ServeConfig
from .replica_options import replica_options
from .small_model import NAME as SMALL_MODEL
from .small_model import ensure_small_model

IMPORT_PATH = "chunkserve.deploy.app:build"

# Ray on loopback, with no reports to anyone, and no token left by an earlier start in the way.
RAY_ENVIRONMENT: Mapping[str, str] = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Ray's workers are nice (15) by default, as batch jobs are: any other program would take a server's cores.
    "RAY_worker_niceness": "0",
    # The controller looks after its replicas twice a second; ten times, as by default, takes 5 % of a core.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_STOP_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_DEPLOY_FAILED = re.compile(r"Deploying app '\w+' failed|DEPLOY_FAILED")


def run_blocking(
    config_path: Path,
    overrides: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
    *,
    until_stdin_closes: bool = False,
) -> int:
    """`serve run` on a config file, until it ends or is interrupted.

    Args:
        config_path: as deploy/config.yaml.
        overrides: knobs of ServeConfig, and `host` and `port`, that differ from the file.
        say: gets a line per long step; the last one says where the server listens.
        until_stdin_closes: the end of standard input counts as an interrupt.
    Returns:
        The exit status of `serve run`; 0 after an interrupt, 1 when the application cannot be deployed.
    Raises:
        ConfigError: the file or a knob is wrong; nothing was started.
    """
    document = load_document(config_path, overrides or {})
    config = ServeConfig.from_args(application_args(document))
    if config.model == SMALL_MODEL:
        ensure_small_model(say)
    with tempfile.TemporaryDirectory(prefix="chunkserve-") as folder:
        path = config_path
        if overrides:
            path = Path(folder) / "config.yaml"
            path.write_text(yaml.safe_dump(document, sort_keys=False))
        say("Checking the model...")
        _check_model(config)
        _refuse_taken_port(base_url(document))
        say(f"Starting Ray and {config.num_replicas} replica(s) of {config.model_name} (about half a minute)...")
        serve = Path(sys.executable).with_name("serve")
        with _interrupts_heeded():
            process = subprocess.Popen(
                [str(serve), "run", str(path)],
                env={**os.environ, **RAY_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        output = _Output(process)
        try:
            with _terminations_as_interrupts():
                if until_stdin_closes:
                    threading.Thread(target=_end_after_stdin, daemon=True).start()
                if _wait_until_healthy(process, output, base_url(document)):
                    say(_welcome(base_url(document), config))
                    return process.wait()
                return process.poll() or 1
        except KeyboardInterrupt:
            return 0
        finally:
            _end(process, config.drain_timeout_s)


def _refuse_taken_port(url: str) -> None:
    """Serve would share the port with the other server (SO_REUSEPORT), and each would get some of the requests."""
    address = urlsplit(url)
    try:
        socket.create_connection((str(address.hostname), address.port or 0), timeout=5).close()
    except OSError:
        return
    raise ConfigError(
        f"port: {address.port} on {address.hostname} has a server already; stop it, or set another --port"
    )


def _check_model(config: ServeConfig) -> None:
    """What can be known of the model without loading it. Imports torch, so not before it is needed."""
    from chunkserve.kernels.dispatch import BackendError
    from chunkserve.replica.build import check_options
    from chunkserve.replica.model_config import ModelError
    from chunkserve.replica.options import BuildError

    try:
        check_options(replica_options(config))
    except (BackendError, BuildError, ModelError) as error:
        raise ConfigError(str(error)) from error


def load_document(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A Serve config file as a mapping, with overrides put in.

    Raises:
        ConfigError: no such file, no YAML, or not our application.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    args = application_args(document)
    for knob, value in overrides.items():
        if knob in ("host", "port"):
            document.setdefault("http_options", {})[knob] = value
        else:
            args[knob] = value
    return document


def assigned_knobs(assignments: Iterable[str]) -> dict[str, Any]:
    """Overrides out of KNOB=VALUE texts, with values in YAML.

    Raises:
        ConfigError: one is no assignment.
    """
    knobs = {}
    for assignment in assignments:
        knob, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: expected KNOB=VALUE")
        knobs[knob.strip()] = yaml.safe_load(value)
    return knobs


def application_args(document: Any) -> dict[str, Any]:
    """The knobs in a Serve config file.

    Raises:
        ConfigError: it has no application with our import_path.
    """
    applications = document.get("applications", []) if isinstance(document, dict) else []
    for application in applications:
        if isinstance(application, dict) and application.get("import_path") == IMPORT_PATH:
            if not isinstance(application.get("args"), dict):
                application["args"] = {}
            args: dict[str, Any] = application["args"]
            return args
    raise ConfigError(f"applications: expected one with import_path {IMPORT_PATH}, got {len(applications)} others")


def base_url(document: Mapping[str, Any]) -> str:
    """Where a client on this machine reaches the server."""
    options = document.get("http_options") or {}
    host = options.get("host", "127.0.0.1")
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{options.get('port', 8000)}"


class _Output:
    """Passes on what `serve run` prints, and notices when it says that the application cannot be deployed.

    `serve run` itself would go on for ever, serving nothing.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.failed = False
        threading.Thread(target=self._pass_on, args=(process,), daemon=True).start()

    def _pass_on(self, process: "subprocess.Popen[str]") -> None:
        for line in process.stdout or ():
            sys.stderr.write(line)
            self.failed = self.failed or bool(_DEPLOY_FAILED.search(line))


def _wait_until_healthy(process: "subprocess.Popen[str]", output: _Output, url: str) -> bool:
    while process.poll() is None and not output.failed:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    return False


def _welcome(url: str, config: ServeConfig) -> str:
    return (
        f"\nchunkserve listens on {url} (Ctrl-C stops it). Try:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d "
        f"""'{{"model": "{config.model_name}", "messages": [{{"role": "user", "content": """
        """"What is the capital of France?"}], "max_tokens": 32, "temperature": 0}'\n"""
    )


def _end_with_parent() -> None:
    """Of a child, before it runs: SIGINT, on which `serve run` drains, when this process ends and cannot tell it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


@contextmanager
def _interrupts_heeded() -> Iterator[None]:
    """What is started here heeds SIGINT, on which `serve run` drains. Of a script's background job it would not."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _terminations_as_interrupts:
    """SIGTERM ends the same way as Ctrl-C."""

    def __enter__(self) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        self._before = signal.signal(signal.SIGTERM, interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)


def _end_after_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _end(process: "subprocess.Popen[str]", drain_timeout_s: float) -> None:
    """Let `serve run` drain and take its Ray processes with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(drain_timeout_s + _STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
