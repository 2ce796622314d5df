"""Stops what `manage.py up` started when that was killed and can no longer do it itself. A program of its own, run as

    python -I -S guardian.py OUTPUT...

whose standard input is a pipe that `up` holds open; OUTPUT are the descriptors of the pipes that the processes write to. On the first every
process tells its number as it starts (`announced`):

    role <place> <pid>      a later one of the same place takes its place
    folder <path>           to be removed at last

At the end of the pipe whatever still runs is stopped as `up` would: the last place first, one after another, with SIGKILL for what does
not go. Where `up` stopped everything itself nothing is left to do. Process numbers come again, so a process is known by its number and
the moment it started.
"""
from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

STOP_SECONDS = 20.0
DEATH_SECONDS = 5.0        # for a process that was killed to be gone


def announced(place: int, command: tuple[str, ...]) -> tuple[str, ...]:
    """`command`, in a shell that first tells its own number, which becomes the command's, on the pipe that is its standard input: so no
    process is there that the guardian does not know, whenever `up` is killed."""
    return "/bin/sh", "-c", 'echo "role $0 $$" >&0 && exec "$@" </dev/null', str(place), *command


def started(pid: int) -> str:
    """When the process of this number started, as the system says it; empty where there is none, or only its remains."""
    if sys.platform == "linux":
        try:
            state, *_, since = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:20]
        except OSError:
            return ""
        return "" if state in "ZX" else since
    listed = subprocess.run(["/bin/ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    state, _, since = listed.partition(" ")
    return "" if state.startswith("Z") else since.strip()


def stop(pid: int, since: str) -> bool:
    """Whether it was there to be stopped."""
    if not since or started(pid) != since:
        return False
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, DEATH_SECONDS)):
        until = time.monotonic() + seconds
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        while started(pid) == since and time.monotonic() < until:
            time.sleep(0.1)
        if started(pid) != since:
            break
    return True


def pass_on(outputs: list[int]) -> None:
    """Their last words, which must not block or fail."""
    while outputs:
        for output in select.select(outputs, [], [])[0]:
            if said := os.read(output, 1 << 16):
                with suppress(OSError):
                    os.write(sys.stderr.fileno(), said)
            else:
                outputs.remove(output)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)        # a shutdown that reaches all: it ends with `up`, in any case
    roles: dict[int, tuple[int, str]] = {}
    folder = ""
    for line in sys.stdin:
        what, _, rest = line.rstrip("\n").partition(" ")
        if what == "role":
            place, pid = map(int, rest.split())
            roles[place] = pid, started(pid)
        else:
            folder = rest
    threading.Thread(target=pass_on, args=(list(map(int, sys.argv[1:])),), daemon=True).start()
    stopped = [stop(*roles[place]) for place in sorted(roles, reverse=True)]
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    if any(stopped):
        with suppress(OSError):
            print("manage.py up was killed; what it had started is stopped", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
