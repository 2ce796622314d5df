"""SigLIP's text tower: pre-norm encoder with learned positions. Reference: transformers `SiglipTextModel`. Pooling: the last position.

It was trained on texts padded to the end of its position table, pads seen as words. So every text is padded, and no other
pooling has a meaning.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import ops
from ..batching import Batch
from ..checkpoint import Checkpoint, read_json
from ..errors import CheckpointError
from ..ops import Tensor
from ..weights import Weights

MODEL_TYPES = ("siglip", "siglip_text_model")
ARCHITECTURES = ("SiglipModel", "SiglipTextModel")
PREFIXES = ("text_model.",)
DROPPED = (r"^vision_model\.", r"^logit_scale$", r"^logit_bias$", r"(^|\.)position_ids$")


def accepts(checkpoint: Checkpoint) -> None:
    """CheckpointError for a SigLIP 2 under SigLIP's model type: it pads with another token and wants lower-case text."""
    tokenizer = read_json(checkpoint.trunk / "tokenizer_config.json", {}).get("tokenizer_class", "SiglipTokenizer")
    if not str(tokenizer).startswith("SiglipTokenizer"):
        raise CheckpointError(
            f"{checkpoint.trunk / 'tokenizer_config.json'}: tokenizer_class is {tokenizer}; expected SiglipTokenizer "
            "(SigLIP 2 is not supported)")


@dataclass(frozen=True)
class Config:
    vocab_size: int = 32_000
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 64
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    pad_token_id: int = 1
    projection_size: int | None = None

    @staticmethod
    def rename(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """The whole model keeps the text tower's keys apart, and leaves out those that have the default."""
        return raw.get("text_config") or {} if raw.get("model_type") == "siglip" else raw

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise CheckpointError(f"config.json: hidden_size {self.hidden_size} cannot be cut into {self.num_attention_heads} heads")

    @property
    def dims(self) -> int:
        return self.projection_size or self.hidden_size

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings

    @property
    def pad_to(self) -> tuple[int, int]:
        return self.max_position_embeddings, self.pad_token_id


class Layer:
    def __init__(self, w: Weights, c: Config) -> None:
        hidden, inner = c.hidden_size, c.intermediate_size
        self.heads = c.num_attention_heads
        self.activation = ops.activation(c.hidden_act)
        self.attention_norm = w.layer_norm("layer_norm1", hidden, c.layer_norm_eps)
        self.query_key_value = w.at("self_attn").linears("q_proj", "k_proj", "v_proj", inputs=hidden, outputs=hidden)
        self.attention_output = w.linear("self_attn.out_proj", hidden, hidden)
        self.mlp_norm = w.layer_norm("layer_norm2", hidden, c.layer_norm_eps)
        self.intermediate = w.linear("mlp.fc1", hidden, inner)
        self.output = w.linear("mlp.fc2", inner, hidden)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = (ops.heads(y, self.heads) for y in self.query_key_value(self.attention_norm(x)))
        x = x + self.attention_output(ops.attention(q, k, v, batch.segments))
        return x + self.output(self.activation(self.intermediate(self.mlp_norm(x))))


class Model:
    """[T, dims]: the head is applied to every row, so that pooling is its usual last step.

    A token or position outside its table is an IndexError.
    """

    pooling = "lasttoken"
    pooling_is_fixed = True

    def __init__(self, w: Weights, c: Config) -> None:
        self.tokens = w.embedding("embeddings.token_embedding", c.vocab_size, c.hidden_size)
        self.position = w.embedding("embeddings.position_embedding", c.max_position_embeddings, c.hidden_size)
        self.layers = [Layer(w.at(f"encoder.layers.{i}"), c) for i in range(c.num_hidden_layers)]
        self.final_norm = w.layer_norm("final_layer_norm", c.hidden_size, c.layer_norm_eps)
        self.head = w.linear("head", c.hidden_size, c.dims)

    def __call__(self, batch: Batch) -> Tensor:
        x = self.tokens(batch.ids) + self.position(batch.positions)
        for layer in self.layers:
            x = layer(x, batch)
        return self.head(self.final_norm(x))
