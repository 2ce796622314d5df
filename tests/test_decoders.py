"""Decoders as embedders: which checkpoints are, what their real configs promise, and how they came to be spelled."""
from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inference import ops
from inference.batching import Batch
from inference.config import Settings
from inference.errors import CheckpointError
from inference.families import find, gemma3, lfm2, llama_bidirectional, ministral3, qwen3
from inference.loader import embedding_family, open_checkpoint
from inference.weights import read_config
from inference.wire import EmbedJob
from tests.checkpoints import client, read, unit, write
from tests.families import CASES
from tests.test_families import assert_matches, build, inputs_of, reference_of

BY_NAME = {case.name: case for case in CASES}
LASTTOKEN = {"1_Pooling__config": {"pooling_mode_lasttoken": True}}
MEAN = {"1_Pooling__config": {"pooling_mode_mean_tokens": True}}
each_backend = pytest.mark.parametrize("backend", ["host", "mlx"])


def config_of(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((BY_NAME[name].folder / "config.json").read_text())
    return raw


def folder_with(folder: Path, raw: dict[str, Any], pooling: str = "") -> Path:
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if pooling:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    return folder


# ---- which checkpoints are embedders

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
LLAMA = {"model_type": "llama", "architectures": ["LlamaModel"]}
MINISTRAL3 = {"model_type": "ministral3", "architectures": ["Ministral3Model"]}
GEMMA3 = {"model_type": "gemma3_text", "architectures": ["Gemma3TextModel"]}
LFM2 = {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"]}


@pytest.mark.parametrize(("raw", "pooling"), [
    (QWEN3, "lasttoken"), (QWEN3 | {"architectures": ["Qwen3Model"]}, ""),
    (LLAMA | {"is_causal": False}, ""), (LLAMA | {"use_bidirectional_attention": True}, "mean"),
    (LLAMA | {"model_type": "llama_bidirec"}, ""),
    (MINISTRAL3 | {"is_causal": False}, ""), (MINISTRAL3 | {"is_causal": False}, "mean"),
    (GEMMA3 | {"use_bidirectional_attention": True}, ""),
    ({"model_type": "gemma3", "architectures": ["Gemma3Model"], "text_config": {"use_bidirectional_attention": True}}, ""),
    (LFM2 | {"architectures": ["Lfm2BidirectionalModel"]}, ""), (LFM2 | {"is_causal": False}, "cls"), (LFM2, "mean"),
    (LFM2 | {"auto_map": {"AutoModel": "modeling_lfm2_bidirectional.Lfm2BidirectionalModel"}}, "cls"),
])
def test_embedders(raw: dict[str, Any], pooling: str, tmp_path: Path) -> None:
    checkpoint = read(folder_with(tmp_path, raw, pooling))
    assert embedding_family(checkpoint) is find(raw["model_type"])


@pytest.mark.parametrize(("raw", "pooling", "said"), [
    (QWEN3, "", r"architectures\[0\] is Qwen3ForCausalLM and there is no pooling module; qwen3 embeds as Qwen3Model"),
    (LLAMA, "mean", "is_causal is missing, use_bidirectional_attention is missing; llama is an embedder with \"is_causal\": false or"),
    (LLAMA | {"is_causal": True}, "", "is_causal is True, use_bidirectional_attention is missing; llama"),
    (MINISTRAL3, "mean", "is_causal is missing, .*; ministral3 is an embedder with \"is_causal\": false"),
    (MINISTRAL3 | {"is_causal": True, "use_bidirectional_attention": False}, "", "is_causal is True, use_bidirectional_attention is False"),
    (GEMMA3, "mean", "use_bidirectional_attention is missing; gemma3_text is an embedder with true"),
    (GEMMA3 | {"use_bidirectional_attention": False}, "", "use_bidirectional_attention is False; gemma3_text"),
    (LFM2, "cls", r"architectures\[0\] is Lfm2ForCausalLM and is_causal is missing, with cls pooling; lfm2 is an embedder as Lfm2Bidirect"),
])
def test_chat_models_are_refused_by_key_and_value(raw: dict[str, Any], pooling: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        embedding_family(read(folder_with(tmp_path, raw, pooling)))


# ---- real configs

def test_real_qwen3_embedding(data: Path) -> None:
    checkpoint = read(data / "checkpoints" / "Qwen__Qwen3-Embedding-0.6B")
    c = read_config(embedding_family(checkpoint).Config, checkpoint.config)
    assert (c.hidden_size, min(checkpoint.length_limit, c.max_length), checkpoint.pooling) == (1024, 8192, "lasttoken")
    assert set(c.layer_types) == {"full_attention"} and c.is_causal and c.rope_parameters["rope_theta"] == 1e6
    assert qwen3.format_text("t", "do", checkpoint.prompts) == "Instruct: do\nQuery:t"
    assert qwen3.format_text("What?", "Given a web search query, retrieve relevant passages that answer the query", checkpoint.prompts) == (
        checkpoint.prompts["query"] + "What?")


def test_real_embeddinggemma(data: Path) -> None:
    checkpoint = read(data / "checkpoints" / "google__embeddinggemma-300m")
    c = read_config(embedding_family(checkpoint).Config, checkpoint.config)
    assert (c.hidden_size, min(checkpoint.length_limit, c.max_length), checkpoint.pooling) == (768, 2048, "mean")
    assert c.sliding_window // 2 == 256 and c.layer_types.count("full_attention") == 4
    assert [c.rope_parameters[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")] == [1e6, 1e4]


def test_resaved_embeddinggemma_is_halved_again_and_said_so(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = read(data / "checkpoints" / "_traps" / "embeddinggemma-resaved-4.57.1")
    with caplog.at_level(logging.WARNING):
        c = read_config(embedding_family(checkpoint).Config, checkpoint.config)
    assert c.sliding_window // 2 == 128
    assert "sliding_window is 257, which transformers 4 has halved" in caplog.text
    assert "see 128 tokens each way; they would see 256 with the published value, 512" in caplog.text


@pytest.mark.parametrize("name", ["nvidia__llama-nemotron-embed-1b-v2", "_traps/llama-nemotron-vllm-overlay"])
def test_real_bidirectional_llama(name: str, data: Path) -> None:
    checkpoint = read(data / "checkpoints" / name)
    assert embedding_family(checkpoint) is llama_bidirectional
    c = read_config(llama_bidirectional.Config, checkpoint.config)
    assert (c.hidden_size, min(checkpoint.length_limit, c.max_length), llama_bidirectional.Model.pooling) == (2048, 8192, "mean")
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (32, 8, 64)
    assert (c.rope_parameters["rope_type"], c.rope_parameters["rope_theta"]) == ("llama3", 500_000.0)


@pytest.mark.parametrize(("name", "change", "dims"), [
    ("qwen3", {}, 4096), ("gemma3_text", {}, 2304), ("ministral3", {}, 4096), ("ministral3", {"rope_parameters": None}, 4096),
    ("lfm2", {}, 2560), ("lfm2", {"rope_parameters": None, "layer_types": None, "block_ff_dim": 12288}, 2560)])
def test_the_references_default_configs(name: str, change: dict[str, Any], dims: int, data: Path) -> None:
    raw = json.loads((data / "checkpoints" / "facts.json").read_text())["_defaults"][name]
    c, changed = (read_config(find(name).Config, one) for one in (raw, raw | change))
    assert c.hidden_size == dims
    assert vars(c) | {"rope_parameters": 0} == vars(changed) | {"rope_parameters": 0}
    if name == "lfm2":
        assert changed.rope_parameters["rope_theta"] == 1e6 and c.intermediate_size == 8192
    if name == "ministral3":
        assert ministral3.query_rope(ministral3.rope_of(c), c) == ministral3.query_rope(ministral3.rope_of(changed), changed)


# ---- spellings

def test_a_query_prompt_with_a_space_keeps_it() -> None:
    prompts = {"query": "Instruct: Retrieve relevant passages\nQuery: ", "document": ""}
    assert qwen3.format_text("t", "do", prompts) == "Instruct: do\nQuery: t"
    assert qwen3.format_text("t", "do", {"query": "query: "}) == qwen3.format_text("t", "do", {}) == "Instruct: do\nQuery:t"
    assert qwen3.format_text("t", None, prompts) == qwen3.format_text("t", "", prompts) == "t"


def test_qwen3s_older_window_keys() -> None:
    raw = config_of("qwen3-sliding")
    older = {k: v for k, v in raw.items() if k != "layer_types"}
    assert raw["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    assert read_config(qwen3.Config, older).layer_types == raw["layer_types"]


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemmas_older_keys_are_the_same_config(key: str) -> None:
    raw = config_of("embeddinggemma")
    kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(raw["num_hidden_layers"])]
    old = {k: v for k, v in raw.items() if k not in ("layer_types", "rope_parameters", "_sliding_window_pattern")} | {
        key: 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
    new = read_config(gemma3.Config, raw | {"layer_types": kinds})
    from_old = read_config(gemma3.Config, old)
    assert from_old.layer_types == kinds
    assert [from_old.rope_parameters[kind]["rope_theta"] for kind in kinds] == [new.rope_parameters[kind]["rope_theta"] for kind in kinds]
    assert read_config(gemma3.Config, {"model_type": "gemma3", "text_config": old}) == from_old


def test_lfm2s_older_keys_are_the_same_config() -> None:
    raw = config_of("lfm2-embedding-adjusted")
    old = {k: v for k, v in raw.items() if k not in ("layer_types", "rope_parameters", "intermediate_size")} | {
        "full_attn_idxs": [0, 2], "rope_theta": 1e6, "block_ff_dim": raw["intermediate_size"]}
    a, b = (read_config(lfm2.Config, one) for one in (old, raw))
    assert vars(a) | {"rope_parameters": 0} == vars(b) | {"rope_parameters": 0} and a.rope_parameters["rope_theta"] == 1e6


@each_backend
def test_lfm2s_convolutions_as_mlx_stores_them(backend: str, tmp_path: Path) -> None:
    case = BY_NAME["lfm2-embedding-adjusted"]
    write(case, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: np.ascontiguousarray(x.swapaxes(1, 2)) if x.ndim == 3 else x for name, x in tensors.items()}
    assert any(x.ndim == 3 for x in tensors.values())
    save_file(turned, tmp_path / "model.safetensors")
    assert_matches(case.folder, build(tmp_path, backend), case.tolerance)


def test_lfm2_run_causally_gives_every_text_one_vector(tmp_path: Path) -> None:
    """Why the causal one is refused: its first row has seen nothing but itself."""
    reference = reference_of(BY_NAME["lfm2-causal"].folder)
    assert np.unique(reference["ids"][np.cumsum([0, *reference["lengths"][:-1]])]).size > 1
    model, ids = build(BY_NAME["lfm2-causal"].folder, "host"), [[7, *rest] for rest in ([1, 2, 3], [40, 50], [9])]
    batch = Batch.of(ids)
    first = ops.numpy(ops.pool(model(batch), batch.segments, "cls"))
    np.testing.assert_array_equal(first, np.repeat(first[:1], 3, 0))


@pytest.mark.parametrize(("name", "change", "said"), [
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types names 1 layers and num_hidden_layers is 3"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types has 'chunked_attention'; known"),
    ("qwen3", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not implemented; known: default"),
    ("qwen3", {"num_key_value_heads": 3}, "4 attention heads cannot share 3 key and value heads"),
    ("lfm2-embedding", {"layer_types": ["conv", "mamba", "conv"]}, "layer_types has 'mamba'; known: full_attention, conv"),
    ("embeddinggemma", {"sliding_window": None}, "config.json lacks 'sliding_window'"),
    ("nemotron-3-embed", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "llama_4_scaling_beta": 0.1}},
     "llama_4_scaling_beta 0.1 with partial_rotary_factor; expected all of a head to rotate"),
    ("lfm2-embedding", {"conv_L_cache": 5}, r"conv.conv.weight has shape \[32, 1, 3\]; the config promises \[32, 1, 5\] or \[32, 5, 1\]"),
])
def test_configs_that_nobody_implements_are_refused(name: str, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    write(BY_NAME[name], tmp_path, config=config_of(name) | change)
    with pytest.raises(CheckpointError, match=said):
        build(tmp_path, "host")


# ---- through the transport

@each_backend
def test_the_last_token_of_a_long_text_is_still_the_one_that_is_pooled(backend: str, tmp_path: Path) -> None:
    served = client(write(BY_NAME["qwen3"], tmp_path / "m", **LASTTOKEN), backend)
    assert (served.models()[0].max_length, served.models()[0].pooling, served.models()[0].instructions) == (256, "lasttoken", True)
    ids = [6 + i % 80 for i in range(300)]
    result = served.embed(EmbedJob((" ".join(f"w{i}" for i in ids), (*ids[:255], 2))))
    assert result.tokens.tolist() == [256, 256] and result.truncated == (0,)
    assert np.abs(result.data[0] - result.data[1]).max() <= 1e-6
    served.close()


@each_backend
@pytest.mark.parametrize("folded", [False, True])
def test_embeddinggemmas_dense_modules_in_both_layouts(backend: str, folded: bool, tmp_path: Path) -> None:
    reference, rng = reference_of(BY_NAME["embeddinggemma"].folder), np.random.default_rng(0)
    up, down = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 32), (32, 64)))
    kinds = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Dense", "Dense"), ("4_Normalize", "Normalize")
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    identity = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    folder = write(BY_NAME["embeddinggemma"], tmp_path / "m", modules=modules, **MEAN, **{
        f"{k}_Dense__config": identity | {"in_features": wide, "out_features": narrow} for k, wide, narrow in ((2, 32, 64), (3, 64, 32))})
    if folded:
        save_file(load_file(folder / "model.safetensors") | {"dense.0.weight": up, "dense.1.weight": down}, folder / "model.safetensors")
    else:
        for name, weight in (("2_Dense", up), ("3_Dense", down)):
            save_file({"linear.weight": weight}, folder / name / "model.safetensors")
    served = client(folder, backend)
    result = served.embed(EmbedJob(tuple(map(tuple, inputs_of(reference)[0]))))
    assert np.abs(result.data - unit(reference["mean"].astype(np.float64) @ up.T @ down.T)).max() <= 1e-5
    served.close()


def test_a_checkpoint_quantised_by_mlx_opens_with_its_config(tmp_path: Path) -> None:
    """Its `quantization` table, with overrides and a layer left alone, does not stand in the way; packed words are not taken for widths."""
    table = {"group_size": 32, "bits": 4, "layers.1.mlp.down_proj": {"group_size": 64, "bits": 8}, "layers.2.mlp.up_proj": False}
    config = config_of("qwen3") | {"quantization": table, "quantization_config": table}
    folder = write(BY_NAME["qwen3"], tmp_path / "m", config=config, **LASTTOKEN)
    tensors = {}
    for name, x in mx.load(str(folder / "model.safetensors")).items():
        stem = name.removesuffix(".weight")
        how = table.get(stem, table)
        if x.ndim != 2 or how is False:
            tensors[name] = x
        else:
            words = mx.quantize(x.astype(mx.bfloat16), how["group_size"], how["bits"])
            tensors |= {f"{stem}.{part}": value for part, value in zip(("weight", "scales", "biases"), words, strict=True)}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    spec = open_checkpoint(read(folder), Settings(backend="host")).spec
    assert (spec.dims, spec.vocab_size) == (32, 96)
    vectors = [client(folder, backend).embed(EmbedJob(("w5 w6 w7", "w9"))).data for backend in ("host", "mlx")]
    assert (1 - (vectors[0] * vectors[1]).sum(-1)).max() <= 1e-3
