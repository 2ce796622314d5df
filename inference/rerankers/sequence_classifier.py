"""Cross-encoders: query and document in one sequence, one logit from a classification head.

Reference: transformers `AutoModelForSequenceClassification` with one label, and sentence-transformers' `CrossEncoder`.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np

from .. import adapters, families, ops
from ..batching import Batch
from ..checkpoint import Checkpoint
from ..engine import Forward
from ..errors import CheckpointError
from ..opened import Opened
from ..tokenizer import Encoded

SCORING = "sequence_classifier"
INSTRUCTIONS = False
MODEL_TYPES = tuple(name for name, family in families.model_types().items() if hasattr(family, "Classifier"))
ARCHITECTURES = "...ForSequenceClassification, one label"


def accepts(checkpoint: Checkpoint) -> bool:
    return checkpoint.architecture.endswith("ForSequenceClassification") and checkpoint.model_type in MODEL_TYPES


def family(checkpoint: Checkpoint) -> ModuleType:
    return families.model_types()[checkpoint.model_type]


class Pairs:
    def __init__(self, opened: Opened) -> None:
        self._tokenizer, self._limit = opened.tokenizer, opened.spec.max_length
        self._type_ids = opened.family.Classifier.type_ids
        if self._limit < opened.tokenizer.pair_specials + 2:
            raise CheckpointError(f"a limit of {self._limit} tokens leaves no room for a pair beside its special tokens "
                                  f"({opened.tokenizer.pair_specials})")

    def __call__(self, query: str, documents: Sequence[str], instruction: str | None) -> list[Encoded]:
        """[2, L] int32 each, ids and type ids; [L] for models that know one type only, whatever their tokenizer.json says."""
        pairs = self._tokenizer.pairs(query, documents, self._limit)
        return pairs if self._type_ids else [replace(pair, ids=pair.ids[0]) for pair in pairs]


def load(opened: Opened) -> Forward:
    weights = adapters.weights(opened.checkpoint, opened.backend, opened.family.PREFIXES)
    model = opened.family.Classifier(weights, opened.config)
    weights.close(opened.family.DROPPED)

    def forward(pairs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        batch = Batch.of([pair[0] for pair in pairs], [pair[1] for pair in pairs]) if model.type_ids else Batch.of(pairs)
        return list(ops.numpy(model(batch))[:, None])

    return forward
