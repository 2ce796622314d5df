"""XLM-RoBERTa and RoBERTa: BERT with positions counted from the token ids. Reference: transformers `XLMRobertaModel`. Pooling: mean.

The first position is pad + 1, and a pad token within a text stays at position pad. Token types are added as in BERT: row 0 is learned.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..batching import Batch
from ..errors import CheckpointError
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
    def __init__(self, w: bert.Weights, c: Config) -> None:
        super().__init__(w, c)
        self.pad = c.pad_token_id

    def positions(self, batch: Batch) -> Any:
        """[T] int"""
        real = batch.ids != self.pad
        count = real.cumsum()
        before = (count - real)[batch.segments.first]
        return (count - before.repeat(batch.segments.lengths)) * real + self.pad
