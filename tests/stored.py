"""Collections for tests, written as the product writes them."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from embeddings import corpus, spaces
from embeddings.models import Collection
from tests.fakes import SPEC


def collection(name: str = "tests", *, dims: int = 8, normalize: float = 2.0, multi_vector: bool = False, prompt: str = "",
               **options: Any) -> Collection:
    spec = replace(SPEC, dims=dims, normalize=normalize, multi_vector=multi_vector)
    return corpus.create(name, spaces.space_for(spec, dims, prompt), **{"text_fields": ["text"], **options})


def document(id: str, *vectors: np.ndarray, text: str | None = None, **metadata: Any) -> corpus.NewDocument:
    """One passage for each vector, [dims] or [rows, dims]; the passages share the text evenly."""
    text = f"text of {id}" if text is None else text
    step = max(len(text) // max(len(vectors), 1), 1)
    passages = [corpus.NewPassage(i * step, (i + 1) * step, 3, np.atleast_2d(vector)) for i, vector in enumerate(vectors)]
    return corpus.NewDocument(id, text, passages, metadata)


def unit(vector: np.ndarray) -> np.ndarray:
    return (vector / np.linalg.norm(vector, axis=-1, keepdims=True)).astype(np.float32)
