"""BERT: post-norm encoder with learned positions. Reference: transformers `BertModel`. Pooling: mean.

Token types are always added: row 0 is learned even where the tokenizer sends no type ids.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import ops
from ..batching import Batch
from ..errors import CheckpointError
from ..ops import Tensor
from ..weights import Weights, one_label

MODEL_TYPES = ("bert",)
ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
PREFIXES = ("bert.",)
DROPPED = (r"(^|\.)position_ids$", r"^cls\.", r"^pooler\.", r"^classifier\.")


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    position_embedding_type: str = "absolute"

    def __post_init__(self) -> None:
        if self.position_embedding_type != "absolute":
            raise CheckpointError(f"config.json: position_embedding_type is {self.position_embedding_type!r}; expected 'absolute'")
        if self.hidden_size % self.num_attention_heads:
            raise CheckpointError(f"config.json: hidden_size {self.hidden_size} cannot be cut into {self.num_attention_heads} heads")

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings


class Embeddings:
    def __init__(self, w: Weights, c: Config) -> None:
        self.word = w.embedding("word_embeddings", c.vocab_size, c.hidden_size)
        self.position = w.embedding("position_embeddings", c.max_position_embeddings, c.hidden_size)
        self.token_type = w.embedding("token_type_embeddings", c.type_vocab_size, c.hidden_size)
        self.norm = w.layer_norm("LayerNorm", c.hidden_size, c.layer_norm_eps)

    def __call__(self, batch: Batch, positions: Any) -> Tensor:
        return self.norm(self.word(batch.ids) + self.position(positions) + self.token_type(batch.type_ids))


class Layer:
    def __init__(self, w: Weights, c: Config) -> None:
        hidden, inner = c.hidden_size, c.intermediate_size
        self.heads = c.num_attention_heads
        self.activation = ops.activation(c.hidden_act)
        self.query_key_value = w.at("attention.self").linears("query", "key", "value", inputs=hidden, outputs=hidden)
        self.attention_output = w.linear("attention.output.dense", hidden, hidden)
        self.attention_norm = w.layer_norm("attention.output.LayerNorm", hidden, c.layer_norm_eps)
        self.intermediate = w.linear("intermediate.dense", hidden, inner)
        self.output = w.linear("output.dense", inner, hidden)
        self.output_norm = w.layer_norm("output.LayerNorm", hidden, c.layer_norm_eps)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = (ops.heads(y, self.heads) for y in self.query_key_value(x))
        x = self.attention_norm(x + self.attention_output(ops.attention(q, k, v, batch.segments)))
        return self.output_norm(x + self.output(self.activation(self.intermediate(x))))


class Model:
    """[T, hidden_size]; a token, type or position outside its table is an IndexError."""

    pooling = "mean"

    def __init__(self, w: Weights, c: Config) -> None:
        self.embeddings = Embeddings(w.at("embeddings"), c)
        self.layers = [Layer(w.at(f"encoder.layer.{i}"), c) for i in range(c.num_hidden_layers)]

    def positions(self, batch: Batch) -> Any:
        """[T] int: the rows of the position table."""
        return batch.positions

    def __call__(self, batch: Batch) -> Tensor:
        x = self.embeddings(batch, self.positions(batch))
        for layer in self.layers:
            x = layer(x, batch)
        return x


class Classifier:
    """[B, 1]: the first row through a tanh layer, then one logit; the cross-encoder's head."""

    type_ids = True

    def __init__(self, w: Weights, c: Config) -> None:
        self.bert = Model(w, c)
        self.dense = w.linear("pooler.dense", c.hidden_size, c.hidden_size)
        self.classifier = w.linear("classifier", c.hidden_size, one_label(w, "classifier"))

    def __call__(self, batch: Batch) -> Tensor:
        return self.classifier(ops.tanh(self.dense(ops.pool(self.bert(batch), batch.segments, "cls"))))
