"""CPU backend: numpy arrays, f32, packed rows; nothing here ever sees a pad token.

The functions below are the backend's face, named as in `ops`; each may be replaced by a faster kernel of the same name and
shape. Arrays belong to no thread: several threads may run one model at once, each on its own pack. In f32 a row's result is
the same to the bit whatever stands beside it.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..rules import check_ids
from .blas import matmul, single_threaded
from .convolution import Depthwise
from .mixing import attention, rope
from .pointwise import LayerNorm, RMSNorm, gelu, gelu_tanh, relu, silu, tanh
from .reading import dequantize, load, read

if TYPE_CHECKING:
    from ...batching import Segments

__all__ = [
    "TENSOR", "Depthwise", "Embedding", "LayerNorm", "Linear", "Linears", "RMSNorm", "attention", "concat", "gelu", "gelu_tanh", "heads",
    "l2_normalize", "load", "numpy", "pool", "prepare", "put", "put_add", "read", "relu", "rope", "rows", "silu", "split", "tanh",
]

F32 = np.float32
TENSOR = np.ndarray
Quantised = tuple[np.ndarray, np.ndarray, int, int]        # scales, biases, bits, group size


def prepare() -> None:
    single_threaded()


# ---- what Weights hands out

class Linear:
    def __init__(self, weight: np.ndarray, bias: np.ndarray | None = None, quantised: Quantised | None = None) -> None:
        self.weight, self.bias = dequantize(weight, *quantised) if quantised else weight, bias

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = matmul(x, self.weight)
        if self.bias is not None:
            y += self.bias
        return y


class Linears:
    """The weights stand in one array, so that one product serves all; the results are views of its columns."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        edges = np.cumsum([0, *(len(part.weight) for part in parts)]).tolist()
        self.parts = [slice(a, b) for a, b in pairwise(edges)]
        bias = None
        if any(part.bias is not None for part in parts):
            bias = np.concatenate([np.zeros(len(part.weight), F32) if part.bias is None else part.bias for part in parts])
        self.joined = Linear(np.concatenate([part.weight for part in parts]), bias)

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        y = self.joined(x)
        return tuple(y[:, part] for part in self.parts)


class Embedding:
    def __init__(self, weight: np.ndarray, quantised: Quantised | None = None) -> None:
        self.weight = dequantize(weight, *quantised) if quantised else weight

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        check_ids(ids, len(self.weight))
        return np.take(self.weight, ids, 0)

    def logits(self, x: np.ndarray, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        return matmul(x, self(np.asarray(ids)))


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
    out = np.empty((segments.count, x.shape[-1]), F32)
    for b in range(segments.count):
        np.mean(x[segments.rows(b)], 0, out=out[b])
    return out


def l2_normalize(x: np.ndarray) -> np.ndarray:
    length = np.sqrt(np.sum(x * x, -1, keepdims=True))
    return np.asarray(x / np.maximum(length, F32(1e-9)))


def numpy(x: np.ndarray) -> np.ndarray:
    return x
