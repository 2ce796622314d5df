"""Tensors out of safetensors files, one at a time and only when asked for. Floats become f32 here, once."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from ..safetensors import Entry, read_header

F32 = np.float32
_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
           "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}

_BLOCK = 1 << 20                                           # integers unpacked at once


def load(path: Path) -> dict[str, Entry]:
    return read_header(path)


def read(entry: Entry) -> np.ndarray:
    """A copy: the file may be replaced while the model lives. F16, BF16 and F64 come as f32, integers as they are stored."""
    stored = np.asarray(np.memmap(entry.path, np.uint8, "r"))[entry.begin:entry.end].view(_STORED[entry.dtype])
    if entry.dtype == "BF16":
        wide = stored.astype(np.uint32)
        wide <<= 16
        return wide.view(F32).reshape(entry.shape)
    return np.array(stored, F32 if entry.dtype in ("F64", "F32", "F16") else stored.dtype).reshape(entry.shape)


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
