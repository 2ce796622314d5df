"""A collection as files that other tools read: .npy with the ids beside it, or Parquet. A file appears whole or not at all."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from inference.errors import InvalidRequest

from . import vectors
from .models import Collection, Passage

ROWS = 1_000


def to_npy(collection: Collection, path: Path) -> int:
    """`path`: [R, D] f32, passages in the order of their documents. Beside it `.ids.jsonl`: for every passage its id, part, start, end and
    rows. Returns the number of passages.
    """
    header: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": (0, collection.space.dims)}
    passages = rows = 0
    with _replacing(path) as matrix, _replacing(path.with_suffix(".ids.jsonl")) as ids:
        np.lib.format.write_array_header_1_0(matrix, header)
        begin = matrix.tell()
        for passage in _passages(collection):
            vector = vectors.decode(passage.vector, passage.rows, passage.dims, passage.dtype)
            matrix.write(vector.astype("<f4").tobytes())
            ids.write(orjson.dumps({"id": passage.document.external_id, "part": passage.part, "start": passage.start, "end": passage.end,
                                    "rows": passage.rows}) + b"\n")
            passages, rows = passages + 1, rows + passage.rows
        matrix.seek(0)
        np.lib.format.write_array_header_1_0(matrix, header | {"shape": (rows, collection.space.dims)})
        if matrix.tell() != begin:      # numpy leaves room for the first axis to grow
            raise AssertionError("the header of the .npy file changed its length")
    return passages


def to_parquet(collection: Collection, path: Path) -> int:
    """A row per passage: id, part, start, end, text, metadata (JSON), vector (list of f32; for multi-vectors a list of lists)."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InvalidRequest("Parquet needs pyarrow; install it with: pip install 'mlxcel[parquet]'", param="out") from None
    space = collection.space
    single = pa.list_(pa.float32(), space.dims)
    schema = pa.schema([
        ("id", pa.string()), ("part", pa.int32()), ("start", pa.int64()), ("end", pa.int64()), ("text", pa.string()),
        ("metadata", pa.string()),
        ("vector", pa.list_(single) if space.multi_vector else single)],
        metadata={"model": space.model_id, "fingerprint": space.fingerprint, "document_prompt": space.document_prompt})
    passages = 0
    with _replacing(path) as stream, pq.ParquetWriter(stream, schema) as writer:
        for batch in _batches(collection):
            matrices = [vectors.decode(p.vector, p.rows, p.dims, p.dtype).astype(np.float32) for p in batch]
            values = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(matrices).reshape(-1)), space.dims)
            if space.multi_vector:
                values = pa.ListArray.from_arrays(pa.array(np.cumsum([0] + [p.rows for p in batch]), pa.int32()), values)
            writer.write_batch(pa.record_batch([
                pa.array([p.document.external_id for p in batch]), pa.array([p.part for p in batch], pa.int32()),
                pa.array([p.start for p in batch], pa.int64()), pa.array([p.end for p in batch], pa.int64()),
                pa.array([p.document.text[p.start:p.end] for p in batch]),
                pa.array([orjson.dumps(p.document.metadata).decode() for p in batch]), values], schema=schema))
            passages += len(batch)
    return passages


def _passages(collection: Collection) -> Iterator[Passage]:
    """One statement, so one moment, however long it takes to read."""
    passages = Passage.objects.filter(collection=collection).select_related("document")
    return passages.order_by("document_id", "part").iterator(chunk_size=ROWS)


def _batches(collection: Collection) -> Iterator[list[Passage]]:
    batch: list[Passage] = []
    for passage in _passages(collection):
        batch.append(passage)
        if len(batch) == ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror or error}", param="out") from error
    finally:
        fresh.unlink(missing_ok=True)
