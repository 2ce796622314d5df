"""MLX backend: rows stay packed for everything pointwise and linear; only `attention` and `pool` pad, to their group's longest.

Arrays belong to the thread that made them, from `load` to `numpy`: MLX evaluates on that thread's stream and no other.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .rules import check_ids, neighbour, visible
from .safetensors import read_header

if TYPE_CHECKING:
    from ..batching import Rope, Segments

F32 = mx.float32
TENSOR = mx.array
Quantised = tuple[mx.array, mx.array, int, int]            # scales, biases, bits, group size


def prepare() -> None:
    """Nothing to set up: MLX does it when the first array is made, on the thread that makes it."""


def load(path: Path) -> dict[str, mx.array]:
    read_header(path)                                      # says what is wrong with a damaged file
    tensors: dict[str, mx.array] = mx.load(str(path))              # type: ignore[assignment]
    return tensors


def read(x: mx.array) -> mx.array:
    """Evaluated, so that no later thread finds a file half read. f64 does not exist on a GPU and becomes f32."""
    x = x.astype(F32) if x.dtype == mx.float64 else x
    mx.eval(x)
    return x


stored = read                                              # MLX reads each tensor when it is evaluated, into its own memory


def shifted(x: mx.array, change: np.ndarray) -> mx.array:
    """x + change, computed in f32 and kept in the type of x."""
    y = (x.astype(F32) + mx.array(change)).astype(x.dtype)
    mx.eval(y)
    return y


# ---- what Weights hands out

Part = tuple[mx.array, mx.array | None, Quantised | None]  # weight, bias, how it is quantised


class Linear:
    def __init__(self, weight: mx.array, bias: mx.array | None = None, quantised: Quantised | None = None) -> None:
        self.weight, self.bias, self.quantised = weight, bias, quantised

    def __call__(self, x: mx.array) -> mx.array:
        if self.quantised:
            scales, biases, bits, group_size = self.quantised
            y = mx.quantized_matmul(x, self.weight, scales, biases, transpose=True, group_size=group_size, bits=bits)
            return y if self.bias is None else y + self.bias
        return x @ self.weight.T if self.bias is None else mx.addmm(self.bias, x, self.weight.T)


class Linears:
    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = [Linear(*part) for part in parts]

    def __call__(self, x: mx.array) -> tuple[mx.array, ...]:
        return tuple(part(x) for part in self.parts)


class Embedding:
    def __init__(self, weight: mx.array, quantised: Quantised | None = None) -> None:
        self.weight, self.quantised = weight, quantised

    def __call__(self, ids: np.ndarray) -> mx.array:
        check_ids(ids, self.weight.shape[0])
        index = mx.array(ids)
        if not self.quantised:
            return self.weight[index]
        scales, biases, bits, group_size = self.quantised
        return mx.dequantize(self.weight[index], scales[index], biases[index], group_size=group_size, bits=bits)

    def logits(self, x: mx.array, ids: Sequence[int] | np.ndarray) -> mx.array:
        return x @ self(np.asarray(ids)).T


class LayerNorm:
    def __init__(self, weight: mx.array, bias: mx.array | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.bias, self.eps).astype(x.dtype)


class RMSNorm:
    """The weight keeps f32 where an offset is added: 1 + w loses w's last bits in bf16."""

    def __init__(self, weight: mx.array, eps: float, offset: float) -> None:
        self.weight, self.eps = weight.astype(F32) + offset if offset else weight, eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps).astype(x.dtype)


class Depthwise:
    """taps: [K, D], bias: [D] or None. Sums in f32."""

    def __init__(self, taps: mx.array, bias: mx.array | None) -> None:
        self.taps, self.bias = taps.astype(F32), None if bias is None else bias.astype(F32)

    def __call__(self, x: mx.array, segments: Segments, *, causal: bool = False) -> mx.array:
        left = len(self.taps) - 1 if causal else len(self.taps) // 2
        y, out = mx.concatenate([x, mx.zeros_like(x[:1])]).astype(F32), self.bias
        for k, offset in enumerate(range(-left, len(self.taps) - left)):
            part = y[segments.memo(("mlx", "neighbour", offset), partial(_neighbour, segments, offset))] * self.taps[k]
            out = part if out is None else out + part
        return out.astype(x.dtype)                        # type: ignore[union-attr]


