"""Tensors out of safetensors files, one at a time and only when asked for. Floats become f32 here, once.

Files are read and not mapped: pages of a mapped file count as this process's memory beside what is made of them.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError
from ..safetensors import DTYPES, Entry, read_header

F32 = np.float32
_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
           "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}

_BLOCK = 1 << 20                                           # integers unpacked at once
_PIECE = 1 << 17                                           # elements converted at once, in the second-level cache


def load(path: Path) -> dict[str, Entry]:
    return read_header(path)


def read(entry: Entry) -> np.ndarray:
    """A copy: the file may be replaced while the model lives. F16, BF16 and F64 come as f32, integers as they are stored."""
    out = np.empty(entry.shape, F32 if entry.dtype in _FLOATS else _STORED[entry.dtype])
    _fill(entry, 0, out.reshape(-1))
    return out


_FLOATS = ("F64", "F32", "F16", "BF16")


def _fill(entry: Entry, first: int, out: np.ndarray) -> None:
    """The elements from `first` on, as many as fit: [n], contiguous, f32 of floats and else of the stored type."""
    stored = np.dtype(_STORED[entry.dtype])
    with entry.path.open("rb", buffering=0) as file:
        file.seek(entry.begin + first * DTYPES[entry.dtype])
        if entry.dtype != "BF16" and stored == out.dtype:
            return _read(file, entry, out)
        raw = np.empty(min(_PIECE, len(out)), stored)
        for start in range(0, len(out), _PIECE):
            piece = out[start:start + _PIECE]
            _read(file, entry, raw[:len(piece)])
            if entry.dtype == "BF16":
                bits = piece.view(np.uint32)
                bits[:] = raw[:len(piece)]
                bits <<= 16
            else:
                piece[:] = raw[:len(piece)]


def _read(file: Any, entry: Entry, out: np.ndarray) -> None:
    left = memoryview(out.view(np.uint8))  # type: ignore[arg-type]
    while left:
        if not (count := file.readinto(left)):
            raise CheckpointError(f"{entry.path} was cut off while {entry.name} was read from it; download it again")
        left = left[count:]


class Stored:
    """A weight [N, K] that stays in its file: its rows are read, as f32, when somebody takes them."""

    def __init__(self, entry: Entry) -> None:
        if entry.dtype not in _FLOATS:
            raise CheckpointError(f"{entry.path}: {entry.name} is a weight of type {entry.dtype}; expected {', '.join(_FLOATS)}")
        self.entry, self.shape = entry, entry.shape

    def __len__(self) -> int:
        return self.shape[0]

    def fill(self, first: int, out: np.ndarray) -> None:
        """The rows from `first` on: [n, K] f32, contiguous."""
        _fill(self.entry, first * self.shape[1], out.reshape(-1))


class Joined:
    """Weights of one width, one below the other."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        self.parts = parts
        self.shape: tuple[int, ...] = (sum(map(len, parts)), parts[0].shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def fill(self, first: int, out: np.ndarray) -> None:
        done = 0
        for part in self.parts:
            count = min(len(part) - first, len(out) - done)
            if count > 0:
                _rows(part, first, out[done:done + count])
                done += count
            first = max(first - len(part), 0)


Weight = np.ndarray | Stored | Joined
"""[N, K], read as f32"""


def _rows(weight: Weight, first: int, out: np.ndarray) -> None:
    if isinstance(weight, np.ndarray):
        out[:] = weight[first:first + len(out)]
    else:
        weight.fill(first, out)


def blocks(weight: Weight, step: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows [n, K] f32): all of a weight, some rows at a time, a multiple of `step` but for the last. Rows are overwritten
    by the next ones."""
    height, width = weight.shape
    count = max(_PIECE // max(width, 1) // step, 1) * step
    buffer = np.empty((min(count, height), width), F32)
    for first in range(0, height, count):
        rows = buffer[:min(count, height - first)]
        _rows(weight, first, rows)
        yield first, rows


def whole(weight: Weight) -> np.ndarray:
    """[N, K] f32, contiguous"""
    if isinstance(weight, np.ndarray):
        return np.ascontiguousarray(weight, F32)
    out = np.empty(weight.shape, F32)
    weight.fill(0, out)
    return out


def dequantize(weight: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, group_size: int) -> np.ndarray:
    """MLX's affine packing, `bits`-wide unsigned ints one after the other from the lowest bit on: [N, words] -> [N, K] f32.

    Eight of them fill `bits` bytes. In blocks of rows: the integers of a whole table would take twice the room of its floats.
    """
    rows, width = len(weight), scales.shape[1] * group_size
    packed = np.ascontiguousarray(weight).view(np.uint8).reshape(rows, width // 8, bits)
    out = np.empty((rows, width // group_size, group_size), F32)
    height = max(_BLOCK // width, 1)
    for start in range(0, rows, height):
        block = slice(start, start + height)
        eight = np.zeros(packed[block].shape[:2], np.uint64)
        for i in range(bits):
            eight |= packed[block, :, i].astype(np.uint64) << np.uint64(8 * i)
        into = out[block].reshape(len(eight), -1, 8)
        for i in range(8):
            into[..., i] = (eight >> np.uint64(bits * i)) & np.uint64(2 ** bits - 1)
        out[block] *= scales[block, :, None]
        out[block] += biases[block, :, None]
    return out.reshape(rows, width)
