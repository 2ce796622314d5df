"""Memory for results, taken again once nobody refers to it: no page faults in the middle of a model.

A result is a view of a buffer; numpy keeps the buffer alive for as long as any view of it lives, so a buffer that only the arena
refers to is free. Nothing is ever given back by hand: an exception anywhere leaves nothing to clean up.
"""
from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

F32 = np.float32
SMALLEST = 1 << 12                                          # elements; below, numpy's own allocation is as fast
KEPT = 1 << 23                                              # elements (32 MiB) that free buffers of one pack may hold together
SLAB = 1 << 22                                              # elements (16 MiB) of small weights that share one piece of memory
_ALIGN = 64


class _Buffers:
    def __init__(self) -> None:
        self.known: list[np.ndarray] = []
        self.scratch = np.zeros(0, F32)


class _Own(threading.local):
    buffers: _Buffers | None = None


_own = _Own()
_spare: list[_Buffers] = []                                 # append and pop are one step of the interpreter each


_lock = threading.Lock()
_slab = weakref.ref(np.empty(0, F32))                       # the last one, while a weight lives in it
_taken = 0                                                  # elements of it


def _forget() -> None:
    """A forked child may have been born while another thread held the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _mine() -> _Buffers:
    """This thread's, which it has borrowed or else keeps for good."""
    if _own.buffers is None:
        _own.buffers = _Buffers()
    return _own.buffers


@contextmanager
def borrowed() -> Iterator[None]:
    """Around a pack. A pack runs on whichever of many threads comes first; buffers of each of these would only add up."""
    before = _own.buffers
    try:
        _own.buffers = _spare.pop()                         # the last that was given back, which is still in the caches
    except IndexError:
        _own.buffers = _Buffers()
    try:
        yield
    finally:
        _spare.append(_own.buffers)
        _own.buffers = before


def empty(*shape: int) -> np.ndarray:
    """An uninitialised f32 array of this pack's."""
    count = 1
    for n in shape:
        count *= n
    if count < SMALLEST:
        return np.empty(shape, F32)
    known = _mine().known
    for i in range(len(known)):
        if count <= known[i].size <= 2 * count and sys.getrefcount(known[i]) == 2:
            return known[i][:count].reshape(shape)
    return _grow(count)[:count].reshape(shape)


def _grow(count: int) -> np.ndarray:
    """A new buffer with some room. Free ones that would make it too many are let go, the largest first."""
    mine = _mine()
    known = mine.known
    free = sorted((i for i in range(len(known)) if sys.getrefcount(known[i]) == 2), key=lambda i: known[i].size)
    held = sum(known[i].size for i in free)
    dropped = set()
    while free and held > KEPT:
        held -= known[free[-1]].size
        dropped.add(free.pop())
    buffer = _aligned(count + count // 8)
    mine.known = [*(known[i] for i in range(len(known)) if i not in dropped), buffer]
    return buffer


def _aligned(count: int) -> np.ndarray:
    raw = np.empty(count + _ALIGN // 4, F32)
    skip = -raw.__array_interface__["data"][0] % _ALIGN // 4
    # A view of `raw` would be collapsed into it by numpy, and counted there: the buffer has to be an owner of its own.
    return np.frombuffer(raw.data[skip:skip + count], F32)


def lasting(count: int) -> np.ndarray:
    """Uninitialised f32 for a weight. Small ones lie side by side in slabs, since numpy asks for huge pages from 4 MiB on only.

    A slab lives for as long as any weight in it.
    """
    global _slab, _taken
    if count >= SLAB // 4:
        return _aligned(count)
    with _lock:
        slab = _slab()
        if slab is None or _taken + count > slab.size:
            slab, _taken = _aligned(SLAB), 0
            _slab = weakref.ref(slab)
        piece = slab[_taken:_taken + count]
        _taken += count + -count % (_ALIGN // 4)
        return piece


def scratch(count: int) -> np.ndarray:
    """At least `count` elements that keep nothing between calls; the first ones of a new buffer are zeros."""
    mine = _mine()
    if mine.scratch.size < count or mine.scratch.size > max(4 * count, KEPT):
        mine.scratch = np.zeros(count + count // 4, F32)
    return mine.scratch
