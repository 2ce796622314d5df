"""pgvector beside the exact index: what it finds, that it follows what is written and removed, and when it steps aside."""
from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import call_command
from django.db import connection

from embeddings import corpus, index, search
from embeddings.index import ExactIndex
from embeddings.models import Collection, Passage
from tests import stored
from tests.fakes import SPEC, FakeClient

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("postgresql")]
RNG = np.random.default_rng(8)
DIMS = 24


@pytest.fixture
def both(tmp_path: Path, postgresql: None) -> Any:
    from embeddings.pgvector import PgVectorIndex, available
    assert available(), "this PostgreSQL has no pgvector"
    return PgVectorIndex(ExactIndex(tmp_path))


def fill(collection: Collection, count: int, prefix: str = "d", passages: int = 1) -> None:
    dims, finish = collection.space.dims, stored.unit if collection.space.normalize == 2 else np.asarray
    for at in range(0, count, 500):
        corpus.upsert(collection, [stored.document(f"{prefix}{i}", *(finish(RNG.standard_normal(dims)) for _ in range(passages)))
                                   for i in range(at, min(at + 500, count))])


def documents(answer: list[Any]) -> list[int]:
    return [scored.document for scored in answer]


@pytest.mark.parametrize("normalize", [2.0, -1.0])
def test_it_finds_what_the_exact_index_finds_with_the_same_scores(both: Any, normalize: float) -> None:
    collection = stored.collection(dims=DIMS, normalize=normalize)
    fill(collection, 1500)
    assert both.build(collection) == 1500
    queries = [RNG.standard_normal((1, DIMS)).astype(np.float32) for _ in range(20)]
    answers, right = both.search(collection, queries, 10), both.exact.search(collection, queries, 10)
    assert not answers.exact and right.exact
    assert np.mean([len(set(documents(a)) & set(documents(r))) / 10 for a, r in zip(answers, right, strict=True)]) >= 0.99
    for answer, exact in zip(answers, right, strict=True):
        scores = {scored.document: scored.score for scored in exact}
        assert all(scores.get(scored.document, scored.score) == scored.score for scored in answer), "re-ranked from the stored float32"


def test_documents_appear_once_with_their_best_passage(both: Any) -> None:
    collection = stored.collection(dims=DIMS)
    fill(collection, 300, passages=4)
    both.build(collection)
    query = RNG.standard_normal((1, DIMS)).astype(np.float32)
    (answer,), (right,) = both.search(collection, [query], 20), both.exact.search(collection, [query], 20)
    assert len(set(documents(answer))) == 20 and answer[0] == right[0]


def test_what_was_written_since_is_found_and_what_was_removed_is_not(both: Any) -> None:
    collection = stored.collection(dims=DIMS)
    fill(collection, 400)
    both.build(collection)
    target = stored.unit(RNG.standard_normal(DIMS))
    corpus.upsert(collection, [stored.document("new", target), stored.document("d7", -target, text="changed")])
    (answer,) = both.search(collection, [target[None]], 3)
    new = collection.documents.get(external_id="new").pk
    assert answer[0].document == new and answer[0].score == pytest.approx(1)
    (opposite,) = both.search(collection, [-target[None]], 1)
    assert opposite[0].document == collection.documents.get(external_id="d7").pk, "a replaced document counts with its new vector"
    corpus.delete(collection, ["new", "d7"])
    assert new not in documents(both.search(collection, [target[None]], 50)[0])
    assert both.build(collection) == 0
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM embeddings_hnsw_{collection.pk}")
        assert cursor.fetchone() == (399,), "passages that are gone leave at the next build"


def test_it_steps_aside_for_filters_multi_vectors_absent_graphs_and_long_tails(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    collection, multi = stored.collection(dims=DIMS), stored.collection("multi", dims=DIMS, multi_vector=True)
    fill(collection, 200)
    fill(multi, 20)
    query = RNG.standard_normal((1, DIMS)).astype(np.float32)
    assert both.search(collection, [query], 5).exact, "no graph"
    both.build(collection)
    assert not both.search(collection, [query], 5).exact
    some = np.array(sorted(collection.documents.values_list("pk", flat=True))[:3])
    filtered = both.search(collection, [query], 5, documents=some)
    assert filtered.exact and set(documents(filtered[0])) == set(some.tolist())
    assert both.search(multi, [query], 5).exact and not both.ensure(multi)
    monkeypatch.setattr(index, "TAIL_BYTES", 100)
    fill(collection, 50, "more")
    assert both.search(collection, [query], 5).exact, "a long tail"
    assert both.build(collection) == 50 and not both.search(collection, [query], 5).exact


def test_a_passage_left_out_and_an_empty_collection(both: Any) -> None:
    collection, nothing = stored.collection(dims=DIMS), stored.collection("nothing", dims=DIMS)
    fill(collection, 100)
    both.build(collection), both.build(nothing)
    passage = Passage.objects.filter(collection=collection).latest("id")
    vector = np.frombuffer(passage.vector, "<f4")[None]
    assert both.search(collection, [vector], 1)[0][0].passage == passage.pk
    assert both.search(collection, [vector], 1, without=passage.pk)[0][0].passage != passage.pk
    assert both.search(nothing, [vector], 3)[0] == []


def test_large_collections_get_a_graph_and_lose_it_when_dropped(both: Any, settings: Any) -> None:
    collection = stored.collection(dims=DIMS)
    fill(collection, 99)
    settings.INDEX_FROM = 100
    assert not both.ensure(collection) and not both.built(collection)
    fill(collection, 1, "one")
    assert both.ensure(collection) and both.built(collection) and both.stats(collection).bytes > 0
    both.drop(collection)
    assert not both.built(collection)


def test_searches_say_whether_they_were_exact_and_index_check_measures(settings: Any, tmp_path: Path) -> None:
    settings.VAR_DIR = tmp_path
    collection = stored.collection(dims=SPEC.dims, prompt="")
    fill(collection, 300)
    client = FakeClient()
    assert search.search(collection, "x", client=client).exact
    out = StringIO()
    call_command("index_check", collection.name, "--build", "--json", stdout=out, stderr=StringIO())
    report = json.loads(out.getvalue())
    assert report["recall"] >= 0.95 and not report["exact"] and report["queries"] == 100
    assert not search.search(collection, "x", client=client).exact
    settings.INDEX = "exact"
    index._index_at.cache_clear()
    assert search.search(collection, "x", client=client).exact
    index._index_at.cache_clear()
