"""Convolution along packed rows, each segment for itself: multiplications and additions of single elements in one fixed order, so a
row's bits depend on the rows of its own segment that its window covers and on nothing else."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..rules import neighbour

if TYPE_CHECKING:
    from ...batching import Segments


class Depthwise:
    """taps: [K, D] f32, bias: [D] f32 or None."""

    def __init__(self, taps: np.ndarray, bias: np.ndarray | None) -> None:
        self.taps, self.bias = np.ascontiguousarray(taps), bias

    def __call__(self, x: np.ndarray, segments: Segments, *, causal: bool = False) -> np.ndarray:
        out = np.zeros(x.shape, np.float32) if self.bias is None else np.broadcast_to(self.bias, x.shape).copy()
        left = len(self.taps) - 1 if causal else len(self.taps) // 2
        for offset, tap in enumerate(self.taps, -left):
            index, outside = neighbour(segments, offset)
            part = np.take(x, index, 0)
            part[outside] = 0.0
            part *= tap
            out += part
        return out
