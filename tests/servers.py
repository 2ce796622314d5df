"""Real servers: `manage.py serve` in a process of its own."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
FAKE = {"MLXCEL_TRANSPORT": "tests.fakes.FakeClient"}


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def stop(self) -> float:
        """Sends SIGTERM; seconds until the process is gone."""
        started = time.monotonic()
        self.process.terminate()
        self.process.wait(30)
        return time.monotonic() - started


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(var: Path, **settings: str) -> dict[str, str]:
    return {**os.environ, "MLXCEL_VAR_DIR": str(var), **settings}


def refused(var: Path, *arguments: str, **settings: str) -> str:
    """What `manage.py serve` says when it does not start."""
    done = subprocess.run([sys.executable, "manage.py", "serve", *arguments], cwd=ROOT, env=environment(var, **settings),
                          capture_output=True,
                          text=True, timeout=60)
    assert done.returncode in (1, 2), (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and "Unexpected exit" not in done.stderr, done.stderr
    return done.stderr


@contextmanager
def serving(var: Path, *arguments: str, **settings: str) -> Iterator[Server]:
    """A server that answers. Its output is in `log`."""
    port = free_port()
    log = var.with_name("serve.log")
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "manage.py", "serve", "--port", str(port), *arguments], cwd=ROOT,
                                   env=environment(var, **settings), stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait(server)
        yield server
    finally:
        if process.poll() is None:
            server.stop()


def _wait(server: Server, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()
        try:
            httpx.get(f"{server.url}/health", timeout=1)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"no answer within {seconds} s: {server.log.read_text()}")
