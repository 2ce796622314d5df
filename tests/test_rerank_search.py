"""A search whose best documents a reranker judges once more: the function, the route and the command."""
from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from embeddings import corpus, search
from embeddings.models import Collection
from embeddings.rendering import render_hits
from inference.client import get_client
from inference.config import Settings
from inference.errors import InvalidRequest, NotLoaded
from inference.transports.local import LocalClient
from inference.wire import RerankJob
from tests import stored
from tests.fakes import RERANKER, FakeClient
from tests.families import GOLDEN
from tests.rerankers import PAIRINGS
from tests.test_rest import envelope, post

pytestmark = pytest.mark.django_db
TEXTS = ["red", "red planet", "venus", "a red planet is mars", "planet red", "nothing", "something", "else"]


@pytest.fixture(autouse=True)
def var(settings: Any, tmp_path: Path) -> Iterator[None]:
    settings.VAR_DIR = tmp_path
    yield


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(reranker=RERANKER)


@pytest.fixture
def planets(client: FakeClient) -> Collection:
    collection = stored.collection()
    corpus.upsert(collection, [stored.document(text, client._vector(text), text=text, n=i) for i, text in enumerate(TEXTS)])
    return collection


def ids(result: search.SearchResult) -> list[str]:
    return [hit.external_id for hit in result.hits]


def test_what_was_cut_is_counted(planets: Collection, client: FakeClient) -> None:
    """The query is over both models' limits, so each pair is too."""
    long = "mars " * 200
    assert search.search(planets, "mars", client=client, limit=3).truncated == 0
    assert search.search(planets, long, client=client, limit=3).truncated == 1
    result = search.search(planets, long, client=client, limit=3, rerank=True, candidates=4)
    assert result.truncated == 5
    response = render_hits(planets, result, include_text=False)
    assert (response.data["usage"]["truncated_inputs"], response["x-truncated-inputs"]) == (5, "5")


def test_the_rerankers_scores_decide(planets: Collection, client: FakeClient) -> None:
    result = search.search(planets, "red planet mars", client=client, limit=3, rerank=True, candidates=8)
    assert ids(result)[0] == "a red planet is mars" and set(ids(result)[1:]) == {"red planet", "planet red"}
    assert [hit.rerank_score for hit in result.hits] == [1.0, float(str(np.float32(2 / 3))), float(str(np.float32(2 / 3)))]
    plain = search.search(planets, "red planet mars", client=client, limit=8)
    similarity = {hit.external_id: hit.score for hit in plain.hits}
    assert all(hit.score == similarity[hit.external_id] for hit in result.hits)
    assert result.hits[1].score >= result.hits[2].score                                   # equal ones in the order they were found
    assert plain.reranker == "" and plain.hits[0].rerank_score is None
    (job,) = client.reranked
    assert job.query == "red planet mars" and sorted(job.documents) == sorted(TEXTS) and job.model == result.reranker == "fake-reranker"
    assert result.exact and result.tokens == plain.tokens + sum(len(text.split()) + 6 for text in TEXTS)
    assert result.hits[0].text is None
    assert search.search(planets, "mars", client=client, rerank="tests/fake-reranker", include_text=True).hits[0].text == TEXTS[3]


@pytest.mark.parametrize(("limit", "candidates", "given"), [(1, None, 5), (2, None, 8), (2, 2, 2), (1, 3, 3), (8, 1000, 8)])
def test_how_many_documents_it_is_given(planets: Collection, client: FakeClient, limit: int, candidates: int | None, given: int) -> None:
    found = search.search(planets, "q", client=client, limit=limit, rerank=True, candidates=candidates)
    assert len(client.reranked[0].documents) == given and len(found.hits) == limit
    best = [hit.external_id for hit in search.search(planets, "q", client=client, limit=given).hits]
    assert list(client.reranked[0].documents) == best


def test_the_passage_is_what_is_judged(client: FakeClient) -> None:
    collection = stored.collection()
    corpus.upsert(collection, [stored.document("both", client._vector("far"), client._vector("near"), text="far-near")])
    hit = search.search(collection, "near", client=client, rerank=True, include_text=True).hits[0]
    assert (hit.part, hit.text, client.reranked[0].documents, hit.rerank_score) == (1, "near", ("near",), 1.0)


def test_nothing_found_asks_nobody(planets: Collection, client: FakeClient) -> None:
    result = search.search(planets, "q", client=client, rerank=True, filter={"n": 99})
    assert result.hits == [] and client.reranked == [] and result.reranker == "fake-reranker"


