"""nomic-bert (nomic-embed-text v1, v1.5): post-norm encoder, rotary, gated MLP. Reference: transformers `NomicBertModel`. Pooling: mean.

No linear layer has a bias. Rotation stretches with the text where the config gives a factor (dynamic NTK); the published ones give none.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import ops
from ..batching import Batch, RopeSpec
from ..errors import CheckpointError
from ..ops import Tensor
from ..weights import Weights

MODEL_TYPES = ("nomic_bert",)
ARCHITECTURES = ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining")
PREFIXES = ("bert.", "nomic_bert.")
DROPPED = (r"(^|\.)position_ids$", r"^cls\.", r"^pooler\.", r"^classifier\.", r"\.rotary_emb\.inv_freq$")
NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Keys of the first published configs -> today's, which win where both stand."""
FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",), "prenorm": (False,), "parallel_block": (False,), "use_rms_norm": (False, None), "causal": (False,),
    "qkv_proj_bias": (False,), "mlp_fc1_bias": (False,), "mlp_fc2_bias": (False,), "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,), "rotary_emb_scale_base": (None,), "num_experts": (0, 1, None), "moe_every_n_layers": (0, -1, None),
}
"""Switches of the published configs, and the values under which the model is the one below."""


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    rope_parameters: dict[str, Any]
    type_vocab_size: int = 2
    hidden_act: str = "silu"
    layer_norm_eps: float = 1e-12

    @staticmethod
    def rename(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        for key, accepted in FIXED.items():
            if key in raw and raw[key] not in accepted:
                raise CheckpointError(f"config.json: {key} is {raw[key]!r}; expected {' or '.join(map(repr, accepted))}")
        trained = raw.get("max_trained_positions") or raw.get("max_position_embeddings") or 2048
        rope = {"rope_theta": raw.get("rotary_emb_base") or 1000.0, "max_position_embeddings": trained}
        if factor := raw.get("rotary_scaling_factor"):
            rope |= {"rope_type": "dynamic", "factor": factor}
        older = {new: raw[old] for old, new in NAMES.items() if old in raw}
        given = {key: value for key, value in raw.items() if value is not None}
        return older | given | {"rope_parameters": rope | (raw.get("rope_parameters") or {})}

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise CheckpointError(f"config.json: hidden_size {self.hidden_size} cannot be cut into {self.num_attention_heads} heads")


class Layer:
    def __init__(self, w: Weights, c: Config) -> None:
        hidden, inner = c.hidden_size, c.intermediate_size
        self.heads = c.num_attention_heads
        self.activation = ops.activation(c.hidden_act)
        self.rope = RopeSpec.of(hidden // self.heads, 1000.0, c.rope_parameters)
        self.query_key_value = w.linear("attn.Wqkv", hidden, 3 * hidden, bias=False)
        self.attention_output = w.linear("attn.out_proj", hidden, hidden, bias=False)
        self.attention_norm = w.layer_norm("norm1", hidden, c.layer_norm_eps)
        self.inner_gate = w.at("mlp").linears("fc11", "fc12", inputs=hidden, outputs=inner, bias=False)
        self.mlp_output = w.linear("mlp.fc2", inner, hidden, bias=False)
        self.mlp_norm = w.layer_norm("norm2", hidden, c.layer_norm_eps)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        x = self.attention_norm(x + self.attention(x, batch))
        inner, gate = self.inner_gate(x)
        return self.mlp_norm(x + self.mlp_output(inner * self.activation(gate)))

    def attention(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = (ops.heads(y, self.heads) for y in ops.split(self.query_key_value(x), 3))
        table = batch.rope(self.rope)
        q, k = ops.rope(q, table), ops.rope(k, table)
        return self.attention_output(ops.attention(q, k, v, batch.segments))


class Model:
    """[T, hidden_size]; a token or type outside its table is an IndexError."""

    pooling = "mean"

    def __init__(self, w: Weights, c: Config) -> None:
        self.word = w.embedding("embeddings.word_embeddings", c.vocab_size, c.hidden_size)
        self.token_type = w.embedding("embeddings.token_type_embeddings", c.type_vocab_size, c.hidden_size)
        self.norm = w.layer_norm("emb_ln", c.hidden_size, c.layer_norm_eps)
        self.layers = [Layer(w.at(f"encoder.layers.{i}"), c) for i in range(c.num_hidden_layers)]

    def __call__(self, batch: Batch) -> Tensor:
        x = self.norm(self.word(batch.ids) + self.token_type(batch.type_ids))
        for layer in self.layers:
            x = layer(x, batch)
        return x