def _neighbour(segments: Segments, offset: int) -> mx.array:
    """[T] rows, T for one that lies outside the segment."""
    index, outside = neighbour(segments, offset)
    index = index.copy()
    index[outside] = segments.total
    return mx.array(index)


# ---- pointwise

def gelu(x: mx.array) -> mx.array:
    y = x.astype(F32)
    return (y * (0.5 + 0.5 * mx.erf(y * 0.5 ** 0.5))).astype(x.dtype)


def gelu_tanh(x: mx.array) -> mx.array:
    y = x.astype(F32)
    return (y * (0.5 + 0.5 * mx.tanh(0.7978845608028654 * y * (1 + 0.044715 * y * y)))).astype(x.dtype)


def silu(x: mx.array) -> mx.array:
    y = x.astype(F32)
    return (y * mx.sigmoid(y)).astype(x.dtype)


def relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def tanh(x: mx.array) -> mx.array:
    return mx.tanh(x.astype(F32)).astype(x.dtype)


# ---- shape

def split(x: mx.array, parts: int) -> tuple[mx.array, ...]:
    return tuple(mx.split(x, parts, axis=-1))


def concat(parts: Sequence[mx.array]) -> mx.array:
    return mx.concatenate(list(parts), axis=-1)


def heads(x: mx.array, count: int) -> mx.array:
    return x.reshape(x.shape[0], count, -1)


def rows(x: mx.array, index: np.ndarray) -> mx.array:
    return x[mx.array(index)]


def put(x: mx.array, index: np.ndarray, values: mx.array) -> mx.array:
    x = mx.array(x)                                        # item assignment changes the object it is given
    x[mx.array(index)] = values.astype(x.dtype)
    return x


def put_add(x: mx.array, index: np.ndarray, values: mx.array) -> mx.array:
    return x.at[mx.array(index)].add(values.astype(x.dtype))


# ---- mixing

def rope(x: mx.array, table: Rope) -> mx.array:
    cos, sin = table.memo("mlx", lambda: (mx.array(table.cos)[:, None], mx.array(table.sin)[:, None]))
    half = cos.shape[-1]
    a, b, rest = x[..., :half].astype(F32), x[..., half:2 * half].astype(F32), x[..., 2 * half:]
    return mx.concatenate([(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype), rest], -1)


@dataclass(frozen=True, eq=False)
class Block:
    """Segments of similar length, padded to the longest: [b, Lq] query rows and [b, Lk] key rows of the pack.

    A pad repeats its segment's last row; `real` [b, Lq] and `real_keys` [b, Lk] tell it apart, None where there is no pad.
    `plain`: all rows of the pack in order, so that a reshape does for the gather.
    """

    query_rows: mx.array
    key_rows: mx.array
    queries: mx.array                                      # positions [b, Lq]; a pad repeats the last, so it sees what that sees
    keys: mx.array                                         # positions [b, Lk]
    unseen: mx.array | None                                # [b, Lk] bool: pads and hidden rows
    real: mx.array | None
    plain: bool
    prefixed: bool
    lengths: mx.array                                      # [b, 1] f32


@dataclass(frozen=True, eq=False)
class Layout:
    """A pack as padded blocks, and the way back: `back` [T] rows of the blocks laid end to end, `order` [B] where each segment went."""

    blocks: list[Block]
    back: mx.array
    order: mx.array


def _layout(segments: Segments) -> Layout:
    layout: Layout = segments.memo("mlx", lambda: _build_layout(segments))
    return layout


