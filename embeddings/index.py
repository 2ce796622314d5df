"""Where vectors are searched. `VectorIndex` is what an engine offers; `ExactIndex`, the default, scores every passage.

It maps the search files of a collection (`segments`), reads what they lack from the database, hides what was removed, and writes the
missing part into a new segment once it is worth a file. The collection's `generation` tells whether anything changed, `deletions` whether
anything was removed.
"""
from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol

import numpy as np
from django.conf import settings
from django.db import connection
from django.db.models import Sum
from numpy.typing import NDArray

from inference.errors import NotFound

from . import segments, vectors
from .models import Collection, Passage
from .scoring import Block, Mask, Metric, Scored, View, best, take

logger = logging.getLogger(__name__)

TAIL_BYTES = 8 << 20       # what is read from the database at each start rather than written into a segment
READ_ROWS = 2_000          # rows of the database at a time
DEAD_SHARE = 0.25          # of the passages in the files: more removed ones, and all are written anew

Capability = Literal["single", "multi", "filters", "exact", "distributed"]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stats:
    passages: int             # that a search sees
    removed: int              # still in the files, hidden
    segments: int
    bytes: int                # of the files
    unindexed: int            # read from the database


class Answers(list[list[Scored]]):
    """By query its best documents. `exact`: every passage was compared."""

    def __init__(self, answers: Iterable[list[Scored]] = (), *, exact: bool) -> None:
        super().__init__(answers)
        self.exact = exact


class VectorIndex(Protocol):
    """`search` and `nearest` answer from what is committed when they are called. Every method may be called from any thread."""

    capabilities: frozenset[Capability]

    def search(self, collection: Collection, queries: list[NDArray[Any]], limit: int, *,
               documents: Ints | None = None, without: int | None = None) -> Answers:
        """By query ([Q, D] f32) its best documents. `documents`: only these ids, ascending. `without`: a passage left out."""

    def stats(self, collection: Collection) -> Stats: ...
    def ensure(self, collection: Collection) -> bool:
        """After a large write: makes what makes searches fast and is not made by searches themselves. False: nothing is."""

    def rebuild(self, collection: Collection) -> None: ...
    def drop(self, collection: Collection) -> None: ...


@dataclass
class _State:
    """What this process holds of a collection."""

    generation: int
    deletions: int
    manifest: segments.Manifest
    files: list[Block]
    tail: Block
    masks: list[Mask | None]      # of the files, then of the tail

    @cached_property
    def view(self) -> View:
        return View([*self.files, self.tail], tuple(self.masks))


