"""The documents of a collection as they stand in the database: made, replaced and removed in whole transactions.

Writers of one collection take turns on its row, so passage ids grow in the order of commits: search files are
extended by "id greater than".
"""
from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.models import F
from django.utils import timezone
from numpy.typing import NDArray

from inference.errors import Conflict, InvalidRequest, NotFound

from . import copying, spaces, storable, vectors
from .models import Collection, Document, Passage, VectorSpace

T = TypeVar("T")

Encoded = Mapping[str, Sequence[vectors.Stored]]      # by external id, in the order of the passages

IN_LIST = 500        # ids looked up by one query


@dataclass(frozen=True, slots=True)
class NewPassage:
    """Characters [start, end) of the text and their vector, [rows, dims]."""

    start: int
    end: int
    tokens: int
    vector: NDArray[Any]


@dataclass(frozen=True, slots=True)
class NewDocument:
    external_id: str
    text: str
    passages: Sequence[NewPassage]
    metadata: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """What of a stored document tells whether it is up to date."""

    pk: int
    content_hash: str
    split: str
    metadata: dict[str, Any]


def content_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def split_name(collection: Collection) -> str:
    """How the collection cuts its documents, as a document records it."""
    return f"{collection.split_tokens}:{collection.split_overlap}" if collection.split_tokens else "none"


def get(name: str) -> Collection:
    if (collection := find(name)) is None:
        raise NotFound(f"There is no collection {name!r}", code="collection_not_found")
    return collection


def find(name: str) -> Collection | None:
    return None if storable.UNSTORABLE.search(name) else Collection.objects.select_related("space").filter(name=name).first()


def create(name: str, space: VectorSpace, **options: Any) -> Collection:
    """A new, empty collection on `space`, which need not be saved. Raises InvalidRequest for a bad name, Conflict for a taken one."""
    check_name(name)
    with transaction.atomic():
        defaults = {name: getattr(space, name) for name in (*spaces.FIELDS, "revision")}
        saved, _ = VectorSpace.objects.get_or_create(fingerprint=space.fingerprint, defaults=defaults)
        collection, made = Collection.objects.get_or_create(name=name, defaults={"space": saved, **options})
    if not made:
        raise Conflict(f"There already is a collection {name!r}", code="collection_exists")
    return collection


def check_name(name: str) -> None:
    """Raises InvalidRequest for a name that no collection can have."""
    try:
        Collection._meta.get_field("name").clean(name, None)
    except ValidationError as error:
        raise InvalidRequest(f"Collection name {name!r}: {' '.join(error.messages)}", param="collection") from None


def remember(collection: Collection, options: Iterable[str]) -> None:
    """Saves these options of a collection; one that is not saved yet is made, on its space.

    Where someone else has made it in the meantime, it is theirs if it is the same. Raises Conflict if it is not.
    """
    values = {name: getattr(collection, name) for name in options}
    if collection.pk is not None:
        if values:
            collection.save(update_fields=[*values, "updated_at"])
        return
    try:
        made = create(collection.name, collection.space, **values)
    except Conflict:
        made = get(collection.name)
        if made.space.fingerprint != collection.space.fingerprint or any(getattr(made, name) != values[name] for name in values):
            raise
    collection.pk, collection.space, collection._state.adding = made.pk, made.space, False
    collection.refresh_from_db(fields=["generation", "deletions", "created_at", "updated_at"])


def held(collection: Collection, external_ids: Iterable[str]) -> dict[str, Held]:
    """What is stored under these ids; ids without a document are absent, and all are while the collection is not saved."""
    rows: dict[str, Held] = {}
    if collection.pk is None:
        return rows
    documents, ids = Document.objects.filter(collection=collection), _storable(external_ids)
    found = ([documents.extra(where=[copying.AMONG], params=[copying.among(ids)])] if _copies()
             else [documents.filter(external_id__in=batch) for batch in _batches(ids, IN_LIST)])
    for query in found:
        for external_id, *rest in query.values_list("external_id", "pk", "content_hash", "split", "metadata"):
            rows[external_id] = Held(*rest)
    return rows


