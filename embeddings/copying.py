"""Documents and their passages written into PostgreSQL by COPY, several times as fast as INSERT. Runs inside the caller's transaction.

The caller holds the collection's lock and knows which documents are there. New ones are copied straight into their table, under ids drawn
before, so that their passages can follow; those that are there are updated, and keep their rows. Passages are never updated: the caller has
removed the old ones, and the new ones are numbered in the order they are given.

Rows are laid out here, which takes a quarter of the time psycopg takes. COPY's binary format has for every row the number of its fields,
and for every field its length in bytes and the bytes, all numbers big-endian.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from struct import Struct
from typing import Any, NamedTuple

import orjson
from django.db import connections

from .vectors import Buffer, Stored

BEGIN, END = b"PGCOPY\n\xff\r\n\x00" + bytes(8), b"\xff\xff"
WRITE_BYTES = 1 << 16      # sent at a time, so that the server reads rows while the next ones are laid out

DRAW = """
    WITH numbers AS MATERIALIZED (SELECT pg_get_serial_sequence('embeddings_document', 'id')::regclass AS sequence)
    SELECT nextval(sequence) FROM numbers, generate_series(1, %s)"""
COPY_DOCUMENTS = """
    COPY embeddings_document (
        collection_id, split, created_at, updated_at, id, content_hash, tokens, truncated, external_id, text, metadata)
    FROM STDIN (FORMAT BINARY)"""
UPDATE_DOCUMENTS = """
    UPDATE embeddings_document AS old SET
        text = new.text, metadata = new.metadata, content_hash = new.content_hash, tokens = new.tokens, truncated = new.truncated,
        split = %s, updated_at = %s
    FROM unnest(%s::bigint[], %s::text[], %s::jsonb[], %s::text[], %s::integer[], %s::boolean[])
        AS new (id, text, metadata, content_hash, tokens, truncated)
    WHERE old.id = new.id AND old.id = ANY (%s::bigint[])"""      # a join alone reads the whole table
AMONG = "external_id = ANY(ARRAY(SELECT jsonb_array_elements_text(%s::jsonb)))"      # one parameter, whatever the number of ids
COPY_PASSAGES = """
    COPY embeddings_passage (collection_id, space_id, dims, dtype, document_id, part, start, "end", tokens, rows, vector)
    FROM STDIN (FORMAT BINARY)"""

_DOCUMENT_BEGIN, _PASSAGE_BEGIN = Struct(">hiqi"), Struct(">hiqiqiii")
_TIMES = Struct(">iqiq")
_DOCUMENT = Struct(">iqi64siii?i")         # id, hash, tokens, truncated, length of the external id
_PASSAGE = Struct(">iqiiiiiiiiiii")        # document, part, start, end, tokens, rows, length of the vector
_LENGTH = Struct(">i")
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class DocumentRow(NamedTuple):
    external_id: str
    text: str
    metadata: dict[str, Any]
    content_hash: str
    tokens: int
    truncated: bool


class PassageRow(NamedTuple):
    document: int
    part: int
    start: int
    end: int
    tokens: int
    vector: Stored


def documents(collection: int, split: str, now: datetime, rows: Sequence[DocumentRow], using: str) -> list[int]:
    """Makes documents of which none is there. Their primary keys, ascending."""
    if not rows:
        return []
    with connections[using].cursor() as cursor:
        cursor.execute(DRAW, [len(rows)])
        keys = sorted(key for (key,) in cursor.fetchall())
    copy(COPY_DOCUMENTS, _documents(collection, split, now, keys, rows), using)
    return keys


def replace(split: str, now: datetime, rows: dict[int, DocumentRow], using: str) -> None:
    """New contents for documents that are there, by primary key."""
    if rows:
        values = rows.values()
        with connections[using].cursor() as cursor:
            cursor.execute(UPDATE_DOCUMENTS, [
                split, now, list(rows), [row.text for row in values], [_json(row.metadata).decode() for row in values],
                [row.content_hash for row in values], [row.tokens for row in values], [row.truncated for row in values], list(rows)])


def passages(collection: int, space: int, dims: int, dtype: str, rows: Iterable[PassageRow], using: str) -> None:
    copy(COPY_PASSAGES, _passages(collection, space, dims, dtype, rows), using)


def copy(statement: Any, rows: Iterable[Buffer], using: str) -> None:
    """Rows in the binary format, in pieces of any size. Raises what Django raises for a database that refuses or is gone."""
    with connections[using].wrap_database_errors, connections[using].cursor() as cursor, cursor.copy(statement) as stream:
        parts: list[Buffer] = [BEGIN]
        size = 0
        for row in rows:
            parts.append(row)
            size += len(row)
            if size >= WRITE_BYTES:
                stream.write(b"".join(parts))
                parts, size = [], 0
        stream.write(b"".join([*parts, END]))


def among(external_ids: Iterable[str]) -> str:
    """The parameter of AMONG."""
    return orjson.dumps(list(external_ids)).decode()


def _documents(collection: int, split: str, now: datetime, keys: Sequence[int], rows: Sequence[DocumentRow]) -> Iterable[Buffer]:
    cut, at = split.encode(), (now - _EPOCH) // timedelta(microseconds=1)
    begin = _DOCUMENT_BEGIN.pack(11, 8, collection, len(cut)) + cut + _TIMES.pack(8, at, 8, at)
    for key, row in zip(keys, rows, strict=True):
        external_id, text, metadata = row.external_id.encode(), row.text.encode(), _json(row.metadata)
        yield b"".join((
            begin, _DOCUMENT.pack(8, key, 64, row.content_hash.encode(), 4, row.tokens, 1, row.truncated, len(external_id)), external_id,
            _LENGTH.pack(len(text)), text, _LENGTH.pack(1 + len(metadata)), b"\x01", metadata))       # 1: the version of jsonb's format


def _passages(collection: int, space: int, dims: int, dtype: str, rows: Iterable[PassageRow]) -> Iterable[Buffer]:
    begin = _PASSAGE_BEGIN.pack(11, 8, collection, 8, space, 4, dims, len(dtype)) + dtype.encode()
    for document, part, start, end, tokens, vector in rows:
        yield begin + _PASSAGE.pack(8, document, 4, part, 4, start, 4, end, 4, tokens, 4, vector.rows, len(vector.data))
        yield vector.data


def _json(value: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:      # whole numbers of more than 64 bits
        return json.dumps(value).encode()
