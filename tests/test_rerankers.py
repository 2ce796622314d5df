"""Rerankers against the reference, one pair at a time, on both backends; pairs and prompts token by token; what is refused."""
from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from inference import rerankers
from inference.batching import Batch, common_prefix
from inference.checkpoint import Checkpoint
from inference.config import Settings
from inference.errors import CheckpointError, InferenceFailed, InvalidRequest, NotLoaded, TimedOut
from inference.loader import open_checkpoint
from inference.opened import Opened
from inference.rerankers import generative_text
from inference.resolve import Source
from inference.tokenizer import Tokenizer
from inference.transports.local import LocalClient
from inference.wire import RerankJob, RerankResult
from tests.rerankers import DOCUMENTS, PAIRINGS, QUERIES, Pairing

BACKENDS = ("host", "mlx")
each_pairing = pytest.mark.parametrize("pairing", PAIRINGS, ids=lambda pairing: pairing.name)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
CLASSIFIERS = [pairing for pairing in PAIRINGS if pairing.scoring == "sequence_classifier"]
GENERATIVE = [pairing for pairing in PAIRINGS if pairing.scoring == "generative_text"]


def source(folder: Path) -> Source:
    return Source(folder, folder.name, "", "", "directory")


def opened(folder: Path, backend: str = "host", **options) -> Opened:
    return open_checkpoint(Checkpoint.read(source(folder)), Settings(backend=backend, **options), "reranker")


@cache
def client(folder: Path, backend: str, **options) -> LocalClient:
    return LocalClient(Settings(embedding_models=(), reranker_models=(str(folder),), backend=backend, threads=2, **options))


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    client.cache_clear()


def reference_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "reference.npz") as stored:
        return dict(stored)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def rerank(served: LocalClient, query: str, documents, instruction: str | None = None, **options) -> RerankResult:
    return served.rerank(RerankJob(query, tuple(documents), instruction=instruction, **options))


def errors(pairing: Pairing, folder: Path, backend: str) -> tuple[float, float]:
    """The greatest distance of a probability and of a logit from the reference, all documents of a query in one job."""
    served, reference = client(folder, backend), reference_of(folder)
    logits = np.split(reference["logits"], len(QUERIES))
    results = [rerank(served, query, DOCUMENTS, pairing.instruction) for query in QUERIES]
    raw = [rerank(served, query, DOCUMENTS, pairing.instruction, raw_scores=True) for query in QUERIES]
    tokens = np.concatenate([result.tokens for result in results])
    assert tokens.tolist() == reference["lengths"].tolist()
    assert all(result.scores.dtype == np.float32 for result in results)
    return (max(np.abs(result.scores - sigmoid(x)).max() for result, x in zip(results, logits, strict=True)),
            max(np.abs(result.scores - x).max() for result, x in zip(raw, logits, strict=True)))


def test_files_and_pairings_are_the_same_set() -> None:
    assert {info.name for info in iter_modules(rerankers.__path__)} == {pairing.scoring for pairing in PAIRINGS}
    assert {pairing.folder for pairing in PAIRINGS} == {path.parent for path in PAIRINGS[0].folder.parent.glob("*/made_by.json")}
    assert {way.SCORING for way in rerankers.ways()} == {pairing.scoring for pairing in PAIRINGS}


@each_pairing
@each_backend
def test_equals_the_reference(pairing: Pairing, backend: str) -> None:
    probability, logit = errors(pairing, pairing.folder, backend)
    print(f"{pairing.name} {backend}: {probability:.1e} {logit:.1e}")
    assert probability <= pairing.tolerance and logit <= 5e-5
