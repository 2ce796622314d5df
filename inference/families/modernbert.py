"""ModernBERT: pre-norm encoder, rotary, most layers local. Reference: transformers `ModernBertModel`. Pooling: mean.

Local layers see `local_attention // 2` tokens to each side and rotate with their own theta. Layer 0 has no attention norm: the
embeddings were just normalised.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from .. import ops
from ..batching import Batch, RopeSpec
from ..errors import CheckpointError
from ..ops import Tensor
from ..weights import Weights, one_label

MODEL_TYPES = ("modernbert",)
ARCHITECTURES = ("ModernBertModel", "ModernBertForMaskedLM")
PREFIXES = ("model.",)
DROPPED = (r"^decoder\.", r"^head\.", r"^classifier\.", r"^pooler\.")
FULL, LOCAL = "full_attention", "sliding_attention"
THETA = {FULL: 160_000.0, LOCAL: 10_000.0}


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    layer_types: list[str]
    rope_parameters: dict[str, Any]
    max_position_embeddings: int = 8192
    local_attention: int = 128
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_activation: str = "gelu"
    classifier_pooling: str = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    @staticmethod
    def rename(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Published configs say every n-th layer is global and name two thetas; transformers 5 writes a list and a table."""
        every = raw.get("global_attn_every_n_layers") or 3
        thetas = {FULL: raw.get("global_rope_theta") or THETA[FULL], LOCAL: raw.get("local_rope_theta", THETA[LOCAL])}
        thetas[LOCAL] = thetas[LOCAL] or thetas[FULL]      # null: local layers rotate as the others do
        table, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
        return dict(raw) | {
            "layer_types": raw.get("layer_types") or [LOCAL if i % every else FULL for i in range(raw.get("num_hidden_layers") or 0)],
            "rope_parameters": {kind: {"rope_theta": thetas[kind]} | scaling | (table.get(kind) or {}) for kind in THETA},
        }

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise CheckpointError(f"config.json: hidden_size {self.hidden_size} cannot be cut into {self.num_attention_heads} heads")
        unknown = [kind for kind in self.layer_types if kind not in THETA]
        if unknown or len(self.layer_types) != self.num_hidden_layers:
            raise CheckpointError(
                f"config.json: layer_types is {self.layer_types}; expected {self.num_hidden_layers}, each of {' or '.join(THETA)}")
        if self.classifier_pooling not in ("cls", "mean"):
            raise CheckpointError(f"config.json: classifier_pooling is {self.classifier_pooling!r}; expected 'cls' or 'mean'")

    @property
    def max_length(self) -> int:
        """What it was trained to: rotation itself knows no end."""
        return self.max_position_embeddings


class Layer:
    def __init__(self, w: Weights, c: Config, index: int) -> None:
        hidden, inner, kind = c.hidden_size, c.intermediate_size, c.layer_types[index]

        def norm(name: str) -> ops.Norm:
            return w.layer_norm(name, hidden, c.norm_eps, bias=c.norm_bias)

        self.heads = c.num_attention_heads
        self.activation = ops.activation(c.hidden_activation)
        self.rope = RopeSpec.of(hidden // self.heads, THETA[kind], c.rope_parameters[kind])
        self.window = c.local_attention // 2 if kind == LOCAL else None
        self.attention_norm = norm("attn_norm") if index else None
        self.query_key_value = w.linear("attn.Wqkv", hidden, 3 * hidden, bias=c.attention_bias)
        self.attention_output = w.linear("attn.Wo", hidden, hidden, bias=c.attention_bias)
        self.mlp_norm = norm("mlp_norm")
        self.inner_gate = w.linear("mlp.Wi", hidden, 2 * inner, bias=c.mlp_bias)
        self.mlp_output = w.linear("mlp.Wo", inner, hidden, bias=c.mlp_bias)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attention(self.attention_norm(x) if self.attention_norm else x, batch)
        inner, gate = ops.split(self.inner_gate(self.mlp_norm(x)), 2)
        return x + self.mlp_output(self.activation(inner) * gate)

    def attention(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = (ops.heads(y, self.heads) for y in ops.split(self.query_key_value(x), 3))
        table = batch.rope(self.rope)
        q, k = ops.rope(q, table), ops.rope(k, table)
        return self.attention_output(ops.attention(q, k, v, batch.segments, window=self.window))


class Model:
    """[T, hidden_size]; a token outside its table is an IndexError."""

    pooling = "mean"

    def __init__(self, w: Weights, c: Config) -> None:
        self.tokens = w.embedding("embeddings.tok_embeddings", c.vocab_size, c.hidden_size)
        self.norm = w.layer_norm("embeddings.norm", c.hidden_size, c.norm_eps, bias=c.norm_bias)
        self.layers = [Layer(w.at(f"layers.{i}"), c, i) for i in range(c.num_hidden_layers)]
        self.final_norm = w.layer_norm("final_norm", c.hidden_size, c.norm_eps, bias=c.norm_bias)

    def __call__(self, batch: Batch) -> Tensor:
        x = self.norm(self.tokens(batch.ids))
        for layer in self.layers:
            x = layer(x, batch)
        return self.final_norm(x)


class Classifier:
    """[B, 1]: pooled rows through a layer and a norm, then one logit; the cross-encoder's head."""

    type_ids = False

    def __init__(self, w: Weights, c: Config) -> None:
        self.model = Model(w, c)
        self.pooling = cast(ops.Pooling, c.classifier_pooling)
        self.activation = ops.activation(c.classifier_activation)
        self.dense = w.linear("head.dense", c.hidden_size, c.hidden_size, bias=c.classifier_bias)
        self.norm = w.layer_norm("head.norm", c.hidden_size, c.norm_eps, bias=c.norm_bias)
        self.classifier = w.linear("classifier", c.hidden_size, one_label(w, "classifier"))

    def __call__(self, batch: Batch) -> Tensor:
        pooled = ops.pool(self.model(batch), batch.segments, self.pooling)
        return self.classifier(self.norm(self.activation(self.dense(pooled))))
