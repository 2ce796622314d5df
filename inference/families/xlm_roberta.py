"""XLM-RoBERTa and RoBERTa: BERT with positions counted from the token ids. Reference: transformers `XLMRobertaModel`. Pooling: mean.

The first position is pad + 1, and a pad token within a text stays at position pad. Token types are added as in BERT: row 0 is learned.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import ops
from ..batching import Batch
from ..errors import CheckpointError
from ..ops import Tensor
from ..weights import Weights, one_label
from . import bert

MODEL_TYPES = ("xlm-roberta", "xlm_roberta", "roberta")
ARCHITECTURES = ("XLMRobertaModel", "XLMRobertaForMaskedLM", "RobertaModel", "RobertaForMaskedLM")
PREFIXES = ("roberta.",)
DROPPED = (r"(^|\.)position_ids$", r"^lm_head\.", r"^pooler\.", r"^classifier\.")


@dataclass(frozen=True)
class Config(bert.Config):
    pad_token_id: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 1:
            raise CheckpointError(
                f"config.json: max_position_embeddings {self.max_position_embeddings} leaves no position after pad_token_id "
                f"{self.pad_token_id}")

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings - (self.pad_token_id + 1)


class Model(bert.Model):
    def __init__(self, w: Weights, c: Config) -> None:
        super().__init__(w, c)
        self.pad = c.pad_token_id

    def positions(self, batch: Batch) -> Any:
        """[T] int"""
        real = batch.ids != self.pad
        count = real.cumsum()
        before = (count - real)[batch.segments.first]
        return (count - before.repeat(batch.segments.lengths)) * real + self.pad


class Classifier:
    """[B, 1]: the first row through a tanh layer, then one logit; the cross-encoder's head. Both texts of a pair are of type 0."""

    type_ids = False

    def __init__(self, w: Weights, c: Config) -> None:
        self.roberta = Model(w, c)
        self.dense = w.linear("classifier.dense", c.hidden_size, c.hidden_size)
        self.out_proj = w.linear("classifier.out_proj", c.hidden_size, one_label(w, "classifier.out_proj"))

    def __call__(self, batch: Batch) -> Tensor:
        return self.out_proj(ops.tanh(self.dense(ops.pool(self.roberta(batch), batch.segments, "cls"))))
