"""A whole installation of real processes for measurements: Redis, model workers, web, bulk workers, and a database of its own."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from inference.config import LANE
from tests.lanes import RedisServer, WorkerProcess, client_of, redis_server, wait_until
from tests.servers import ROOT, Server, serving

UNWANTED = ("DATABASE_URL", "MLXCEL_")     # what this shell is set up for is not what is measured


class Installation:
    """`model`: a directory. Everything ends with the `with` block, the last started first."""

    def __init__(self, folder: Path, model: str, database_url: str = "") -> None:
        self.folder, self.model, self.database_url = folder, model, database_url
        self.var = folder / "var"
        self._running = ExitStack()
        self.processes: dict[str, psutil.Process] = {}

    def __enter__(self) -> Installation:
        self.redis: RedisServer = self._running.enter_context(redis_server(self.folder))
        self.known("redis", self.redis.process.pid)
        self.lane = client_of(self.redis.url)
        self._running.callback(self.lane.close)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(UNWANTED)} | {
            "DJANGO_SETTINGS_MODULE": "mlxcel_site.settings", "MLXCEL_VAR_DIR": str(self.var), "MLXCEL_REDIS_URL": self.redis.url,
            "MLXCEL_EMBEDDING_MODEL": self.model, "MLXCEL_LOG_LEVEL": "WARNING", "PYTHONUNBUFFERED": "1",
            **({"DATABASE_URL": self.database_url} if self.database_url else {})}
        subprocess.run([sys.executable, "manage.py", "migrate", "-v0"], cwd=ROOT, env=self.environment, check=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def model_worker(self, name: str = "model worker", **settings: str) -> WorkerProcess:
        """One that serves by the time it is returned. `settings` are MLXCEL_ ones, in the environment."""
        worker = WorkerProcess(self.redis.url, self.folder / f"{name}.log", model=self.model,
                               **{"MLXCEL_TRANSPORT": "", "MLXCEL_BACKEND": "host", **settings})
        self._running.callback(worker.stop)
        wait_until(lambda: self._serves(worker), 60, lambda: worker.log.read_text("utf-8", "replace"))
        self.known(name, worker.process.pid)
        return worker

    def _serves(self, worker: WorkerProcess) -> bool:
        """It, not another one of its model."""
        said = worker.log.read_text("utf-8", "replace")
        assert worker.process.poll() is None, said
        return " is ready after " in said

    def web(self) -> Server:
        server = self._running.enter_context(serving(self.var, **self.environment))
        self.known("web", server.process.pid)
        return server

    def bulk_worker(self, name: str = "bulk worker") -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "mlxcel_site", "worker", "-Q", "bulk", "-P", "threads", "-c", "2", "-l", "INFO",
                 "--without-gossip", "--without-mingle", "-n", f"{time.monotonic_ns()}@%h"],
                cwd=ROOT, env={**self.environment, "MLXCEL_TRANSPORT": LANE}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self._running.callback(_end, process)
        self.known(name, process.pid)
        return process

    def embed(self, collection: str, texts: Iterable[str], *arguments: str) -> subprocess.Popen[bytes]:
        """`embed_corpus --workers celery`, running."""
        source = self.folder / f"{collection}.jsonl"
        with source.open("w") as lines:
            lines.writelines(json.dumps({"_id": str(i), "text": text}) + "\n" for i, text in enumerate(texts))
        with (self.folder / "embed_corpus.log").open("ab") as log:
            command = subprocess.Popen(
                [sys.executable, "manage.py", "embed_corpus", collection, str(source), "--workers", "celery", *arguments],
                cwd=ROOT, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self._running.callback(_end, command)
        return command

    def counters(self) -> dict[str, float]:
        """Counters of all model workers together, as their heartbeats last told them."""
        found: dict[str, float] = {}
        for model in self.lane.health()["models"].values():
            for counted in model["instances"].values():
                for name, value in counted.items():
                    if isinstance(value, int | float):
                        found[name] = found.get(name, 0) + value
        return found

    def cpu(self, *roles: str) -> float:
        """CPU seconds of these processes and what they started."""
        return sum(sum(process.cpu_times()[:2]) for role in roles for process in _family(self.processes[role]))

    def rss(self, role: str) -> int:
        """Bytes of a role's processes together, of PostgreSQL's without what they share."""
        total = 0
        for process in _family(self.processes[role]):
            with suppress(psutil.NoSuchProcess):                 # a connection's process may end meanwhile
                memory = process.memory_info()
                total += memory.rss - (memory.shared if role == "postgresql" else 0)
        return total

    def ended(self) -> list[str]:
        """Roles whose process is gone."""
        return [role for role, process in self.processes.items() if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE]

    def logs(self) -> str:
        """The end of what every process said."""
        return "\n".join(f"== {log.name}\n{log.read_text('utf-8', 'replace')[-2000:]}" for log in sorted(self.folder.glob("*.log")))

    def known(self, role: str, pid: int) -> None:
        self.processes[role] = psutil.Process(pid)


def _family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

