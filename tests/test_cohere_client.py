"""The official Cohere client, as its users use it for reranking, against a real server with a tiny cross-encoder."""
from __future__ import annotations

from collections.abc import Iterator

import cohere
import httpx
import pytest

from tests.rerankers import DOCUMENTS, PAIRINGS, QUERIES
from tests.servers import serving


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pairing = PAIRINGS[0]
    with serving(tmp_path_factory.mktemp("cohere") / "var", "--api-key", "k1", "--reranker-model", str(pairing.folder),
                 MLXCEL_EMBEDDING_MODEL="", MLXCEL_BACKEND="host") as server:
        yield server.url


@pytest.fixture(scope="module")
def model(url: str) -> str:
    (found,) = httpx.get(f"{url}/v1/models", headers={"X-Api-Key": "k1"}).json()["data"]
    return str(found["id"])


@pytest.fixture
def client(url: str) -> Iterator[cohere.Client]:
    with cohere.Client(api_key="k1", base_url=url) as client:
        yield client


def test_documents_come_back_best_first(url: str, client: cohere.Client, model: str) -> None:
    response = client.rerank(model=model, query=QUERIES[0], documents=list(DOCUMENTS), return_documents=True)
    plain = httpx.post(f"{url}/v1/rerank", json={"query": QUERIES[0], "documents": DOCUMENTS}, headers={"X-Api-Key": "k1"})
    found = [(result.index, result.relevance_score) for result in response.results]
    assert found == [(entry["index"], entry["relevance_score"]) for entry in plain.json()["results"]]
    assert found == sorted(found, key=lambda entry: -entry[1]) and len(found) == len(DOCUMENTS)
    assert [result.document.text for result in response.results if result.document] == [DOCUMENTS[index] for index, _ in found]


def test_top_n(client: cohere.Client, model: str) -> None:
    best = client.rerank(model=model, query=QUERIES[0], documents=list(DOCUMENTS)).results[:2]
    assert client.rerank(model=model, query=QUERIES[0], documents=list(DOCUMENTS), top_n=2).results == best


def test_errors_are_typed(url: str, client: cohere.Client, model: str) -> None:
    with pytest.raises(cohere.BadRequestError) as caught:
        client.rerank(model="another", query="a", documents=["b"])
    assert caught.value.body["error"]["param"] == "model"
    with cohere.Client(api_key="wrong", base_url=url) as stranger, pytest.raises(cohere.UnauthorizedError):
        stranger.rerank(model=model, query="a", documents=["b"])