class ExactIndex:
    capabilities: frozenset[Capability] = frozenset({"single", "multi", "filters", "exact"})

    def __init__(self, root: Path) -> None:
        self.root = root
        self._states: dict[str, _State] = {}
        self._locks: dict[str, Lock] = {}
        self._guard = Lock()

    def search(self, collection: Collection, queries: list[NDArray[Any]], limit: int, *,
               documents: Ints | None = None, without: int | None = None) -> Answers:
        view = self.view(collection)
        masks, metric = view.masks_for(documents, without), metric_of(collection)
        return Answers((best(view, masks, metric, query, limit) for query in queries), exact=True)

    def view(self, collection: Collection) -> View:
        """All living passages, as committed now."""
        with self._lock(collection):
            return self._refresh(collection).view

    def stats(self, collection: Collection) -> Stats:
        with self._lock(collection):
            state = self._refresh(collection)
        blocks = zip([*state.files, state.tail], state.masks, strict=True)
        alive = sum(len(block) if mask is None else int(mask.sum()) for block, mask in blocks)
        stored = sum(len(block) for block in state.files)
        size = sum(path.stat().st_size for path in self.folder(collection).rglob("*") if path.is_file())
        return Stats(alive, stored + len(state.tail) - alive, len(state.files), size, len(state.tail))

    def ensure(self, collection: Collection) -> bool:
        return False

    def rebuild(self, collection: Collection) -> None:
        self.drop(collection)
        with self._lock(collection):
            self._refresh(collection)

    def drop(self, collection: Collection) -> None:
        with self._lock(collection):
            self._states.pop(str(collection.token), None)
            shutil.rmtree(self.folder(collection), ignore_errors=True)

    def folder(self, collection: Collection) -> Path:
        return self.root / f"{collection.pk}-{collection.name}"

    def _lock(self, collection: Collection) -> Lock:
        with self._guard:
            return self._locks.setdefault(str(collection.token), Lock())

    def _refresh(self, collection: Collection) -> _State:
        key = str(collection.token)
        now = Collection.objects.filter(pk=collection.pk, token=collection.token).values_list("generation", "deletions").first()
        if now is None:
            self._states.pop(key, None)
            raise NotFound(f"Collection {collection.name!r} was deleted", code="collection_not_found")
        generation, deletions = now
        state = self._states.get(key)
        if state is not None and state.generation == generation:
            return state
        state = self._open(collection, generation, state)
        removed = deletions != state.deletions
        state = self._extend(collection, state)
        self._hide(collection, state, deletions, removed)
        if removed and sum(len(m) - int(m.sum()) for m in state.masks[:-1] if m is not None) > DEAD_SHARE * state.manifest.count:
            state = self._write(collection, state, 0, everything=True) or state
        self._states[key] = state
        return state

    def _open(self, collection: Collection, generation: int, held: _State | None) -> _State:
        """What the files hold; nothing where they are absent, damaged, another's, or ahead of a database that was put back.

        A state whose manifest is still the current one is kept with its tail, else at least the segments it has mapped.
        """
        folder, space = self.folder(collection), collection.space
        dtype = vectors.stored_as(space.multi_vector)
        mapped = {} if held is None else {info.name: block for info, block in zip(held.manifest.segments, held.files, strict=True)}
        for attempt in range(2):      # twice: another process may switch between the manifest and its segments
            try:
                manifest = segments.read(folder, str(collection.token), space.fingerprint)
                if manifest.generation > generation:
                    raise segments.Unusable("they are newer than the database")
                if held is not None and held.manifest == manifest and held.generation <= generation:
                    return replace(held, generation=generation, masks=list(held.masks))
                files = [mapped[s.name] if s.name in mapped else segments.load(folder, s, space.dims, dtype) for s in manifest.segments]
                if manifest.deletions == self._deletions(collection) and manifest.count != self._count(collection, manifest):
                    raise segments.Unusable("they hold other passages than the database")
                return _State(generation, manifest.deletions, manifest, files, empty(space.dims, dtype), [None] * (len(files) + 1))
            except segments.Unusable as error:
                if attempt and (folder / "CURRENT").exists():
                    logger.warning("The search files of collection %s are not used: %s", collection.name, error)
        if held is not None and not held.files and held.generation <= generation:
            return replace(held, generation=generation, masks=list(held.masks))
        nothing = segments.Manifest(str(collection.token), space.fingerprint, space.dims, dtype, 0, 0, ())
        return _State(generation, 0, nothing, [], empty(space.dims, dtype), [None])

    @staticmethod
    def _deletions(collection: Collection) -> int:
        return Collection.objects.values_list("deletions", flat=True).get(pk=collection.pk)

    @staticmethod
    def _count(collection: Collection, manifest: segments.Manifest) -> int:
        last = manifest.segments[-1].last_id if manifest.segments else 0
        return Passage.objects.filter(collection=collection, id__lte=last).count()

    def _extend(self, collection: Collection, state: _State) -> _State:
        """With everything written since, in a new segment where it is large, else in memory."""
        last = _last(state)
        rows = Passage.objects.filter(collection=collection, id__gt=last).aggregate(rows=Sum("rows"))["rows"] or 0
        rows += len(state.tail.vectors)
        if rows * state.manifest.dims * np.dtype(state.manifest.dtype).itemsize > TAIL_BYTES:
            written = self._write(collection, state, rows, everything=False)
            if written is not None:
                return written
        fresh = list(passages_after(collection, last, state.manifest.dims, state.manifest.dtype))
        if fresh:
            mask = state.masks[-1]
            state.tail = join([state.tail, *fresh])
            if mask is not None:
                state.masks[-1] = np.concatenate([mask, np.ones(len(state.tail) - len(mask), bool)])
        return state

    def _write(self, collection: Collection, state: _State, rows: int, *, everything: bool) -> _State | None:
        """The state with the tail, and all that came after it, in files; about `rows` rows are new. Small or (`everything`) all older
        segments are merged in, without their removed passages. None: another process is writing, or the disk will not take it.
        """
        folder, manifest = self.folder(collection), state.manifest
        count = len(manifest.segments) if everything else segments.mergeable(manifest.segments, rows)
        kept = len(manifest.segments) - count
        try:
            with segments.writing(folder) as mine:
                if not mine or not self._current(folder, manifest):
                    return None
                writer = segments.Writer(folder, manifest.dims, manifest.dtype)
                try:
                    for block, mask in zip([*state.files[kept:], state.tail], state.masks[kept:], strict=True):
                        writer.copy(block, mask)
                    for block in passages_after(collection, _last(state), manifest.dims, manifest.dtype):
                        writer.add(block)
                    info = writer.finish()
                    clean = all(mask is None for mask in state.masks[:kept])
                    fresh = replace(manifest, generation=state.generation, deletions=state.deletions if clean else manifest.deletions,
                                    segments=(*manifest.segments[:kept], info))
                    block = segments.load(folder, info, manifest.dims, manifest.dtype)
                    segments.switch(folder, fresh)
                except BaseException:
                    writer.discard()
                    raise
        except (OSError, segments.Unusable) as error:
            logger.warning("The search files of collection %s cannot be written, it is searched from memory: %s", collection.name, error)
            return None
        return replace(state, manifest=fresh, files=[*state.files[:kept], block], tail=empty(manifest.dims, manifest.dtype),
                       masks=[*state.masks[:kept], None, None])

    @staticmethod
    def _current(folder: Path, manifest: segments.Manifest) -> bool:
        """Whether the segments the manifest names are still those on the disk; for a first one, whether nothing is there to be kept."""
        try:
            return segments.read(folder, manifest.token, manifest.fingerprint) == manifest or not manifest.segments
        except segments.Unusable:
            return not manifest.segments

    @staticmethod
    def _hide(collection: Collection, state: _State, deletions: int, removed: bool) -> None:
        """Masks for passages that are in the files but not in the database any more; the tail is without them."""
        if removed:
            ids = Passage.objects.filter(collection=collection).order_by("id").values_list("id", flat=True)
            living = np.fromiter(ids.iterator(), np.int64)
            for i, block in enumerate([*state.files, state.tail]):
                mask = np.isin(block.ids, living, assume_unique=True)
                state.masks[i] = None if mask.all() else mask
            if (alive := state.masks[-1]) is not None:           # else documents that change often would pile up in it
                state.tail, state.masks[-1] = take(state.tail, np.flatnonzero(alive)), None
        state.deletions = deletions


