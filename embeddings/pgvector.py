"""Single vectors in pgvector: a graph (HNSW) over half-precision copies finds candidates, the stored float32 vectors rank them.

A collection gets a derived table of its own, made and filled by `build`; rows of passages that are gone stay in it until the next `build`,
and drop out because candidates are read from the passages. What was written since is scored exactly beside them. Everything the graph is no
good for goes to the exact index: multi-vectors, filters, a collection without a table, or one that has grown far beyond it.
"""
from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from numpy.typing import NDArray
from psycopg import sql

from . import copying, index, vectors
from .index import Answers, Capability, ExactIndex, Ints, Stats
from .models import Collection, Passage
from .scoring import Block, View, best

logger = logging.getLogger(__name__)

MOST_DIMS = 4_000            # of an index over halfvec
LINKS, BUILD_CANDIDATES = 16, 64
CANDIDATES = 4               # for each document wanted: passages of one document take several
LEAST_CANDIDATES = 100
BUILD_MEMORY = "512MB"


@dataclass(frozen=True)
class _Seen:
    """What a process knows of a collection's table. `tail`: passages that are not in it; None: too many, or no table."""

    generation: int
    last: int
    tail: Block | None


def available() -> bool:
    """Whether the database is a PostgreSQL that has pgvector, or may have it."""
    if connections[DEFAULT_DB_ALIAS].vendor != "postgresql":
        return False
    with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'")
        return cursor.fetchone() is not None


def suits(collection: Collection) -> bool:
    return not collection.space.multi_vector and collection.space.dims <= MOST_DIMS


class PgVectorIndex:
    capabilities: frozenset[Capability] = frozenset({"single", "multi", "filters"})

    def __init__(self, exact: ExactIndex) -> None:
        self.exact = exact
        self._seen: dict[str, _Seen] = {}
        self._lock = Lock()

    def search(self, collection: Collection, queries: list[NDArray[Any]], limit: int, *,
               documents: Ints | None = None, without: int | None = None) -> Answers:
        seen = self._look(collection) if documents is None and suits(collection) else None
        if seen is None or seen.tail is None:
            return self.exact.search(collection, queries, limit, documents=documents, without=without)
        metric = index.metric_of(collection)
        answers = Answers(exact=False)
        for query in queries:
            found = self._candidates(collection, metric.query(query)[0], limit)
            view = View([found, seen.tail], [None, None])
            answers.append(best(view, view.masks_for(None, without), metric, query, limit))
        return answers

    def stats(self, collection: Collection) -> Stats:
        """Of the exact index, with what the graph takes."""
        stats, name = self.exact.stats(collection), table(collection)
        if not _exists(name):
            return stats
        with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
            cursor.execute("SELECT pg_total_relation_size(%s::regclass)", [name])
            return replace(stats, bytes=stats.bytes + int(cursor.fetchone()[0]))

    def rebuild(self, collection: Collection) -> None:
        self.exact.rebuild(collection)
        if suits(collection):
            _drop(collection)
            self.build(collection)

    def drop(self, collection: Collection) -> None:
        self.exact.drop(collection)
        if connections[DEFAULT_DB_ALIAS].vendor == "postgresql":
            _drop(collection)
        self._forget(collection)

    def ensure(self, collection: Collection) -> bool:
        """Builds, or adds to, the graph of a collection that has one, or is large enough, where the database has pgvector."""
        if not suits(collection) or not (self.built(collection) or (self._large(collection) and available())):
            return False
        self.build(collection)
        return True

    def built(self, collection: Collection) -> bool:
        return suits(collection) and _exists(table(collection))

    @staticmethod
    def _large(collection: Collection) -> bool:
        return Passage.objects.filter(collection=collection)[settings.INDEX_FROM - 1:settings.INDEX_FROM].exists()

    def build(self, collection: Collection) -> int:
        """Adds the passages that the table lacks, makes it if there is none, and removes those that are gone. Returns how many were added.

        Searches go on meanwhile, by what they knew.
        """
        name, dims, added = table(collection), collection.space.dims, 0
        target = sql.Identifier(name)
        with transaction.atomic(), connections[DEFAULT_DB_ALIAS].cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [hash_of("embeddings.pgvector"), collection.pk])
            fresh = not _exists(name)
            if fresh:
                cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
                cursor.execute(sql.SQL("CREATE TABLE {} (passage bigint PRIMARY KEY, document bigint NOT NULL, vector halfvec({}))")
                               .format(target, sql.Literal(dims)))
            else:
                cursor.execute(sql.SQL("DELETE FROM {} t WHERE NOT EXISTS (SELECT FROM embeddings_passage p WHERE p.id = t.passage)")
                               .format(target))
            for block in index.passages_after(collection, _last(name), dims, vectors.SINGLE):
                copying.copy(sql.SQL("COPY {} FROM STDIN (FORMAT BINARY)").format(target), [_rows(block)], DEFAULT_DB_ALIAS)
                added += len(block)
            if fresh:
                cursor.execute(sql.SQL("SET LOCAL maintenance_work_mem = {}").format(sql.Literal(BUILD_MEMORY)))
                cursor.execute(sql.SQL("CREATE INDEX ON {} USING hnsw (vector halfvec_cosine_ops) WITH (m = {}, ef_construction = {})")
                               .format(target, sql.Literal(LINKS), sql.Literal(BUILD_CANDIDATES)))
        with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
            cursor.execute(sql.SQL("ANALYZE {}").format(target))
        self._forget(collection)
        return added

    def _look(self, collection: Collection) -> _Seen | None:
        key = str(collection.token)
        generation = Collection.objects.filter(pk=collection.pk, token=collection.token).values_list("generation", flat=True).first()
        if generation is None:
            self._forget(collection)
            return None
        with self._lock:
            seen = self._seen.get(key)
        if seen is not None and seen.generation == generation:
            return seen
        name = table(collection)
        if not _exists(name):
            seen = _Seen(generation, 0, None)
        else:
            last, dims = _last(name), collection.space.dims
            missing = Passage.objects.filter(collection=collection, id__gt=last).count()
            tail = None if missing * dims * 4 > index.TAIL_BYTES else index.join([
                index.empty(dims, vectors.SINGLE), *index.passages_after(collection, last, dims, vectors.SINGLE)])
            seen = _Seen(generation, last, tail)
        with self._lock:
            self._seen[key] = seen
        return seen

    def _candidates(self, collection: Collection, query: NDArray[np.float32], limit: int) -> Block:
        """The passages nearest by the graph, as they are stored."""
        wanted = max(CANDIDATES * limit, LEAST_CANDIDATES)
        with transaction.atomic(), connections[DEFAULT_DB_ALIAS].cursor() as cursor:
            cursor.execute("SELECT set_config('hnsw.ef_search', %s, true), set_config('hnsw.iterative_scan', 'relaxed_order', true)",
                           [str(min(wanted, 1000))])
            cursor.execute(sql.SQL("""
                SELECT p.id, p.document_id, p.rows, p.dtype, p.vector FROM
                    (SELECT passage FROM {} ORDER BY vector <=> %s::halfvec LIMIT %s) near
                JOIN embeddings_passage p ON p.id = near.passage ORDER BY p.id""").format(sql.Identifier(table(collection))),
                           [_text(query), wanted])
            batch = cursor.fetchall()
        dims = collection.space.dims
        return index.block_of(batch, dims, vectors.SINGLE) if batch else index.empty(dims, vectors.SINGLE)

    def _forget(self, collection: Collection) -> None:
        with self._lock:
            self._seen.pop(str(collection.token), None)


