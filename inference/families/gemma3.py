"""EmbeddingGemma: Gemma 3 whose rows see both ways. Reference: transformers `Gemma3TextModel`. Pooling: mean.

Norms multiply by 1 + weight and stand on both sides of each step. Sliding layers rotate by a theta of their own and see half a
window each way: `sliding_window` counts both sides.
"""
from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..batching import Batch, RopeSpec
from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..layers.decoder import Attention, Decoder, GatedMLP, check_kinds
from ..ops import Norm, Tensor
from ..weights import Weights

MODEL_TYPES = ("gemma3_text", "gemma3")
ARCHITECTURES = ("Gemma3TextModel", "Gemma3Model")
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
DROPPED = (r"^lm_head\.", r"rotary_emb\.\w*inv_freq$", r"^(model\.)?(vision_tower|multi_modal_projector)\.")
log = logging.getLogger(__name__)


def accepts(checkpoint: Checkpoint) -> None:
    """CheckpointError for a Gemma 3 whose rows see only what stands before them: that is a chat model."""
    found = _text(checkpoint.config).get("use_bidirectional_attention", "missing")
    if found is not True:
        raise CheckpointError(f"config.json: use_bidirectional_attention is {found}; {checkpoint.model_type} is an embedder with true")


def _text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw.get("text_config") or raw


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    sliding_window: int
    layer_types: list[str]
    rope_parameters: dict[str, Any]
    head_dim: int = 256
    max_position_embeddings: int = 131_072
    query_pre_attn_scalar: float = 256.0
    rms_norm_eps: float = 1e-6
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False

    @staticmethod
    def rename(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Older configs say that every n-th layer is full, and name two thetas; scaling is of the full layers alone."""
        raw = {name: value for name, value in _text(raw).items() if value is not None}
        every = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(raw.get("num_hidden_layers", 0))]
        tables = raw.get("rope_parameters", {})
        full = {"rope_theta": raw.get("rope_theta", 1e6), "original_max_position_embeddings": raw.get("max_position_embeddings")}
        return {"layer_types": kinds, "num_key_value_heads": 4} | raw | {"rope_parameters": {
            "full_attention": full | (tables.get("full_attention") or {}) | raw.get("rope_scaling", {}),
            "sliding_attention": {"rope_theta": raw.get("rope_local_base_freq", 1e4)} | (tables.get("sliding_attention") or {})}}

    def __post_init__(self) -> None:
        check_kinds(self.layer_types, self.num_hidden_layers, tuple(self.rope_parameters))
        if self.sliding_window % 2:
            log.warning(
                "config.json: sliding_window is %d, which transformers 4 has halved when it saved this checkpoint; like transformers, "
                "this server halves it again. Sliding layers see %d tokens each way; they would see %d with the published value, %d.",
                self.sliding_window, self.sliding_window // 2, self.sliding_window - 1, 2 * (self.sliding_window - 1))

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings


class Layer:
    def __init__(self, w: Weights, c: Config, kind: str) -> None:
        def norm(name: str, width: int = c.hidden_size) -> Norm:
            return w.rms_norm(name, width, c.rms_norm_eps, offset=1.0)

        self.before_attention, self.after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        self.before_mlp, self.after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        self.attention = Attention(
            w.at("self_attn"), c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
            RopeSpec.of(c.head_dim, 1e4, c.rope_parameters[kind]), causal=False, scale=c.query_pre_attn_scalar ** -0.5,
            window=c.sliding_window // 2 if kind == "sliding_attention" else None,
            norms=(norm("self_attn.q_norm", c.head_dim), norm("self_attn.k_norm", c.head_dim)), bias=c.attention_bias)
        self.mlp = GatedMLP(w.at("mlp"), c.hidden_size, c.intermediate_size, c.hidden_activation)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.after_attention(self.attention(self.before_attention(x), batch))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


class Model(Decoder):
    pooling = "mean"

    def __init__(self, w: Weights, c: Config) -> None:
        layers = [Layer(w.at(f"layers.{i}"), c, kind) for i, kind in enumerate(c.layer_types)]
        super().__init__(w, c.vocab_size, c.hidden_size, layers, w.rms_norm("norm", c.hidden_size, c.rms_norm_eps, offset=1.0))
        self.scale = c.hidden_size ** 0.5

    def embed(self, batch: Batch) -> Tensor:
        return super().embed(batch) * self.scale
