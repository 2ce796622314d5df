"""Vectors as bytes and back: little-endian, row-major, `dtype` as numpy spells it. Knows nothing of Django or the database."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SINGLE = "<f4"
MULTI = "<f2"        # hundreds of rows a passage: half the size for an error far below what MaxSim ranks by
DTYPES = (SINGLE, MULTI)

Buffer = bytes | bytearray | memoryview


def stored_as(multi_vector: bool) -> str:
    """The type a space's numbers are stored in. A unit row moves by 2^-11 at most in float16, so a MaxSim of Q query rows by Q / 2048."""
    return MULTI if multi_vector else SINGLE


class Stored(NamedTuple):
    """What a row of the database holds: `numpy.frombuffer(data, dtype).reshape(rows, dims)` is the vector."""

    data: Buffer
    rows: int
    dims: int
    dtype: str


def encode(vector: NDArray[Any], dtype: str = SINGLE) -> Stored:
    """[dims] or [rows, dims], any float dtype. Raises ValueError for another shape, no rows, or a number that is not finite."""
    _known(dtype)
    matrix = np.atleast_2d(np.asarray(vector))
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"a vector has the shape [dims] or [rows, dims] with at least one number, not {list(np.shape(vector))}")
    rows, dims = matrix.shape
    return Stored(_converted([matrix], dtype), rows, dims, dtype)


def encode_many(vectors: Sequence[NDArray[Any]], dtype: str = SINGLE) -> list[Stored]:
    """`encode` of each [rows, dims], at a tenth of the time where they are small: those of one width are converted and checked as one
    matrix, and their bytes are parts of one buffer."""
    shapes = [vector.shape for vector in vectors]
    if len({shape[1:] for shape in shapes}) != 1 or len(shapes[0]) != 2 or not all(map(all, set(shapes))):
        return [encode(vector, dtype) for vector in vectors]
    _known(dtype)
    buffer, dims = _converted(vectors, dtype), shapes[0][1]
    ends = list(accumulate(rows * dims * np.dtype(dtype).itemsize for rows, _ in shapes))
    return [Stored(buffer[begin:end], rows, dims, dtype) for begin, end, (rows, _) in zip([0, *ends[:-1]], ends, shapes, strict=True)]


def _converted(matrices: Sequence[NDArray[Any]], dtype: str) -> memoryview:
    """The bytes of all rows."""
    with np.errstate(over="ignore"):
        stored: NDArray[Any] = np.concatenate(matrices, dtype=np.dtype(dtype), casting="unsafe")
    if not np.isfinite(stored).all():
        raise ValueError(f"a vector holds a number that is not finite as {dtype}")
    return stored.reshape(-1).view(np.uint8).data


def decode(data: Buffer, rows: int, dims: int, dtype: str) -> NDArray[Any]:
    """[rows, dims] of `dtype`, read-only over `data`. Raises ValueError where the sizes do not agree."""
    _known(dtype)
    expected = rows * dims * np.dtype(dtype).itemsize
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if rows < 1 or dims < 1 or size != expected:
        raise ValueError(f"{rows} x {dims} numbers of {dtype} take {expected} bytes, found {size}")
    array: NDArray[Any] = np.frombuffer(data, dtype).reshape(rows, dims)
    array.flags.writeable = False
    return array


def decode_many(data: Sequence[Buffer], rows: NDArray[np.int64], dims: int, dtypes: Sequence[str], into: str) -> NDArray[Any]:
    """The rows of many vectors laid end to end: [sum(rows), dims] of dtype `into`."""
    if set(dtypes) == {into}:
        return decode(b"".join(data), int(rows.sum()), dims, into)
    parts = [decode(d, int(r), dims, t) for d, r, t in zip(data, rows, dtypes, strict=True)]
    return np.concatenate(parts).astype(into, copy=False) if parts else np.empty((0, dims), into)


def _known(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"vectors are stored as {' or '.join(DTYPES)}, not {dtype!r}")
