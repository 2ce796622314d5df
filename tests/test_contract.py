"""What clients of llama-server and operators rely on: native routes, models, properties, modes, prefix, CORS, ids, timings, readiness."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from django.test import Client, override_settings

from inference.config import Settings
from inference.errors import ConfigError, NotLoaded
from inference.transports.local import LocalClient
from inference.wire import EmbedResult
from mlxcel_site import checks
from mlxcel_site.environment import misspelt
from mlxcel_site.middleware import Prefix
from tests.fakes import SPEC, FakeClient
from tests.test_rest import envelope, post

pytestmark = pytest.mark.usefixtures("served")
NATIVE = ["/embedding", "/embeddings", "/embedding/", "/embeddings/"]


@pytest.fixture
def http() -> Client:
    return Client(raise_request_exception=False)


# POST /embedding

@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("name", ["content", "input"])
def test_the_native_shape(http: Client, path: str, name: str) -> None:
    same = post(http, {"input": ["a b", "c"]}).json()["data"]
    assert post(http, {name: ["a b", "c"]}, path).json() == [{"index": i, "embedding": [same[i]["embedding"]]} for i in range(2)]
    assert post(http, {name: "a b", "encoding_format": "base64"}, path).json() == [{"index": 0, "embedding": [same[0]["embedding"]]}]
    assert len(post(http, {name: [[1, 2], [3]], "dimensions": 4}, path).json()[1]["embedding"][0]) == 4


def test_a_row_a_token_of_multi_vector_models(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(10, dtype=np.float32).reshape(5, 2)
    result = EmbedResult("fake-8", data, np.array([2, 3], np.int32), np.array([2, 3], np.int32), multi_vector=True)
    monkeypatch.setattr(served, "embed", lambda job: result)
    assert post(http, {"content": ["a", "b"]}, "/embedding").json() == [
        {"index": 0, "embedding": [[0, 1], [2, 3]]}, {"index": 1, "embedding": [[4, 5], [6, 7], [8, 9]]}]


def test_which_field_is_read(http: Client, served: FakeClient) -> None:
    post(http, {"content": "a", "input": "b"}, "/embedding")
    assert served.jobs[-1].items == ("b",)
    assert envelope(post(http, {"content": "a"}), 400)["message"] == "invalid request body: missing field `input`"
    assert post(http, {"content": "a " * 40}, "/embedding")["x-truncated-inputs"] == "1"
    assert envelope(post(http, {"content": None}, "/embedding"), 400)["param"] == "input"


# Each body is wrong in all that follows too, so that the order shows.
ORDER: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, '"input" or "content" must be provided'),
    ({"input": 1.5}, 400, "invalid request body: `input` must be a string"),
    ({"input": ["a"], "dimensions": "4"}, 400, "invalid request body: `dimensions` must be a whole number of at least 0"),
    ({"input": ""}, 501, "This server does not support embeddings."),
    ({"input": "", "model": "x"}, 400, "model `x` is not the served embedding model `fake-8`"),
    ({"input": "", "encoding_format": " hex "}, 400, "unsupported encoding_format `hex`; expected `float` or `base64`"),
    ({"input": "", "dimensions": 9}, 400, "`dimensions` must be between 1 and 8 for this model, got 9"),
    ({"input": ["a", ""]}, 400, "input[1] is an empty string"),
    ({"input": []}, 400, "input[0] is an empty token list"),
    ({"input": [[1], [5000, 6000]]}, 400, "input[1] contains token id 5000, which is >= vocab_size 1000"),
    ({"input": [{"type": "image_url", "image_url": {"url": "x"}}]}, 400,
     "input[0] is an image, but the loaded embedding model does not accept images"),
    ({"input": "a"}, 400, "embd_normalize -2 is out of domain: pass -1 for no normalization, 0 for the max-absolute int16 rescale, 1 for "
                          "taxicab, 2 for euclidean, or a value above 2 for that p-norm"),
]
LATER = [{"embd_normalize": -2}, {"dimensions": 99}, {"encoding_format": "hex"}, {"model": "x"}]


@pytest.mark.parametrize("path", ["/v1/embeddings", *NATIVE[:2]])
@pytest.mark.parametrize(("step", "body", "status", "message"), [(i, *case) for i, case in enumerate(ORDER)])
def test_the_order_of_the_checks(http: Client, served: FakeClient, path: str, step: int, body: dict[str, Any], status: int,
                                 message: str) -> None:
    if step <= 3:
        served.spec = None
    reached = {3: 4, 4: 3, 5: 2}.get(step, 4 if step < 3 else 1)      # how many of LATER are checked after this
    later = {key: value for extra in LATER[:reached] for key, value in extra.items()}
    response = post(http, {**later, **body}, path)
    assert envelope(response, status)["message"].startswith(message)


# Models and properties

def test_models_in_both_forms(http: Client) -> None:
    body = http.get("/v1/models").json()
    (model,), (entry,) = body["data"], body["models"]
    assert {name: model["meta"][name] for name in ("n_ctx", "n_embd", "n_vocab", "n_params", "size", "ftype")} == {
        "n_ctx": 32, "n_embd": 8, "n_vocab": 1000, "n_params": 8, "size": 32, "ftype": "f32"}
    assert model["tags"] == [] and (entry["name"], entry["model"], entry["type"]) == ("fake-8", "fake-8", "model")
    assert entry["capabilities"] == model["capabilities"] == ["embedding"] and entry["details"]["family"] == "fake"


def test_properties_are_shown_where_asked_for(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--props" in envelope(http.get("/props"), 501)["message"]
    with override_settings(PROPS=True):
        embedding = {"model": "fake-8", "dim": 8, "pooling": "mean", "embd_normalize": 2, "multi_vector": False}
        assert http.get("/props").json() == {"capabilities": {"generation": False, "embedding": embedding}}
        served.spec = replace(SPEC, kind="reranker", scoring="sequence_classifier")
        monkeypatch.setenv("MLXCEL_MODE", "reranking")
        assert http.get("/props/").json() == {"capabilities": {
            "generation": False, "serving_mode": "--reranking", "reranking": {"model": "fake-8", "kind": "sequence_classifier"}}}
        served.spec = None
        assert http.get("/props").json() == {"capabilities": {"generation": False, "serving_mode": "--reranking"}}


# Modes

def test_a_mode_serves_one_kind() -> None:
    both = {"MLXCEL_EMBEDDING_MODEL": "e", "MLXCEL_RERANKER_MODEL": "r"}
    embeddings, reranking = (Settings.from_env({**both, "MLXCEL_MODE": mode}) for mode in ("embeddings", "Reranking"))
    assert (embeddings.embedding_models, embeddings.reranker_models) == (("e",), ())
    assert (reranking.embedding_models, reranking.reranker_models) == ((), ("r",))
    assert Settings.from_env({"MLXCEL_MODE": "embeddings"}).embedding_models == Settings().embedding_models
    with pytest.raises(ConfigError, match="embeddings, reranking"):
        Settings.from_env({"MLXCEL_MODE": "generation"})
    with pytest.raises(NotLoaded, match=r"^This server does not support embeddings: it was started with --reranking"):
        LocalClient(reranking).describe("embedding")
    with pytest.raises(NotLoaded, match=r"^This server does not support reranking: it was started with --embeddings"):
        LocalClient(embeddings).describe("reranker", "r")


@pytest.mark.parametrize(("mode", "missing"), [("reranking", "MLXCEL_RERANKER_MODEL"), ("embeddings", "MLXCEL_EMBEDDING_MODEL")])
def test_a_mode_needs_its_model(mode: str, missing: str) -> None:
    settings = Settings.from_env({"MLXCEL_EMBEDDING_MODEL": "", "MLXCEL_MODE": mode})
    (error,) = checks._check_mode(settings)
    assert error.id == "mlxcel.E004" and missing in error.msg
    assert checks._check_mode(Settings.from_env({"MLXCEL_EMBEDDING_MODEL": ""})) == []


def test_misspelt_settings_are_named() -> None:
    assert misspelt({"MLXCEL_EMBEDING_MODEL": "x", "MLXCEL_API_KEYS": "k", "PATH": ""}) == [
        ("MLXCEL_EMBEDING_MODEL", "MLXCEL_EMBEDDING_MODEL")]


# Prefix

def call(application: Callable[..., Iterable[bytes]], path: str) -> tuple[dict[str, Any], list[bytes]]:
    seen: dict[str, Any] = {}

    def inner(environ: dict[str, Any], start_response: object) -> list[bytes]:
        seen.update(environ)
        return []

    return seen, list(Prefix(inner, "/ai")({"PATH_INFO": path}, lambda status, headers: seen.update(status=status)))


@pytest.mark.parametrize(("path", "inside"), [("/ai", "/"), ("/ai/", "/"), ("/ai/v1/models", "/v1/models"), ("/ai/ai/x", "/ai/x")])
def test_paths_under_the_prefix(path: str, inside: str) -> None:
    seen, _ = call(lambda *_: [], path)
    assert (seen["SCRIPT_NAME"], seen["PATH_INFO"], seen["mlxcel.prefix"]) == ("/ai", inside, "/ai")


def test_paths_beside_the_prefix() -> None:
    for path in ("/v1/models", "/", "/aix", "/health/ready"):
        seen, body = call(lambda *_: [], path)
        assert seen["status"] == "404 Not Found" and "/ai" in json.loads(b"".join(body))["error"]["message"]
    seen, _ = call(lambda *_: [], "/health/")
    assert "mlxcel.prefix" not in seen and "SCRIPT_NAME" not in seen


@pytest.mark.parametrize("text", ["", "/", "ai", "/ai/", "/ai/v2", "a-b.c_d~e"])
def test_prefixes(text: str) -> None:
    assert checks._check_prefix(text) == []


@pytest.mark.parametrize("text", ["/a b", "//", "/a//b", "/ä", "/a?b", "http://x"])
def test_what_is_no_prefix(text: str) -> None:
    assert [error.id for error in checks._check_prefix(text)] == ["mlxcel.E005"]


# CORS

@pytest.fixture
def origin() -> Any:
    with override_settings(CORS_ALLOWED_ORIGINS=["https://app.example"], API_KEYS="k"):
        yield Client(raise_request_exception=False)


def test_a_preflight_needs_no_key(origin: Client) -> None:
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type,x-stainless-retry-count"}
    response = origin.options("/v1/embeddings", headers=asked)
    assert response.status_code == 200 and response["Access-Control-Allow-Origin"] == "https://app.example"
    assert {"authorization", "content-type", "x-api-key", "x-stainless-retry-count"} <= set(
        response["Access-Control-Allow-Headers"].split(", "))
    assert "Access-Control-Allow-Credentials" not in response


def test_answers_and_errors_can_be_read_by_the_page(origin: Client) -> None:
    page = {"Origin": "https://app.example"}
    for headers, status in (({**page, "X-Api-Key": "k"}, 200), (page, 401)):
        response = origin.get("/v1/models", headers=headers)
        assert response.status_code == status and response["Access-Control-Allow-Origin"] == "https://app.example"
        assert "x-request-id" in response["Access-Control-Expose-Headers"]
    assert "Access-Control-Allow-Origin" not in origin.get("/v1/models", headers={"Origin": "https://other.example", "X-Api-Key": "k"})
    assert "Access-Control-Allow-Origin" not in origin.get("/admin/login/", headers=page)


def test_no_origin_is_let_in_unless_named(http: Client) -> None:
    assert "Access-Control-Allow-Origin" not in http.get("/v1/models", headers={"Origin": "https://app.example"})


# Ids and timings

@pytest.mark.parametrize("given", ["abc-123", "01J/x:y.z=", "a" * 128])
def test_a_sane_request_id_is_taken_over(http: Client, given: str) -> None:
    assert post(http, {"input": "a"}, **{"x-request-id": given})["x-request-id"] == given
    assert post(http, {}, **{"x-request-id": given})["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "é", "x{y}", "a\tb", '"'])
def test_another_is_replaced(http: Client, given: str) -> None:
    made = post(http, {"input": "a"}, **{"x-request-id": given})["x-request-id"]
    assert made != given and len(made) == 36


def test_stages_and_the_whole_time(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = served.embed
    timings = {"forward": 0.0061, "tokenize": 0.001, "queue": 0.0}
    monkeypatch.setattr(served, "embed", lambda job: replace(embed(job), timings=timings))
    for path in ("/v1/embeddings", "/embedding"):
        stages = dict(part.split(";dur=") for part in post(http, {"input": "a"}, path)["Server-Timing"].split(", "))
        assert list(stages) == ["tokenize", "queue", "forward", "total"] and stages["forward"] == "6.10" and float(stages["total"]) > 0
    assert http.get("/health")["Server-Timing"].startswith("total;dur=")


# Readiness

def test_not_ready_while_a_model_makes_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    served = SimpleNamespace(name="m", kind="embedding", opened=object(), running=SimpleNamespace(spec=SPEC))
    client = LocalClient(Settings(embedding_models=(), timeout=5.0))
    monkeypatch.setattr(client, "_served", [served])
    for stalled, status in ((4.0, "ok"), (6.0, "stale")):
        served.running.counters = lambda stalled=stalled: {"stalled_seconds": stalled}
        assert client.health()["status"] == status


# Whatever Django says itself

@pytest.mark.parametrize("debug", [False, True])
def test_no_page_where_an_answer_is_expected(http: Client, debug: bool, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with override_settings(DEBUG=debug, ALLOWED_HOSTS=["testserver"]):
        for method, path, status in (("GET", "/nothing", 404), ("POST", "/v1/nothing/", 404), ("PUT", "/v1/embeddings", 405),
                                     ("POST", "/metrics", 405), ("POST", "/", 405), ("DELETE", "/openapi.json", 405),
                                     ("POST", "/docs", 405)):
            response = http.generic(method, path, b"{}", content_type="text/html", headers={"Accept": "text/html"})
            envelope(response, status)
            assert ("Allow" in response) is (status == 405) and response["x-request-id"]
        envelope(http.get("/v1/models", headers={"host": "elsewhere.example"}), 400)
        with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=10):
            assert envelope(post(http, {"input": "a"}, "/embedding"), 413)["message"] == "Request body too large."
            assert envelope(post(http, {"input": "a"}, "/nothing"), 404)

        def broken() -> None:
            raise ZeroDivisionError("the secret of the house")

        monkeypatch.setattr(served, "models", broken)
        for path in ("/v1/models", "/"):
            response = http.get(path, headers={"Accept": "text/html"})
            envelope(response, 500)
            assert b"secret" not in response.content


def test_head_is_get_without_a_body(http: Client) -> None:
    for path in ("/v1/models", "/health", "/openapi.json", "/metrics"):
        response = http.head(path)
        assert response.status_code == 200 and response.content == b""
    assert http.head("/embedding").status_code == 405


def test_errors_of_modes_reach_the_caller(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(kind: str, model: str | None = None) -> None:
        raise NotLoaded("This server does not support embeddings: it was started with --reranking")

    monkeypatch.setattr(served, "describe", describe)
    response = post(http, {"content": "a"}, "/embedding")
    assert envelope(response, 501)["type"] == "not_implemented" and response["x-should-retry"] == "false"
