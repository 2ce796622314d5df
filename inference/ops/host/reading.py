"""Tensors out of safetensors files, one at a time and only when asked for. Floats become f32 here, once."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from ..safetensors import Entry, read_header

F32 = np.float32
_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
           "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}


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
    """MLX's affine packing, `bits`-wide unsigned ints inside uint32 words, lowest first: [N, words] -> [N, K] f32."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    q = ((weight[..., None] >> shifts) & np.uint32(2 ** bits - 1)).reshape(len(weight), -1, group_size).astype(F32)
    q *= scales[..., None]
    q += biases[..., None]
    return q.reshape(len(weight), -1)
