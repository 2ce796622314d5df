"""Activations and norms in numpy, in row blocks that stay in the second-level cache: each pass then costs about 0.1 ns an element.

Every pass works on contiguous scratch, so an element's result does not depend on its place or on the strides it came with.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

F32 = np.float32
BLOCK = 1 << 14                                            # elements: 64 KiB a buffer, three or four of them in use


def _blocks(x: np.ndarray, step: Callable[..., None], scratch: int) -> np.ndarray:
    """`step(x, out, *scratch)` over blocks of rows; all arguments are of one shape, out and scratch contiguous."""
    out = np.empty(x.shape, F32)
    flat, into = (x, out) if x.ndim == 2 else (x.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1]))
    height = max(BLOCK // max(flat.shape[1], 1), 1)
    buffers = [np.empty((min(height, len(flat)), flat.shape[1]), F32) for _ in range(scratch)]
    with np.errstate(over="ignore", invalid="ignore"):        # infinities have their limits; NaN is the caller's to judge
        for start in range(0, len(flat), height):
            part = flat[start:start + height]
            step(part, into[start:start + height], *(buffer[:len(part)] for buffer in buffers))
    return out


# erfc(z) = t (a1 + t (a2 + t (a3 + t (a4 + t a5)))) exp(-z^2) + e, t = 1 / (1 + p z), |e| <= 1.5e-7, z >= 0:
# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
_P = 0.3275911
_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _half_erfc(z2: np.ndarray, z: np.ndarray, out: np.ndarray) -> None:
    """out = erfc(z) / 2 for z >= 0; both inputs are used up: z2 becomes exp(-z2), z becomes t."""
    z *= _P
    z += 1.0
    np.divide(1.0, z, out=z)
    np.multiply(z, _A[4] / 2, out=out)
    for a in _A[3::-1]:
        out += a / 2
        out *= z
    np.negative(z2, out=z2)
    np.exp(z2, out=z2)
    out *= z2


def _gelu(x: np.ndarray, out: np.ndarray, size: np.ndarray, z: np.ndarray, z2: np.ndarray) -> None:
    np.abs(x, out=size)
    np.multiply(size, 0.5 ** 0.5, out=z)
    np.multiply(z, z, out=z2)
    _half_erfc(z2, z, out)
    out *= size
    np.maximum(x, 0.0, out=size)
    np.subtract(size, out, out=out)


def gelu(x: np.ndarray) -> np.ndarray:
    """max(x, 0) - |x| erfc(|x| / sqrt 2) / 2, which is x / 2 (1 + erf(x / sqrt 2)) without its cancellation.

    Absolute error at most 1e-6 + 1e-7 |x|.
    """
    return _blocks(x, _gelu, 3)


def _gelu_tanh(x: np.ndarray, out: np.ndarray, y: np.ndarray) -> None:
    np.multiply(x, x, out=y)
    y *= 0.044715 * 0.7978845608028654
    y += 0.7978845608028654
    y *= x
    np.tanh(y, out=y)
    y += 1.0
    y *= 0.5
    np.multiply(x, y, out=out)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return _blocks(x, _gelu_tanh, 1)


def _silu(x: np.ndarray, out: np.ndarray) -> None:
    np.negative(x, out=out)
    np.exp(out, out=out)
    out += 1.0
    np.divide(x, out, out=out)


def silu(x: np.ndarray) -> np.ndarray:
    return _blocks(x, _silu, 0)


def relu(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(x, F32(0)))


def tanh(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.tanh(np.ascontiguousarray(x)))


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return _blocks(x, self._block, 1)

    def _block(self, x: np.ndarray, out: np.ndarray, squares: np.ndarray) -> None:
        np.subtract(x, np.mean(x, -1, keepdims=True), out=out)
        np.multiply(out, out, out=squares)
        out *= 1.0 / np.sqrt(np.mean(squares, -1, keepdims=True) + self.eps)
        out *= self.weight
        if self.bias is not None:
            out += self.bias


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis."""

    def __init__(self, weight: np.ndarray, eps: float, offset: float) -> None:
        self.weight, self.eps = weight + F32(offset), eps

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return _blocks(x, self._block, 0)

    def _block(self, x: np.ndarray, out: np.ndarray) -> None:
        np.multiply(x, x, out=out)
        np.multiply(x, 1.0 / np.sqrt(np.mean(out, -1, keepdims=True) + self.eps), out=out)
        out *= self.weight
