"""Bodies of /v1/rerank: what is accepted, the wording of each error, and which of several errors is told."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.test import override_settings

from inference.errors import InvalidRequest, NotLoaded, ServiceError, UnsupportedCapability
from rerank.parsing import INSTRUCTED, RerankRequest, parse_rerank
from tests.fakes import RERANKER, SPEC, FakeClient

MALFORMED = "invalid request body: "
CLASSIFIER = FakeClient(reranker=RERANKER)
GENERATIVE = FakeClient(reranker=replace(RERANKER, instructions=True, scoring="generative_text"))
ITEM = "must be a string or an object with `text`, `image` or `image_url`, got "
IMAGE = {"image_url": {"url": "data:image/png;base64,AA=="}}


def parse(client: FakeClient = CLASSIFIER, **body: Any) -> RerankRequest:
    return parse_rerank({"query": "q", "documents": ["a", "b"], **body}, client)


def message(body: Any, client: FakeClient = CLASSIFIER) -> str:
    with pytest.raises(ServiceError) as caught:
        parse_rerank(body, client)
    return str(caught.value)


def test_the_plain_request() -> None:
    assert parse() == RerankRequest("q", ("a", "b"), "fake-reranker", ("a", "b"))
    assert parse(model="tests/fake-reranker", query={"text": "x"}).query == "x"


@pytest.mark.parametrize(("body", "texts"), [
    ({"documents": ["a"]}, False), ({"texts": ["a"]}, True), ({"documents": ["a"], "texts": ["b"]}, False),
    ({"documents": None, "texts": ["a"]}, True), ({"documents": ["a"], "texts": None}, False), ({"documents": ["a"], "texts": 7}, False)])
def test_the_body_decides_the_form(body: dict[str, Any], texts: bool) -> None:
    request = parse_rerank({"query": "q", **body}, CLASSIFIER)
    assert request.texts is texts and request.documents == ("a",)


@pytest.mark.parametrize(("sent", "text", "kept"), [
    ("a", "a", "a"), ({"text": "a"}, "a", {"text": "a"}), ({"text": "a", "image": None, "title": "t"}, "a", {"text": "a"}),
    (" a ", " a ", " a "), ("\0", "\0", "\0")])
def test_forms_of_a_document(sent: Any, text: str, kept: Any) -> None:
    request = parse(documents=[sent, "b"])
    assert request.documents == (text, "b") and request.items == (kept, "b")


@pytest.mark.parametrize(("fields", "expected"), [
    ({"top_n": 1}, {"top_n": 1}), ({"top_n": 99}, {"top_n": 99}), ({"top_k": 2}, {"top_n": 2, "top_k": True}),
    ({"top_n": 1, "top_k": 2}, {"top_n": 1}), ({"top_n": None, "top_k": 2}, {"top_n": 2, "top_k": True}),
    ({"return_documents": True}, {"return_documents": True}), ({"return_text": True}, {"return_documents": True}),
    ({"return_documents": False, "return_text": True}, {"return_documents": True}), ({"raw_scores": True}, {"raw_scores": True}),
    ({"instruction": " \n"}, {}), ({"user": 7, "rank_fields": ["text"], "max_chunks_per_doc": 10, "max_tokens_per_doc": None,
      "truncate": True, "truncation_direction": "Right", "truncation": True, "unheard_of": {}}, {})])
def test_options(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parse(**fields) == replace(parse(), **expected)


@pytest.mark.parametrize("field", ["model", "top_n", "top_k", "return_documents", "return_text", "instruction", "raw_scores", "user",
                                   "texts", "truncate", "rank_fields"])
def test_null_is_absent(field: str) -> None:
    assert parse(**{field: None}) == parse()


def test_an_instruction_is_for_those_that_read_one() -> None:
    assert parse(GENERATIVE, instruction=" Find it ").job().instruction == "Find it"
    assert message({"query": "q", "documents": ["a"], "instruction": "x"}) == INSTRUCTED


@pytest.mark.parametrize(("body", "expected"), [
    ({}, '"query" must be provided'),
    ({"query": None, "documents": ["a"]}, '"query" must be provided'),
    ({"query": 7, "documents": ["a"]}, '"query" must be a string'),
    ({"query": ["a"], "documents": []}, '"query" must be a string'),
    ({"query": "q"}, '"documents" must be a non-empty string array'),
    ({"query": "q", "documents": []}, '"documents" must be a non-empty string array'),
    ({"query": "q", "documents": "a"}, '"documents" must be a non-empty string array'),
    ({"query": "q", "documents": {"0": "a"}}, '"documents" must be a non-empty string array'),
    ({"query": "q", "texts": []}, '"documents" must be a non-empty string array'),
    ({"query": "q", "documents": [], "texts": ["a"]}, '"documents" must be a non-empty string array'),
    ([1], MALFORMED + "expected an object, got a list"),
    (None, MALFORMED + "expected an object, got null"),
    ("q", MALFORMED + 'expected an object, got the string "q"'),
    ({"query": "q", "documents": ["a", 7]}, MALFORMED + f"documents[1] {ITEM}the number 7"),
    ({"query": "q", "documents": [None]}, MALFORMED + f"documents[0] {ITEM}null"),
    ({"query": "q", "texts": [["a"]]}, MALFORMED + f"documents[0] {ITEM}a list"),
    ({"query": {"text": 7}, "documents": ["a"]}, MALFORMED + "the text of `query` must be a string, got the number 7"),
    ({"query": "q", "documents": [{"image": 7}]},
     MALFORMED + 'the image of documents[0] must be a URL or {"url": "..."}, got the number 7'),
    ({"query": "q", "documents": [{"image_url": {}}]},
     MALFORMED + 'the image_url of documents[0] must be a URL or {"url": "..."}, got an object'),
    ({"query": "q", "documents": ["a"], "top_n": -1}, MALFORMED + "`top_n` must be a whole number of at least 0, got the number -1"),
    ({"query": "q", "documents": ["a"], "top_n": "2"}, MALFORMED + '`top_n` must be a whole number of at least 0, got the string "2"'),
    ({"query": "q", "documents": ["a"], "top_n": 1.0}, MALFORMED + "`top_n` must be a whole number of at least 0, got the number 1.0"),
    ({"query": "q", "documents": ["a"], "top_n": True}, MALFORMED + "`top_n` must be a whole number of at least 0, got true"),
    ({"query": "q", "documents": ["a"], "return_documents": 1}, MALFORMED + "`return_documents` must be true or false, got the number 1"),
    ({"query": "q", "documents": ["a"], "instruction": []}, MALFORMED + "`instruction` must be a string, got a list"),
    ({"query": "q", "documents": ["a"], "model": "m"}, "model `m` is not the served reranker `fake-reranker`"),
    ({"query": "q", "documents": ["a"], "model": "fake-8"}, "model `fake-8` is not the served reranker `fake-reranker`"),
    ({"query": "q", "documents": ["a"], "top_n": 0}, "`top_n` must be at least 1"),
    ({"query": "q", "documents": ["a"], "top_k": 0}, "`top_k` must be at least 1"),
    ({"query": "", "documents": ["a"]}, "`query` carries neither text nor an image"),
    ({"query": {}, "documents": ["a"]}, "`query` carries neither text nor an image"),
    ({"query": " \n", "documents": [""]}, "`query` carries neither text nor an image"),
    ({"query": "q", "documents": ["a", " "]}, "documents[1] carries neither text nor an image"),
    ({"query": "q", "texts": ["a", {"title": "t"}]}, "documents[1] carries neither text nor an image"),
    ({"query": IMAGE, "documents": ["a"]}, "`query` is an image, but the loaded reranker does not accept images"),
    ({"query": "q", "documents": ["a", {"text": "b", "image": "http://x/y.png"}]},
     "documents[1] is an image, but the loaded reranker does not accept images"),
])
def test_messages(body: Any, expected: str) -> None:
    assert message(body) == expected


def test_errors_come_in_the_order_of_the_contract() -> None:
    """Each step repairs what the step before complained of; the request has all errors at once."""
    body: dict[str, Any] = {"model": "m", "top_n": 0, "instruction": "x", "return_text": "yes"}
    repairs: list[tuple[str, dict[str, Any]]] = [
        ('"query" must be provided', {"query": 7}),
        ('"query" must be a string', {"query": " "}),
        ('"documents" must be a non-empty', {"documents": [7]}),
        (MALFORMED + "`return_text`", {"return_text": True}),
        (MALFORMED + "documents[0]", {"documents": ["", IMAGE]}),
        ("model `m`", {"model": "fake-reranker"}),
        ("`top_n`", {"top_n": 2}),
        ("`instruction`", {"instruction": " "}),
        ("`query` carries", {"query": "q"}),
        ("documents[0] carries", {"documents": ["a", IMAGE]}),
        ("documents[1] is an image", {"documents": ["a"]}),
    ]
    for begins, repair in repairs:
        assert message(body).startswith(begins)
        body |= repair
    assert parse_rerank(body, CLASSIFIER) == RerankRequest("q", ("a",), "fake-reranker", ("a",), top_n=2, return_documents=True)


@pytest.mark.parametrize(("body", "param"), [
    ({"documents": ["a"]}, "query"), ({"query": "q"}, "documents"), ({"query": "q", "texts": []}, "texts"),
    ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"), ({"query": "q", "documents": ["a"], "top_k": 0}, "top_k"),
    ({"query": "q", "documents": [7]}, "documents"), ({"query": "q", "texts": [7]}, "texts"),
    ({"query": {"text": 7}, "texts": ["a"]}, "query"),
    ({"query": "q", "documents": [""]}, "documents"), ({"query": "q", "texts": [""]}, "texts"),
    ({"query": "q", "documents": ["a"], "model": "m"}, "model"), ({"query": "q", "documents": ["a"], "instruction": "x"}, "instruction")])
def test_the_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_rerank(body, CLASSIFIER)
    assert caught.value.param == param


def test_images_are_a_missing_capability() -> None:
    with pytest.raises(UnsupportedCapability):
        parse(documents=[IMAGE])


def test_without_a_reranker_a_malformed_body_is_still_malformed() -> None:
    nothing = FakeClient()
    assert message({"query": "q", "documents": [7]}, nothing).startswith(MALFORMED)
    with pytest.raises(NotLoaded, match=r"^This server does not support reranking\. Start it with `manage.py serve --reranker-model"):
        parse_rerank({"query": "q", "documents": ["a"], "model": "m", "top_n": 0}, nothing)


@override_settings(ACCEPT_ANY_MODEL=True)
def test_any_model() -> None:
    assert parse(model="rerank-v3.5").model == "fake-reranker"


@override_settings(STRICT_FIELDS=True)
def test_strict_fields() -> None:
    said = message({"query": "q", "documents": ["a"], "topn": 1})
    assert said.startswith(MALFORMED + "unknown field `topn`; this server takes model, query,")
    assert parse(rank_fields=["text"], user="u").documents == ("a", "b")


def test_the_embedder_answers_to_no_rerank() -> None:
    assert FakeClient(spec=SPEC, reranker=RERANKER).describe("reranker", "fake-8") is None
