"""`manage.py up`: real processes, started, crashed and stopped together."""
from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.here import missing
from tests.lanes import ENGINE, wait_until
from tests.servers import ROOT, environment, free_port


@contextmanager
def up(folder: Path, **settings: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    if shutil.which("redis-server") is None:
        missing("redis-server is not installed")
    port, log = free_port(), folder / "up.log"
    settings = {"MLXCEL_TRANSPORT": ENGINE, "MLXCEL_EMBEDDING_MODEL": "fake-8", **settings}
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "manage.py", "up", "--port", str(port)], cwd=ROOT, stdout=output,
                                   stderr=subprocess.STDOUT, env=environment(folder / "var", **settings), start_new_session=True)
    try:
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def embeds(url: str) -> bool:
    try:
        return httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_start_crash_stop(tmp_path: Path) -> None:
    with up(tmp_path, MLXCEL_RERANKER_MODEL="fake-reranker", TEST_DEADLY="poison") as (process, url, log):
        wait_until(lambda: embeds(url), 40, log.read_text)
        assert {model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]} == {"fake-8", "fake-reranker"}
        assert httpx.get(f"{url}/health/ready").status_code == 200
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "poison"}, timeout=30).status_code == 500
        wait_until(lambda: embeds(url), 20, log.read_text)
        started = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 0 and time.monotonic() - started < 10
        said = log.read_text()
        assert "worker fake-8            ended with status 139; starting it again in 1 s" in said
        assert "Traceback" not in said and "Stopping ..." in said
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


@pytest.mark.parametrize(("settings", "says"), [
    ({"MLXCEL_EMBEDDING_MODEL": ""}, "no model is configured"),
    ({"MLXCEL_TRANSPORT": "", "MLXCEL_EMBEDDING_MODEL": "/no/such/model"}, "worker model ended before it served its model"),
    ({"MLXCEL_REDIS_URL": "redis://127.0.0.1:1/0"}, "Redis at 127.0.0.1:1/0 cannot be reached"),
    ({"PATH": "/nowhere"}, "redis-server is not installed"),
])
def test_what_cannot_work_is_said(tmp_path: Path, settings: dict[str, str], says: str) -> None:
    with up(tmp_path, **settings) as (process, _, log):
        assert process.wait(60) != 0
        assert says in log.read_text() and "Traceback" not in log.read_text(), log.read_text()


def test_what_would_not_start_is_told_before_anything_does(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for arguments, told in ((("--host", "0.0.0.0"), "refusing to listen on 0.0.0.0 without an API key"),
                                (("--port", str(taken.getsockname()[1])), "cannot listen on 127.0.0.1 port")):
            done = subprocess.run([sys.executable, "manage.py", "up", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30,
                                  env=environment(tmp_path / "var", MLXCEL_TRANSPORT=ENGINE, MLXCEL_EMBEDDING_MODEL="fake-8"))
            assert done.returncode == 2 and told in done.stderr and "redis" not in done.stdout, (done.stdout, done.stderr)
