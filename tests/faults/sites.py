"""A whole installation for bulk jobs, of real processes: a database in a PostgreSQL, a Redis, bulk workers, commands."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from tests.fakes import FakeClient
from tests.lanes import RedisServer, wait_until
from tests.postgres import Postgres
from tests.servers import ROOT, free_port

LEASE_SECONDS = 3


class Site:
    def __init__(self, folder: Path, postgres: Postgres, transport: str = "tests.faults.clients.SlowClient") -> None:
        self.folder, self.postgres = folder, postgres
        self.redis = RedisServer(folder)
        self.url = postgres.database(f"faults_{free_port()}")
        self.environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "mlxcel_site.settings", "MLXCEL_VAR_DIR": str(folder / "var"),
                            "DATABASE_URL": self.url, "MLXCEL_REDIS_URL": self.redis.url, "MLXCEL_TRANSPORT": transport,
                            "MLXCEL_BULK_LEASE_SECS": str(LEASE_SECONDS), "PYTHONUNBUFFERED": "1"}
        self.processes: list[subprocess.Popen[str]] = []
        migrate = self.manage("migrate", "-v0")
        assert migrate.wait(120) == 0, migrate.stderr and migrate.stderr.read()

    def manage(self, *args: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "manage.py", *args], cwd=ROOT, env={**self.environment, **environment}, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        self.processes.append(process)
        return process

    def worker(self) -> subprocess.Popen[str]:
        """`celery -A mlxcel_site worker -Q bulk` as an operator starts it."""
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "mlxcel_site", "worker", "-Q", "bulk", "-P", "threads", "-c", "2", "-l", "INFO",
                 "--without-gossip", "--without-mingle", "-n", f"{time.monotonic_ns()}@%h"],
                cwd=ROOT, env=self.environment, text=True, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.processes.append(process)
        return process

    @property
    def log(self) -> Path:
        return self.folder / "workers.log"

    def source(self, count: int, **texts: str) -> Path:
        path = self.folder / "corpus.jsonl"
        rows = {f"d{i}": f"text number {i}" for i in range(count)} | texts
        path.write_text("".join(json.dumps({"_id": id, "text": text}) + "\n" for id, text in rows.items()))
        return path

    def embed(self, source: Path, *args: str) -> subprocess.Popen[str]:
        return self.manage("embed_corpus", "c", str(source), "--workers", "celery", "--json", *args)

    def ended(self, command: subprocess.Popen[str], seconds: float = 150) -> dict[str, Any]:
        """The summary of a command that ends by itself."""
        out, err = command.communicate(timeout=seconds)
        assert out.startswith("{") and "Traceback" not in err, f"{out}\n{err}\n{self.log.read_text()[-5000:]}"
        return dict(json.loads(out)) | {"stderr": err}

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(sql).fetchall()  # type: ignore[arg-type]

    def one(self, sql: str) -> int:
        return int(self.query(sql)[0][0])

    def stored(self) -> int:
        return self.one("SELECT count(*) FROM embeddings_document")

    def working(self, documents: int = 100) -> None:
        """Waits until so many are stored and a chunk is being worked on."""
        wait_until(lambda: self.stored() >= documents and self.one(
            "SELECT count(*) FROM embeddings_chunk WHERE state = 'running'") > 0, 60, lambda: self.log.read_text()[-5000:])

    def right(self, count: int) -> None:
        """Every document once, with one vector, which is that of its own text."""
        rows = self.query("SELECT d.external_id, d.text, p.vector FROM embeddings_document d "
                          "LEFT JOIN embeddings_passage p ON p.document_id = d.id ORDER BY d.id")
        assert len(rows) == len({row[0] for row in rows}) == count
        fake = FakeClient()
        for id, text, vector in rows:
            assert vector is not None and np.array_equal(np.frombuffer(vector, "<f4"), fake._vector("passage: " + text)), id
        assert self.one("SELECT count(*) FROM embeddings_chunk WHERE state <> 'done' OR length(documents) > 0") == 0

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.communicate()
        self.redis.stop()