def upsert(collection: Collection, documents: Sequence[NewDocument]) -> int:
    """Stores the documents with their passages, replacing those of the same id, in one transaction. Repeating it changes nothing.

    Returns how many were written; those that another writer stored identically in the meantime are left alone.
    Raises Conflict for vectors of another width than the collection's space, ValueError for numbers that are not finite.
    """
    if not documents:
        return 0
    split = split_name(collection)
    hashes = {document.external_id: content_hash(document.text) for document in documents}
    stacked = iter(_encode(collection.space, [passage.vector for document in documents for passage in document.passages]))
    encoded = {document.external_id: list(islice(stacked, len(document.passages))) for document in documents}
    with transaction.atomic():
        _lock(collection)
        stored = held(collection, hashes)
        changed = [d for d in documents if _differs(stored.get(d.external_id), hashes[d.external_id], split, d.metadata)]
        if not changed:
            return 0
        replaced = {d.external_id: stored[d.external_id].pk for d in changed if d.external_id in stored}
        removed = _delete_passages(replaced.values())
        if _copies():
            _copy(collection, split, changed, hashes, encoded, replaced)
        else:
            _create(collection, split, changed, hashes, encoded)
        _bump(collection, removed)
    return len(changed)


def _create(collection: Collection, split: str, documents: Sequence[NewDocument], hashes: Mapping[str, str], encoded: Encoded) -> None:
    now = timezone.now()
    rows = Document.objects.bulk_create(
        [Document(
            collection=collection, external_id=d.external_id, text=d.text, metadata=d.metadata, content_hash=hashes[d.external_id],
            split=split, tokens=sum(p.tokens for p in d.passages), truncated=d.truncated, updated_at=now) for d in documents],
        update_conflicts=True, unique_fields=["collection", "external_id"],
        update_fields=["text", "metadata", "content_hash", "split", "tokens", "truncated", "updated_at"])
    Passage.objects.bulk_create([
        Passage(collection=collection, document=row, space=collection.space, part=part, start=p.start, end=p.end, tokens=p.tokens,
                rows=v.rows, dims=v.dims, dtype=v.dtype, vector=v.data)
        for row, d in zip(rows, documents, strict=True)
        for part, (p, v) in enumerate(zip(d.passages, encoded[d.external_id], strict=True))])


def _copy(collection: Collection, split: str, documents: Sequence[NewDocument], hashes: Mapping[str, str], encoded: Encoded,
          replaced: Mapping[str, int]) -> None:
    rows = {d.external_id: copying.DocumentRow(
        d.external_id, d.text, d.metadata, hashes[d.external_id], sum(p.tokens for p in d.passages), d.truncated) for d in documents}
    now, fresh = timezone.now(), [d for d in documents if d.external_id not in replaced]
    copying.replace(split, now, {key: rows[external_id] for external_id, key in replaced.items()}, DEFAULT_DB_ALIAS)
    keys = copying.documents(collection.pk, split, now, [rows[d.external_id] for d in fresh], DEFAULT_DB_ALIAS)
    document_keys = {**replaced, **{d.external_id: key for d, key in zip(fresh, keys, strict=True)}}
    copying.passages(collection.pk, collection.space_id, collection.space.dims, vectors.stored_as(collection.space.multi_vector), (
        copying.PassageRow(document_keys[d.external_id], part, p.start, p.end, p.tokens, v)
        for d in documents for part, (p, v) in enumerate(zip(d.passages, encoded[d.external_id], strict=True))), DEFAULT_DB_ALIAS)


