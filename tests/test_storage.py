"""What every database must do alike: upserts that keep rows, order of ids, texts that databases refuse."""
from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from django.db import DEFAULT_DB_ALIAS, DatabaseError, IntegrityError, connection, connections, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embeddings import copying, corpus, sources, storable, vectors
from embeddings.models import Collection, Document, Passage
from inference.errors import Conflict, NotFound
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


@pytest.mark.parametrize("number", [5.085048049152998e16, -5.085048049152998e16, 1.7976931348623157e308, 2.0 ** 53, 1e-7, 5e-324, 2 ** 70])
def test_large_numbers_in_metadata_are_not_taken_for_changed_ones(number: float) -> None:
    (record,) = sources.documents([sources.Raw("f:1", {"id": "a", "text": "x", "n": [number, "1e5"]})])
    assert isinstance(record, sources.Record)
    collection, one = stored.collection(), np.eye(8, dtype=np.float32)[0]
    document = corpus.NewDocument("a", "x", stored.document("a", one).passages, record.metadata)
    assert corpus.upsert(collection, [document]) == 1 and corpus.upsert(collection, [document]) == 0
    assert not storable.same({"n": [2 ** 60, 1]}, {"n": [2 ** 60 + 1, 1]}) and not storable.same({"n": [2]}, {"n": [2.5]})


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
        cursor.execute("SELECT indexdef FROM pg_indexes WHERE indexname = 'truncated_documents'")
        assert "WHERE truncated" in cursor.fetchone()[0]
        cursor.execute("SET LOCAL enable_seqscan = off")
    found = Document.objects.filter(collection=1, external_id__startswith="ab")
    assert re.search(r"one_document_per_external_id.*external_id.* >= 'ab'", found.explain(), re.DOTALL)


def test_ids_are_sorted_by_their_characters_codes_whatever_the_databases_language() -> None:
    collection = stored.collection()
    ids = ["a", "B", "_", "ä", "b", "A-1", "A1", "\U0001f600", "\uffff"]
    corpus.upsert(collection, [stored.document(id, np.eye(8, dtype=np.float32)[0]) for id in ids])
    assert list(Document.objects.order_by("external_id").values_list("external_id", flat=True)) == sorted(ids)


def test_an_id_given_twice_is_refused_and_nothing_is_stored() -> None:
    collection, one = stored.collection(), np.eye(8, dtype=np.float32)
    with pytest.raises(IntegrityError):
        corpus.upsert(collection, [stored.document(id, one[0]) for id in "aba"])
    assert not Document.objects.exists() and not Passage.objects.exists()


@pytest.mark.parametrize("wrong", [np.ones((1, 9)), np.ones((2, 8)), np.full((1, 8), np.nan), np.ones((0, 8))])
def test_a_vector_that_does_not_belong_there_keeps_the_others_out(wrong: np.ndarray) -> None:
    collection = stored.collection()
    with pytest.raises((Conflict, ValueError)):
        corpus.upsert(collection, [stored.document("a", np.eye(8, dtype=np.float32)[0]), stored.document("b", wrong)])
    assert not Document.objects.exists()


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8)


COUNTS = st.integers(0, 2**31 - 1)


@st.composite
def batches(draw: st.DrawFn, *, multi_vector: bool) -> list[corpus.NewDocument]:
    """Documents of few ids, so that later batches replace what earlier ones brought; some without a passage."""
    documents = []
    for id in draw(st.sets(st.sampled_from(["a", "ä'\\", '{"b",NULL}', "\t\n", "\U0001f600", ""]), max_size=4)):
        passages = []
        for tokens in draw(st.lists(st.integers(0, 2**31 // 4), max_size=3)):
            shape = (draw(st.integers(1, 3)) if multi_vector else 1, 8)
            bits = np.random.default_rng(draw(st.integers(0, 99))).integers(-9, 9, shape)
            passages.append(corpus.NewPassage(draw(COUNTS), draw(COUNTS), tokens, bits.astype(np.float16 if multi_vector else np.float32)))
        metadata = storable.metadata(draw(st.dictionaries(TEXTS, JSON, max_size=2)))
        documents.append(corpus.NewDocument(id, draw(TEXTS), passages, metadata, draw(st.booleans())))
    return documents


@pytest.mark.parametrize("multi_vector", [False, True])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_documents_written_again_and_again_are_what_was_written_last(multi_vector: bool, data: st.DataObject) -> None:
    Collection.objects.all().delete()
    collection = stored.collection(multi_vector=multi_vector)
    expected: dict[str, corpus.NewDocument] = {}
    rows: dict[str, int] = {}
    for _ in range(3):
        batch = data.draw(batches(multi_vector=multi_vector))
        known = Passage.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
        changed = {d.external_id: d for d in batch if (old := expected.get(d.external_id)) is None
                   or (old.text, old.metadata) != (d.text, d.metadata)}
        assert corpus.upsert(collection, batch) == len(changed)
        expected |= changed
        fresh = Passage.objects.filter(pk__gt=known).order_by("pk").values_list("document__external_id", "part")
        assert list(fresh) == [(id, part) for id, d in changed.items() for part in range(len(d.passages))], "in the order given"
        now = dict(Document.objects.values_list("external_id", "pk"))
        assert now.keys() == expected.keys() and rows.items() <= now.items(), "each once, those that were there in their rows"
        rows = now
        for document in Document.objects.all():
            new = expected[document.external_id]
            assert storable.same(document.metadata, new.metadata)
            assert (document.text, document.truncated, document.content_hash, document.tokens) == (
                new.text, new.truncated, corpus.content_hash(new.text), sum(p.tokens for p in new.passages))
            held = [(p.start, p.end, p.tokens, bytes(p.vector), p.rows) for p in document.passages.order_by("part")]
            assert held == [(p.start, p.end, p.tokens, p.vector.tobytes(), len(p.vector)) for p in new.passages]


@pytest.mark.usefixtures("postgresql")
def test_rows_that_the_server_refuses_are_an_error_of_the_database() -> None:
    """Who waits for a database that is away, and commands that tell of one that refuses, know Django's errors."""
    with pytest.raises(DatabaseError), transaction.atomic():
        copying.copy("COPY embeddings_passage (id) FROM STDIN (FORMAT BINARY)", [b"\x00\x07"], DEFAULT_DB_ALIAS)