@pytest.mark.parametrize(("options", "said"), [
    ({"rerank": "other"}, "model `other` is not the served reranker `fake-reranker`"),
    ({"rerank": True, "candidates": 2}, r"candidates: expected 3 \(the limit\) to 1000, found 2"),
    ({"rerank": True, "candidates": 1001}, r"candidates: expected 3 \(the limit\) to 1000, found 1001"),
    ({"candidates": 5}, "candidates: they are for a reranker, and none is asked")])
def test_refusals(planets: Collection, client: FakeClient, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        search.search(planets, "q", client=client, limit=3, **options)
    assert caught.value.param in ("rerank", "candidates") and client.jobs == []          # told before a model runs


def test_without_a_reranker(planets: Collection) -> None:
    with pytest.raises(NotLoaded, match="This server does not support reranking"):
        search.search(planets, "q", client=FakeClient(), rerank=True)


def test_the_route(planets: Collection, served: FakeClient) -> None:
    http = Client(raise_request_exception=False)

    def ask(**fields: Any) -> Any:
        return post(http, {"query": "red planet mars", "limit": 2, **fields}, f"/collections/{planets.name}/search")

    plain = ask().json()
    assert "reranker" not in plain and "rerank_score" not in plain["data"][0] and ask(rerank=False, candidates=None).json() == plain
    assert envelope(ask(rerank=True), 501)["type"] == "not_implemented"
    served.reranker = RERANKER
    body = ask(rerank=True, candidates=8, include_text=True).json()
    assert body["reranker"] == "fake-reranker" and body["data"][0]["rerank_score"] == 1 and body["data"][0]["text"] == TEXTS[3]
    assert body["data"][0].keys() == plain["data"][0].keys() | {"rerank_score", "text"}
    assert ask(rerank="fake-reranker", candidates=8).json()["data"][0]["id"] == TEXTS[3]
    for wrong, param in (({"rerank": "x"}, "rerank"), ({"rerank": 1}, "rerank"), ({"candidates": 9}, "candidates"),
                         ({"rerank": True, "candidates": 1}, "candidates"), ({"rerank": True, "candidates": "9"}, "candidates")):
        assert envelope(ask(**wrong), 400)["param"] == param


def manage(*arguments: Any) -> str:
    out = io.StringIO()
    call_command(*map(str, arguments), stdout=out)
    return out.getvalue()


@pytest.fixture
def local(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLXCEL_BACKEND", "host")
    monkeypatch.setenv("MLXCEL_EMBEDDING_MODEL", str(minilm))
    get_client.cache_clear()
    yield
    get_client.cache_clear()


@pytest.mark.parametrize("pairing", [PAIRINGS[0], PAIRINGS[-1]], ids=lambda pairing: pairing.name)
def test_the_command_with_both_models_in_its_process(local: None, tmp_path: Path, pairing: Any) -> None:
    source = tmp_path / "planets.jsonl"
    source.write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    manage("embed_corpus", "planets", source)
    found = json.loads(manage("search_corpus", "planets", "which planet is red", "--limit", 3, "--rerank", pairing.folder, "--json"))
    plain = json.loads(manage("search_corpus", "planets", "which planet is red", "--json"))
    reranker = LocalClient(Settings(embedding_models=(), reranker_models=(str(pairing.folder),), backend="host"))
    result = reranker.rerank(RerankJob("which planet is red", tuple(TEXTS)))
    reranker.close()
    best = np.argsort(-result.scores, kind="stable")[:3]
    assert found["reranker"] == pairing.name and [int(hit["external_id"]) for hit in found["hits"]] == best.tolist()
    assert [hit["rerank_score"] for hit in found["hits"]] == pytest.approx(result.scores[best].tolist(), abs=1e-5)
    similarity = {hit["external_id"]: hit["score"] for hit in plain["hits"]}
    assert [hit["score"] for hit in found["hits"]] == [similarity[hit["external_id"]] for hit in found["hits"]]
    assert "reranker" not in plain and "rerank_score" not in plain["hits"][0] and "text" not in found["hits"][0]
    shown = manage("search_corpus", "planets", "which planet is red", "--limit", 1, "--candidates", 8, "--rerank", pairing.folder)
    assert shown.startswith(f"  1. {result.scores[best[0]]:.4f} (similarity {similarity[str(best[0])]:.4f})  {best[0]}\n")
    with pytest.raises(CommandError, match="candidates"):
        manage("search_corpus", "planets", "x", "--candidates", 5)
    with pytest.raises(CommandError, match="Unsupported reranker model type"):
        manage("search_corpus", "planets", "x", "--rerank", GOLDEN / "bert")
