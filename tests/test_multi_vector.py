"""Multi-vectors from file to answer: a tiny ColBERT through the commands, the API, the admin and clients."""
from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from django.test import Client

from embeddings import corpus, search, vectors
from embeddings.encoding import Encoder, Failure
from embeddings.models import Passage
from embeddings.scoring import Metric
from embeddings.sources import Record
from inference.__main__ import main
from inference.client import get_client
from inference.wire import EmbedJob
from tests import stored
from tests.checkpoints import colbert
from tests.fakes import FakeClient
from tests.servers import serving
from tests.test_commands import manage, write

ROWS = ({"_id": "boats", "text": "a boat sails against the wind", "topic": "sea"},
        {"_id": "trains", "text": "trains ride on iron rails; fast"},
        {"_id": "plants", "text": "plants make sugar from light. " * 9, "topic": "green"}, {"_id": "noise", "text": "?!... --"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return colbert(tmp_path_factory.mktemp("models") / "tiny-colbert", data)


@pytest.fixture
def served(model: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path) -> Iterator[Any]:
    settings.VAR_DIR = tmp_path / "var"
    monkeypatch.setenv("MLXCEL_EMBEDDING_MODEL", str(model))
    monkeypatch.setenv("MLXCEL_BACKEND", "host")
    get_client.cache_clear()
    yield get_client()
    get_client().close()
    get_client.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", *ROWS)


@pytest.fixture
def http() -> Client:
    return Client(raise_request_exception=False)


def post(http: Client, body: Any, path: str = "/v1/embeddings") -> Any:
    return http.post(path, json.dumps(body), content_type="application/json")


def maxsim(query: np.ndarray, document: np.ndarray) -> float:
    return float((query.astype(np.float64) @ document.astype(np.float64).T).max(1).sum())


# ---- collections

@pytest.mark.django_db
def test_a_collection_from_file_to_figures(served: Any, source: Path, tmp_path: Path, http: Client) -> None:
    done = manage("embed_corpus", "texts", source, "--json")
    assert (done.code, done.json["embedded"], done.json["failed"], done.json["passages"]) == (0, 4, 0, 4)
    assert manage("embed_corpus", "texts", source, "--json").json["unchanged"] == 4
    collection = corpus.get("texts")
    space = collection.space
    assert space.multi_vector and (space.dims, space.pooling, space.max_length) == (12, "none", 64)
    assert {p.dtype for p in Passage.objects.all()} == {"<f2"}

    query = served.embed(EmbedJob(("does wind move boats",), input_type="query")).data
    assert len(query) == 16
    rows = {p.document.external_id: vectors.decode(p.vector, p.rows, p.dims, p.dtype) for p in Passage.objects.select_related("document")}
    expected = sorted(((maxsim(query, rows[r["_id"]]), r["_id"]) for r in ROWS), reverse=True)
    found = manage("search_corpus", "texts", "does wind move boats", "--json").json
    assert found["exact"] and [hit["external_id"] for hit in found["hits"]] == [name for _, name in expected]
    assert [hit["score"] for hit in found["hits"]] == pytest.approx([score for score, _ in expected], abs=1e-5)
    assert found["hits"][0]["external_id"] == "boats"

    asked = {"query": "does wind move boats", "limit": 2, "filter": {"topic": ["sea", "green"]}}
    api = post(http, asked, "/collections/texts/search").json()
    assert [hit["id"] for hit in api["data"]] == [name for _, name in expected if name in ("boats", "plants")]
    assert api["usage"]["prompt_tokens"] == 16
    shown = http.get("/collections/texts").json()
    assert shown["multi_vector"] and shown["dims"] == 12

    queries = write(tmp_path / "queries.jsonl", {"_id": "q1", "text": "boats and wind"}, {"_id": "q2", "text": "iron trains"})
    (tmp_path / "qrels.trec").write_text("q1 0 boats 1\nq2 0 trains 1\n")
    figures = manage("evaluate_corpus", "texts", "--queries", queries, "--qrels", tmp_path / "qrels.trec", "--json").json["figures"]
    assert figures["nDCG@10"] == 1.0 and figures["RR@10"] == 1.0

    assert manage("export_corpus", "texts", tmp_path / "out.npy").code == 0
    matrix = np.load(tmp_path / "out.npy")
    ids = [json.loads(line) for line in (tmp_path / "out.ids.jsonl").read_text().splitlines()]
    assert [(entry["id"], entry["rows"]) for entry in ids] == [(r["_id"], len(rows[r["_id"]])) for r in ROWS]
    np.testing.assert_array_equal(matrix, np.concatenate([rows[r["_id"]] for r in ROWS]))

    near = search.nearest(Passage.objects.get(document__external_id="boats"))
    assert near[0].external_id != "boats" and len(near) == 3
    assert manage("delete_corpus", "texts", "--no-input").code == 0


@pytest.mark.django_db
def test_parquet_holds_a_matrix_a_passage(served: Any, source: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    manage("embed_corpus", "texts", source)
    assert manage("export_corpus", "texts", tmp_path / "out.parquet").code == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    for vector, passage in zip(table["vector"].to_pylist(), Passage.objects.order_by("document_id", "part"), strict=True):
        np.testing.assert_array_equal(np.array(vector), vectors.decode(passage.vector, passage.rows, passage.dims, passage.dtype))


@pytest.mark.django_db
def test_passages_of_a_split_are_whole_and_the_best_one_answers(served: Any, source: Path) -> None:
    assert manage("embed_corpus", "texts", source, "--split", "16:4", "--json").json["passages"] > 6
    assert max(Passage.objects.values_list("tokens", flat=True)) <= 16
    query = served.embed(EmbedJob(("plants make sugar from light",), input_type="query")).data
    expected: dict[str, tuple[float, int]] = {}
    for p in Passage.objects.select_related("document"):
        score = maxsim(query, vectors.decode(p.vector, p.rows, p.dims, p.dtype)), -p.part
        expected[p.document.external_id] = max(expected.get(p.document.external_id, score), score)
    for hit in search.search(corpus.get("texts"), "plants make sugar from light", client=served).hits:
        assert (hit.score, -hit.part) == pytest.approx(expected.pop(hit.external_id), abs=1e-5)
    assert not expected
    assert manage("embed_corpus", "other", source, "--split", "65").code == 2


@pytest.mark.django_db
def test_a_model_that_makes_other_rows_is_refused(served: Any, source: Path, tmp_path: Path, data: Path, http: Client,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights with another skip list, under the same name: documents would not be comparable. Queries may differ."""
    manage("embed_corpus", "texts", source)
    changed = colbert(tmp_path / "a" / "tiny-colbert", data, skiplist_words=[])
    monkeypatch.setenv("MLXCEL_EMBEDDING_MODEL", str(changed))
    for ended in (manage("search_corpus", "texts", "boats"), manage("embed_corpus", "texts", source)):
        assert ended.code == 2 and "weights_hash" in ended.message
    longer = colbert(tmp_path / "b" / "tiny-colbert", data, query_length=24)
    monkeypatch.setenv("MLXCEL_EMBEDDING_MODEL", str(longer))
    assert manage("search_corpus", "texts", "boats").code == 0


@pytest.mark.django_db
def test_the_admin_searches_by_maxsim(served: Any, source: Path, admin_client: Client) -> None:
    manage("embed_corpus", "texts", source)
    collection = corpus.get("texts")
    page = admin_client.get(f"/admin/embeddings/collection/{collection.pk}/search/", {"q": "boats and wind"}).content.decode()
    assert "MaxSim" in page and page.index("boats</a>") < page.index("trains</a>")
    document = Passage.objects.get(document__external_id="boats").document
    assert admin_client.get(f"/admin/embeddings/document/{document.pk}/change/").status_code == 200
    assert admin_client.get(f"/admin/embeddings/collection/{collection.pk}/change/").status_code == 200


# ---- storage

def test_float16_moves_a_score_by_less_than_its_bound() -> None:
    """2^-11 a query row, whatever the rows are; the order of clearly different documents does not change."""
    rng = np.random.default_rng(0)
    query = stored.unit(rng.standard_normal((32, 128)))
    documents = [stored.unit(rng.standard_normal((int(n), 128))) for n in rng.integers(5, 80, 60)]
    exact = np.array([maxsim(query, d) for d in documents])
    kept = [vectors.decode(*vectors.encode(d, vectors.stored_as(True))) for d in documents]
    moved = np.abs(np.array([maxsim(query, d) for d in kept]) - exact)
    assert 0 < moved.max() <= len(query) * 2**-11
    assert moved.max() < 0.0005                    # measured: 0.00026, of scores of 3.4 to 7.0
    assert vectors.stored_as(False) == "<f4" and Metric(multi_vector=True, divide=False).multi_vector


@pytest.mark.django_db
def test_numbers_that_float16_cannot_hold_fail_their_document_alone() -> None:
    class Loud(FakeClient):
        def embed(self, job: EmbedJob) -> Any:
            result = super().embed(job)
            result.data[[i for i, item in enumerate(job.items) if "loud" in str(item)]] *= 1e6
            return result

    collection = stored.collection(multi_vector=True, normalize=-1.0)
    client = Loud()
    encoder = Encoder.of(collection, client, client.spec, None)        # type: ignore[arg-type]
    quiet, loud = encoder.encode([Record("1", "a", "quiet", {}), Record("2", "b", "loud", {})])
    assert not isinstance(quiet, Failure) and isinstance(loud, Failure)
    assert "stored as float16, up to 65504" in loud.message
    assert [job.input_type for job in client.jobs] == ["document"]


# ---- the API

def test_rows_as_numbers_and_as_bytes(served: Any, http: Client) -> None:
    texts = ["boats, wind", "plants"]
    floats = post(http, {"input": texts}).json()
    coded = post(http, {"input": texts, "encoding_format": "base64"}).json()
    assert floats["usage"] == coded["usage"] == {"prompt_tokens": 10, "total_tokens": 10}     # [CLS], marker, [SEP] and the words
    for plain, packed, count in zip(floats["data"], coded["data"], (5, 4), strict=True):       # the comma is no row of a document
        rows = np.array(plain["embedding"], "<f4")
        assert rows.shape == (count, 12) and packed["shape"] == [count, 12] and "shape" not in plain
        assert base64.b64decode(packed["embedding"]) == rows.tobytes()
        assert plain["object"] == "embedding" and np.abs(np.linalg.norm(rows, axis=1) - 1).max() < 1e-6


@pytest.mark.parametrize("field", ["input_type", "task", "prompt_name"])
@pytest.mark.parametrize(("value", "rows"), [
    ("query", 16), ("retrieval.query", 16), ("search_query", 16), ("document", 4), ("passage", 4), ("retrieval.passage", 4)])
def test_the_side_is_the_callers(served: Any, http: Client, field: str, value: str, rows: int) -> None:
    (entry,) = post(http, {"input": "plants", field: value, "multi_embedding": True}).json()["data"]
    assert entry["object"] == "multi-embedding" and len(entry["embedding"]) == rows


def test_another_side_is_refused(served: Any, http: Client) -> None:
    response = post(http, {"input": "plants", "input_type": "classification"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "input_type"
    assert "`query` or `document`" in response.json()["error"]["message"]


def test_rows_can_be_cut_and_left_as_they_are(served: Any, http: Client) -> None:
    (cut,) = post(http, {"input": "plants", "dimensions": 5}).json()["data"]
    (raw,) = post(http, {"input": "plants", "embd_normalize": -1}).json()["data"]
    assert np.abs(np.linalg.norm(np.array(cut["embedding"]), axis=1) - 1).max() < 1e-6 and np.array(cut["embedding"]).shape == (4, 5)
    assert np.linalg.norm(np.array(raw["embedding"]), axis=1).min() > 1.5


def test_a_single_vector_model_has_no_rows_to_give(monkeypatch: pytest.MonkeyPatch, http: Client) -> None:
    monkeypatch.setenv("MLXCEL_TRANSPORT", "tests.fakes.FakeClient")
    get_client.cache_clear()
    response = post(http, {"input": "a", "multi_embedding": True})
    assert response.status_code == 400 and response.json()["error"]["code"] == "unsupported_capability"
    assert response.json()["error"]["param"] == "multi_embedding"
    assert post(http, {"input": "a", "multi_embedding": False, "input_type": "anything"}).status_code == 200
    get_client.cache_clear()


def test_the_openai_client(tmp_path: Path, model: Path) -> None:
    """Its default mode decodes base64 into one flat list; `shape`, which it keeps, says where the rows end."""
    with serving(tmp_path / "var", "--model", str(model), "--backend", "host") as server, \
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        (served,) = client.models.list().data
        flat = client.embeddings.create(model=served.id, input=["boats, wind", "plants"])
        rows = client.embeddings.create(model=served.id, input=["boats, wind", "plants"], encoding_format="float")
        for a, b in zip(flat.data, rows.data, strict=True):
            np.testing.assert_array_equal(np.array(a.embedding, np.float32).reshape(a.shape), np.array(b.embedding, np.float32))  # type: ignore[attr-defined]
        query = client.embeddings.create(model=served.id, input="plants", extra_body={"input_type": "query"})
        assert query.data[0].shape == [16, 12]                                                     # type: ignore[attr-defined]


# ---- without a server

def test_the_command_prints_the_maxsim_matrix(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["embed", "-m", str(model), "--backend", "host", "-q", "boats and wind", *[t for r in ROWS[:2] for t in ("-p", r["text"])]]
    assert main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [np.array(json.loads(line)) for line in lines[:3]]
    assert rows[0].shape == (16, 12) and lines[4] == "MaxSim similarity:"
    printed = np.array([[float(value) for value in line.split()] for line in lines[5:8]])
    assert np.abs(printed - [[maxsim(a, b) for b in rows] for a in rows]).max() <= 1e-4
    assert printed[0, 0] == 16 and printed[0, 1] > printed[0, 2] and printed[0, 1] != printed[1, 0]
    assert main([*options, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["shapes"][0] == [16, 12] and len(shown["embeddings"][0]) == 16 and shown["prompt_tokens"] > 16


def test_the_command_takes_queries_for_such_models_only(minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "-m", str(minilm), "-q", "a"]) == 1
    assert "-q is for multi-vector models" in capsys.readouterr().err
