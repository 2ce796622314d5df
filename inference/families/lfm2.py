"""LFM2.5-Embedding: short convolutions and attention in turns, all of them looking both ways. Pooling: cls.

Reference: transformers `Lfm2Model` with its attention not causal and its convolution centred on the row. Causal, the first row would
see nothing but itself, and every text would get one vector.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import ops
from ..batching import Batch, RopeSpec, rope_parameters
from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..layers.decoder import Attention, Block, Decoder, GatedMLP, check_kinds, sees_both_ways
from ..ops import Tensor
from ..weights import Weights

MODEL_TYPES = ("lfm2",)
ARCHITECTURES = ("Lfm2BidirectionalModel",)
PREFIXES = ("model.",)
DROPPED = (r"^lm_head\.", r"rotary_emb\.inv_freq$")


def accepts(checkpoint: Checkpoint) -> None:
    """CheckpointError for a causal LFM2 that pools its first row, which has seen nothing; late interaction pools none."""
    if _causal(checkpoint.config) and (checkpoint.pooling or Model.pooling) == "cls" and not checkpoint.late_interaction:
        raise CheckpointError(
            f"config.json: architectures[0] is {checkpoint.architecture or 'missing'} and is_causal is "
            f"{checkpoint.config.get('is_causal', 'missing')}, with cls pooling; lfm2 is an embedder as {ARCHITECTURES[0]}, with "
            '"is_causal": false, or with a pooling that sees the text')


def _causal(raw: Mapping[str, Any]) -> bool:
    classes = (*(raw.get("architectures") or ()), *(raw.get("auto_map") or {}).values())
    return not sees_both_ways(raw) and not any(str(name).endswith(ARCHITECTURES) for name in classes)


@dataclass(frozen=True)
class Config:
    """intermediate_size: the width of the MLP itself; published configs name one that is still to be adjusted."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    layer_types: list[str]
    rope_parameters: dict[str, Any]
    is_causal: bool
    max_position_embeddings: int = 128_000
    norm_eps: float = 1e-5
    conv_L_cache: int = 3
    conv_bias: bool = False

    @staticmethod
    def rename(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        raw = {name: value for name, value in raw.items() if value is not None}
        layers, heads = raw.get("num_hidden_layers", 0), raw.get("num_attention_heads")
        attending = raw.get("full_attn_idxs", range(layers))
        older = {"layer_types": ["full_attention" if i in attending else "conv" for i in range(layers)], "num_key_value_heads": 8,
                 "head_dim": raw.get("hidden_size", 0) // heads if heads else None}
        inner = raw.get("block_ff_dim", raw.get("intermediate_size"))
        if inner and raw.get("block_auto_adjust_ff_dim", True):
            step, inner = raw.get("block_multiple_of", 256), int(raw.get("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
            inner = -(-inner // step) * step
        return older | raw | {"intermediate_size": inner, "is_causal": _causal(raw), "rope_parameters": rope_parameters(raw, 1e6)}

    def __post_init__(self) -> None:
        check_kinds(self.layer_types, self.num_hidden_layers, ("full_attention", "conv"))

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings


class ShortConvolution:
    """output(c * convolution(b * x)), b, c and x of one projection."""

    def __init__(self, w: Weights, c: Config) -> None:
        self.input = w.linear("in_proj", c.hidden_size, 3 * c.hidden_size, bias=c.conv_bias)
        self.convolution = w.depthwise("conv", c.hidden_size, c.conv_L_cache, bias=c.conv_bias)
        self.output = w.linear("out_proj", c.hidden_size, c.hidden_size, bias=c.conv_bias)
        self.causal = c.is_causal

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        if (unseen := batch.segments.unseen) is not None:          # rows that nobody attends to do not reach others here either
            x = ops.put(x, unseen, ops.rows(x, unseen) * 0.0)
        b, c, x = ops.split(self.input(x), 3)
        return self.output(c * self.convolution(b * x, batch.segments, causal=self.causal))


def layer(w: Weights, c: Config, kind: str) -> Block:
    mix = ShortConvolution(w.at("conv"), c) if kind == "conv" else Attention(
        w.at("self_attn"), c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
        RopeSpec.of(c.head_dim, 1e6, c.rope_parameters), causal=c.is_causal, output="out_proj",
        norms=(w.rms_norm("self_attn.q_layernorm", c.head_dim, c.norm_eps), w.rms_norm("self_attn.k_layernorm", c.head_dim, c.norm_eps)))
    return Block(w.rms_norm("operator_norm", c.hidden_size, c.norm_eps), mix, w.rms_norm("ffn_norm", c.hidden_size, c.norm_eps),
                 GatedMLP(w.at("feed_forward"), c.hidden_size, c.intermediate_size, "silu", names=("w1", "w3", "w2")))


class Model(Decoder):
    pooling = "cls"

    def __init__(self, w: Weights, c: Config) -> None:
        layers = [layer(w.at(f"layers.{i}"), c, kind) for i, kind in enumerate(c.layer_types)]
        super().__init__(w, c.vocab_size, c.hidden_size, layers, w.rms_norm("embedding_norm", c.hidden_size, c.norm_eps))
