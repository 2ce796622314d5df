"""Documents and their passages written into PostgreSQL by COPY, several times as fast as INSERT. Runs inside the caller's transaction.

Documents go through a temporary table and INSERT .. ON CONFLICT, so that an id that is there keeps its row. Passages are never updated in
place: the caller has removed the old ones, and the new ones are copied straight into the table, numbered in the order they are given.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from django.db import connections

DocumentRow = tuple[str, str, dict[str, Any], str, int, bool]               # external id, text, metadata, content hash, tokens, truncated
PassageRow = tuple[int, int, int, int, int, int, int, str, bytes]           # document, part, start, end, tokens, rows, dims, dtype, vector

INCOMING = "embeddings_incoming"
CREATE = f"""
    CREATE TEMPORARY TABLE {INCOMING} (
        place integer, external_id text, text text, metadata jsonb, content_hash text, tokens integer, truncated boolean) ON COMMIT DROP"""
COPY_DOCUMENTS = f"COPY {INCOMING} (place, external_id, text, metadata, content_hash, tokens, truncated) FROM STDIN (FORMAT BINARY)"
MERGE = f"""
    INSERT INTO embeddings_document (collection_id, split, created_at, updated_at,
                                     external_id, text, metadata, content_hash, tokens, truncated)
    SELECT %s, %s, %s, %s, external_id, text, metadata, content_hash, tokens, truncated FROM {INCOMING} ORDER BY place
    ON CONFLICT (collection_id, external_id) DO UPDATE SET
        text = EXCLUDED.text, metadata = EXCLUDED.metadata, content_hash = EXCLUDED.content_hash, split = EXCLUDED.split,
        tokens = EXCLUDED.tokens, truncated = EXCLUDED.truncated, updated_at = EXCLUDED.updated_at
    RETURNING external_id, id"""
COPY_PASSAGES = """
    COPY embeddings_passage (collection_id, space_id, document_id, part, start, "end", tokens, rows, dims, dtype, vector)
    FROM STDIN (FORMAT BINARY)"""


def documents(collection: int, split: str, now: datetime, rows: Sequence[DocumentRow], using: str) -> dict[str, int]:
    """Makes or replaces the documents. Their primary keys by external id."""
    with connections[using].cursor() as cursor:
        cursor.execute(CREATE)
        with cursor.copy(COPY_DOCUMENTS) as copy:
            copy.set_types(["int4", "text", "text", "jsonb", "text", "int4", "bool"])
            for place, (external_id, text, metadata, content_hash, tokens, truncated) in enumerate(rows):
                copy.write_row((place, external_id, text, metadata, content_hash, tokens, truncated))
        cursor.execute(MERGE, [collection, split, now, now])
        keys = dict(cursor.fetchall())
        cursor.execute(f"DROP TABLE {INCOMING}")
    return keys


def passages(collection: int, space: int, rows: Iterable[PassageRow], using: str) -> None:
    with connections[using].cursor() as cursor, cursor.copy(COPY_PASSAGES) as copy:
        copy.set_types(["int8", "int8", "int8", *["int4"] * 6, "varchar", "bytea"])
        for row in rows:
            copy.write_row((collection, space, *row))
