"""Vector normalisation, on the way out. The kinds are llama-server's `embd_normalize`."""
from __future__ import annotations

import numpy as np

from .errors import InvalidRequest

EPSILON = np.float32(1e-9)
INT16 = np.float32(32760)


def check(kind: float) -> None:
    """Raises InvalidRequest for a kind outside the domain."""
    if kind != -1 and not (kind >= 0 and np.isfinite(kind)):
        shown = int(kind) if float(kind).is_integer() else kind
        raise InvalidRequest(
            f"embd_normalize {shown} is out of domain: pass -1 for no normalization, 0 for the max-absolute int16 rescale, 1 for taxicab, "
            "2 for euclidean, or a value above 2 for that p-norm", param="embd_normalize")


def normalize(x: np.ndarray, kind: float) -> np.ndarray:
    """[R, D] f32 -> [R, D] f32, each row by itself.

    -1 none; 0 rescaled so that the largest component is 32760; 2 euclidean length one; another p: that p-norm one. Zero rows stay zero.
    """
    if kind == -1:
        return x
    if kind == 2:
        return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), EPSILON)
    if kind == 0:
        size = np.abs(x).max(-1, keepdims=True) / INT16
    else:
        largest = np.abs(x).max(-1, keepdims=True)             # taken out first: x ** p overflows f32 for large p
        scaled = np.divide(np.abs(x), largest, out=np.zeros_like(x), where=largest > 0)
        size = largest * (scaled ** np.float32(kind)).sum(-1, keepdims=True) ** np.float32(1 / kind)
    return np.divide(x, size, out=np.zeros_like(x), where=size > 0)


def shorten(x: np.ndarray, dimensions: int | None, kind: float) -> np.ndarray:
    """Normalises, keeps the first `dimensions` components (all where None) and normalises those: [R, D] -> [R, dimensions]."""
    x = normalize(x, kind)
    if dimensions is None or dimensions == x.shape[-1]:
        return x
    return normalize(np.ascontiguousarray(x[:, :dimensions]), kind)
