"""The routes over a fake model: shapes of answers, and one envelope for everything that goes wrong."""
from __future__ import annotations

import base64
import gzip
import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from django.core.management import call_command
from django.db import InterfaceError, OperationalError
from django.test import Client, override_settings
from django.urls import get_resolver, resolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from embeddings import views
from embeddings.models import Collection, VectorSpace
from embeddings.search import Hit, SearchResult
from inference.client import get_client
from inference.errors import (
    Away,
    Busy,
    Conflict,
    InferenceFailed,
    InvalidNumericResult,
    InvalidRequest,
    Loading,
    NotLoaded,
    ServiceError,
    TimedOut,
)
from inference.wire import EmbedResult
from mlxcel_site import errors
from mlxcel_site.bodies import Bodies
from mlxcel_site.codec import loads
from tests.fakes import RERANKER, SPEC, FakeClient
from tests.routes import addresses

pytestmark = pytest.mark.usefixtures("served")


@pytest.fixture
def http() -> Client:
    return Client(raise_request_exception=False)


def post(http: Client, body: Any, path: str = "/v1/embeddings", **headers: str) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return http.generic("POST", path, raw, content_type=headers.pop("content_type", "application/json"), headers=headers)


def envelope(response: Any, status: int) -> dict[str, Any]:
    """The error of an answer that is an error of this status, in the form every error has."""
    assert response.status_code == status, response.content
    assert response["Content-Type"].startswith("application/json")
    body = json.loads(response.content)
    assert set(body) == {"error", "detail"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["detail"] == body["error"]["message"] != ""
    return body["error"]  # type: ignore[no-any-return]


# POST /v1/embeddings

def test_embeddings(http: Client) -> None:
    response = post(http, {"input": ["a b", "c", "a b"], "model": "fake-8", "user": "someone"})
    body = response.json()
    assert {key: body[key] for key in ("object", "model", "usage")} == {
        "object": "list", "model": "fake-8", "usage": {"prompt_tokens": 11, "total_tokens": 11}}
    assert [(entry["object"], entry["index"], len(entry["embedding"])) for entry in body["data"]] == [("embedding", i, 8) for i in range(3)]
    assert body["data"][0]["embedding"] == body["data"][2]["embedding"] != body["data"][1]["embedding"]
    assert "x-truncated-inputs" not in response and response["x-request-id"]


def test_base64_is_the_floats_bit_for_bit(http: Client) -> None:
    inputs = [f"text {i}" for i in range(50)]
    floats = [entry["embedding"] for entry in post(http, {"input": inputs}).json()["data"]]
    coded = [entry["embedding"] for entry in post(http, {"input": inputs, "encoding_format": "base64"}).json()["data"]]
    for row, text in zip(floats, coded, strict=True):
        assert np.array(row, dtype="<f4").tobytes() == base64.b64decode(text, validate=True)


@pytest.mark.parametrize("dims", [1, 3, 8])
def test_dimensions(http: Client, dims: int) -> None:
    (entry,) = post(http, {"input": "a", "dimensions": dims}).json()["data"]
    assert len(entry["embedding"]) == dims and np.linalg.norm(entry["embedding"]) == pytest.approx(1, abs=1e-6)


def test_multi_vector_rows(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(10, dtype=np.float32).reshape(5, 2)
    result = EmbedResult("fake-8", data, np.array([2, 3], np.int32), np.array([2, 3], np.int32), multi_vector=True)
    monkeypatch.setattr(served, "embed", lambda job: result)
    first, second = post(http, {"input": ["a", "b"]}).json()["data"]
    assert first["embedding"] == [[0, 1], [2, 3]] and second["embedding"] == [[4, 5], [6, 7], [8, 9]] and "shape" not in first
    first, second = post(http, {"input": ["a", "b"], "encoding_format": "base64"}).json()["data"]
    assert (first["shape"], second["shape"]) == ([2, 2], [3, 2])
    assert base64.b64decode(second["embedding"]) == data[2:].tobytes()


def test_truncated_inputs_are_reported(http: Client) -> None:
    response = post(http, {"input": ["a", "a " * 40, "a " * 50]})
    assert response["x-truncated-inputs"] == "2"
    assert response.json()["usage"] == {"prompt_tokens": 67, "total_tokens": 67, "truncated_inputs": 2}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding"])
def test_an_instruction_that_has_no_effect_is_told(http: Client, served: FakeClient, path: str) -> None:
    """The contract ignores it; a caller who believes in it would compare vectors that differ less than they think."""
    assert post(http, {"input": "a", "instruction": "Find it"}, path)["x-ignored-fields"] == "instruction"
    assert "x-ignored-fields" not in post(http, {"input": "a", "instruction": " "}, path)
    with override_settings(STRICT_FIELDS=True):
        error = envelope(post(http, {"input": "a", "instruction": "Find it"}, path), 400)
    assert error["message"] == "`instruction` has no effect: fake-8 takes none" and error["param"] == "instruction"
    served.spec = replace(SPEC, instructions=True)
    assert "x-ignored-fields" not in post(http, {"input": "a", "instruction": "Find it"}, path)


def test_the_job(http: Client, served: FakeClient) -> None:
    post(http, {"input": [[1, 2]], "dimensions": 4, "instruction": "x", "embd_normalize": 1, "truncate": False})
    (job,) = served.jobs
    assert (job.items, job.model, job.dimensions, job.instruction, job.normalize, job.truncate, job.lane) == (
        ((1, 2),), "fake-8", 4, "x", 1.0, False, "interactive")


def test_as_many_inputs_as_the_body_holds(http: Client) -> None:
    assert len(post(http, {"input": ["a"] * 5000}).json()["data"]) == 5000


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "text/plain", "application/x-www-form-urlencoded",
                                          "multipart/form-data; boundary=x", "multipart/form-data", "", "nonsense", "a/b/c;;=",
                                          "application/xml"])
