"""Matrix products whose rows do not depend on their neighbours.

A BLAS picks its inner loop by the shape of the whole product and by where a row falls inside it, and the loops add in different
orders. Measured with numpy's OpenBLAS 0.3.31, one thread, one row repeated M times, all of its copies compared:
its SkylakeX kernels give a row one result from a least M on (2 for MiniLM's 1536 x 384, 4 at 384 x 384, 19 at 64 x 64), up to
M = 2400; its Haswell kernels, which every processor without AVX-512 gets, give three: in the last M % 12 rows two others than
before them, and in some columns another for every second six rows, at any M. Eight rows at a time, they too are stable.
So nothing is assumed: the first product with a weight's shape measures which way of calling is stable, and later ones use it.
"""
from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

F32 = np.float32
_SMALL = (*range(1, 41), 47, 48, 63, 64, 65)
_LARGE = (96, 129, 257, 448, 513, 1025)
_BLOCKS = (192, 96, 48, 32, 24, 16, 12, 8, 4, 2)
_lock = threading.Lock()
_calls: dict[tuple[int, int], Call] = {}


@dataclass(frozen=True)
class Call:
    """How to multiply by a weight: all rows at once if there are at least `rows` of them, or `block` rows at a time."""

    rows: int = 1
    block: int | None = None


def single_threaded() -> None:
    """One thread per product, for the whole process: parallelism is several Python threads that each take whole packs."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, user_api="blas")


def stable(outputs: int, inputs: int) -> Call:
    """The measured way of calling for weights [outputs, inputs]; measured once per process, by whichever thread comes first."""
    shape = outputs, inputs
    if shape not in _calls:
        with _lock:
            if shape not in _calls:
                _calls[shape] = _measure(outputs, inputs)
    return _calls[shape]


def _measure(outputs: int, inputs: int) -> Call:
    rng = np.random.default_rng(0)
    trials = [(rng.standard_normal((1, inputs), F32), rng.standard_normal((outputs, inputs), F32)) for _ in range(-(-64 // outputs))]

    def results(m: int) -> list[np.ndarray]:
        return [np.repeat(x, m, 0) @ w.T for x, w in trials]

    def uniform(y: np.ndarray) -> bool:
        return bool((y == y[0]).all())

    reference = results(_LARGE[-1])
    if all(map(uniform, reference)):
        unlike = [m for m in (*_SMALL, *_LARGE)
                  if not all(np.array_equal(y, want[:m]) for y, want in zip(results(m), reference, strict=True))]
        if max(unlike, default=0) < _SMALL[-1]:
            return Call(rows=max(unlike, default=0) + 1)
    return Call(block=next((m for m in _BLOCKS if all(map(uniform, results(m)))), 1))


def matmul(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x @ weight.T, a new array: [T, K], [N, K] -> [T, N] f32. A row's bits depend on that row and the weight alone."""
    call, count = stable(*weight.shape), len(x)
    if call.block is None:
        y: np.ndarray = np.matmul(x if count >= call.rows else _padded(x, call.rows), weight.T)
        return y[:count]
    whole = -(-count // call.block) * call.block
    blocks = (x if whole == count else _padded(x, whole)).reshape(-1, call.block, x.shape[1])
    y = np.matmul(blocks, weight.T)
    return y.reshape(whole, len(weight))[:count]


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
    padded = np.zeros((rows, x.shape[1]), F32)
    padded[:len(x)] = x
    return padded
