"""Published scores of real rerankers, on both backends: `pytest -m checkpoint`, with the weights under MLXCEL_MODELS_DIR.

The values come from golden.json of the test data, whose entries name the library, version and command, and from the card and the
measurements of another server (BATTERY), which computed in bf16: its logits are good to two or three digits.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.config import Settings
from inference.errors import ModelNotFound
from inference.resolve import resolve
from inference.tokenizer import Tokenizer
from inference.transports.local import LocalClient
from inference.wire import RerankJob, RerankResult
from tests.conftest import missing

CHINA = "What is the capital of China?"
CHINA_DOCUMENTS = (
    "The capital of China is Beijing.", "Gravity is a force that attracts two bodies towards each other.", "Berlin is in Germany.")
BATTERY: dict[str, tuple[int, tuple[float, ...]]] = {
    "cross-encoder/ms-marco-MiniLM-L6-v2": (512, (0.9999217, 1.59e-5, 3.35e-5)),
    "BAAI/bge-reranker-v2-m3": (8192, (0.9999681, 1.5995e-5, 4.4010e-5)),
    "Alibaba-NLP/gte-reranker-modernbert-base": (8192, (0.9800415, 0.1246974, 0.7244105)),
    "mlx-community/Qwen3-Reranker-0.6B-4bit": (8192, (0.9883127, 8.94e-6, 1.47e-5)),
}
"""Limit of tokens, and the scores of CHINA_DOCUMENTS."""
GOLDENS = (
    "st-ce-redplanet-gte-reranker-modernbert-base", "st-ce-redplanet-bge-reranker-v2-m3", "card-bgereranker-2",
    "st-ce-redplanet-ms-marco-minilm-l6-v2", "fastembed-msmarco", "st-ce-redplanet-ms-marco-minilm-l12-v2", "st-qwen3-reranker")


def served(name: str, backend: str) -> LocalClient:
    models = os.environ.get("MLXCEL_MODELS_DIR")
    settings = Settings(embedding_models=(), reranker_models=(name,), models_dir=Path(models) if models else None,
                        backend=backend)  # type: ignore[arg-type]
    try:
        resolve(name, settings)
    except ModelNotFound:
        missing(f"{name}: its weights are not under MLXCEL_MODELS_DIR" + (f"={models}" if models else ", which is not set"))
    return LocalClient(settings)


@pytest.fixture(params=["host", "mlx"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reranker(request: pytest.FixtureRequest, backend: str) -> Iterator[LocalClient]:
    client = served(request.param, backend)
    yield client
    client.close()


def rerank(client: LocalClient, query: str, documents: Any, **options: Any) -> RerankResult:
    return client.rerank(RerankJob(query, tuple(documents), **options))


@pytest.mark.checkpoint
@pytest.mark.parametrize("reranker", BATTERY, indirect=True)
def test_the_capital_of_china(reranker: LocalClient, request: pytest.FixtureRequest) -> None:
    limit, wanted = BATTERY[request.node.callspec.params["reranker"]]
    (spec,) = reranker.models()
    scores = rerank(reranker, CHINA, CHINA_DOCUMENTS).scores
    assert spec.max_length == limit and np.argsort(-scores).tolist() == [0, 2, 1]
    assert np.abs(scores - wanted).max() <= 0.02 and np.abs(np.log(scores / np.array(wanted))).max() <= 0.3
    alone = [rerank(reranker, CHINA, [document]).scores[0] for document in CHINA_DOCUMENTS]
    assert np.abs(scores - alone).max() <= (1e-5 if spec.precision == "f32" else 5e-3)


@pytest.mark.checkpoint
@pytest.mark.parametrize("id", GOLDENS)
def test_published_scores(id: str, backend: str, data: Path) -> None:
    entry = next(entry for entry in json.loads((data / "golden.json").read_text())["goldens"] if entry["id"] == id)
    client = served(entry["model"], backend)
    result = rerank(client, entry["query"], entry["documents"], instruction=entry.get("instruction"),
                    raw_scores=entry["activation"] == "identity")
    client.close()
    assert np.abs(result.scores - entry["expected"]).max() <= entry["tolerance"]["atol"]


def test_no_published_score_is_left_out(data: Path) -> None:
    entries = json.loads((data / "golden.json").read_text())["goldens"]
    assert {entry["id"] for entry in entries if entry["kind"].startswith("rerank")} == set(GOLDENS)


def test_token_counts_of_the_real_tokenizer(data: Path) -> None:
    pairs = Tokenizer(data / "checkpoints/cross-encoder__ms-marco-MiniLM-L6-v2").pairs(CHINA, CHINA_DOCUMENTS, 512)
    assert [pair.length for pair in pairs] == [17, 22, 15]
