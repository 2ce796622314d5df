"""Published values of real embedding checkpoints, on both backends: `pytest -m checkpoint`, with the weights under MLXCEL_MODELS_DIR.

golden.json of the test data names the library, version and command behind each of its entries. PAIRS comes from model cards and from the
measurements of another server, which computed in bf16: good to two digits.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.config import Settings
from inference.errors import ModelNotFound
from inference.resolve import resolve
from inference.transports.local import LocalClient
from inference.wire import EmbedJob
from tests.conftest import missing

SOLAR = "query: how do solar panels generate electricity"
PHOTOVOLTAIC = "Photovoltaic cells convert sunlight into electricity through the photovoltaic effect."
RECIPE = "The recipe calls for two cups of flour and one egg."
TASK = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class Pairs:
    """cosines[i]: of the first text with the i-th of the others. `instruction` goes with the first text alone."""

    dims: int
    limit: int
    texts: tuple[str, ...]
    cosines: tuple[float, ...]
    tolerance: float = 2e-2
    instruction: str | None = None
    dimensions: int | None = None


PAIRS: dict[str, tuple[Pairs, ...]] = {
    "sentence-transformers/all-MiniLM-L6-v2": (
        Pairs(384, 256, ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."), (0.6660, 0.1046), 1e-4),),
    "intfloat/multilingual-e5-small": (
        Pairs(384, 512, ("query: how much protein should a female eat",
                         "passage: As a general guideline, the CDC's average requirement of protein for women ages 19 to 70 is 46 grams "
                         "per day.",
                         "passage: Definition of summit for English Language Learners: the highest point of a mountain."),
              (0.9252, 0.7632)),),
    "seansitter/bge-m3-safetensors": (
        Pairs(1024, 8192, ("What is BGE M3?",
                           "BGE M3 is an embedding model supporting dense retrieval, lexical matching and multi-vector interaction.",
                           "BM25 is a bag-of-words retrieval function that ranks a set of documents based on the query terms appearing "
                           "in each document", "He drove to the stadium."), (0.6259, 0.3475, 0.2519)),),
    "google/siglip-base-patch16-224": (
        Pairs(768, 64, ("a photo of a cat", "a photo of a kitten", "a diagram of a car engine"), (0.96643, 0.70737), 1e-3),),
    "mlx-community/embeddinggemma-300m-4bit": tuple(
        Pairs(768, 2048, ("task: search result | query: Which planet is known as the Red Planet?",
                          "title: none | text: Mars, known for its reddish appearance, is often referred to as the Red Planet.",
                          "title: none | text: Venus is the second planet from the Sun.",
                          "title: none | text: Jupiter is the largest planet in our solar system."), cosines, dimensions=dimensions)
        for dimensions, cosines in ((None, (0.642725, 0.323360, 0.329467)), (256, (0.693574, 0.422158, 0.412816)))),
    "Qwen/Qwen3-Embedding-0.6B": (
        Pairs(1024, 8192, ("What is the capital of China?", "The capital of China is Beijing.",
                           "Gravity is a force that attracts two bodies towards each other. It gives weight to physical objects and is "
                           "responsible for the movement of planets around the sun."), (0.7646, 0.1414), instruction=TASK),),
    "nvidia/llama-nemotron-embed-1b-v2": (
        Pairs(2048, 8192, (SOLAR, f"passage: {PHOTOVOLTAIC}", f"passage: {RECIPE}"), (0.432512, 0.012978)),),
    "nvidia/Nemotron-3-Embed-1B-BF16": (
        Pairs(2048, 8192, (SOLAR, f"passage: {PHOTOVOLTAIC}", f"passage: {RECIPE}"), (0.552243, 0.057058)),),
    "LiquidAI/LFM2.5-Embedding-350M": (
        Pairs(1024, 512, (SOLAR, f"document: {PHOTOVOLTAIC}", f"document: {RECIPE}"), (0.400611, -0.026907)),),
}
GOLDENS = (
    "st-redplanet-bge-m3", "st-redplanet-qwen3-embedding-0.6b", "st-redplanet-embeddinggemma-300m", "st-redplanet-multilingual-e5-small",
    "st-redplanet-multilingual-e5-base", "st-redplanet-multilingual-e5-large", "st-redplanet-modernbert-embed-base",
    "st-redplanet-modernbert-embed-large", "fastembed-qvec-qwen3-embedding-0.6b", "fastembed-qvec-embeddinggemma-300m",
    "fastembedrs-sum-embeddinggemma300m", "fastembed-vec-multilingual-e5-large", "st-maxsim-answerai-colbert-small-v1")


@pytest.fixture(params=["host", "mlx"])
def serve(request: pytest.FixtureRequest) -> Iterator[Any]:
    opened: list[LocalClient] = []

    def open_model(name: str) -> LocalClient:
        models = os.environ.get("MLXCEL_MODELS_DIR")
        settings = Settings(embedding_models=(name,), models_dir=Path(models) if models else None, backend=request.param)
        try:
            resolve(name, settings)
        except ModelNotFound:
            missing(f"{name}: its weights are not under MLXCEL_MODELS_DIR" + (f"={models}" if models else ", which is not set"))
        opened.append(LocalClient(settings))
        return opened[-1]

    yield open_model
    for client in opened:
        client.close()


def embed(client: LocalClient, *texts: str, **options: Any) -> list[np.ndarray]:
    return client.embed(EmbedJob(texts, **options)).vectors()


@pytest.mark.checkpoint
@pytest.mark.parametrize("name", PAIRS)
def test_published_similarities(name: str, serve: Any) -> None:
    client = serve(name)
    for case in PAIRS[name]:
        spec = client.models()[0]
        assert (spec.dims, spec.max_length) == (case.dims, case.limit)
        query = embed(client, case.texts[0], instruction=case.instruction, dimensions=case.dimensions)[0][0]
        others = np.concatenate(embed(client, *case.texts[1:], dimensions=case.dimensions))
        assert np.abs(np.linalg.norm(others, axis=1) - 1).max() <= 1e-3
        assert np.abs(others @ query - case.cosines).max() <= case.tolerance, (others @ query).tolist()


@pytest.mark.checkpoint
@pytest.mark.parametrize("id", GOLDENS)
def test_published_values(id: str, serve: Any, data: Path) -> None:
    entry = next(e for e in json.loads((data / "golden.json").read_text())["goldens"] if e["id"] == id)
    client, expected = serve(entry["model"]), np.array(entry["expected"])
    if "query" in entry:
        prompts = client.models()[0].prompts
        sides = {"input_type": "query"}, {"input_type": "document"}
        query = embed(client, prompts.get("query", "") + entry["query"], **sides[0])[0]
        documents = embed(client, *(prompts.get("document", "") + text for text in entry["documents"]), **sides[1])
        got = np.array([(query @ document.T).max(1).sum() for document in documents])
    else:
        rows = np.concatenate(embed(client, *entry["texts"], **({"normalize": -1.0} if entry.get("normalised") is False else {})))
        got = rows.sum(1) if entry["kind"] == "vector_sum" else rows[:, :expected.shape[-1]]
    tolerance = {"rtol": 0.0, "atol": 0.0} | entry["tolerance"]
    assert np.allclose(got, expected, **tolerance), (got - expected).tolist()


def test_no_text_golden_of_a_served_family_is_left_out(data: Path) -> None:
    entries = json.loads((data / "golden.json").read_text())["goldens"]
    elsewhere = {"sentence-transformers/all-MiniLM-L6-v2", "Qwen/Qwen3-VL-Embedding-2B"}       # tests/test_goldens.py; images
    kinds = {"query_doc_cosine", "vector_sum", "maxsim"}
    assert {e["id"] for e in entries if e["kind"] in kinds and e["model"] not in elsewhere} <= set(GOLDENS)
