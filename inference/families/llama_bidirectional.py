"""Llama whose rows see both ways (LLM2Vec). Reference: transformers `LlamaModel` with `is_causal` false. Pooling: mean.

Published under a model_type of its own, and as plain llama with a flag.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..batching import RopeSpec, rope_parameters
from ..checkpoint import Checkpoint
from ..layers.decoder import Attention, Block, Decoder, GatedMLP, must_see_both_ways
from ..weights import Weights

MODEL_TYPES = ("llama_bidirec", "llama")
ARCHITECTURES = ("LlamaBidirectionalModel", "LlamaModel")
PREFIXES = ("language_model.model.", "language_model.", "model.")
DROPPED = (r"^lm_head\.", r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def accepts(checkpoint: Checkpoint) -> None:
    """CheckpointError for a llama that does not say it sees both ways."""
    if checkpoint.model_type == "llama":
        must_see_both_ways(checkpoint.config, checkpoint.model_type)


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_parameters: dict[str, Any]
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False

    @staticmethod
    def rename(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        raw = {name: value for name, value in raw.items() if value is not None}
        heads = raw.get("num_attention_heads")
        older = {"num_key_value_heads": heads, "head_dim": raw.get("hidden_size", 0) // heads if heads else None}
        return older | raw | {"rope_parameters": rope_parameters(raw, 10_000.0)}

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings


def layer(w: Weights, c: Config) -> Block:
    attention = Attention(
        w.at("self_attn"), c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
        RopeSpec.of(c.head_dim, 10_000.0, c.rope_parameters), causal=False, bias=c.attention_bias)
    return Block(
        w.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps), attention,
        w.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
        GatedMLP(w.at("mlp"), c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias))


class Model(Decoder):
    pooling = "mean"

    def __init__(self, w: Weights, c: Config) -> None:
        layers = [layer(w.at(f"layers.{i}"), c) for i in range(c.num_hidden_layers)]
        super().__init__(w, c.vocab_size, c.hidden_size, layers, w.rms_norm("norm", c.hidden_size, c.rms_norm_eps))
