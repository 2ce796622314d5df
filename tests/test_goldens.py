"""The real all-MiniLM-L6-v2 against published values and against vectors of sentence-transformers, on both backends.

The values come from the test data (golden.json, hostile/text, ir/*); each entry there names the library, version and command.
The mlx backend is slow without a GPU, so that it takes a part of the longer lists here and the rest in `make test-ir`.
"""
from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from inference import ops
from inference.batching import Batch
from inference.checkpoint import Checkpoint
from inference.config import Settings
from inference.loader import open_checkpoint
from inference.resolve import Source
from inference.transports.local import LocalClient
from inference.weights import Weights
from inference.wire import EmbedJob
from tests.test_tokenizer import text_of

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture(scope="module", params=["host", "mlx"])
def client(request, minilm) -> Iterator[LocalClient]:
    client = LocalClient(Settings(embedding_models=(str(minilm),), backend=request.param))
    yield client
    client.close()


def on_host(client: LocalClient) -> bool:
    return client.models()[0].backend == "host"


def embed(client: LocalClient, texts, **options) -> np.ndarray:
    return client.embed(EmbedJob(tuple(texts), **options)).data


def golden(data, name: str) -> dict:
    entries = json.loads((data / "golden.json").read_text())["goldens"]
    return next(entry for entry in entries if entry["id"] == name)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def test_readme_similarities(client, data):
    entry = golden(data, "st-readme-minilm-sim")
    vectors = embed(client, entry["texts"])
    assert np.abs(vectors @ vectors.T - entry["expected"]).max() <= entry["tolerance"]["atol"]
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5


def test_fastembed_sums(client, data):
    entry = golden(data, "fastembedrs-sum-allminilml6v2")
    assert np.abs(embed(client, entry["texts"]).sum(1) - entry["expected"]).max() <= entry["tolerance"]["atol"]


def test_text_embeddings_inference_vectors(client, data):
    entry = golden(data, "tei-minilm-mean")
    expected = np.load(data / entry["expected"]["npy"])
    vectors = embed(client, entry["texts"], normalize=-1)
    assert cosines(vectors, expected).min() >= entry["tolerance"]["cosine_min"]
    assert np.abs(vectors - expected).max() < 2e-3


@pytest.mark.parametrize("backend", ["host", "mlx"])
def test_text_embeddings_inference_token_vectors(backend, minilm, data):
    entry = golden(data, "tei-minilm-tokens")
    opened = open_checkpoint(Checkpoint.read(Source(minilm, "minilm", "", "", "directory")), Settings(backend=backend))
    weights = Weights.open(minilm, ops.backend(backend)).strip(*opened.family.PREFIXES)
    encoded = opened.tokenizer.encode(entry["texts"], 256)
    hidden = ops.numpy(opened.family.Model(weights, opened.config)(Batch.of([e.ids for e in encoded])))
    expected = np.load(data / entry["expected"]["npy"])
    assert hidden.shape == expected.shape
    assert cosines(hidden, expected).min() >= entry["tolerance"]["cosine_min"] and np.abs(hidden - expected).max() < 5e-3


def test_no_golden_of_the_model_is_left_out(data):
    entries = json.loads((data / "golden.json").read_text())["goldens"]
    assert {e["id"] for e in entries if e["model"] == MODEL and e["kind"] != "query_doc_cosine"} == {
        "st-readme-minilm-sim", "fastembedrs-sum-allminilml6v2", "tei-minilm-mean", "tei-minilm-tokens"}


def test_card_values(client):
    """cos 0.6660 and 0.1046 of the model card's three sentences; a limit of 256; 5 ids ending in [SEP] at a limit of 5."""
    spec = client.models()[0]
    assert (spec.dims, spec.max_length, spec.vocab_size, spec.pooling, spec.normalize) == (384, 256, 30522, "mean", 2.0)
    v = embed(client, ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."])
    assert abs(v[0] @ v[1] - 0.6660) < 1e-4 and abs(v[0] @ v[2] - 0.1046) < 1e-4


def test_hostile_texts(client, data):
    """Vectors of sentence-transformers to the six digits that the file holds."""
    cases = [c for c in json.loads((data / "hostile" / "text" / "cases.json").read_text())
             if "minilm_vec_head" in c.get("reference", {}) and text_of(c)]
    if not on_host(client):
        cases = [c for c in cases if c["reference"]["minilm_ids_len"] <= 16]
    result = client.embed(EmbedJob(tuple(map(text_of, cases))))
    assert result.tokens.tolist() == [c["reference"]["minilm_ids_len"] for c in cases]
    for case, vector in zip(cases, result.data, strict=True):
        assert np.abs(vector[:6] - case["reference"]["minilm_vec_head"]).max() <= 1e-5, case["id"]
    assert len(cases) >= (70 if on_host(client) else 30)


@pytest.mark.parametrize("collection", ["cranfield", "cisi", "npl"])
def test_vectors_of_documents_and_queries(client, data, collection):
    check_collection(client, data, collection, None if on_host(client) else 3)


@pytest.mark.ir
@pytest.mark.parametrize("collection", ["cranfield", "cisi", "npl"])
def test_all_vectors_of_documents_and_queries(client, data, collection):
    check_collection(client, data, collection, None)


def check_collection(client: LocalClient, data, collection: str, most: int | None) -> None:
    folder = data / "ir" / collection
    texts = json.loads((folder / "golden_docs.json").read_text())
    docs = [(d["text"], v) for d, v in zip(texts["docs"], np.load(folder / "golden_docs.npy"), strict=True) if d["text"].strip()]
    queries = [(q["text"], v) for q, v in zip(texts["queries"], np.load(folder / "golden_queries.npy"), strict=True)]
    assert len(docs) >= 48 and len(queries) == 10
    chosen = docs[:most] + queries[:most]
    got = embed(client, [text for text, _ in chosen])
    assert np.abs(got - np.stack([v for _, v in chosen])).max() <= 1e-5


def test_a_batch_equals_its_rows(client, data):
    """Bit for bit on host, whatever stands beside a row; within 1e-5 on mlx."""
    folder = data / "ir" / "cranfield"
    texts = [d["text"] for d in json.loads((folder / "golden_docs.json").read_text())["docs"] if d["text"].strip()]
    texts = [t[:n] for t, n in zip(texts, [3, 10, 60, 150, 400, 2000] * 8, strict=False)][:48 if on_host(client) else 4]
    together = embed(client, texts)
    alone = np.concatenate([embed(client, [t]) for t in texts])
    if on_host(client):
        assert np.array_equal(together, alone)
        assert np.array_equal(embed(client, texts[::-1])[::-1], together)
    else:
        assert np.abs(together - alone).max() <= 1e-5
