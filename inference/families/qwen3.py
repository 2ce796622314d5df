"""Qwen3-Embedding: causal decoder with a norm on each head of queries and keys. Reference: transformers `Qwen3Model`. Pooling: lasttoken.

The tokenizer appends <|endoftext|>, whose row sees the whole text. A config may say that rows see both ways, and some fine-tunes do.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import ops
from ..batching import Batch, DynamicRope, RopeSpec, rope_parameters
from ..layers.decoder import Attention, Block, Decoder, GatedMLP, check_kinds, sees_both_ways
from ..ops import Norm, Tensor
from ..weights import Weights

MODEL_TYPES = ("qwen3",)
ARCHITECTURES = ("Qwen3Model",)                    # Qwen3ForCausalLM is a chat model unless a pooling layout says otherwise
PREFIXES = ("model.",)
DROPPED = (r"^lm_head\.", r"rotary_emb\.inv_freq$")


def format_text(text: str, instruction: str | None, prompts: Mapping[str, str]) -> str:
    """`Instruct: {instruction}\\nQuery:{text}`, with what the checkpoint's own query prompt has from the line's end on (the published
    one has no space there); the text itself where there is no instruction."""
    if not instruction:
        return text
    _, _, rest = prompts.get("query", "").partition("\n")
    return f"Instruct: {instruction}\n{rest if rest.startswith('Query:') else 'Query:'}{text}"


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    layer_types: list[str]
    rope_parameters: dict[str, Any]
    max_position_embeddings: int = 32768
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    sliding_window: int = 4096
    is_causal: bool = True
    tie_word_embeddings: bool = False

    @staticmethod
    def rename(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Older configs say from which layer on windows are used, if they are."""
        sliding_from = raw.get("max_window_layers", 28) if raw.get("use_sliding_window") else raw.get("num_hidden_layers", 0)
        kinds = ["full_attention" if i < sliding_from else "sliding_attention" for i in range(raw.get("num_hidden_layers", 0))]
        older = {"layer_types": kinds, "num_key_value_heads": raw.get("num_attention_heads")}
        settled = {"rope_parameters": rope_parameters(raw, 10_000.0), "is_causal": not sees_both_ways(raw)}
        return older | {name: value for name, value in raw.items() if value is not None} | settled

    def __post_init__(self) -> None:
        check_kinds(self.layer_types, self.num_hidden_layers, ("full_attention", "sliding_attention"))

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings

    @property
    def rope(self) -> RopeSpec:
        return RopeSpec.of(self.head_dim, 10_000.0, self.rope_parameters)

    @property
    def radius(self) -> int:
        """Of a sliding layer: the reference counts the row itself where it looks back only, and does not where it looks both ways."""
        return self.sliding_window - self.is_causal


def layer(w: Weights, c: Config, kind: str) -> Block:
    def norm(name: str, width: int = c.hidden_size) -> Norm:
        return w.rms_norm(name, width, c.rms_norm_eps)

    attention = Attention(
        w.at("self_attn"), c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
        c.rope, causal=c.is_causal, window=c.radius if kind == "sliding_attention" else None,
        norms=(norm("self_attn.q_norm", c.head_dim), norm("self_attn.k_norm", c.head_dim)), bias=c.attention_bias)
    return Block(norm("input_layernorm"), attention, norm("post_attention_layernorm"),
                 GatedMLP(w.at("mlp"), c.hidden_size, c.intermediate_size, c.hidden_act))


class Model(Decoder):
    pooling = "lasttoken"

    def __init__(self, w: Weights, c: Config) -> None:
        layers = [layer(w.at(f"layers.{i}"), c, kind) for i, kind in enumerate(c.layer_types)]
        super().__init__(w, c.vocab_size, c.hidden_size, layers, w.rms_norm("norm", c.hidden_size, c.rms_norm_eps))


class YesNo:
    """[B, 2]: the logits of two tokens after the last row; the generative reranker's head."""

    def __init__(self, w: Weights, c: Config, yes: int, no: int) -> None:
        self.model = Model(w, c)
        self.head = self.model.tokens if c.tie_word_embeddings else w.embedding("lm_head", c.vocab_size, c.hidden_size)
        self.answers = (yes, no)
        # What stands before may be computed without what follows.
        self.shares = c.is_causal and not isinstance(c.rope, DynamicRope)

    def __call__(self, batch: Batch) -> Tensor:
        return self.head.logits(ops.pool(self.model(batch), batch.segments, "lasttoken"), self.answers)
