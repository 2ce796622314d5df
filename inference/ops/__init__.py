"""The vocabulary model code is written in. Tensors are opaque; the tensor itself decides which backend does the work.

A tensor is what a backend made of a checkpoint: numpy on `host`, mx.array on `mlx`. Model code never names either, never
asks for a shape, and uses only these functions, the callables that `Weights` hands out (`Linear`, `Linears`, `Norm`,
`Embedding`, `Depthwise`), and the operators `+` and `*` between tensors of one shape, or a tensor and a Python number.

Shapes: `[T, D]` rows, T all real tokens of a pack laid end to end; `[T, H, Dh]` once `heads` has cut them; `[B, D]` once
`pool` has met the segments. Index arguments are numpy ints on both backends. Nothing changes its argument. Outputs keep the
dtype of their input; `pool`, `l2_normalize` and `numpy` give f32, and softmax, norms, rope and activations compute in f32.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from . import rules

if TYPE_CHECKING:
    from ..batching import Rope, Segments

Tensor = Any
Pooling = Literal["cls", "mean", "max", "lasttoken"]


class Linear(Protocol):
    """[T, in] -> [T, out]"""

    def __call__(self, x: Tensor) -> Tensor: ...


class Linears(Protocol):
    """Several projections of one input, in one matrix product where the backend gains by it: [T, in] -> a tuple of [T, out_i]."""

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]: ...


class Norm(Protocol):
    """Over the last axis: rows, or heads of [T, H, Dh]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Depthwise(Protocol):
    """Every column by its own few taps over the rows of its segment, zeros beyond its ends: [T, D] -> [T, D].

    causal: the taps end at the row; else they stand around it, K // 2 of K before it.
    """

    def __call__(self, x: Tensor, segments: Segments, *, causal: bool = False) -> Tensor: ...


class Embedding(Protocol):
    """[T] int -> [T, D]; an id outside the table is an IndexError, on every backend."""

    def __call__(self, ids: np.ndarray) -> Tensor: ...

    def logits(self, x: Tensor, ids: Sequence[int] | np.ndarray) -> Tensor:
        """The tied output head, these columns only: [B, D], [n] int -> [B, n]."""


_BACKENDS: dict[type, ModuleType] = {}


def backend(name: Literal["mlx", "host"], **options: Any) -> ModuleType:
    """Opens a backend: the one call that knows it by name, made by the loader. Importing `ops` imports neither.

    options: for its `prepare`; they hold for weights that are read from now on.
    """
    if name not in ("mlx", "host"):
        raise ValueError(f"backend {name!r} does not exist; known: mlx, host")
    module = import_module(f".{name}", __name__)
    module.prepare(**options)
    _BACKENDS[module.TENSOR] = module
    return module


def _of(x: Tensor) -> ModuleType:
    try:
        return _BACKENDS[type(x)]
    except KeyError:
        known = ", ".join(module.__name__.rpartition(".")[2] for module in _BACKENDS.values()) or "none"
        raise TypeError(f"{type(x).__name__} is not a tensor of an open backend; open: {known}") from None


# ---- pointwise

def gelu(x: Tensor) -> Tensor:
    """x / 2 (1 + erf(x / sqrt 2))"""
    return _of(x).gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))"""
    return _of(x).gelu_tanh(x)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))"""
    return _of(x).silu(x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)"""
    return _of(x).relu(x)


def tanh(x: Tensor) -> Tensor:
    return _of(x).tanh(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu, "gelu_python": gelu, "gelu_new": gelu_tanh, "gelu_fast": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh,
    "silu": silu, "swish": silu, "relu": relu, "tanh": tanh,
}
"""By the names that config.json files use."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function a config names; CheckpointError for one that nobody implemented."""
    from ..errors import CheckpointError

    if name not in ACTIVATIONS:
        raise CheckpointError(f"activation {name!r} is not implemented; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


# ---- shape

def split(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """[T, parts * D] -> parts x [T, D]"""
    pieces: tuple[Tensor, ...] = _of(x).split(x, parts)
    return pieces


def concat(*parts: Tensor) -> Tensor:
    """[T, D_i] ... -> [T, sum of D_i]"""
    return _of(parts[0]).concat(parts)


def heads(x: Tensor, count: int) -> Tensor:
    """[T, H * Dh] -> [T, H, Dh]"""
    return _of(x).heads(x, count)


def rows(x: Tensor, index: np.ndarray) -> Tensor:
    """x[index]: [T, ...], [n] int -> [n, ...]"""
    return _of(x).rows(x, index)


def put(x: Tensor, index: np.ndarray, values: Tensor) -> Tensor:
    """x with the rows `index` replaced by `values` [n, D], each row named once."""
    return _of(x).put(x, index, values)


def put_add(x: Tensor, index: np.ndarray, values: Tensor) -> Tensor:
    """x with `values` [n, D] added to the rows `index`; a row named twice gets both."""
    return _of(x).put_add(x, index, values)


# ---- mixing: the only operations that see more than one row

def rope(x: Tensor, table: Rope) -> Tensor:
    """Rotates pairs (i, i + dim / 2) of each head of [T, H, Dh]. `table` is `batch.rope(spec)`; it may cover only the first part of Dh."""
    return _of(x).rope(x, table)


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool = False, window: int | None = None,
              scale: float | None = None) -> Tensor:
    """softmax(scale q k^T) v within each segment and the prefix it continues: [T, H, Dh], [T, Hkv, Dh] x 2 -> [T, H * Dh].

    causal: a row sees itself and what stands before it. window: an inclusive radius, row and key at most that many positions
    apart. scale: Dh ** -0.5 unless given. H is a multiple of Hkv: head h reads keys and values h // (H / Hkv). Rows in
    `segments.hidden` are seen by nobody. A row that sees nothing gets zeros, as from torch's scaled_dot_product_attention: so do
    the rows of an expanded query that stand further than the window from its text.
    """
    y = _of(q).attention(q, k, v, segments, causal, window, q.shape[-1] ** -0.5 if scale is None else scale)
    lost = rules.blind(segments, causal, window)
    return y if lost is None else put(y, lost, rows(y, lost) * 0.0)


# ---- ends

def pool(x: Tensor, segments: Segments, mode: Pooling) -> Tensor:
    """[T, D] -> [B, D] f32: the first row of each segment, the mean or the maximum over its rows, or its last row."""
    if mode not in ("cls", "mean", "max", "lasttoken"):
        raise ValueError(f"pooling {mode!r} does not exist; known: cls, mean, max, lasttoken")
    return _of(x).pool(x, segments, mode)


def l2_normalize(x: Tensor) -> Tensor:
    """x / max(|x|, 1e-9) over the last axis, f32; zero rows stay zero."""
    return _of(x).l2_normalize(x)


def numpy(x: Tensor) -> np.ndarray:
    """The way out: evaluated, f32, host memory."""
    array: np.ndarray = _of(x).numpy(x)
    return array
