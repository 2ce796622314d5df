"""A decoder as most checkpoints have it: RMS norms, grouped-query attention with rotary positions, gated MLPs.

Causal or not is the family's word: a decoder whose rows see both ways is an encoder.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import ops
from ..batching import Batch, GrowingRope, RopeSpec
from ..errors import CheckpointError
from ..ops import Norm, Tensor
from ..weights import Weights


def sees_both_ways(raw: Mapping[str, Any]) -> bool:
    """What a config.json says about it. Both keys are in use, and either is enough."""
    return raw.get("is_causal") is False or raw.get("use_bidirectional_attention") is True


def must_see_both_ways(raw: Mapping[str, Any], model_type: str) -> None:
    """CheckpointError for a config whose rows see only what stands before them: that is a chat model."""
    if not sees_both_ways(raw):
        found = ", ".join(f"{key} is {raw.get(key, 'missing')}" for key in ("is_causal", "use_bidirectional_attention"))
        raise CheckpointError(
            f"config.json: {found}; {model_type} is an embedder with \"is_causal\": false or \"use_bidirectional_attention\": true")


def check_kinds(kinds: Sequence[str], layers: int, known: Sequence[str]) -> None:
    """CheckpointError unless `layer_types` names one of the known kinds for each layer."""
    if len(kinds) != layers:
        raise CheckpointError(f"config.json: layer_types names {len(kinds)} layers and num_hidden_layers is {layers}")
    if unknown := next((kind for kind in kinds if kind not in known), None):
        raise CheckpointError(f"config.json: layer_types has {unknown!r}; known: {', '.join(known)}")


class Attention:
    """[T, hidden] -> [T, hidden], from `q_proj`, `k_proj`, `v_proj` and `output` of the scope.

    norms: for each head of the queries and of the keys, before they rotate. query_rope: where queries rotate otherwise than keys.
    """

    def __init__(self, w: Weights, hidden: int, heads: int, kv_heads: int, width: int, rope: RopeSpec, *, causal: bool,
                 window: int | None = None, scale: float | None = None, norms: tuple[Norm, Norm] | None = None,
                 query_rope: RopeSpec | GrowingRope | None = None, bias: bool = False, output: str = "o_proj") -> None:
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} key and value heads")
        self.heads = (heads, kv_heads, kv_heads)
        self.norms, self.rope, self.query_rope = norms, rope, query_rope or rope
        self.causal, self.window, self.scale = causal, window, scale
        outputs = (heads * width, kv_heads * width, kv_heads * width)
        self.query_key_value = w.linears("q_proj", "k_proj", "v_proj", inputs=hidden, outputs=outputs, bias=bias)
        self.output = w.linear(output, heads * width, hidden, bias=bias)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = map(ops.heads, self.query_key_value(x), self.heads)
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = ops.rope(q, batch.rope(self.query_rope)), ops.rope(k, batch.rope(self.rope))
        return self.output(ops.attention(q, k, v, batch.segments, causal=self.causal, window=self.window, scale=self.scale))


class GatedMLP:
    """down(activation(gate(x)) * up(x)): [T, hidden] -> [T, hidden]. `names`: of gate, up and down."""

    def __init__(self, w: Weights, hidden: int, inner: int, activation: str, *,
                 names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), bias: bool = False) -> None:
        gate, up, down = names
        self.gate_up = w.linears(gate, up, inputs=hidden, outputs=inner, bias=bias)
        self.down = w.linear(down, inner, hidden, bias=bias)
        self.activation = ops.activation(activation)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down(self.activation(gate) * up)


class Block:
    """Two residual steps, each with its norm before it. `mix` is what lets rows see each other."""

    def __init__(self, mix_norm: Norm, mix: Callable[[Tensor, Batch], Tensor], mlp_norm: Norm, mlp: GatedMLP) -> None:
        self.mix_norm, self.mix, self.mlp_norm, self.mlp = mix_norm, mix, mlp_norm, mlp

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.mix(self.mix_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


class Decoder:
    """Tokens, layers, a norm: [T, hidden]. A token outside the table is an IndexError."""

    def __init__(self, w: Weights, vocabulary: int, hidden: int, layers: Sequence[Callable[[Tensor, Batch], Tensor]], norm: Norm) -> None:
        self.tokens = w.embedding("embed_tokens", vocabulary, hidden)
        self.layers, self.norm = layers, norm

    def embed(self, batch: Batch) -> Tensor:
        return self.tokens(batch.ids)

    def __call__(self, batch: Batch) -> Tensor:
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm(x)