def relabel(collection: Collection, metadata: dict[str, dict[str, Any]]) -> int:
    """New metadata for documents whose text stays. Returns how many there were."""
    if not metadata:
        return 0
    with transaction.atomic():
        _lock(collection)
        rows = list(Document.objects.filter(collection=collection, external_id__in=metadata).only("pk", "external_id"))
        for row in rows:
            row.metadata, row.updated_at = metadata[row.external_id], timezone.now()
        Document.objects.bulk_update(rows, ["metadata", "updated_at"], batch_size=200)
        _bump(collection, 0)
    return len(rows)


def delete(collection: Collection, external_ids: Iterable[str]) -> int:
    """Removes documents with their passages. Returns how many there were."""
    count = 0
    for ids in _batches(_storable(external_ids), IN_LIST):
        with transaction.atomic():
            _lock(collection)
            rows = Document.objects.filter(collection=collection, external_id__in=ids)
            count += _delete_documents(collection, list(rows.values_list("pk", flat=True)))
    return count


def prune(collection: Collection, keep: Container[str], *, dry_run: bool = False) -> int:
    """Removes every document whose id is not in `keep`. Returns how many."""
    if collection.pk is None:
        return 0
    gone = [id for id in Document.objects.filter(collection=collection).values_list("external_id", flat=True) if id not in keep]
    return len(gone) if dry_run else delete(collection, gone)


def drop(collection: Collection) -> int:
    """Removes a collection and everything in it. Returns how many documents it had."""
    with transaction.atomic():
        _lock(collection)
        Passage.objects.filter(collection=collection)._raw_delete(using=DEFAULT_DB_ALIAS)
        count = Document.objects.filter(collection=collection)._raw_delete(using=DEFAULT_DB_ALIAS)
        space = collection.space
        collection.delete()
        if not space.collections.exists():
            VectorSpace.objects.filter(pk=space.pk)._raw_delete(using=DEFAULT_DB_ALIAS)      # its passages went with the collection
    return count


def _storable(ids: Iterable[str]) -> Iterator[str]:
    """Without those that no row can have, and that PostgreSQL refuses to look for."""
    return (id for id in ids if not storable.UNSTORABLE.search(id))


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _differs(stored: Held | None, hash: str, split: str, metadata: dict[str, Any]) -> bool:
    return stored is None or (stored.content_hash, stored.split) != (hash, split) or not storable.same(stored.metadata, metadata)


def _encode(space: VectorSpace, matrices: Sequence[NDArray[Any]]) -> list[vectors.Stored]:
    encoded = vectors.encode_many(matrices, vectors.stored_as(space.multi_vector))
    for stored in encoded:
        if stored.dims != space.dims or (stored.rows > 1 and not space.multi_vector):
            raise Conflict(f"The space holds {'rows' if space.multi_vector else 'single vectors'} of {space.dims} dimensions, "
                           f"found {stored.rows} x {stored.dims}", code="fingerprint_mismatch")
    return encoded


def _copies() -> bool:
    return connections[DEFAULT_DB_ALIAS].vendor == "postgresql"


def _lock(collection: Collection) -> None:
    if not Collection.objects.select_for_update().filter(pk=collection.pk, space=collection.space_id).exists():
        raise Conflict(f"Collection {collection.name!r} was deleted in the meantime", code="collection_not_found")


def _bump(collection: Collection, deletions: int) -> None:
    Collection.objects.filter(pk=collection.pk).update(
        generation=F("generation") + 1, deletions=F("deletions") + deletions, updated_at=timezone.now())


def _delete_passages(documents: Iterable[int]) -> int:
    return sum(Passage.objects.filter(document__in=pks)._raw_delete(using=DEFAULT_DB_ALIAS) for pks in _batches(documents, IN_LIST))


def _delete_documents(collection: Collection, documents: Sequence[int]) -> int:
    if not documents:
        return 0
    removed = _delete_passages(documents)
    count = Document.objects.filter(pk__in=documents)._raw_delete(using=DEFAULT_DB_ALIAS)
    _bump(collection, removed)
    return count
