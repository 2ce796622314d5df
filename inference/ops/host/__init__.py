"""CPU backend: numpy arrays, f32, packed rows; nothing here ever sees a pad token.

The functions below are the backend's face, named as in `ops`; each may be replaced by a faster kernel of the same name and
shape. Arrays belong to no thread: several threads may run one model at once, each on its own pack. In f32 a row's result is
the same to the bit whatever stands beside it.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np

from ..rules import check_ids
from . import blas, team
from .convolution import Depthwise
from .pointwise import relu, tanh
from .reading import Joined, Stored, Weight, dequantize, load, read

try:
    from .fast import LayerNorm, RMSNorm, attention, gelu, gelu_tanh, mean, rope, silu
except ImportError:                                        # no numba, or a processor it has no kernels for
    from .mixing import attention, mean, rope
    from .pointwise import LayerNorm, RMSNorm, gelu, gelu_tanh, silu  # type: ignore[assignment]

if TYPE_CHECKING:
    from ...batching import Segments

__all__ = [
    "TENSOR", "Depthwise", "Embedding", "LayerNorm", "Linear", "Linears", "RMSNorm", "attention", "concat", "gelu", "gelu_tanh", "heads",
    "l2_normalize", "load", "numpy", "pack", "pool", "prepare", "provider", "put", "put_add", "read", "relu", "rope", "rows", "shifted",
    "silu", "split", "stored", "tanh",
]

F32 = np.float32
TENSOR = np.ndarray
Quantised = tuple[np.ndarray, np.ndarray, int, int]        # scales, biases, bits, group size


_provider: blas.Provider | None = None


def prepare(library: str | None = None, precision: blas.Precision | None = None, threads: int | None = None) -> None:
    """Chooses who multiplies matrices for the weights that are read from now on, and how many threads may share one operation;
    what is not given stays as it is."""
    global _provider
    if threads is not None:
        team.resize(threads)
    if _provider is None or (library, precision) != (None, None):
        _provider = blas.choose(library or "auto", precision or "f32")


pack, stored = team.pack, Stored


def provider() -> blas.Provider:
    assert _provider is not None, "a backend is opened by ops.backend"
    return _provider


def shifted(x: np.ndarray, change: np.ndarray) -> np.ndarray:
    """x + change; x is overwritten."""
    x += change
    return x


# ---- what Weights hands out

Part = tuple[Weight, np.ndarray | None, Quantised | None]  # weight, bias, how it is quantised


class Linear:
    """The weight goes from its file into the form it is multiplied in, and no request has to wait for it."""

    def __init__(self, weight: Weight, bias: np.ndarray | None = None, quantised: Quantised | None = None) -> None:
        self.product = provider().product(_plain(weight, quantised), bias)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.product(x)


class Linears:
    """The weights stand in one array, so that one product serves all; the results are views of its columns."""

    def __init__(self, parts: Sequence[Part]) -> None:
        weights = [_plain(weight, quantised) for weight, _, quantised in parts]
        edges = np.cumsum([0, *map(len, weights)]).tolist()
        self.parts = [slice(a, b) for a, b in pairwise(edges)]
        bias = None
        if any(bias is not None for _, bias, _ in parts):
            bias = np.concatenate([np.zeros(len(w), F32) if b is None else b for w, (_, b, _) in zip(weights, parts, strict=True)])
        self.product = provider().product(Joined(weights), bias)

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        y = self.product(x)
        return tuple(y[:, part] for part in self.parts)


def _plain(weight: Weight, quantised: Quantised | None) -> Weight:
    return dequantize(cast(np.ndarray, weight), *quantised) if quantised else weight


class Embedding:
    def __init__(self, weight: np.ndarray, quantised: Quantised | None = None) -> None:
        self.weight = dequantize(weight, *quantised) if quantised else weight
        self.provider = provider()

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        check_ids(ids, len(self.weight))
        return np.take(self.weight, ids, 0)

    def logits(self, x: np.ndarray, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        return self.provider.product(self(np.asarray(ids)), None)(x)


# ---- ops

def split(x: np.ndarray, parts: int) -> tuple[np.ndarray, ...]:
    width = x.shape[-1] // parts
    return tuple(x[..., i * width:(i + 1) * width] for i in range(parts))


def concat(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts, -1)


def heads(x: np.ndarray, count: int) -> np.ndarray:
    return x.reshape(len(x), count, -1)


def rows(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.take(x, index, 0)


def put(x: np.ndarray, index: np.ndarray, values: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[index] = values
    return x


def put_add(x: np.ndarray, index: np.ndarray, values: np.ndarray) -> np.ndarray:
    x = x.copy()
    np.add.at(x, index, values)
    return x


def pool(x: np.ndarray, segments: Segments, mode: str) -> np.ndarray:
    if mode in ("cls", "lasttoken"):
        return np.take(x, segments.first if mode == "cls" else segments.last, 0)
    if mode == "max":
        return np.asarray(np.maximum.reduceat(x, segments.first))
    return mean(x, segments)


def l2_normalize(x: np.ndarray) -> np.ndarray:
    length = np.sqrt(np.sum(x * x, -1, keepdims=True))
    return np.asarray(x / np.maximum(length, F32(1e-9)))


def numpy(x: np.ndarray) -> np.ndarray:
    return x
