"""One `Case` per way a family is built: a tiny random checkpoint, made by the reference implementation.

`tests/golden/<name>/` holds what `python -m tests.make_golden` wrote there: the checkpoint as the reference saves it, and what
the reference answers. tests/test_families.py holds every family to the same invariants.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
LENGTHS = (1, 2, 3, 5, 8, 9, 17, 33, 64, 70)


@dataclass(frozen=True, eq=False)
class Case:
    """config: arguments of the reference's config class. lengths: tokens of each input; their order is shuffled.

    published: a prefix under which published checkpoints keep the same names. surplus: tensors that published checkpoints hold
    beside the model's, by shape, and that must be dropped.
    """

    name: str
    family: str
    reference: str
    config: Mapping[str, Any]
    lengths: tuple[int, ...] = LENGTHS
    type_ids: bool = False
    published: str = ""
    surplus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tolerance: float = 1e-5

    @property
    def folder(self) -> Path:
        return GOLDEN / self.name


_TINY_BERT = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 72, "initializer_range": 0.2, "pad_token_id": 0,
}
_BERT_HEADS = {
    "embeddings.position_ids": (1, 72), "pooler.dense.weight": (32, 32), "pooler.dense.bias": (32,), "cls.predictions.bias": (120,),
    "cls.seq_relationship.weight": (2, 32), "classifier.weight": (2, 32), "classifier.bias": (2,),
}
CASES = (
    Case("bert", "bert", "BertModel", _TINY_BERT, type_ids=True, published="bert.", surplus=_BERT_HEADS),
    Case("bert-gelu-new", "bert", "BertModel", _TINY_BERT | {
        "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "hidden_act": "gelu_new", "type_vocab_size": 1,
        "layer_norm_eps": 1e-6}, published="bert."),
)
