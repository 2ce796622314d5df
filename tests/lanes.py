"""Redis servers and model workers of the tests' own, in processes that may be killed."""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from inference.config import Settings
from inference.transports.lane import LaneClient
from tests.here import missing
from tests.servers import ROOT, free_port

ENGINE = "tests.engines.EngineClient"


class RedisServer:
    """On a free port, in memory only; `restart` forgets everything."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("redis-server") is None:
            missing("redis-server is not installed (Debian: apt install redis-server; macOS: brew install redis)")
        self.port, self.folder = free_port(), folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.redis: Any = redis.Redis.from_url(self.url, protocol=2)
        self.start()

    def start(self) -> None:
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)],
                stdout=log, stderr=log, start_new_session=True)
        wait_until(self._answers, 10)

    def _answers(self) -> bool:
        with suppress(redis.RedisError):
            return bool(self.redis.ping())
        return False

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)

    def restart(self) -> None:
        self.stop()
        self.start()

    def remains(self) -> list[str]:
        """What requests leave behind: lists, jobs and replies. The registry and Celery's own keys are no leavings."""
        return sorted(key.decode() for key in self.redis.keys("*")
                      if key.startswith((b"j:", b"r:")) or key.endswith((b":online", b":bulk")) or b"unacked" in key)


class WorkerProcess:
    """`celery -A inference.app worker` as an operator starts it."""

    def __init__(self, url: str, log: Path, *, model: str = "fake-8", **settings: str) -> None:
        self.log = log
        environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"} | {
            "MLXCEL_REDIS_URL": url, "MLXCEL_WORKER_MODEL": model, "MLXCEL_TRANSPORT": ENGINE, **settings}
        self.started = time.monotonic()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "inference.app", "worker", "-P", "threads", "-l", "INFO", "--without-gossip",
                 "--without-mingle", "--without-heartbeat", "-n", f"{model}-{time.monotonic_ns()}@%h"],
                cwd=ROOT, env={name: value for name, value in environment.items() if value}, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True)

    def wait_ready(self, client: LaneClient, model: str | None = None, seconds: float = 60) -> float:
        """Seconds from its start until it serves, kept as `took`."""
        wait_until(lambda: self._ready(client, model), seconds, lambda: self.log.read_text("utf-8", "replace"))
        self.took = time.monotonic() - self.started
        return self.took

    def _ready(self, client: LaneClient, model: str | None) -> bool:
        assert self.process.poll() is None, self.log.read_text("utf-8", "replace")
        return any(spec.state == "ready" and (model is None or spec.answers_to(model)) for spec in client.models())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> int:
        """Cleanly; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self.process.wait(30)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


def wait_until(true: Callable[[], bool], seconds: float, otherwise: Callable[[], object] = lambda: "") -> float:
    """Seconds it took."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < seconds, f"not so within {seconds} s. {otherwise()}"
        time.sleep(0.02)
    return time.monotonic() - started


def client_of(url: str, **settings: Any) -> LaneClient:
    return LaneClient(Settings(redis_url=url, transport="inference.transports.lane.LaneClient", **settings))


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    try:
        yield server
    finally:
        server.redis.close()
        if server.process.poll() is None:
            server.stop()
