"""What a person who searches sees: grouped documents, filters, passages, and refusals that say what to do."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings import corpus, filters, search, spaces
from embeddings.models import Collection, Passage
from inference.errors import Conflict, InvalidRequest, TimedOut
from tests import stored
from tests.fakes import SPEC, FakeClient

pytestmark = pytest.mark.django_db
CLIENT = FakeClient()


@pytest.fixture(autouse=True)
def var(settings: Any, tmp_path: Path) -> Iterator[None]:
    settings.VAR_DIR = tmp_path
    yield


def fill(collection: Collection, texts: dict[str, dict[str, Any]]) -> Collection:
    corpus.upsert(collection, [stored.document(id, CLIENT._vector(id), text=id, **metadata) for id, metadata in texts.items()])
    return collection


BOOKS = {
    "a": {"lang": "en", "year": 1960, "tags": ["x", "y"], "a__b": 1, "ok": True},
    "b": {"lang": "de", "year": 1971, "tags": [], "ok": False},
    "c": {"lang": "en", "year": "1960", "2024": "n", "ok": 1},
    "d": {"lang": None, "year": 1965.5, 'q"uote': "v", "nested": {"k": 1}},
    "e": {},
}


def test_an_equal_text_comes_first_with_score_one() -> None:
    collection = fill(stored.collection(), BOOKS)
    result = search.search(collection, "c", client=CLIENT, limit=2, include_text=True)
    hit = result.hits[0]
    assert (hit.external_id, hit.part, hit.start, hit.end, hit.text, hit.metadata) == ("c", 0, 0, 1, "c", BOOKS["c"])
    assert hit.score == pytest.approx(1, abs=1e-6) and len(result.hits) == 2 and result.exact and result.tokens == 3
    assert search.search(collection, "c", client=CLIENT).hits[0].text is None


def test_the_query_prompt_is_put_before_the_query_and_dimensions_are_those_of_the_collection() -> None:
    collection = corpus.create("half", spaces.space_for(SPEC, 4), query_prompt="query: ")
    client = FakeClient()
    search.search(collection, "ship", client=client)
    assert (client.jobs[0].items, client.jobs[0].dimensions, client.jobs[0].lane) == (("query: ship",), 4, "interactive")


def test_passages_are_grouped_by_document_with_the_best_one() -> None:
    collection = stored.collection()
    vectors = {word: CLIENT._vector(word) for word in ("near", "far", "other")}
    corpus.upsert(collection, [stored.document("both", vectors["far"], vectors["near"], text="far-near"),
                               stored.document("one", vectors["other"])])
    hits = search.search(collection, "near", client=CLIENT, include_text=True).hits
    assert [hit.external_id for hit in hits].count("both") == 1
    assert (hits[0].part, hits[0].start, hits[0].end, hits[0].text) == (1, 4, 8, "near")


def test_documents_with_many_passages_do_not_crowd_out_others() -> None:
    collection, near = stored.collection(), CLIENT._vector("near")
    corpus.upsert(collection, [stored.document("many", *[near] * 50), *(stored.document(str(i), CLIENT._vector(str(i))) for i in range(9))])
    assert len(search.search(collection, "near", client=CLIENT, limit=10).hits) == 10


@pytest.mark.parametrize(("filter", "expected"), [
    ({}, "abcde"), ({"lang": "en"}, "ac"), ({"lang": ["en", "de"]}, "abc"), ({"lang": {"in": ["de"]}}, "b"), ({"lang": []}, ""),
    ({"year": {"gte": 1960, "lt": 1971}}, "ad"), ({"year": 1960}, "a"), ({"year": 1960.0}, "a"), ({"year": "1960"}, "c"),
    ({"year": {"gt": "1950"}}, "c"), ({"year": {"lte": 1965.5}}, "ad"), ({"tags": "y"}, "a"), ({"tags": {"ne": "y"}}, "bcde"),
    ({"a__b": 1}, "a"), ({"2024": "n"}, "c"), ({'q"uote': "v"}, "d"), ({"ok": True}, "a"), ({"ok": 1}, "c"), ({"ok": False}, "b"),
    ({"lang": None}, "de"), ({"lang": {"ne": None}}, "abc"), ({"lang": "en", "year": {"ne": 1960}}, "c"), ({"nested": "x"}, ""),
    ({"collection__name": "tests"}, ""), ({"lang__startswith": "e"}, ""), ({"year": {"in": [1960, 1971]}}, "ab"),
])
def test_filters(filter: dict[str, Any], expected: str) -> None:
    collection = fill(stored.collection(), BOOKS)
    hits = search.search(collection, "x", client=CLIENT, filter=filter).hits
    assert "".join(sorted(hit.external_id for hit in hits)) == expected


@pytest.mark.parametrize(("filter", "message"), [
    ([], "expected an object"), ("lang", "expected an object"), ({"a": {}}, "no operator"), ({"a": {"like": "x"}}, "'like'; expected gte"),
    ({"a": {"gte": None}}, "number or a string, found None"), ({"a": {"gt": True}}, "found True"), ({"a": {"in": "x"}}, "takes a list"),
    ({"a": [["x"]]}, "string, number, boolean or null"), ({"a": {"gte": 1, "x": 2}}, "'x'"), ({"a": {"ne": {"b": 1}}}, "found {'b': 1}"),
])
def test_a_wrong_filter_is_told_before_the_model_runs(filter: Any, message: str) -> None:
    client = FakeClient()
    with pytest.raises(InvalidRequest, match=message) as raised:
        search.search(fill(stored.collection(), BOOKS), "x", client=client, filter=filter)
    assert raised.value.param == "filter" and not client.jobs


def test_a_filter_sees_new_metadata_at_once() -> None:
    collection = fill(stored.collection(), {"a": {"n": 1}})
    assert len(filters.matching(collection, 1, {"n": 2})) == 0
    corpus.relabel(collection, {"a": {"n": 2}})
    assert len(search.search(collection, "x", client=CLIENT, filter={"n": 2}).hits) == 1


@pytest.mark.parametrize("limit", [0, -1, 1001, 2.5, True, "3"])
def test_limits(limit: Any) -> None:
    with pytest.raises(InvalidRequest, match="limit: expected 1 to 1000"):
        search.search(stored.collection(), "x", client=CLIENT, limit=limit)


def test_an_empty_query_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not empty"):
        search.search(stored.collection(), "", client=CLIENT)


def test_models_that_are_not_served_or_not_the_same_are_conflicts() -> None:
    collection = stored.collection()
    with pytest.raises(Conflict, match=r"manage.py serve --model fake-8"):
        search.search(collection, "x", client=CLIENT.without_model())
    with pytest.raises(Conflict, match="pooling 'mean' is not 'cls'"):
        search.search(collection, "x", client=FakeClient(spec=replace(SPEC, pooling="cls")))


def test_errors_of_the_model_pass_through() -> None:
    with pytest.raises(TimedOut):
        search.search(stored.collection(), "x", client=FakeClient(fail=TimedOut("late")))


def test_neighbours_of_a_passage_leave_it_out_and_need_no_model() -> None:
    fill(stored.collection(), BOOKS)
    passage = Passage.objects.get(document__external_id="b")
    hits = search.nearest(passage, 10)
    assert {hit.external_id for hit in hits} == set("acde") and hits[0].text is not None
    scores = [float(CLIENT._vector("b") @ CLIENT._vector(hit.external_id)) for hit in hits]
    assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-6) and scores == sorted(scores, reverse=True)


def test_multi_vector_collections_are_ranked_by_maxsim() -> None:
    collection = stored.collection(multi_vector=True)
    rng = np.random.default_rng(0)
    rows = {str(i): stored.unit(rng.standard_normal((i + 1, 8))) for i in range(6)}
    corpus.upsert(collection, [stored.document(id, matrix) for id, matrix in rows.items()])
    passage = Passage.objects.get(document__external_id="3")
    assert (passage.rows, passage.dtype) == (4, "<f2")
    expected = {id: (rows["3"] @ matrix.T).max(axis=1).sum() for id, matrix in rows.items() if id != "3"}
    hits = search.nearest(passage, 10)
    assert [hit.external_id for hit in hits] == sorted(expected, key=lambda id: -expected[id])
    assert [hit.score for hit in hits] == pytest.approx([expected[hit.external_id] for hit in hits], abs=5e-3)


def test_a_passage_removed_while_it_was_searched_for_is_left_out() -> None:
    collection = fill(stored.collection(), BOOKS)
    found = search.ranked(collection, ["a"], client=CLIENT, limit=5)[0]
    corpus.delete(collection, ["a"])
    assert "a" not in [hit.external_id for hit in search._hits(found, False)]
