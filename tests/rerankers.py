"""One `Pairing` per way a reranker is built: a tiny random checkpoint, made by the reference implementation.

`tests/golden/rerankers/<name>/` holds what `python -m tests.make_golden` wrote there: the checkpoint as the reference saves it, a
tokenizer, and what the reference answers to every pair of QUERIES and DOCUMENTS, one at a time.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.families import _TINY_BERT, _TINY_MODERNBERT, _TINY_XLM_ROBERTA, GOLDEN

QUERIES = ("which planet is red", "a", "what is said of the planet " * 12)
DOCUMENTS = (
    "mars is the red planet", "venus", "the planet that is red is said to be mars and not venus", "jupiter " * 60, "...",
    "mars [SEP] venus", "is the red planet mars? " * 9)
WORDS = ("which", "planet", "is", "red", "the", "mars", "venus", "jupiter", "what", "said", "of", "that", "to", "be", "and", "not")


@dataclass(frozen=True, eq=False)
class Pairing:
    """config: arguments of the reference's config class. scoring: the file of `inference/rerankers`. template: how a cross-encoder's
    tokenizer joins a pair. instruction: of a generative reranker, None for its default."""

    name: str
    scoring: str
    reference: str
    config: Mapping[str, Any]
    max_length: int
    template: str = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    instruction: str | None = None
    tolerance: float = 1e-5

    @property
    def folder(self) -> Path:
        return GOLDEN / "rerankers" / self.name


_ONE_LABEL = {"num_labels": 1, "initializer_range": 0.4}
_TINY_QWEN3 = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.3, "rope_theta": 10000.0,
    "bos_token_id": None, "eos_token_id": None}
PAIRINGS = (
    Pairing("bert", "sequence_classifier", "BertForSequenceClassification", _TINY_BERT | _ONE_LABEL, 60),
    Pairing("xlm-roberta", "sequence_classifier", "XLMRobertaForSequenceClassification", _TINY_XLM_ROBERTA | _ONE_LABEL, 61,
            "[CLS] $A [SEP] [SEP] $B:1 [SEP]:1"),
    Pairing("roberta", "sequence_classifier", "RobertaForSequenceClassification", _TINY_XLM_ROBERTA | _ONE_LABEL, 72,
            "[CLS] $A [SEP] [SEP] $B [SEP]"),
    Pairing("modernbert-cls", "sequence_classifier", "ModernBertForSequenceClassification", _TINY_MODERNBERT | _ONE_LABEL, 120),
    Pairing("modernbert-mean", "sequence_classifier", "ModernBertForSequenceClassification", _TINY_MODERNBERT | _ONE_LABEL | {
        "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True, "classifier_activation": "silu"}, 90),
    Pairing("qwen3-tied", "generative_text", "Qwen3ForCausalLM", _TINY_QWEN3 | {"tie_word_embeddings": True}, 700),
    Pairing("qwen3-head", "generative_text", "Qwen3ForCausalLM", _TINY_QWEN3 | {"tie_word_embeddings": False, "num_key_value_heads": 4},
            620, instruction="Find what is red"),
    Pairing("qwen3-sliding", "generative_text", "Qwen3ForCausalLM", _TINY_QWEN3 | {
        "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "attention_bias": True},
            512),
)