def _build_layout(segments: Segments) -> Layout:
    """A block is cut where the next segment has under 3/4 of its longest's keys: one long text does not pad fifty short ones."""
    key_lengths = segments.lengths + segments.offsets
    order = np.argsort(-key_lengths, kind="stable")
    cuts, longest = [0], int(key_lengths[order[0]])
    for i, length in enumerate(key_lengths[order].tolist()):
        if 4 * length < 3 * longest:
            cuts.append(i)
            longest = length
    back, base, blocks = np.empty(segments.total, np.int32), 0, []
    for members in np.split(order, cuts[1:]):
        lengths, offsets, first = segments.lengths[members][:, None], segments.offsets[members][:, None], segments.first[members][:, None]
        q = np.arange(int(lengths.max()), dtype=np.int32)[None]
        k = np.arange(int((lengths + offsets).max()), dtype=np.int32)[None]
        real, real_keys = q < lengths, k < lengths + offsets
        query_rows = first + np.minimum(q, lengths - 1)
        key_rows = first + np.minimum(k, lengths + offsets - 1) - offsets
        if segments.parent is not None:
            key_rows = np.where(k < offsets, segments.first[segments.parent[members]][:, None] + k, key_rows)
        unseen = ~real_keys if segments.hidden is None else ~real_keys | segments.hidden[key_rows]
        back[query_rows[real]] = base + np.flatnonzero(real)
        base += real.size
        blocks.append(Block(
            query_rows=mx.array(query_rows), key_rows=mx.array(key_rows), queries=mx.array(np.minimum(q, lengths - 1) + offsets),
            keys=mx.array(np.where(real_keys, k, -1)), unseen=mx.array(unseen) if unseen.any() else None,
            real=None if real.all() else mx.array(real), prefixed=bool(offsets.any()), lengths=mx.array(lengths.astype(np.float32)),
            plain=bool(real.all() and not offsets.any() and real.size == segments.total and (np.diff(members) == 1).all())))
    return Layout(blocks, mx.array(back), mx.array(np.argsort(order).astype(np.int32)))


def _mask(segments: Segments, block: Block, causal: bool, window: int | None) -> mx.array | str | None:
    if causal and window is None and block.unseen is None and not block.prefixed:
        return "causal"
    allowed = visible(block.queries, block.keys, block.unseen, causal, window)
    return None if allowed is None else allowed[:, None]


def attention(q: mx.array, k: mx.array, v: mx.array, segments: Segments, causal: bool, window: int | None, scale: float) -> mx.array:
    layout = _layout(segments)
    masks = segments.memo(("mlx", causal, window), lambda: [_mask(segments, block, causal, window) for block in layout.blocks])
    out = []
    for block, mask in zip(layout.blocks, masks, strict=True):
        a, b, c = (_gather(x, index, block.plain).swapaxes(1, 2)                                    # [b, H, L, Dh]
                   for x, index in ((q, block.query_rows), (k, block.key_rows), (v, block.key_rows)))
        y = mx.fast.scaled_dot_product_attention(a, b, c, scale=scale, mask=mask)
        out.append(y.swapaxes(1, 2).flatten(2).flatten(0, 1))                                      # [b * L, H * Dh]
    if layout.blocks[0].plain:
        return out[0]
    return (mx.concatenate(out) if len(out) > 1 else out[0])[layout.back]


def _gather(x: mx.array, index: mx.array, plain: bool) -> mx.array:
    return x.reshape(*index.shape, *x.shape[1:]) if plain else x[index]


# ---- ends

def pool(x: mx.array, segments: Segments, mode: str) -> mx.array:
    if mode in ("cls", "lasttoken"):
        return x[mx.array(segments.first if mode == "cls" else segments.last)].astype(F32)
    layout = _layout(segments)
    out = []
    for block in layout.blocks:
        y = _gather(x, block.query_rows, block.plain).astype(F32)
        if mode == "max":
            out.append(y.max(1))                                                                   # a pad repeats a real row
        else:
            y = y if block.real is None else mx.where(block.real[..., None], y, 0.0)
            out.append(y.sum(1) / block.lengths)
    return mx.concatenate(out)[layout.order] if len(out) > 1 else out[0][layout.order]


def l2_normalize(x: mx.array) -> mx.array:
    x = x.astype(F32)
    return x / mx.maximum(mx.sqrt((x * x).sum(-1, keepdims=True)), 1e-9)


def numpy(x: mx.array) -> np.ndarray:
    return np.array(x.astype(F32))
