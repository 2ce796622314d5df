"""Threads that share one operation of a pack that runs alone: a single text is done sooner, and its bits are the same.

Work is handed over through locks, and nobody spins: a hand-over costs some ten microseconds, so only what takes several times as long
is shared. Where several packs run at once, each keeps to its own thread, which costs less than sharing.
"""
from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Part = Callable[[int, int], None]
"""Does part i of n."""

_size = 1
_active = 0
_lock = threading.Lock()
_helpers: list[_Helper] = []
_busy = threading.Lock()


class _Helper:
    def __init__(self, number: int) -> None:
        self.begin, self.end = threading.Lock(), threading.Lock()
        self.begin.acquire()
        self.end.acquire()
        self.error: BaseException | None = None
        self.part: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, name=f"host-helper-{number}", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.begin.acquire()
            try:
                self.part()
            except BaseException as error:
                self.error = error
            self.end.release()


def resize(threads: int) -> None:
    """How many threads may share an operation."""
    global _size
    _size = threads


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _active, _lock, _busy
    _helpers.clear()
    _active, _lock, _busy = 0, threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def pack() -> Iterator[None]:
    """Around a pack: while two of them run, nothing is shared."""
    global _active
    with _lock:
        _active += 1
    try:
        yield
    finally:
        with _lock:
            _active -= 1


def share(part: Part, most: int) -> bool:
    """part(i, n) for i below n, n at most `most`, on as many threads, if this pack runs alone; False, and nothing done, if not."""
    count = min(_size, most)
    if count < 2 or _active != 1 or not _busy.acquire(blocking=False):
        return False
    try:
        while len(_helpers) < count - 1:
            _helpers.append(_Helper(len(_helpers) + 1))
        helpers = _helpers[:count - 1]
        for i, helper in enumerate(helpers, 1):
            helper.part = lambda i=i: part(i, count)             # type: ignore[misc]
            helper.begin.release()
        try:
            part(0, count)
        finally:
            for helper in helpers:
                helper.end.acquire()
                helper.part = lambda: None                       # keeps no array alive
        for helper in helpers:
            if helper.error is not None:
                error, helper.error = helper.error, None
                raise error
        return True
    finally:
        _busy.release()