def test_a_body_is_json_whatever_it_is_called(http: Client, content_type: str) -> None:
    assert post(http, {"input": "a"}, content_type=content_type).status_code == 200
    envelope(post(http, b"input=a", content_type=content_type), 400)


@pytest.mark.parametrize("accept", ["text/html", "application/xml", "*/*", "nonsense", "application/json;q=0"])
def test_the_answer_is_json_whatever_is_accepted(http: Client, accept: str) -> None:
    assert post(http, {"input": "a"}, Accept=accept)["Content-Type"] == "application/json"


# JSON

@pytest.mark.parametrize(("body", "value"), [
    (b'{"a": 1, "a": 2}', {"a": 2}), (b'\xef\xbb\xbf"a"', "a"), (rb'"\ud83d\ude00"', "\U0001f600"), (rb'"\ud800"', "\ufffd"),
    (rb'"\udc00x"', "\ufffdx"),
    (rb'"\ud800\ud83d\ude00\udfff"', "\ufffd\U0001f600\ufffd"), (rb'"\\ud800"', r"\ud800"), (rb'"\\\ud800\n"', "\\\ufffd\n"),
    (rb'"\ud800\u0041"', "\ufffdA"), (rb'{"\udead": "\uDBFFx"}', {"\ufffd": "\ufffdx"}), (b"18446744073709551615", 2**64 - 1),
])
def test_json(body: bytes, value: Any) -> None:
    assert loads(body) == value


