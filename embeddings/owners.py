"""Which owners of chunks have died on this machine. Each holds a lock on a file for as long as it has its lease, and the system takes the
lock away when its process ends, however that comes about.

This only saves time. An owner on another machine, or one whose file cannot be made, is taken for alive until its lease runs out.
"""
from __future__ import annotations

import fcntl
import os
import socket
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from django.conf import settings

Lock = int      # a file descriptor


def hold(owner: uuid.UUID) -> Lock | None:
    """None: dead or alive, nobody will see it here."""
    path = _path(owner)
    new = path.with_name(f".{path.name}")      # under its own name only once it is locked
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(path)
    except OSError:
        os.close(lock)
        new.unlink(missing_ok=True)
        return None
    return lock


def release(owner: uuid.UUID, lock: Lock | None) -> None:
    if lock is not None:
        forget([owner])
        os.close(lock)


def dead() -> list[uuid.UUID]:
    """Those whose process is gone; `forget` them when that has been dealt with."""
    found = []
    for path in _folder().glob(f"{socket.gethostname()}:*"):
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:
            continue
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(uuid.UUID(path.name.rpartition(":")[2]))
        os.close(lock)
    return found


def forget(owners: Iterable[uuid.UUID]) -> None:
    for owner in owners:
        with suppress(OSError):
            _path(owner).unlink()


def _path(owner: uuid.UUID) -> Path:
    """With the machine's name: directories may be shared between machines by file systems that do not share locks."""
    return _folder() / f"{socket.gethostname()}:{owner}"


def _folder() -> Path:
    return Path(settings.VAR_DIR) / "owners"