def table(collection: Collection) -> str:
    return f"embeddings_hnsw_{collection.pk}"


def hash_of(name: str) -> int:
    """A number for an advisory lock."""
    return int.from_bytes(name.encode()[:3], "little")


def _exists(name: str) -> bool:
    with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
        cursor.execute("SELECT to_regclass(%s)", [name])
        return cursor.fetchone()[0] is not None


def _last(name: str) -> int:
    with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
        cursor.execute(sql.SQL("SELECT coalesce(max(passage), 0) FROM {}").format(sql.Identifier(name)))
        return int(cursor.fetchone()[0])


def _drop(collection: Collection) -> None:
    with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
        cursor.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(table(collection))))


def _rows(block: Block) -> bytes:
    """Rows as COPY takes them, all of one size: two bigints and a halfvec (dimensions, nothing, components), big-endian."""
    count, dims = block.vectors.shape
    row = np.dtype([("fields", ">i2"), ("n1", ">i4"), ("passage", ">i8"), ("n2", ">i4"), ("document", ">i8"), ("n3", ">i4"),
                    ("dims", ">i2"), ("unused", ">i2"), ("vector", ">f2", (dims,))])
    rows = np.zeros(count, row)
    rows["fields"], rows["n1"], rows["n2"], rows["n3"], rows["dims"] = 3, 8, 8, 4 + 2 * dims, dims
    rows["passage"], rows["document"] = block.ids, block.documents
    rows["vector"] = block.vectors / np.maximum(block.norms, np.finfo(np.float32).tiny)[:, None]      # unit length: nothing overflows
    return rows.tobytes()


def _text(query: NDArray[np.float32]) -> str:
    query = query / max(float(np.linalg.norm(query)), float(np.finfo(np.float32).tiny))
    return "[" + ",".join(map(str, query.astype(np.float16).astype(float))) + "]"
