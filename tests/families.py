"""One `Case` per way a family is built: a tiny random checkpoint, made by the reference implementation.

`tests/golden/<name>/` holds what `python -m tests.make_golden` wrote there: the checkpoint as the reference saves it, and what
the reference answers. tests/test_families.py holds every family to the same invariants.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
LENGTHS = (1, 2, 3, 5, 8, 9, 17, 33, 64, 70)


@dataclass(frozen=True, eq=False)
class Case:
    """config: arguments of the reference's config class. lengths: tokens of each input; their order is shuffled.

    published: a prefix under which published checkpoints keep the same names. surplus: tensors that published checkpoints hold
    beside the model's, by their full names and shapes, and that must be dropped. pad: an id that fills every input up to the longest
    and counts as a word. head: the reference's module that its last hidden states still have to go through. causal: no row sees
    what comes after it.
    """

    name: str
    family: str
    reference: str
    config: Mapping[str, Any]
    lengths: tuple[int, ...] = LENGTHS
    type_ids: bool = False
    published: str = ""
    surplus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pad: int | None = None
    head: str = ""
    causal: bool = False
    tolerance: float = 1e-5

    @property
    def folder(self) -> Path:
        return GOLDEN / self.name


_TINY_BERT = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 72, "initializer_range": 0.2, "pad_token_id": 0,
}
_BERT_HEADS = {
    "bert.embeddings.position_ids": (1, 72), "bert.pooler.dense.weight": (32, 32), "bert.pooler.dense.bias": (32,),
    "cls.predictions.bias": (120,), "cls.seq_relationship.weight": (2, 32), "classifier.weight": (2, 32), "classifier.bias": (2,),
}
_TINY_XLM_ROBERTA = _TINY_BERT | {"max_position_embeddings": 74, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
_ROBERTA_HEADS = {
    "roberta.embeddings.position_ids": (1, 74), "roberta.pooler.dense.weight": (32, 32), "roberta.pooler.dense.bias": (32,),
    "lm_head.bias": (120,), "lm_head.layer_norm.weight": (32,), "classifier.dense.weight": (32, 32), "classifier.out_proj.bias": (2,),
}
_NO_SPECIALS = {"bos_token_id": None, "eos_token_id": None}
_TINY_MODERNBERT = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 4, "pad_token_id": 0,
    "cls_token_id": None, "sep_token_id": None, "initializer_range": 0.2, "local_attention": 17, "max_position_embeddings": 400,
    **_NO_SPECIALS,
}
_TINY_NOMIC = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.2,
}
_TINY_SIGLIP = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, **_NO_SPECIALS,
}
_TINY_DECODER = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_BOTH_WAYS = _TINY_DECODER | {"is_causal": False}
_TINY_GEMMA = _TINY_DECODER | {"head_dim": 16, "use_bidirectional_attention": True, "sliding_window": 16, "query_pre_attn_scalar": 20}
_TINY_LFM2 = _BOTH_WAYS | {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}
_HEAD = {"lm_head.weight": (96, 32)}
_LONG = (*LENGTHS, 150, 256)
DECODERS = (
    Case("qwen3", "qwen3", "Qwen3Model", _TINY_DECODER | {"head_dim": 16}, _LONG, published="model.", surplus=_HEAD, causal=True),
    Case("qwen3-sliding", "qwen3", "Qwen3Model", _TINY_DECODER | {
        "head_dim": 16, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1, "attention_bias": True,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}}, causal=True),
    Case("qwen3-both-ways", "qwen3", "Qwen3Model", _BOTH_WAYS | {
        "head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    Case("embeddinggemma", "gemma3", "Gemma3TextModel", _TINY_GEMMA | {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
        _LONG, published="model.", surplus=_HEAD),
    Case("embeddinggemma-pattern", "gemma3", "Gemma3TextModel", _TINY_GEMMA | {
        "num_hidden_layers": 7, "sliding_window": 10, "num_key_value_heads": 1, "hidden_activation": "gelu", "attention_bias": True,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 2000.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}},
        published="language_model.model.", surplus=_HEAD | {"vision_tower.patch.weight": (4, 4), "multi_modal_projector.norm.weight": (4,)}),
    Case("llama-bidirectional", "llama_bidirectional", "LlamaModel", _BOTH_WAYS | {"rope_parameters": _LLAMA3}, _LONG, published="model.",
         surplus=_HEAD | {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}),
    Case("llama-bidirectional-biases", "llama_bidirectional", "LlamaModel", _BOTH_WAYS | {
        "head_dim": 24, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
        published="language_model.model."),
    Case("nemotron-3-embed", "ministral3", "Ministral3Model", _BOTH_WAYS | {"head_dim": 16, "rope_parameters": _YARN}, _LONG,
         published="model.", surplus=_HEAD),
    Case("nemotron-3-embed-sliding", "ministral3", "Ministral3Model", _BOTH_WAYS | {
        "head_dim": 16, "sliding_window": 11, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16}}),
    Case("lfm2-embedding", "lfm2", "Lfm2Model", _TINY_LFM2, _LONG, published="model.", surplus=_HEAD),
    Case("lfm2-embedding-adjusted", "lfm2", "Lfm2Model", _TINY_LFM2 | {
        "block_auto_adjust_ff_dim": True, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.3, "conv_L_cache": 4, "conv_bias": True,
        "layer_types": ["full_attention", "conv", "full_attention"]}),
    Case("lfm2-causal", "lfm2", "Lfm2Model", _TINY_LFM2 | {"is_causal": True}, causal=True),
)
CASES = (
    Case("bert", "bert", "BertModel", _TINY_BERT, type_ids=True, published="bert.", surplus=_BERT_HEADS),
    Case("bert-gelu-new", "bert", "BertModel", _TINY_BERT | {
        "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "hidden_act": "gelu_new", "type_vocab_size": 1,
        "layer_norm_eps": 1e-6}, published="bert."),
    Case("xlm-roberta", "xlm_roberta", "XLMRobertaModel", _TINY_XLM_ROBERTA, (*LENGTHS, 72), published="roberta.", surplus=_ROBERTA_HEADS),
    Case("xlm-roberta-far-pad", "xlm_roberta", "XLMRobertaModel", _TINY_XLM_ROBERTA | {
        "max_position_embeddings": 40, "pad_token_id": 5, "type_vocab_size": 2}, (1, 2, 9, 17, 33, 34)),
    Case("roberta", "xlm_roberta", "RobertaModel", _TINY_XLM_ROBERTA | {
        "num_hidden_layers": 1, "type_vocab_size": 2}, published="roberta."),
    Case("modernbert", "modernbert", "ModernBertModel", _TINY_MODERNBERT, (*LENGTHS, 150, 400), published="model.", surplus={
        "decoder.bias": (120,), "head.dense.weight": (32, 32), "head.norm.weight": (32,), "classifier.weight": (2, 32)}),
    Case("modernbert-biases", "modernbert", "ModernBertModel", _TINY_MODERNBERT | {
        "norm_bias": True, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3, "local_attention": 8, "norm_eps": 1e-3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}}}),
    Case("nomic-bert", "nomic_bert", "NomicBertModel", _TINY_NOMIC, type_ids=True, published="bert.", surplus={
        "cls.predictions.bias": (128,), "bert.pooler.dense.weight": (32, 32)}),
    Case("nomic-bert-dynamic", "nomic_bert", "NomicBertModel", _TINY_NOMIC | {
        "max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}},
        (*LENGTHS, 15, 16, 150)),
    Case("siglip-text", "siglip_text", "SiglipTextModel", _TINY_SIGLIP, (1, 2, 3, 7, 20, 50, 63, 64), pad=1, head="head",
         published="text_model.", surplus={
             "logit_scale": (), "logit_bias": (1,), "vision_model.embeddings.patch_embedding.weight": (4, 3, 2, 2),
             "vision_model.head.probe": (1, 1, 4), "text_model.embeddings.position_ids": (1, 64)}),
    Case("siglip-text-projected", "siglip_text", "SiglipTextModel", _TINY_SIGLIP | {"projection_size": 24, "max_position_embeddings": 16},
         (1, 5, 15, 16), pad=1, head="head"),
    *DECODERS,
)
