"""Products of a BLAS whose rows do not depend on their neighbours.

A BLAS picks its inner loop by the shape of the whole product and by where a row falls inside it, and the loops add in different
orders. Measured with numpy's OpenBLAS 0.3.31, one thread, one row repeated M times, all of its copies compared:
its SkylakeX kernels give a row one result from a least M on (2 for MiniLM's 1536 x 384, 4 at 384 x 384, 19 at 64 x 64), up to
M = 2400; its Haswell kernels, which every processor without AVX-512 gets, give three: in the last M % 12 rows other ones than before
them, and in a few columns (26 of 384, 75 of 1536) another for every second six rows. Eight rows at a time, all is stable, at half the rate.
So nothing is assumed: the first weight of a shape measures which way of calling is steady with this BLAS, and later ones use it.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

F32 = np.float32
_SMALL = range(1, 66)                                      # without gaps: the limit lies at M * N = 1200, for one
_LARGE = (96, 129, 257, 513, 1025)
_MULTIPLES = (12, 16, 24, 8)
_BLOCKS = (192, 96, 48, 32, 24, 16, 12, 8, 4, 2)
_lock = threading.Lock()
_calls: dict[tuple[str, int, int], Call] = {}

Multiply = Callable[[np.ndarray], np.ndarray]
"""[M, K] or [n, M, K] contiguous f32 -> x @ weight.T, new"""
Prepare = Callable[[np.ndarray], Multiply]
"""A weight [N, K], in whatever form the library wants it."""


@dataclass(frozen=True, eq=False)
class Call:
    """How to multiply by a weight: `block` rows at a time if given, else all rows at once, at least `rows` of them and a multiple
    of `multiple`, and `unsteady` columns [n] int once more in a product of their own."""

    rows: int = 1
    multiple: int = 1
    unsteady: np.ndarray | None = None
    block: int | None = None


def steady(library: str, prepare: Prepare, outputs: int, inputs: int) -> Call:
    """The measured way of calling for weights [outputs, inputs]; measured once per process, by whichever thread comes first."""
    shape = library, outputs, inputs
    if shape not in _calls:
        with _lock:
            if shape not in _calls:
                _calls[shape] = _measure(prepare, outputs, inputs)
    return _calls[shape]


class Product:
    """x @ weight.T + bias, a new array: [T, K] -> [T, N] f32. A row's bits depend on that row and the weight alone."""

    def __init__(self, library: str, prepare: Prepare, weight: np.ndarray, bias: np.ndarray | None) -> None:
        self.call, self.multiply, self.bias = steady(library, prepare, *weight.shape), prepare(weight), bias
        again = self.call.unsteady
        self.again = None if again is None else Product(library, prepare, np.ascontiguousarray(weight[again]), None)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        call, count = self.call, len(x)
        step = call.block or call.multiple
        whole = max(-(-count // step) * step, call.rows)
        padded = np.ascontiguousarray(x) if whole == count else _padded(x, whole)
        if call.block:
            y = self.multiply(padded.reshape(-1, call.block, x.shape[1])).reshape(whole, -1)[:count]
        else:
            y = self.multiply(padded)[:count]
        if self.again:
            y[:, call.unsteady] = self.again(x)
        if self.bias is not None:
            y += self.bias
        return y


def _measure(prepare: Prepare, outputs: int, inputs: int) -> Call:
    rng = np.random.default_rng(0)
    trials = [(rng.standard_normal((1, inputs), F32), prepare(rng.standard_normal((outputs, inputs), F32)))
              for _ in range(-(-64 // outputs))]

    def results(m: int) -> list[np.ndarray]:
        return [multiply(np.repeat(x, m, 0)) for x, multiply in trials]

    def uniform(y: np.ndarray) -> bool:
        return bool((y == y[0]).all())

    reference = results(_LARGE[-1])
    if all(map(uniform, reference)):
        unlike = [m for m in (*_SMALL, *_LARGE)
                  if not all(np.array_equal(y, want[:m]) for y, want in zip(results(m), reference, strict=True))]
        if max(unlike, default=0) < _SMALL[-1]:
            return Call(rows=max(unlike, default=0) + 1)
    for multiple in _MULTIPLES:
        unsteady = np.flatnonzero(_unsteady(multiple, trials[0][1], outputs, inputs, rng))
        if 8 * len(unsteady) <= outputs:
            return Call(multiple=multiple, unsteady=unsteady if len(unsteady) else None)
    return Call(block=next((m for m in _BLOCKS if all(map(uniform, results(m)))), 1))


def _unsteady(multiple: int, multiply: Multiply, outputs: int, inputs: int, rng: np.random.Generator) -> np.ndarray:
    """[N] bool: columns in which some of 4 x `multiple` rows change with their place or with M, M a multiple of `multiple`.

    That many rows, since two orders of adding often agree by chance: a column that can change did so for two rows in three.
    """
    x = rng.standard_normal((4 * multiple, inputs), F32)
    want = multiply(x)
    changed = np.zeros(outputs, bool)
    for shift in range(1, multiple):
        changed |= (np.roll(multiply(np.roll(x, shift, 0)), -shift, 0) != want).any(0)
    for m in (1, 2, 3, 8, 21, 44, 1024 // multiple):
        copies = -(-m * multiple // len(x))
        changed |= (multiply(np.tile(x, (copies, 1))[:m * multiple]) != np.tile(want, (copies, 1))[:m * multiple]).any(0)
    return changed


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
    padded = np.zeros((rows, x.shape[1]), F32)
    padded[:len(x)] = x
    return padded
