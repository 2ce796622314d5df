"""Matrix products whose rows do not depend on their neighbours.

A BLAS picks its inner loop by the shape of the whole product and by where a row falls inside it, and the loops add in different
orders. Measured with numpy's OpenBLAS 0.3.31, one thread, one row repeated M times, all of its copies compared:
its SkylakeX kernels give a row one result from a least M on (2 for MiniLM's 1536 x 384, 4 at 384 x 384, 19 at 64 x 64), up to
M = 2400; its Haswell kernels, which every processor without AVX-512 gets, give three: in the last M % 12 rows other ones than before
them, and in a few columns (26 of 384, 75 of 1536) another for every second six rows. Eight rows at a time, all is stable, at half the rate.
So nothing is assumed: the first product with a weight's shape measures which way of calling is stable, and later ones use it.
"""
from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

F32 = np.float32
_SMALL = range(1, 66)                                      # without gaps: the limit lies at M * N = 1200, for one
_LARGE = (96, 129, 257, 513, 1025)
_MULTIPLES = (12, 16, 24, 8)
_BLOCKS = (192, 96, 48, 32, 24, 16, 12, 8, 4, 2)
_lock = threading.Lock()
_calls: dict[tuple[int, int], Call] = {}


@dataclass(frozen=True, eq=False)
class Call:
    """How to multiply by a weight: `block` rows at a time if given, else all rows at once, at least `rows` of them and a multiple
    of `multiple`, and `unsteady` columns [n] int once more in a product of their own."""

    rows: int = 1
    multiple: int = 1
    unsteady: np.ndarray | None = None
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
    for multiple in _MULTIPLES:
        unsteady = np.flatnonzero(_unsteady(multiple, trials[0][1], rng))
        if 8 * len(unsteady) <= outputs:
            return Call(multiple=multiple, unsteady=unsteady if len(unsteady) else None)
    return Call(block=next((m for m in _BLOCKS if all(map(uniform, results(m)))), 1))


def _unsteady(multiple: int, weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[N] bool: columns in which some of 4 x `multiple` rows change with their place or with M, M a multiple of `multiple`.

    That many rows, since two orders of adding often agree by chance: a column that can change did so for two rows in three.
    """
    x = rng.standard_normal((4 * multiple, weight.shape[1]), F32)
    want = x @ weight.T
    changed = np.zeros(len(weight), bool)
    for shift in range(1, multiple):
        changed |= (np.roll(np.roll(x, shift, 0) @ weight.T, -shift, 0) != want).any(0)
    for m in (1, 2, 3, 8, 21, 44, 1024 // multiple):
        copies = -(-m * multiple // len(x))
        changed |= (np.tile(x, (copies, 1))[:m * multiple] @ weight.T != np.tile(want, (copies, 1))[:m * multiple]).any(0)
    return changed


def matmul(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x @ weight.T, a new array: [T, K], [N, K] -> [T, N] f32. A row's bits depend on that row and the weight alone."""
    call, count = stable(*weight.shape), len(x)
    step = call.block or call.multiple
    whole = max(-(-count // step) * step, call.rows)
    padded = x if whole == count else _padded(x, whole)
    if call.block:
        blocks = np.matmul(padded.reshape(-1, call.block, x.shape[1]), weight.T)
        return np.asarray(blocks.reshape(whole, len(weight))[:count])
    y = np.matmul(padded, weight.T)[:count]
    if call.unsteady is not None:
        y[:, call.unsteady] = matmul(x, weight[call.unsteady])
    return np.asarray(y)


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
    padded = np.zeros((rows, x.shape[1]), F32)
    padded[:len(x)] = x
    return padded