def metric_of(collection: Collection) -> Metric:
    space = collection.space
    return Metric(multi_vector=space.multi_vector, divide=not space.multi_vector and space.normalize != 2)


def _last(state: _State) -> int:
    """The largest passage id the state covers."""
    if len(state.tail):
        return int(state.tail.ids[-1])
    return state.manifest.segments[-1].last_id if state.manifest.segments else 0


def empty(dims: int, dtype: str) -> Block:
    return Block(np.empty((0, dims), dtype), np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


def join(blocks: list[Block]) -> Block:
    offsets, rows = [np.zeros(1, np.int64)], 0
    for block in blocks:
        offsets.append(block.offsets[1:] + rows)
        rows += len(block.vectors)
    return Block(*(np.concatenate(parts) for parts in (
        [b.vectors for b in blocks], offsets, [b.ids for b in blocks], [b.documents for b in blocks], [b.norms for b in blocks])))


def passages_after(collection: Collection, after: int, dims: int, dtype: str) -> Iterator[Block]:
    """Stored passages with larger ids than `after`, ascending."""
    query = Passage.objects.filter(collection=collection, id__gt=after).order_by("id")
    batch: list[tuple[int, int, int, str, vectors.Buffer]] = []
    for row in query.values_list("id", "document_id", "rows", "dtype", "vector").iterator(chunk_size=READ_ROWS):
        batch.append(row)
        if len(batch) == READ_ROWS:
            yield block_of(batch, dims, dtype)
            batch = []
    if batch:
        yield block_of(batch, dims, dtype)


def block_of(batch: list[tuple[int, int, int, str, vectors.Buffer]], dims: int, dtype: str) -> Block:
    ids, documents, counts, dtypes, data = zip(*batch, strict=True)
    rows = np.array(counts, np.int64)
    matrix = vectors.decode_many(data, rows, dims, dtypes, dtype)
    norms = np.sqrt(np.einsum("rd,rd->r", matrix, matrix, dtype=np.float32))
    offsets = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    return Block(matrix, offsets, np.array(ids, np.int64), np.array(documents, np.int64), norms)


@lru_cache(maxsize=8)
def _index_at(root: Path, vendor: str) -> VectorIndex:
    exact = ExactIndex(root)
    if settings.INDEX == "exact" or vendor != "postgresql":
        return exact
    from .pgvector import PgVectorIndex  # needs psycopg
    return PgVectorIndex(exact)


def get_index() -> VectorIndex:
    """The process's index: exact over files in the data directory, on PostgreSQL with pgvector's graphs where they were built."""
    return _index_at(Path(settings.VAR_DIR) / "index", connection.vendor)
