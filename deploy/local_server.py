"""A server of one's own for as long as a block runs: tests and benchmarks use it, and notebooks may."""

import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from .config import DEFAULT_FILE

_STOP_TIMEOUT_S = 60.0


class LocalServerError(RuntimeError):
    """The server did not start, or left processes behind; the message has its last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """A running `chunkserve serve`.

    lines: what it has printed so far.
    """

    url: str
    process: "subprocess.Popen[str]"
    lines: list[str]

    def processes(self) -> list[psutil.Process]:
        """The server's own process and all below it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


@contextmanager
def local_server(
    knobs: Mapping[str, Any] | None = None, *, config: Path = DEFAULT_FILE, start_timeout_s: float = 300.0
) -> Iterator[LocalServer]:
    """Start `chunkserve serve` on a free loopback port with a Ray session of its own; all of it ends with the block,
    and when this process dies.

    Args:
        knobs: of ServeConfig, that differ from the config file.
    Raises:
        LocalServerError: no answer within start_timeout_s, or a process that does not end.
    """
    with loopback_port() as port, _server_on(port, knobs or {}, config, start_timeout_s) as server:
        yield server


@contextmanager
def loopback_port() -> Iterator[int]:
    """A free port that no other program is given while the block runs; one that sets SO_REUSEPORT, as Serve does, can
    listen on it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def _server_on(port: int, knobs: Mapping[str, Any], config: Path, start_timeout_s: float) -> Iterator[LocalServer]:
    program = str(Path(sys.executable).with_name("chunkserve"))
    command = [program, "serve", str(config), "--port", str(port), "--until-stdin-closes"]
    for knob, value in knobs.items():
        command += ["--set", f"{knob}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}"]
    lines: list[str] = []
    ready: queue.SimpleQueue[bool] = queue.SimpleQueue()
    # Names of Unix sockets are short, and Ray's lie deep in its folder.
    with tempfile.TemporaryDirectory(prefix="cs", dir="/tmp", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            command,
            env={**os.environ, "RAY_TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

        def read() -> None:
            for line in process.stdout or ():
                lines.append(line)
                if "listens on" in line:
                    ready.put(True)
            ready.put(False)

        threading.Thread(target=read, daemon=True).start()
        server = LocalServer(url=f"http://127.0.0.1:{port}", process=process, lines=lines)
        try:
            try:
                started = ready.get(timeout=start_timeout_s)
            except queue.Empty:
                started = False
            if not started:
                raise LocalServerError(f"no server within {start_timeout_s:g} s:\n" + "".join(lines[-30:]))
            yield server
        finally:
            orphans = _stop(server)
    if orphans:
        raise LocalServerError(f"processes outlived the server and were killed: {orphans}")


def _stop(server: LocalServer) -> list[psutil.Process]:
    """End the server; processes that outlive it are killed and returned."""
    family = server.processes() if server.process.poll() is None else []
    server.process.terminate()
    try:
        server.process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    for orphan in alive:
        orphan.kill()
    return alive
