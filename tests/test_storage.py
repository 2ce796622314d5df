"""What every database must do alike: upserts that keep rows, order of ids, texts that databases refuse."""
from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from django.db import connection, connections

from embeddings import corpus, sources, vectors
from embeddings.models import Collection, Document, Passage
from inference.errors import NotFound
from tests import stored

pytestmark = pytest.mark.django_db
RNG = np.random.default_rng(3)

METADATA: dict[str, Any] = {"a": 1, "b": [True, None, 1.5, "ä\\\"\n"], "c": {"deep": {"x": -0.25}}, "big": 2 ** 70, "": ""}


def contents(collection: Collection) -> list[tuple[Any, ...]]:
    return [(p.document.external_id, p.document.text, p.document.metadata, p.document.truncated, p.document.tokens, p.part, p.start, p.end,
             p.tokens, vectors.decode(p.vector, p.rows, p.dims, p.dtype).tolist())
            for p in Passage.objects.filter(collection=collection).select_related("document").order_by("id")]


def test_documents_come_back_as_they_were_given() -> None:
    collection = stored.collection()
    given = [stored.document(f"d{i}", *(stored.unit(RNG.standard_normal(8)) for _ in range(1 + i % 3)),
                             text=f"täxt\t\\N {i} \U0001f600" * i, **METADATA) for i in range(40)]
    assert corpus.upsert(collection, given) == 40
    assert contents(collection) == [
        (d.external_id, d.text, d.metadata, False, 3 * len(d.passages), part, p.start, p.end, p.tokens, p.vector.tolist())
        for d in given for part, p in enumerate(d.passages)]
    assert corpus.upsert(collection, given) == 0, "the same again changes nothing"


def test_a_replaced_document_keeps_its_row_and_gets_new_passages_with_larger_ids() -> None:
    collection, one = stored.collection(), np.eye(8, dtype=np.float32)
    corpus.upsert(collection, [stored.document(id, one[0], one[1], text=f"old {id}") for id in "abc"])
    rows = dict(Document.objects.values_list("external_id", "pk"))
    last, made = Passage.objects.latest("id").pk, Document.objects.get(external_id="b").created_at
    corpus.upsert(collection, [stored.document(id, one[2], text=f"new {id}") for id in ("d", "b")])
    assert dict(Document.objects.exclude(external_id="d").values_list("external_id", "pk")) == rows
    renewed = Document.objects.get(external_id="b")
    assert renewed.text == "new b" and renewed.created_at == made < renewed.updated_at
    fresh = Passage.objects.filter(pk__gt=last).order_by("pk").values_list("document__external_id", flat=True)
    assert list(fresh) == ["d", "b"] and Passage.objects.filter(document=renewed).count() == 1


def test_multi_vectors_are_stored_in_half_precision() -> None:
    collection = stored.collection(multi_vector=True)
    matrix = RNG.standard_normal((5, 8)).astype(np.float32)
    corpus.upsert(collection, [stored.document("a", matrix)])
    row = Passage.objects.get()
    assert (row.rows, row.dtype) == (5, "<f2") and np.array_equal(
        vectors.decode(row.vector, row.rows, row.dims, row.dtype), matrix.astype("<f2"))


def test_texts_that_databases_refuse_are_stored_with_replacements() -> None:
    raw = sources.Raw("f:1", {"id": "a", "text": "x\x00y\ud800z", "meta\x00": {"deep\udfff": ["\x00", float("nan")]}})
    (record,) = sources.documents([raw])
    assert isinstance(record, sources.Record)
    corpus.upsert(stored.collection(), [corpus.NewDocument(record.id, record.text, [
        corpus.NewPassage(0, 5, 3, np.eye(8, dtype=np.float32)[:1])], record.metadata)])
    document = Document.objects.get()
    assert (document.text, document.metadata) == ("x�y�z", {"meta�": {"deep�": ["�", None]}})
    (refused,) = sources.documents([sources.Raw("f:1", {"id": "a\x00", "text": "x"})])
    assert isinstance(refused, sources.Problem) and "NUL" in refused.message


@pytest.mark.parametrize("name", ["a\x00b", "\ud800"])
def test_names_that_no_row_can_have_are_not_found(name: str) -> None:
    collection = stored.collection()
    with pytest.raises(NotFound):
        corpus.get(name)
    assert corpus.find(name) is None and corpus.held(collection, [name]) == {} and corpus.delete(collection, [name]) == 0


@pytest.mark.usefixtures("several_writers")
@pytest.mark.django_db(transaction=True)
def test_passage_ids_grow_in_the_order_of_commits_with_several_writers() -> None:
    """A reader that has seen id n must never find a smaller one later."""
    collection = stored.collection()
    failures: list[BaseException] = []

    def write(writer: int) -> None:
        try:
            for batch in range(10):
                corpus.upsert(collection, [stored.document(f"{writer}/{batch}/{i}", stored.unit(RNG.standard_normal(8))) for i in range(5)])
        except BaseException as error:
            failures.append(error)
        finally:
            connections.close_all()
    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    while not all(not thread.is_alive() for thread in threads) or not seen:
        last = seen[-1] if seen else 0
        seen += Passage.objects.filter(collection=collection, pk__gt=last).order_by("pk").values_list("pk", flat=True)
    seen += Passage.objects.filter(collection=collection, pk__gt=seen[-1]).order_by("pk").values_list("pk", flat=True)
    for thread in threads:
        thread.join()
    assert not failures
    assert seen == list(Passage.objects.order_by("pk").values_list("pk", flat=True)) and len(seen) == 150


@pytest.mark.usefixtures("postgresql")
def test_vectors_are_kept_uncompressed_and_prefixes_are_indexed() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT attstorage FROM pg_attribute WHERE attrelid = 'embeddings_passage'::regclass AND attname = 'vector'")
        assert cursor.fetchone() == ("e",)
        cursor.execute("SELECT indexdef FROM pg_indexes WHERE indexname IN ('documents_by_prefix', 'truncated_documents') ORDER BY 1")
        prefix, truncated = (definition for (definition,) in cursor.fetchall())
    assert "varchar_pattern_ops" in prefix and "WHERE truncated" in truncated


@pytest.mark.usefixtures("postgresql")
def test_an_upsert_leaves_no_temporary_table() -> None:
    corpus.upsert(stored.collection(), [stored.document("a", np.eye(8, dtype=np.float32)[0])])
    assert "embeddings_incoming" not in connection.introspection.table_names()
