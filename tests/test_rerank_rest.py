"""The rerank routes over a fake model: the two shapes of answers, their order, and one envelope for everything that goes wrong."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.test import Client, override_settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference.errors import Busy, InferenceFailed, Loading, ServiceError, TimedOut
from inference.wire import RerankResult
from tests.fakes import RERANKER, FakeClient
from tests.test_rest import envelope
from tests.test_rest import post as post_to

PATHS = ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"]
DOCUMENTS = ["red", "red planet", "venus", "a red planet is mars", "planet red"]
BEST = [3, 1, 4, 0, 2]          # by words of "red planet mars", equal ones in the order of the request


@pytest.fixture
def http(served: FakeClient) -> Client:
    served.reranker = RERANKER
    return Client(raise_request_exception=False)


def post(http: Client, body: Any, path: str = "/v1/rerank", **headers: str) -> Any:
    return post_to(http, body, path, **headers)


def ask(http: Client, **fields: Any) -> Any:
    response = post(http, {"query": "red planet mars", "documents": DOCUMENTS, **fields})
    assert response.status_code == 200, response.content
    return response.json()


@pytest.mark.parametrize("path", [*PATHS, "/v1/rerank/"])
def test_the_body_decides_the_form_on_every_path(http: Client, path: str) -> None:
    body = post(http, {"query": "red planet mars", "documents": DOCUMENTS}, path).json()
    assert {key: body[key] for key in ("object", "model", "usage")} == {
        "object": "list", "model": "fake-reranker", "usage": {"prompt_tokens": 41, "total_tokens": 41}}
    assert [entry["index"] for entry in body["results"]] == BEST and body["id"]
    assert [entry["relevance_score"] for entry in body["results"]] == pytest.approx([1, 2 / 3, 2 / 3, 1 / 3, 0])
    assert all(entry.keys() == {"index", "relevance_score"} for entry in body["results"]) and "data" not in body
    assert body["meta"]["billed_units"] == {"search_units": 1}
    texts = post(http, {"query": "red planet mars", "texts": DOCUMENTS}, path).json()
    assert [entry["index"] for entry in texts] == BEST and all(entry.keys() == {"index", "score"} for entry in texts)


def test_top_n(http: Client) -> None:
    for n in (1, 2, 5, 99, 2**63):
        assert [entry["index"] for entry in ask(http, top_n=n)["results"]] == BEST[:n]
    assert ask(http, top_k=2)["data"] == ask(http, top_n=2)["results"]


def test_documents_come_back_as_they_were_sent(http: Client) -> None:
    documents = ["red", {"text": "planet"}, {"text": "mars", "title": "dropped", "image": None}]
    for field in ("return_documents", "return_text"):
        results = ask(http, documents=documents, **{field: True})["results"]
        assert [entry["document"] for entry in results] == ["red", {"text": "planet"}, {"text": "mars"}]
        texts = post(http, {"query": "red planet mars", "texts": documents, field: True}).json()
        assert [entry["text"] for entry in texts] == ["red", {"text": "planet"}, {"text": "mars"}]


def test_cohere_reads_an_object(http: Client) -> None:
    body = {"query": "red", "documents": ["red", {"text": "b"}], "return_documents": True}
    for sdk in ("cohere", "cohere-ai"):
        results = post(http, body, **{"X-Fern-SDK-Name": sdk}).json()["results"]
        assert [entry["document"] for entry in results] == [{"text": "red"}, {"text": "b"}]
    with override_settings(RERANK_DOCUMENT_SHAPE="object"):
        assert post(http, body).json()["results"][0]["document"] == {"text": "red"}
        assert post(http, {"query": "red", "texts": ["red"], "return_text": True}).json()[0]["text"] == "red"
    assert post(http, body, **{"X-Fern-SDK-Name": "other"}).json()["results"][0]["document"] == "red"


def test_raw_scores_are_logits_and_may_lie_anywhere(http: Client, served: FakeClient) -> None:
    assert ask(http, raw_scores=True)["results"][0]["relevance_score"] == 10
    assert served.reranked[-1].raw_scores and served.reranked[-1].model == "fake-reranker" and served.reranked[-1].lane == "interactive"


def test_the_instruction_reaches_a_generative_reranker(http: Client, served: FakeClient) -> None:
    served.reranker = replace(RERANKER, instructions=True)
    ask(http, instruction=" Find mars ")
    assert served.reranked[-1].instruction == "Find mars"


def test_truncated_documents_are_reported(http: Client) -> None:
    response = post(http, {"query": "a", "documents": ["b", "b " * 50]})
    assert response["x-truncated-inputs"] == "1" and response.json()["usage"]["truncated_inputs"] == 1
    assert post(http, {"query": "a", "texts": ["b", "b " * 50]})["x-truncated-inputs"] == "1"
    assert "x-truncated-inputs" not in post(http, {"query": "a", "documents": ["b"]})


def test_one_job_whatever_the_number(http: Client, served: FakeClient) -> None:
    assert len(ask(http, documents=[str(i) for i in range(3000)])["results"]) == 3000
    assert len(served.reranked) == 1


@pytest.mark.parametrize(("error", "headers"), [
    (Busy("All slots are busy. Please try again later."), {"Retry-After": "1"}),
    (Loading("Loading model"), {"Retry-After": "1"}),
    (TimedOut("Rerank request timed out. Please try again later."), {"x-should-retry": "false"}),
    (InferenceFailed("rerank inference failed: no"), {}),
])
def test_failures_of_the_model(http: Client, served: FakeClient, error: ServiceError, headers: dict[str, str]) -> None:
    served.fail = error
    response = post(http, {"query": "q", "documents": ["a"]})
    assert envelope(response, error.status)["message"] == error.message
    assert {name: response[name] for name in headers} == headers


def test_no_reranker(http: Client, served: FakeClient) -> None:
    served.reranker = None
    response = post(http, {"query": "q", "documents": ["a"]})
    assert envelope(response, 501)["type"] == "not_implemented" and response["x-should-retry"] == "false"
    assert envelope(post(http, {"query": "q"}), 400)["param"] == "documents"


@pytest.mark.django_db
def test_an_embedder_is_not_needed(http: Client, served: FakeClient) -> None:
    served.spec = None
    assert ask(http)["model"] == "fake-reranker"
    assert http.get("/").status_code == 200 and b"fake-reranker" in http.get("/").content


@pytest.mark.parametrize("scores", [[np.nan], [np.inf], [1.01], [-0.01], [0.5, 0.5], []])
def test_scores_that_cannot_be_are_an_error(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> None:
    monkeypatch.setattr(served, "rerank", lambda job: RerankResult("fake-reranker", np.array(scores, np.float32), np.ones(1, np.int32)))
    said = envelope(post(http, {"query": "q", "documents": ["a"]}), 500)["message"]
    assert said == ("rerank inference returned an invalid numeric result" if len(scores) == 1
                    else f"reranker returned {len(scores)} scores for 1 documents")


def test_every_float_of_a_score_is_written_in_full(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(0).random(200, dtype=np.float32)
    monkeypatch.setattr(served, "rerank", lambda job: RerankResult("fake-reranker", scores, np.ones(200, np.int32)))
    results = ask(http, documents=["a"] * 200)["results"]
    assert np.array([entry["relevance_score"] for entry in results], np.float32).tobytes() == np.sort(scores)[::-1].tobytes()


def test_methods_and_models(http: Client) -> None:
    assert envelope(http.get("/v1/rerank"), 405)["message"] == "GET is not allowed here; allowed: POST, OPTIONS"
    listed = http.get("/v1/models").json()["data"]
    assert [(model["id"], model["capabilities"], model["meta"].get("scoring")) for model in listed] == [
        ("fake-8", ["embedding"], None), ("fake-reranker", ["rerank"], "sequence_classifier")]
    assert "vectors" not in http.get("/v1/models/fake-reranker").json()


def test_the_schema_knows_the_route_and_its_examples_are_answered(http: Client) -> None:
    document = http.get("/openapi.json").json()
    assert [path for path in document["paths"] if "rerank" in path] == ["/v1/rerank"]
    operation = document["paths"]["/v1/rerank"]["post"]
    assert {"400", "501", "503", "504"} <= operation["responses"].keys()
    examples = operation["requestBody"]["content"]["application/json"]["examples"]
    assert len(examples) == 2
    for example in examples.values():
        assert post(http, example["value"]).status_code == 200


def test_hostile_bodies(http: Client, data: Path) -> None:
    folder = data / "hostile/text/http"
    cases = [case for case in json.loads((folder / "index.json").read_text()) if case["file"].startswith("rerank")]
    assert len(cases) == 3
    for case in cases:
        body = (folder / case["file"]).read_bytes().replace(b'"model":"m"', b'"model":"fake-reranker"')
        response = post(http, body)
        assert response.status_code == case["expect"], case["file"]
        if response.status_code != 200:
            envelope(response, response.status_code)


def test_every_text_arrives_as_it_was_sent(http: Client, data: Path, served: FakeClient) -> None:
    for case in json.loads((data / "hostile/text/cases.json").read_text()):
        text = case.get("text")
        if isinstance(text, str) and text.strip():
            assert post(http, {"query": "q", "documents": [text], "return_documents": True}).status_code == 200, case["id"]
            assert served.reranked[-1].documents == (text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"),)


WORD = st.sampled_from(["a", "", " ", "mars", "\ud800", "\0", "é", "[SEP]"])
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORD,
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["text", "image", "image_url", "url"]), inner, max_size=3), max_leaves=6)
BODY = st.fixed_dictionaries({}, optional={
    "query": WORD | JSON, "documents": st.lists(WORD | JSON, max_size=4) | JSON, "texts": st.lists(WORD | JSON, max_size=4) | JSON,
    "model": st.sampled_from(["fake-reranker", "m"]) | JSON, "top_n": st.integers(-1, 5) | JSON, "top_k": JSON, "instruction": JSON,
    "return_documents": st.booleans() | JSON, "return_text": JSON, "raw_scores": st.booleans() | JSON, "rank_fields": JSON, "odd": JSON})


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODY | JSON, path=st.sampled_from(PATHS))
def test_no_body_is_answered_by_a_500(http: Client, body: Any, path: str) -> None:
    response = post(http, body, path)
    if response.status_code != 200:
        envelope(response, 400)
        return
    answer = response.json()
    texts = body.get("documents") is None
    entries = answer if texts else answer["results"]
    scores = [entry["score" if texts else "relevance_score"] for entry in entries]
    assert scores == sorted(scores, reverse=True) and len({entry["index"] for entry in entries}) == len(entries) > 0


