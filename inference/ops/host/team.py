"""Threads that share one operation of a pack that runs alone: a single text is done sooner, and its bits are the same.

Work is handed over through a queue, and nobody spins: a hand-over costs some ten microseconds, so only what takes several times as long
is shared. The caller works too and waits only for parts that a helper has begun: where the machine is busy with something else and no
helper wakes up, it does all of them. Where several packs run at once, each keeps to its own thread, which costs less than sharing.
"""
from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from . import arena

Part = Callable[[int, int], None]
"""Does part i of n."""

PARTS = 2                                                   # parts a thread

_size = 1
_active = 0
_started = 0
_lock, _busy = threading.Lock(), threading.Lock()
_jobs: SimpleQueue[_Job] = SimpleQueue()


class _Job:
    def __init__(self, part: Part, count: int) -> None:
        self.part: Part | None = part
        self.count, self.left = count, count
        self.take = itertools.count().__next__               # one step of the interpreter: no part is taken twice
        self.lock, self.done = threading.Lock(), threading.Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        while (i := self.take()) < self.count:
            part = self.part
            assert part is not None
            try:
                part(i, self.count)
            except BaseException as error:
                self.error = error
            with self.lock:
                self.left -= 1
                if not self.left:
                    self.done.set()


def _help(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().work()


def resize(threads: int) -> None:
    """How many threads may share an operation."""
    global _size
    _size = threads


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _active, _started, _lock, _busy, _jobs
    _active, _started, _lock, _busy, _jobs = 0, 0, threading.Lock(), threading.Lock(), SimpleQueue()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def pack() -> Iterator[None]:
    """Around a pack: while two of them run, nothing is shared."""
    global _active
    with _lock:
        _active += 1
    try:
        with arena.borrowed():
            yield
    finally:
        with _lock:
            _active -= 1


def share(part: Part, most: int) -> bool:
    """part(i, n) for i below n, n at most `most`, on several threads, if this pack runs alone; False, and nothing done, if not."""
    global _started
    helpers = min(_size, most) - 1
    if helpers < 1 or _active != 1 or not _busy.acquire(blocking=False):
        return False
    try:
        while _started < helpers:
            _started += 1
            threading.Thread(target=_help, args=(_jobs,), name=f"host-helper-{_started}", daemon=True).start()
        while not _jobs.empty():                             # what nobody woke up for; only this caller puts anything in
            with suppress(Empty):
                _jobs.get_nowait()
        job = _Job(part, min(PARTS * (helpers + 1), most))
        for _ in range(helpers):
            _jobs.put(job)
        job.work()
        job.done.wait()
        job.part = None                                      # a helper that comes late keeps no array alive
        if job.error is not None:
            raise job.error
        return True
    finally:
        _busy.release()
