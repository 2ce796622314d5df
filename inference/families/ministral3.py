"""Nemotron-3-Embed: Ministral 3 whose rows see both ways. Reference: transformers `Ministral3Model` with `is_causal` false. Pooling: mean.

Queries grow with their position: 1 + beta ln(1 + floor(position / original length)). Positions rotate as YaRN has it unless the
config says otherwise.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..batching import GrowingRope, RopeSpec, rope_parameters
from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..layers.decoder import Attention, Block, Decoder, GatedMLP, must_see_both_ways
from ..weights import Weights

MODEL_TYPES = ("ministral3",)
ARCHITECTURES = ("Ministral3Model",)
PREFIXES = ("language_model.model.", "language_model.", "model.")
DROPPED = (r"^lm_head\.", r"rotary_emb\.inv_freq$")
ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
"""The reference's, for a config that has no table of its own."""


def accepts(checkpoint: Checkpoint) -> None:
    """CheckpointError for a checkpoint that does not say it sees both ways."""
    must_see_both_ways(checkpoint.config, checkpoint.model_type)


@dataclass(frozen=True)
class Config:
    """sliding_window: an inclusive radius, of every layer."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    rope_parameters: dict[str, Any]
    head_dim: int = 128
    max_position_embeddings: int = 262_144
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None

    @staticmethod
    def rename(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        older: dict[str, Any] = {"num_key_value_heads": raw.get("num_attention_heads"), "rope_parameters": ROPE}
        if "head_dim" in raw and raw.get("num_attention_heads"):          # null means hidden / heads, no key at all means 128
            older["head_dim"] = raw.get("hidden_size", 0) // raw["num_attention_heads"]
        raw = older | {name: value for name, value in raw.items() if value is not None}
        return raw | {"rope_parameters": rope_parameters(raw, 1e6)}

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings


def layer(w: Weights, c: Config) -> Block:
    rope = RopeSpec.of(c.head_dim, 1e6, c.rope_parameters)
    attention = Attention(
        w.at("self_attn"), c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, rope, query_rope=query_rope(rope, c),
        causal=False, window=c.sliding_window)
    return Block(
        w.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps), attention,
        w.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
        GatedMLP(w.at("mlp"), c.hidden_size, c.intermediate_size, c.hidden_act))


def query_rope(rope: RopeSpec, c: Config) -> RopeSpec | GrowingRope:
    """The rotation with the growth folded in, which needs all components of a head to rotate."""
    beta = c.rope_parameters.get("llama_4_scaling_beta")
    if not beta:
        return rope
    if rope.dim != c.head_dim:
        raise CheckpointError(f"config.json: llama_4_scaling_beta {beta} with partial_rotary_factor; expected all of a head to rotate")
    return GrowingRope(rope, float(beta), float(c.rope_parameters["original_max_position_embeddings"]))


class Model(Decoder):
    pooling = "mean"

    def __init__(self, w: Weights, c: Config) -> None:
        layers = [layer(w.at(f"layers.{i}"), c) for i in range(c.num_hidden_layers)]
        super().__init__(w, c.vocab_size, c.hidden_size, layers, w.rms_norm("norm", c.hidden_size, c.rms_norm_eps))
