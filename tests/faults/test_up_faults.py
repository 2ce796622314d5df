"""`manage.py up` killed, which can then stop nothing itself."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mlxcel_site import guardian
from tests.lanes import wait_until
from tests.test_up import embeds, up

pytestmark = pytest.mark.faults


def started(process: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    """What `up` has started and what these have, by a word of their command lines."""
    names = {"guardian.py": "guardian", "redis-server": "redis", "inference.app": "model", "bulk": "bulk", "serve": "web",
             "spawn_main": "app"}
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if name := next((name for word, name in names.items() if word in line), None):
                found[name] = child
    return found


def left(family: dict[str, psutil.Process]) -> list[str]:
    return [name for name, process in family.items() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def running(tmp_path: Path, process: subprocess.Popen[bytes], url: str, log: Path) -> dict[str, psutil.Process]:
    wait_until(lambda: embeds(url), 60, log.read_text)
    family = started(process)
    assert family.keys() == {"guardian", "redis", "model", "bulk", "web", "app"}
    return family


def test_up_killed(tmp_path: Path) -> None:
    """Everything stops, in order and cleanly, also a worker that was started again meanwhile."""
    with up(tmp_path, TMPDIR=str(tmp_path)) as (process, url, log):
        first = running(tmp_path, process, url, log)
        first["model"].kill()
        wait_until(lambda: "starting it again" in log.read_text() and not first["model"].is_running() and embeds(url), 30, log.read_text)
        family = started(process)
        assert family["model"].pid != first["model"].pid
        ends: dict[str, float] = {}
        process.kill()
        process.wait()
        killed = time.monotonic()
        while len(ends) < len(family):
            assert time.monotonic() - killed < 20, (left(family), log.read_text())
            for name in family.keys() - ends.keys() - set(left(family)):
                ends[name] = time.monotonic()
            time.sleep(0.02)
        assert ends["web"] < ends["bulk"] < ends["model"] < ends["redis"] <= ends["guardian"], ends
        assert "manage.py up was killed; what it had started is stopped" in log.read_text()
        assert not list(tmp_path.glob("mlxcel-*")), "the folder of its Redis is gone"


def test_whatever_dies_is_started_again(tmp_path: Path) -> None:
    with up(tmp_path) as (process, url, log):
        for name in ("app", "web", "redis", "bulk"):
            family = running(tmp_path, process, url, log)
            family[name].kill()
            wait_until(lambda family=family, name=name: (found := started(process)).keys() == family.keys()
                       and found[name].pid != family[name].pid and embeds(url), 60, log.read_text)
        assert process.poll() is None


def test_up_killed_with_a_worker_that_does_not_stop(tmp_path: Path) -> None:
    with up(tmp_path) as (process, url, log):
        family = running(tmp_path, process, url, log)
        family["model"].send_signal(signal.SIGSTOP)
        process.kill()
        process.wait()
        wait_until(lambda: sorted(left(family)) == ["guardian", "model", "redis"], 15, lambda: left(family))
        assert wait_until(lambda: not left(family), guardian.STOP_SECONDS + 10, lambda: left(family)) > guardian.STOP_SECONDS / 2


def test_the_guardian_killed_first(tmp_path: Path) -> None:
    """Another one takes its place and knows as much; a clean stop leaves neither."""
    with up(tmp_path) as (process, url, log):
        family = running(tmp_path, process, url, log)
        family["guardian"].kill()
        wait_until(lambda: "guardian" in started(process) and started(process)["guardian"].pid != family["guardian"].pid, 5)
        family = started(process)
        process.kill()
        process.wait()
        wait_until(lambda: not left(family), 20, lambda: left(family))
    with up(tmp_path) as (process, url, log):
        family = running(tmp_path, process, url, log)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0 and left(family) == []
        assert "was killed" not in log.read_text()


def test_a_number_that_was_given_again_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        since = guardian.started(other.pid)
        assert since and not guardian.stop(other.pid, since + "1") and not guardian.stop(other.pid, "") and other.poll() is None
        other.send_signal(signal.SIGKILL)
        wait_until(lambda: not guardian.started(other.pid), 5)
