"""What sees more than one row. Every product here has a shape that follows from its segment alone: neighbours cannot change a bit."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..rules import visible

if TYPE_CHECKING:
    from ...batching import Rope, Segments

F32 = np.float32
SCORES = 1 << 18                                           # scores held at once, all heads together: 1 MiB
LEAST = 16                                                 # query rows a block, however many keys there are


def rope(x: np.ndarray, table: Rope) -> np.ndarray:
    half = table.cos.shape[1]
    cos, sin = table.cos[:, None], table.sin[:, None]
    a, b = x[..., :half], x[..., half:2 * half]
    out = np.empty(x.shape, F32)
    np.subtract(a * cos, b * sin, out=out[..., :half])
    np.add(b * cos, a * sin, out=out[..., half:2 * half])
    out[..., 2 * half:] = x[..., 2 * half:]
    return out


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: Segments,
              causal: bool, window: int | None, scale: float) -> np.ndarray:
    out = np.empty(q.shape, F32)
    groups = q.shape[1] // k.shape[1]
    for b in range(segments.count):
        keys = segments.keys(b)
        _segment(q, k[keys], v[keys], out, segments, b, keys, groups, causal, window, scale)
    return out.reshape(len(out), -1)


def _segment(q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, segments: Segments, b: int, keys: slice | np.ndarray,
             groups: int, causal: bool, window: int | None, scale: float) -> None:
    """Rows of segment b, a block of queries at a time. k, v: [Lk, Hkv, Dh]; heads of one group stand in one batch axis."""
    own, (count, kv_heads, width) = segments.rows(b), k.shape
    key_positions, hidden = np.arange(count, dtype=np.int32), None if segments.hidden is None else segments.hidden[keys]
    offset = int(segments.offsets[b])
    k, v = k.transpose(1, 2, 0)[:, None], v.transpose(1, 0, 2)[:, None]                     # [Hkv, 1, Dh, Lk], [Hkv, 1, Lk, Dh]
    block = max(SCORES // (q.shape[1] * count), LEAST)
    for start in range(own.start, own.stop, block):
        mine = slice(start, min(start + block, own.stop))
        positions = np.arange(mine.start, mine.stop, dtype=np.int32) - own.start + offset
        low = 0 if window is None else max(int(positions[0]) - window, 0)
        high = count if window is None else min(int(positions[-1]) + window + 1, count)
        seen = slice(low, min(high, int(positions[-1]) + 1) if causal else high)            # keys that any row of the block sees
        scores = (q[mine] * F32(scale)).reshape(-1, kv_heads, groups, width).transpose(1, 2, 0, 3) @ k[..., seen]
        allowed = visible(positions, key_positions[seen], None if hidden is None else hidden[seen], causal, window)
        if allowed is not None:
            np.copyto(scores, F32(-np.inf), where=~allowed)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(-1, keepdims=True)
        mixed = scores @ v[:, :, seen]                                                     # [Hkv, groups, Lq, Dh]
        mixed /= total
        out[mine].reshape(-1, kv_heads, groups, width)[...] = mixed.transpose(2, 0, 1, 3)


def mean(x: np.ndarray, segments: Segments) -> np.ndarray:
    """[T, D] -> [B, D]"""
    out = np.empty((segments.count, x.shape[-1]), F32)
    for b in range(segments.count):
        np.mean(x[segments.rows(b)], 0, out=out[b])
    return out
