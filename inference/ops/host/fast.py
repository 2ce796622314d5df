"""The backend's functions on compiled kernels: what stands here replaces the numpy ones of the same names.

Importing it compiles (or reads from disk) every kernel. ImportError where numba is missing or the processor has no fused
multiply-add; the plain functions then do the same work.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .arena import empty, lasting, scratch
from .blas import to_bf16
from .reading import Weight, blocks
from .simd import BF16_DOT, LANES, WIDTH

if not WIDTH:
    raise ImportError("this processor has no fused multiply-add that kernels could use")

from . import kernels, team

if TYPE_CHECKING:
    from ...batching import Rope, Segments

__all__ = [
    "BF16_DOT", "VECTORS", "HalfProduct", "LayerNorm", "Product", "RMSNorm", "attention", "gelu", "gelu_tanh", "mean", "rope", "silu"]

F32 = np.float32
VECTORS = f"{32 * LANES}-bit vectors"
SHARED = 1 << 23                                           # multiplications that are worth sharing: 50 us and more
PAGE = 1 << 12                                             # bytes; addresses that far apart fall into one set of the first-level cache
_NOBODY, _NOTHING = np.zeros(0, np.int32), np.zeros(0, bool)


def _rows(x: np.ndarray) -> np.ndarray:
    """As the kernels take it: f32 [T, H, D] with unit stride along D; one long row where all of it is contiguous."""
    if x.dtype != F32 or (x.strides[-1] != 4 and x.size):
        x = np.ascontiguousarray(x, F32)
    return x if x.ndim == 3 else x[:, None] if x.ndim == 2 else x.reshape(-1, 1, x.shape[-1])


def _pointwise(kernel: Callable[[np.ndarray, np.ndarray], None]) -> Callable[[np.ndarray], np.ndarray]:
    def apply(x: np.ndarray) -> np.ndarray:
        out = empty(*x.shape)
        if x.flags.c_contiguous and x.dtype == F32:
            kernel(x.reshape(1, 1, -1), out.reshape(1, 1, -1))
        else:
            kernel(_rows(x), _rows(out))
        return out
    return apply


gelu, gelu_tanh, silu = _pointwise(kernels.gelu), _pointwise(kernels.gelu_tanh), _pointwise(kernels.silu)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> None:
        self.weight = np.ascontiguousarray(weight)
        self.bias = np.zeros_like(self.weight) if bias is None else np.ascontiguousarray(bias)
        self.eps = F32(eps)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        out = empty(*x.shape)
        kernels.layer_norm(_rows(x), _rows(out), self.weight, self.bias, self.eps)
        return out


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis."""

    def __init__(self, weight: np.ndarray, eps: float, offset: float) -> None:
        self.weight, self.eps = np.ascontiguousarray(weight + F32(offset)), F32(eps)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        out = empty(*x.shape)
        kernels.rms_norm(_rows(x), _rows(out), self.weight, self.eps)
        return out


def rope(x: np.ndarray, table: Rope) -> np.ndarray:
    out = empty(*x.shape)
    kernels.rope(_rows(x), out, np.ascontiguousarray(table.cos), np.ascontiguousarray(table.sin))
    return out


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: Segments,
              causal: bool, window: int | None, scale: float) -> np.ndarray:
    if not scale > 0:
        raise ValueError(f"attention with a scale of {scale}: expected a positive number")
    out = empty(*q.shape)
    longest = segments.memo("longest keys", lambda: int((segments.lengths + segments.offsets).max()))
    size, kv_heads = kernels.scratch_size(longest, q.shape[2]), k.shape[1]
    fixed = (_rows(q), _rows(k), _rows(v), out, segments.starts, _NOBODY if segments.parent is None else segments.parent,
             _NOTHING if segments.hidden is None else segments.hidden, causal, -1 if window is None else window, F32(scale))

    def part(i: int, n: int) -> None:
        kernels.attention(*fixed, scratch(size), kv_heads * i // n, kv_heads * (i + 1) // n)

    if out.size * longest < SHARED // 2 or not team.share(part, kv_heads):
        part(0, 1)
    return out.reshape(len(out), -1)


def mean(x: np.ndarray, segments: Segments) -> np.ndarray:
    """[T, D] -> [B, D]"""
    out = np.empty((segments.count, x.shape[-1]), F32)
    kernels.mean(_rows(x)[:, 0], segments.starts, out)
    return out


class Product:
    """x @ weight.T + bias in f32. A row's bits depend on the row and the weight alone: every sum runs along K in order.

    The weight is kept as panels of WIDTH of its rows, [P, K, WIDTH], which is the order they are read in; columns beyond N are zeros.
    """

    def __init__(self, weight: Weight, bias: np.ndarray | None) -> None:
        self.outputs = len(weight)
        self.panels = self._packed(weight)
        self.bias = np.zeros(len(self.panels) * WIDTH, F32)
        if bias is not None:
            self.bias[:self.outputs] = bias

    def _packed(self, weight: Weight) -> np.ndarray:
        panels = _panels(*weight.shape)
        for first, rows in blocks(weight, WIDTH):
            kernels.pack(rows, panels, first // WIDTH)
        return panels

    def __call__(self, x: np.ndarray) -> np.ndarray:
        out = empty(len(x), self.outputs)
        _multiply(kernels.linear, _apart(_rows(x)[:, 0]), self, out)
        return out


def _apart(x: np.ndarray) -> np.ndarray:
    """The same [T, K], in a copy whose rows are no whole pages apart: a tile's rows would drive each other out of the cache."""
    if x.strides[0] % PAGE or len(x) < 2:
        return x
    copy = empty(len(x), x.shape[1] + WIDTH)[:, :x.shape[1]]
    copy[:] = x
    return copy


def _multiply(kernel: Callable[..., None], x: np.ndarray, product: Product, out: np.ndarray) -> None:
    count = len(product.panels)

    def part(i: int, n: int) -> None:
        kernel(x, product.panels, product.bias, out, count * i // n, count * (i + 1) // n)

    if len(x) * product.panels.size < SHARED or not team.share(part, count):
        part(0, 1)


def _panels(outputs: int, inputs: int) -> np.ndarray:
    """For a weight [N, K]: [P, K, WIDTH], of which only the last has to be zeros before it is filled."""
    count = -(-outputs // WIDTH)
    panels = lasting(count * inputs * WIDTH).reshape(count, inputs, WIDTH)
    panels[outputs // WIDTH:] = 0
    return panels


class HalfProduct(Product):
    """The same with both factors rounded to bf16 and sums in f32, on processors with avx512_bf16."""

    def __init__(self, weight: Weight, bias: np.ndarray | None) -> None:
        step = 2 * LANES
        self.inputs = -(-weight.shape[1] // step) * step
        super().__init__(weight, bias)

    def _packed(self, weight: Weight) -> np.ndarray:
        panels = _panels(len(weight), self.inputs // 2)
        for first, rows in blocks(weight, WIDTH):
            padded = np.zeros((len(rows), self.inputs), np.uint16)
            padded[:, :rows.shape[1]] = to_bf16(rows)
            kernels.pack(padded.view(F32), panels, first // WIDTH)
        return panels.view(np.uint32)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        x = _rows(x)[:, 0]
        factors = empty(len(x), self.inputs // 2)
        if x.shape[1] <= self.inputs - LANES:               # conversion stops at whole vectors of f32
            factors[:, -(LANES // 2):] = 0
        kernels.halves(x, factors.view(np.uint16))
        out = empty(len(x), self.outputs)
        _multiply(kernels.linear_bf16, factors.view(np.uint32), self, out)
        return out
