"""Search files: immutable segments of passages, and the manifest that says which of them count. Derived from the database, disposable.

    <folder>/CURRENT             manifest, JSON: whose files these are, up to which write, the segments with their checksums
    <folder>/<segment>/vectors   [R, D] f32 or f16       <segment>/offsets    [N + 1] int64     <segment>/norms  [R] f32
                       ids       [N] int64, of passages  <segment>/documents  [N] int64
    <folder>/LOCK                held by the one process that writes

A segment is written under a name of its own and synced; only then does `os.replace` put a CURRENT in place that names it. A reader of the
old manifest keeps its mapped files; whatever does not fit (another owner, a checksum, a missing file) counts as absent.
"""
from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .scoring import Block, Mask, take

FORMAT = 1
ARRAYS = {"vectors": "", "offsets": "<i8", "ids": "<i8", "documents": "<i8", "norms": "<f4"}     # vectors have the manifest's dtype
COPY_PASSAGES = 4_096


class Unusable(Exception):
    """Files that are not there, not whole or not ours."""


@dataclass(frozen=True)
class SegmentInfo:
    name: str
    passages: int
    rows: int
    last_id: int
    checksums: dict[str, int]          # crc32 by array


@dataclass(frozen=True)
class Manifest:
    """`generation` and `deletions` are the collection's when the rows were read: what was removed by then is not in the files."""

    token: str
    fingerprint: str
    dims: int
    dtype: str
    generation: int
    deletions: int
    segments: tuple[SegmentInfo, ...]
    format: int = FORMAT

    @property
    def count(self) -> int:
        return sum(segment.passages for segment in self.segments)


def read(folder: Path, token: str, fingerprint: str) -> Manifest:
    """The manifest of that owner. Raises Unusable."""
    try:
        values = json.loads((folder / "CURRENT").read_bytes())
        values["segments"] = tuple(SegmentInfo(**segment) for segment in values["segments"])
        manifest = Manifest(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Unusable(str(error)) from None
    if (manifest.format, manifest.token, manifest.fingerprint) != (FORMAT, token, fingerprint):
        raise Unusable("files of another collection, space or format")
    return manifest


def load(folder: Path, info: SegmentInfo, dims: int, dtype: str) -> Block:
    """The segment, memory-mapped, its checksums verified. Raises Unusable."""
    shapes = {"vectors": (info.rows, dims), "offsets": (info.passages + 1,), "ids": (info.passages,), "documents": (info.passages,),
              "norms": (info.rows,)}
    arrays: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        path, kind = folder / info.name / name, np.dtype(ARRAYS[name] or dtype)
        try:
            if path.stat().st_size != kind.itemsize * int(np.prod(shape)):
                raise Unusable(f"{path} has the wrong size")
            arrays[name] = np.memmap(path, kind, "r", shape=shape).view(np.ndarray) if 0 not in shape else np.empty(shape, kind)
        except (OSError, ValueError) as error:
            raise Unusable(f"{path}: {error}") from None
        if zlib.crc32(arrays[name].reshape(-1).view(np.uint8).data) != info.checksums[name]:
            raise Unusable(f"{path} has another checksum")
    return Block(**arrays)


def switch(folder: Path, manifest: Manifest) -> None:
    """Makes the manifest the current one and removes the segments it does not name."""
    fresh = folder / f"CURRENT.{uuid.uuid4().hex}"
    try:
        with fresh.open("wb") as stream:
            stream.write(json.dumps(asdict(manifest)).encode())
            _sync(stream)
        os.replace(fresh, folder / "CURRENT")
    finally:
        fresh.unlink(missing_ok=True)
    _sync_folder(folder)
    named = {segment.name for segment in manifest.segments}
    for path in folder.iterdir():
        if path.is_dir() and path.name not in named:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def writing(folder: Path) -> Iterator[bool]:
    """True for the one process that may write here now; never waits. The lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "LOCK").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


class Writer:
    """Writes one segment piece by piece; nothing refers to it until its `finish()` is put into a manifest."""

    def __init__(self, folder: Path, dims: int, dtype: str) -> None:
        self.folder, self.dims, self.dtype = folder, dims, dtype
        self.name = uuid.uuid4().hex
        self.passages = self.rows = self.last_id = 0
        self.checksums = dict.fromkeys(ARRAYS, 0)
        (folder / self.name).mkdir(parents=True)
        self.streams: dict[str, IO[bytes]] = {name: (folder / self.name / name).open("wb") for name in ARRAYS}
        self._write("offsets", np.zeros(1, np.int64))

    def add(self, block: Block) -> None:
        if not len(block):
            return
        self._write("vectors", block.vectors)
        self._write("offsets", block.offsets[1:] - block.offsets[0] + self.rows)
        self._write("ids", block.ids)
        self._write("documents", block.documents)
        self._write("norms", block.norms)
        self.passages += len(block)
        self.rows += len(block.vectors)
        self.last_id = int(block.ids[-1])

    def copy(self, block: Block, mask: Mask | None) -> None:
        """The living passages of another segment."""
        alive = np.arange(len(block)) if mask is None else np.flatnonzero(mask)
        for at in range(0, len(alive), COPY_PASSAGES):
            self.add(take(block, alive[at:at + COPY_PASSAGES]))

    def finish(self) -> SegmentInfo:
        for stream in self.streams.values():
            _sync(stream)
            stream.close()
        _sync_folder(self.folder / self.name)
        return SegmentInfo(self.name, self.passages, self.rows, self.last_id, self.checksums)

    def discard(self) -> None:
        for stream in self.streams.values():
            with suppress(OSError):      # a full disk: what is buffered cannot be written either
                stream.close()
        shutil.rmtree(self.folder / self.name, ignore_errors=True)

    def _write(self, name: str, array: NDArray[Any]) -> None:
        data = np.ascontiguousarray(array, ARRAYS[name] or self.dtype).reshape(-1).view(np.uint8).data
        self.checksums[name] = zlib.crc32(data, self.checksums[name])
        self.streams[name].write(data)


def mergeable(segments: Sequence[SegmentInfo], rows: int) -> int:
    """How many trailing segments to merge with `rows` new rows, so that sizes fall geometrically and their number stays logarithmic."""
    count = 0
    while count < len(segments) and segments[-1 - count].rows < 2 * rows:
        rows += segments[-1 - count].rows
        count += 1
    return count


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
