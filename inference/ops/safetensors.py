"""The safetensors format: what a file holds, and whether it holds it. Both backends look here before they read.

Layout: the header's length (8 bytes, little end first), a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
"""Bytes an element, of the types that are read."""
_LONGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: bytes `begin` to `end`, counted from the start of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name; CheckpointError says what is wrong with a file that does not hold what it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        if first == b"version ":
            raise CheckpointError(f"{path} is a git-lfs pointer, not the weights: fetch them with `git lfs pull`")
        length = int.from_bytes(first, "little")
        if len(first) < 8 or not 2 <= length <= _LONGEST_HEADER:
            raise CheckpointError(f"{path} ({size} bytes) is not a safetensors file: it starts with {first!r}")
        if 8 + length > size:
            raise CheckpointError(f"{path} is cut off: its header needs {8 + length} bytes and the file has {size}; download it again")
        text = file.read(length)
    try:
        raw = json.loads(text)
        raw.pop("__metadata__", None)
        entries = {name: _entry(path, name, value, 8 + length) for name, value in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a damaged header ({error}); download it again") from None
    end = max((entry.end for entry in entries.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path} is cut off: its tensors need {end} bytes and the file has {size}; download it again")
    return entries


def _entry(path: Path, name: str, value: Mapping[str, Any], base: int) -> Entry:
    dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} is of type {dtype}, which is not read; known: {', '.join(DTYPES)}")
    if begin < 0 or end - begin != prod(shape) * DTYPES[dtype]:
        raise ValueError(f"{name}: {dtype} {list(shape)} in bytes {begin} to {end}")
    return Entry(path, name, dtype, shape, base + begin, base + end)