@pytest.mark.parametrize(("body", "message"), [
    (b"", "it is empty; expected a JSON object"), (b" \n", "it is empty; expected a JSON object"), ('"é"'.encode("latin-1"), "not UTF-8"),
    ('{"input": "a"}'.encode("utf-16"), "not UTF-8 (it looks like UTF-16 or UTF-32)"), (b'"\xed\xa0\x80"', "not UTF-8"),
    (b"[1,\n 2", "not valid JSON: unexpected end of data (line 2, column 3)"),
])
def test_json_errors(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        loads(body)
    assert str(caught.value) == f"invalid request body: {message}"


@pytest.mark.parametrize("body", [b"NaN", b"[Infinity]", b"9" * 5000, b"1e999", b"[" * 5000, b"{'a': 1}", rb'"\ud80"', rb'"\u"', b"[1,]",
                                  b"\xff\xfe"])
def test_what_is_not_json(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^invalid request body: "):
        loads(body)


@given(st.text(alphabet=st.characters(codec=None), max_size=20))
def test_half_surrogates_only_are_replaced(text: str) -> None:
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert len(loads(json.dumps(text).encode())) == len(whole.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass"))


# Errors

@pytest.mark.parametrize(("error", "headers"), [
    (Busy("All slots are busy. Please try again later."), {"Retry-After": "1"}),
    (Loading("the model is loading"), {"Retry-After": "1"}),
    (TimedOut("Embedding request timed out. Please try again later."), {"x-should-retry": "false"}),
    (NotLoaded("no"), {"x-should-retry": "false"}),
    (InferenceFailed("embedding inference failed: x"), {}),
    (InvalidNumericResult("embedding inference returned an invalid numeric result"), {}),
    (InvalidRequest("input[0] has 40 tokens, more than 32", param="input", code="too_long"), {}),
    (Conflict("x"), {}),
])
def test_errors_of_the_model(http: Client, served: FakeClient, error: ServiceError, headers: dict[str, str]) -> None:
    served.fail = error
    response = post(http, {"input": "a"})
    assert envelope(response, error.status) == {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    assert {name: response[name] for name in ("Retry-After", "x-should-retry") if name in response} == headers


def test_an_unforeseen_error_is_logged_and_not_told(http: Client, served: FakeClient, caplog: pytest.LogCaptureFixture,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    def embed(job: object) -> None:
        raise ZeroDivisionError("the secret of the house")

    monkeypatch.setattr(served, "embed", embed)
    with caplog.at_level(logging.ERROR):
        response = post(http, {"input": "a"})
    assert envelope(response, 500)["type"] == "server_error" and b"secret" not in response.content
    (record,) = [record for record in caplog.records if record.name == "mlxcel_site.errors"]
    assert "the secret of the house" in str(record.msg) and response["x-request-id"] in str(record.msg)


@pytest.mark.parametrize("error", (OperationalError("the connection is lost"), InterfaceError("connection already closed")))
def test_a_database_that_is_away_is_a_503(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def get(name: str) -> None:
        raise error

    monkeypatch.setattr("embeddings.corpus.get", get)
    response = http.post("/collections/papers/search", {"query": "a"}, content_type="application/json")
    assert envelope(response, 503)["type"] == "server_busy" and response["Retry-After"]
    assert b"connection" not in response.content


def test_where_redis_is_and_why_it_refuses_is_for_the_log(http: Client, served: FakeClient, caplog: pytest.LogCaptureFixture) -> None:
    served.fail = Away("Redis at 10.0.0.5:6379/0 cannot be reached: refused")
    with caplog.at_level(logging.WARNING):
        response = post(http, {"input": "a"})
    assert envelope(response, 503)["message"] == "The models cannot be reached at the moment. Please try again later."
    assert any("10.0.0.5" in str(record.msg) for record in caplog.records) and response["Retry-After"]


def test_no_model(http: Client, served: FakeClient) -> None:
    served.spec = None
    response = post(http, {"input": "a"})
    assert envelope(response, 501)["message"].startswith("This server does not support embeddings.")
    assert response["x-should-retry"] == "false"
    assert http.get("/v1/models").json() == {"models": [], "object": "list", "data": []}


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/embeddings", 405), ("PUT", "/v1/embeddings", 405), ("DELETE", "/v1/models", 405), ("POST", "/health", 405),
    ("BREW", "/health", 405),
    ("GET", "/nothing", 404), ("POST", "/v1/nothing", 404), ("GET", "/static/nothing", 404), ("POST", "/v1/chat/completions", 404),
    ("GET", "/v1/models/nothing", 404), ("GET", "/collections/nothing", 404), ("GET", "/v1/%00", 404), ("GET", "/v1/\N{SNOWMAN}", 404),
])
@pytest.mark.django_db
def test_wrong_paths_and_methods(http: Client, method: str, path: str, status: int) -> None:
    response = http.generic(method, path)
    error = envelope(response, status)
    assert "Allow" in response if status == 405 else error["type"] == "not_found_error"


def test_a_doubled_prefix_is_told_the_right_path(http: Client) -> None:
    assert "use /v1/embeddings" in envelope(post(http, {}, "/v1/v1/embeddings"), 404)["message"]
    assert "use /v1/models" in envelope(http.get("/v1/v1/v1/models/"), 404)["message"]


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/", "/v1/health"])
@pytest.mark.parametrize("hosts", [["api.example"], [".example"], ["*"]])
def test_probes_without_a_host(http: Client, settings: Any, path: str, hosts: list[str]) -> None:
    settings.ALLOWED_HOSTS = hosts
    assert http.get(path, HTTP_HOST="").status_code == 200
    assert http.get("/v1/models", HTTP_HOST="").status_code == 400


def test_the_base_url_in_a_browser(http: Client) -> None:
    body = http.get("/v1").json()
    assert "/v1/embeddings" in body["routes"]["POST"] and body["docs"].endswith("/docs")
    for path in body["routes"]["GET"]:
        assert resolve(path)


def test_a_compressed_body(http: Client) -> None:
    response = http.post("/v1/embeddings", gzip.compress(b'{"input": "a"}'), content_type="application/json", HTTP_CONTENT_ENCODING="gzip")
    assert "Content-Encoding `gzip` is not accepted" in envelope(response, 415)["message"]


def test_an_unknown_host(http: Client) -> None:
    assert "DJANGO_ALLOWED_HOSTS" in envelope(http.get("/health", headers={"host": "elsewhere.example"}), 400)["message"]


@override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=100)
def test_a_body_over_the_limit(http: Client) -> None:
    assert post(http, b'{"input": "a"}'.ljust(100)).status_code == 200
    assert envelope(post(http, b'{"input": "a"}'.ljust(101)), 413) == {
        "message": "Request body too large.", "type": "invalid_request_error", "param": None, "code": None}


@override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=100)
@pytest.mark.parametrize("size", [0, 99, 100, 101, 10_000])
def test_a_chunked_body_has_a_length_and_the_same_limit(size: int) -> None:
    seen = {}
    environ = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input": io.BytesIO(b"x" * size)}
    Bodies(lambda environ, start: seen.update(environ) or [], readers=1)(environ, None)  # type: ignore[func-returns-value]
    assert (seen["CONTENT_LENGTH"], len(seen["wsgi.input"].read())) == (str(min(size, 101)), min(size, 101))


def test_errors_outside_the_views(http: Client, rf: Any) -> None:
    assert envelope(errors.handler500(rf.get("/v1/x")), 500)["type"] == "server_error"
    assert errors.handler500(rf.get("/admin/")).content.startswith(b"\n<!doctype html>")
    assert http.get("/admin/nothing/").status_code in (302, 404)


# Paths around the models

def test_models(http: Client) -> None:
    response = http.get("/v1/models")
    (model,) = response.json()["data"]
    assert (model["id"], model["object"], model["owned_by"], model["aliases"]) == ("fake-8", "model", "mlxcel", ["tests/fake-8"])
    assert model["capabilities"] == ["embedding"] and model["meta"]["dims"] == 8 and model["meta"]["prompts"] == dict(SPEC.prompts)
    assert http.get("/models").content == response.content == http.get("/v1/models/").content
    assert http.get("/v1/models/fake-8").json() == model == http.get("/v1/models/tests/fake-8").json()
    error = envelope(http.get("/v1/models/x"), 404)
    assert error["code"] == "model_not_found" and "fake-8" in error["message"]


def test_capabilities(http: Client, served: FakeClient) -> None:
    served.spec = replace(SPEC, images=True, multi_vector=True, instructions=True)
    assert http.get("/v1/models").json()["data"][0]["capabilities"] == ["embedding", "images", "multi_vector", "instructions"]


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/health/", "/health/ready", "/v1/health/ready"])
def test_health(http: Client, path: str) -> None:
    response = http.get(path)
    assert (response.status_code, response.content) == (200, b'{"status":"ok"}')
    assert http.head(path).status_code == 200


@pytest.mark.parametrize("status", ["loading", "failed"])
def test_not_ready(http: Client, served: FakeClient, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "health", lambda: {"status": status})
    response = http.get("/health/ready")
    error = envelope(response, 503)
    assert (error["type"], error["code"], response["Retry-After"]) == ("unavailable_error", 503, "1")
    assert http.get("/health").status_code == 200


# Collections

@pytest.fixture
def collection(db: None) -> Collection:
    space = VectorSpace.objects.create(fingerprint="f" * 64, model_id="fake-8", weights_hash="0" * 64, pooling="mean", normalize=2.0,
                                       dims=8, max_length=32)
    return Collection.objects.create(name="books", space=space, query_prompt="query: ", text_fields=["text"])


def test_collections(http: Client, collection: Collection) -> None:
    collection.documents.create(external_id="1", text="a", content_hash="0" * 64, split="none")
    (found,) = http.get("/collections").json()["data"]
    assert (found["id"], found["object"], found["documents"], found["model"], found["dims"]) == ("books", "collection", 1, "fake-8", 8)
    assert http.get("/collections/books").json() == found == http.get("/collections/books/").json()
    assert envelope(http.get("/collections/films"), 404)["code"] == "collection_not_found"


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Search is tested where it is; here a stand-in records what it is asked."""
    calls: list[dict[str, Any]] = []

    def search(collection: Collection, query: str, **options: Any) -> SearchResult:
        calls.append({"collection": collection.name, "query": query, **options})
        hit = Hit(document_id=1, external_id="d1", score=0.5, part=2, start=10, end=20, text="the text", metadata={"year": 1999})
        return SearchResult(hits=[hit], exact=True, tokens=5)

    monkeypatch.setattr(views, "search", search)
    yield calls


def test_search(http: Client, collection: Collection, hits: list[dict[str, Any]]) -> None:
    response = post(http, {"query": "a story", "limit": 3, "filter": {"year": 1999}, "include_text": True}, "/collections/books/search")
    assert response.json() == {
        "object": "list", "collection": "books", "model": "fake-8", "exact": True,
        "data": [{"id": "d1", "score": 0.5, "part": 2, "start": 10, "end": 20, "text": "the text", "metadata": {"year": 1999}}],
        "usage": {"prompt_tokens": 5, "total_tokens": 5}}
    assert hits == [{"collection": "books", "query": "a story", "client": get_client(), "limit": 3, "filter": {"year": 1999},
                     "include_text": True, "rerank": False, "candidates": None}]
    assert "text" not in post(http, {"query": "a"}, "/collections/books/search").json()["data"][0]


def test_search_errors(http: Client, collection: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    assert envelope(post(http, {}, "/collections/books/search"), 400)["param"] == "query"
    assert envelope(post(http, {"query": "a"}, "/collections/films/search"), 404)["code"] == "collection_not_found"

    def search(*args: Any, **options: Any) -> None:
        raise Conflict("the model is not served")

    monkeypatch.setattr(views, "search", search)
    assert envelope(post(http, {"query": "a"}, "/collections/books/search"), 409)["type"] == "conflict_error"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
def test_no_method_on_any_route_gives_a_500_or_a_page(db: None, http: Client, method: str) -> None:
    for path, _ in addresses(get_resolver()):
        for address in (path, f"{path}/"):
            response = http.generic(method, re.sub(r"{\w+}", "x", address), b"{}", content_type="application/json")
            assert response.status_code in (200, 400, 404, 405, 501), (method, address, response.content)
            page = path in ("/", "/docs", "/metrics") and method in ("GET", "HEAD")
            assert page or response["Content-Type"] in ("application/json", "application/vnd.oai.openapi+json"), (method, address)


def test_a_path_that_is_no_route_is_told_in_short(http: Client) -> None:
    assert len(envelope(http.get(f"/{'a' * 9000}"), 404)["message"]) < 300


# Pages and the document of the API

def test_home(http: Client, collection: Collection, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    page = http.get("/").content.decode()
    assert all(text in page for text in ('lang="en"', "fake-8", "books", 'href="/docs"', 'href="/admin/"', "http://testserver/v1"))

    def models() -> None:
        raise InferenceFailed("the model <x> is broken")

    monkeypatch.setattr(served, "models", models)
    assert "the model &lt;x&gt; is broken" in http.get("/").content.decode()


@pytest.mark.django_db
def test_docs_need_nothing_from_elsewhere(http: Client) -> None:
    page = http.get("/docs").content.decode()
    assert "/static/drf_spectacular_sidecar/swagger-ui-dist/swagger-ui-bundle.js" in page and "https://" not in page
    with closing(http.get("/static/drf_spectacular_sidecar/swagger-ui-dist/swagger-ui-bundle.js")) as script:
        assert script.status_code == 200


def test_schema_is_valid(http: Client) -> None:
    call_command("spectacular", "--validate", "--fail-on-warn", file="/dev/null")
    components = http.get("/openapi.json").json()["components"]["schemas"]
    for schema in components.values():
        Draft202012Validator.check_schema(schema)
    generators_cannot_say = [f"{name}.{field}" for name, schema in components.items() for field, of in schema.get("properties", {}).items()
                             if "default" in of and len(set(of["type"]) - {"null"}) > 1 and isinstance(of["type"], list)]
    assert generators_cannot_say == []      # they write such a default as a string


def test_examples_of_the_schema_fit_it(http: Client) -> None:
    schema = http.get("/openapi.json").json()
    for operations in schema["paths"].values():
        for operation in operations.values():
            for part in (operation.get("requestBody", {}), *operation["responses"].values()):
                content = part.get("content", {}).get("application/json", {})
                for example in content.get("examples", {}).values():
                    Draft202012Validator({**content["schema"], "components": schema["components"]}).validate(example["value"])


def test_schema_is_complete(http: Client) -> None:
    schema = http.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/v1/embeddings", "/embedding", "/v1/rerank", "/props", "/v1/models", "/v1/models/{model}", "/health", "/health/ready",
        "/collections", "/collections/{name}", "/collections/{name}/search", "/jobs", "/jobs/{job}"}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert operation["summary"] and operation["operationId"] and "500" in operation["responses"]
            assert ("401" in operation["responses"]) is (path not in ("/health", "/health/ready"))
            if "requestBody" in operation:
                body = operation["requestBody"]
                assert body["required"] and body["content"]["application/json"]["examples"]
                assert {"400", "408", "413", "415"} <= set(operation["responses"])
    assert set(schema["paths"]["/v1/embeddings"]["post"]["responses"]) == {
        "200", "400", "401", "408", "413", "415", "500", "501", "503", "504"}


# Nothing makes it fall over

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=12)
FIELDS = ["input", "model", "encoding_format", "dimensions", "instruction", "embd_normalize", "user", "encoding_type", "output_dimension",
          "output_dtype", "prompt_name", "input_type", "normalize", "truncate", "truncation", "truncate_prompt_tokens",
          "truncation_direction", "late_chunking"]
LIKELY = st.sampled_from(["a", ["a", "b"], [1, 2], [[1], [2]], [{"type": "text", "text": "a"}], "fake-8", "base64", "float", 4, -1, 0,
                          True, False, None, "END"])


def sound(response: Any) -> None:
    if response.status_code == 200:
        body = json.loads(response.content, parse_constant=pytest.fail)
        assert body["data"] and [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    else:
        envelope(response, response.status_code)
        assert 400 <= response.status_code < 500


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(st.sampled_from(FIELDS), LIKELY | JSON, max_size=6))
def test_no_object_gives_a_500(http: Client, body: dict[str, Any]) -> None:
    sound(post(http, body))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()), content_type=st.text(
    st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=20))
def test_no_bytes_give_a_500(http: Client, body: bytes, content_type: str) -> None:
    sound(post(http, body, content_type=content_type))


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.text(st.characters(codec="utf-8", exclude_characters="?#"), max_size=20),
       method=st.sampled_from(["GET", "POST", "HEAD", "PATCH"]))
def test_no_path_gives_a_page(http: Client, path: str, method: str) -> None:
    response = http.generic(method, f"/v1/{path}", b"{}")
    assert response.status_code in (200, 400, 404, 405) and response["Content-Type"].startswith("application/json")


def fields(schema: dict[str, Any], of: dict[str, Any]) -> set[str]:
    """The names of a body's fields, in whatever form."""
    if "$ref" in of:
        return fields(schema, schema["components"]["schemas"][of["$ref"].rpartition("/")[2]])
    return set(of.get("properties", ())).union(*(fields(schema, form) for form in of.get("oneOf", ())))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_no_operation_of_the_schema_gives_a_500(http: Client, served: FakeClient, collection: Collection, drawn: st.DataObject) -> None:
    schema = http.get("/openapi.json").json()
    bodies = {path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
              for path, operations in schema["paths"].items() if "post" in operations}
    served.reranker = RERANKER
    path = drawn.draw(st.sampled_from(sorted(bodies)))
    body = drawn.draw(st.dictionaries(st.sampled_from(sorted(fields(schema, bodies[path]))), LIKELY | JSON, max_size=6))
    response = post(http, body, path.replace("{name}", collection.name))
    assert response["Content-Type"] == "application/json" and response.status_code < 500, (path, body, response.content)
