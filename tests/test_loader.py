"""Whole checkpoints through the loader and the local transport: pooling, Dense modules, limits, padding, and what real configs promise."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inference import ops
from inference.batching import Batch, RopeSpec, Segments
from inference.config import Settings
from inference.errors import CheckpointError
from inference.families import find
from inference.layers import dense
from inference.loader import load, open_checkpoint
from inference.weights import Weights, read_config
from inference.wire import EmbedJob
from tests.checkpoints import client, read, unit, write
from tests.families import CASES, Case
from tests.test_families import build, config_of, family_of, inputs_of, reference_of

BY_NAME = {case.name: case for case in CASES}
DENSE = BY_NAME["bert-dense"]
MEAN = {"1_Pooling__config": {"pooling_mode_mean_tokens": True}}
each_backend = pytest.mark.parametrize("backend", ["host", "mlx"])


def opened(folder: Path, **settings):
    return open_checkpoint(read(folder), Settings(**{"backend": "host"} | settings))


def embeds(case: Case) -> bool:
    """Whether the family takes the case for an embedder, and the API can say all that its inputs hold."""
    try:
        getattr(family_of(case.folder)[0], "accepts", lambda _: None)(read(case.folder))
    except CheckpointError:
        return False
    return not case.type_ids


@pytest.mark.parametrize("case", [*filter(embeds, CASES)], ids=lambda case: case.name)
@each_backend
def test_token_ids_through_the_transport_are_the_references_vectors(case: Case, backend: str, tmp_path: Path) -> None:
    """Unit vectors within 1e-5, whatever stands behind the trunk; what a family pads is not counted."""
    reference = reference_of(case.folder)
    items = [ids for ids, _ in zip(*inputs_of(reference), strict=True)]
    if case.pad is not None:
        items = [ids[:n] for ids, n in zip(items, np.random.default_rng(0).permutation(case.lengths), strict=True)]
    want = reference["dense" if case.dense else "lasttoken" if case.pad is not None else "mean"]
    served = client(write(case, tmp_path / "m", **MEAN), backend)
    result = served.embed(EmbedJob(tuple(map(tuple, items))))
    assert np.abs(result.data - unit(want)).max() <= 1e-5
    assert result.tokens.tolist() == [len(ids) for ids in items]
    assert served.models()[0].dims == want.shape[1]
    served.close()


# ---- limits

@pytest.mark.parametrize("name, limit", [
    ("bert", 72), ("xlm-roberta", 72), ("xlm-roberta-far-pad", 34), ("modernbert", 400), ("siglip-text", 64)])
def test_a_text_over_the_limit_is_cut_to_it_and_keeps_its_last_special_token(name: str, limit: int, tmp_path: Path) -> None:
    served = client(write(BY_NAME[name], tmp_path / "m"))
    assert served.models()[0].max_length == limit
    words = [f"w{6 + i % 90}" for i in range(limit + 20)]
    ids = [6 + i % 90 for i in range(limit + 20)]
    result = served.embed(EmbedJob((" ".join(words), (*ids[:limit - 1], 2), " ".join(words[:limit - 1]))))
    assert result.tokens.tolist() == [limit] * 3 and result.truncated == (0,)
    assert np.array_equal(result.data[0], result.data[1]) and np.array_equal(result.data[1], result.data[2])
    served.close()


def test_rotation_has_no_table_and_the_side_files_decide(tmp_path: Path) -> None:
    folder = write(BY_NAME["nomic-bert"], tmp_path / "m", sentence_bert_config={"max_seq_length": 500})
    assert opened(folder).spec.max_length == 500
    assert opened(write(BY_NAME["nomic-bert"], tmp_path / "n")).spec.max_length == 8192


def test_the_batch_budget_counts_pads_and_the_bill_does_not(tmp_path: Path) -> None:
    served = client(write(BY_NAME["siglip-text"], tmp_path / "m"))
    result = served.embed(EmbedJob(("w5 w6", "w5", "w5 w6 w7 w8")))
    assert result.tokens.tolist() == [3, 2, 5]
    assert served.health()["models"]["m"]["tokens"] == 3 * 64
    served.close()


# ---- what SigLIP fixes

def test_siglip_pools_its_last_position_whatever_anyone_says(tmp_path: Path) -> None:
    plain = opened(write(BY_NAME["siglip-text-projected"], tmp_path / "m")).spec
    told = opened(write(BY_NAME["siglip-text-projected"], tmp_path / "n", **MEAN), pooling="cls").spec
    assert (plain.pooling, told.pooling, plain.dims, plain.max_length) == ("lasttoken", "lasttoken", 24, 16)


def test_the_whole_siglip_model_gives_the_text_towers_vectors(tmp_path: Path) -> None:
    case = BY_NAME["siglip-text"]
    text = json.loads((case.folder / "config.json").read_text())
    folder = write(case, tmp_path / "m", config={"model_type": "siglip", "architectures": ["SiglipModel"], "text_config": text})
    tensors = {f"text_model.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"logit_scale": np.zeros(1, np.float32), "vision_model.head.probe": np.zeros((1, 1, 4), np.float32)},
              folder / "model.safetensors")
    a, b = (client(path).embed(EmbedJob(("w5 w6",))).data for path in (folder, write(case, tmp_path / "n")))
    assert np.array_equal(a, b)


def test_siglip2_is_refused(tmp_path: Path) -> None:
    folder = write(BY_NAME["siglip-text"], tmp_path / "m", tokenizer_config={"tokenizer_class": "GemmaTokenizerFast"})
    with pytest.raises(CheckpointError, match="tokenizer_class is GemmaTokenizerFast; expected SiglipTokenizer"):
        opened(folder)


# ---- Dense modules

def chain(folder: Path, backend: str, width: int = 32):
    modules = dense.read(read(folder), width)
    w = Weights.open(folder, ops.backend(backend))
    return dense.Chain(w, modules), w


def fold(folder: Path, change=lambda name, x: {name: x}) -> Path:
    """The modules' weights moved into the trunk's file, and their folders and modules.json gone."""
    tensors = load_file(folder / "model.safetensors")
    for k, module in enumerate(sorted(folder.glob("*_Dense"))):
        for name, x in load_file(module / "model.safetensors").items():
            tensors |= change(name.replace("linear", f"dense.{k}"), x)
        shutil.rmtree(module)
    mx.save_safetensors(str(folder / "model.safetensors"), {name: mx.array(x) for name, x in tensors.items()})
    (folder / "modules.json").unlink(missing_ok=True)
    return folder


@each_backend
def test_dense_chain_is_the_references(backend: str, tmp_path: Path) -> None:
    """Bias or none, tanh, gelu and identity, with and without a residual; rows alone are rows of a batch."""
    reference = reference_of(DENSE.folder)
    run, _ = chain(write(DENSE, tmp_path / "m"), backend)
    tensor = mx.array if backend == "mlx" else np.asarray
    got = ops.numpy(run(tensor(reference["mean"])))
    assert got.shape == (4, 40) and np.abs(got - reference["dense"]).max() <= 1e-5
    alone = np.concatenate([ops.numpy(run(tensor(row[None]))) for row in reference["mean"]])
    assert np.array_equal(got, alone) if backend == "host" else np.abs(got - alone).max() <= 1e-5


def plain_dense(folder: Path, keep: int = 2) -> Path:
    """Two modules without activation, as EmbeddingGemma has them."""
    write(DENSE, folder, modules=[{"type": t, "path": p} for t, p in (
        ("a.Transformer", ""), ("a.Pooling", "1_Pooling"), ("a.Dense", "2_Dense"), ("a.Dense", "3_Dense"))])
    for extra in ("4_Dense", "5_Dense"):
        shutil.rmtree(folder / extra)
    for k, (rows, columns, bias) in {"2_Dense": (64, 32, True), "3_Dense": (32, 64, False)}.items():
        (folder / k / "config.json").write_text(json.dumps({
            "in_features": columns, "out_features": rows, "bias": bias, "activation_function": "torch.nn.modules.linear.Identity"}))
        rng = np.random.default_rng(rows)
        weights = {"linear.weight": rng.standard_normal((rows, columns)), "linear.bias": rng.standard_normal(rows)}
        save_file({name: x.astype(np.float32) for name, x in weights.items() if bias or x.ndim == 2}, folder / k / "model.safetensors")
    return folder


@each_backend
@pytest.mark.parametrize("configs", [True, False])
def test_folded_weights_are_the_modules(backend: str, configs: bool, tmp_path: Path) -> None:
    apart, folded = plain_dense(tmp_path / "m"), plain_dense(tmp_path / "n")
    kept = {path.name: (path / "config.json").read_text() for path in folded.glob("*_Dense")}
    listed = (folded / "modules.json").read_text()
    fold(folded)
    if configs:
        (folded / "modules.json").write_text(listed)
        for name, text in kept.items():
            (folded / name).mkdir()
            (folded / name / "config.json").write_text(text)
    a, b = (client(path, backend).embed(EmbedJob(("w5 w6", "w7"))).data for path in (apart, folded))
    assert np.array_equal(a, b) and opened(folded).spec.dims == 32


@each_backend
def test_folded_quantised_weights(backend: str, tmp_path: Path) -> None:
    def quantise(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
        if x.ndim == 1:
            return {name: x}
        words, scales, biases = mx.quantize(mx.array(np.tile(x, (1, 64 // x.shape[1]))[:, :64]), group_size=64, bits=8)
        stem = name.removesuffix("weight")
        return {name: np.array(words), f"{stem}scales": np.array(scales), f"{stem}biases": np.array(biases)}

    folder = plain_dense(tmp_path / "m")
    weight = load_file(folder / "3_Dense" / "model.safetensors")["linear.weight"]
    fold(folder, lambda name, x: quantise(name, x) if name == "dense.1.weight" else {name: x})
    x = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    w = Weights.open(folder, ops.backend(backend))
    run = dense.Chain(w, dense.read(read(folder), 32))
    got = ops.numpy(run(mx.array(x) if backend == "mlx" else x))
    first = load_file(folder / "model.safetensors")
    want = (x @ first["dense.0.weight"].T + first["dense.0.bias"]) @ weight.T
    assert (1 - (unit(got) * unit(want)).sum(-1)).max() <= 1e-4


def test_a_folded_copy_beside_the_modules_is_ignored(tmp_path: Path) -> None:
    folder = plain_dense(tmp_path / "m")
    before = client(folder).embed(EmbedJob(("w5 w6",))).data
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"dense.0.weight": np.zeros((64, 32), np.float32)}, folder / "model.safetensors")
    assert np.array_equal(client(folder).embed(EmbedJob(("w5 w6",))).data, before)


def test_trunk_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """The layout of sentence-transformers before 2.0: modules stand beside the trunk, not in it."""
    flat, nested = plain_dense(tmp_path / "m"), plain_dense(tmp_path / "n")
    (nested / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (nested / name).rename(nested / "0_Transformer" / name)
    listed = json.loads((nested / "modules.json").read_text())
    listed[0]["path"] = "0_Transformer"
    (nested / "modules.json").write_text(json.dumps(listed))
    assert np.array_equal(*(client(path).embed(EmbedJob(("w5 w6",))).data for path in (flat, nested)))


def test_dimensions_are_those_of_the_last_module(tmp_path: Path) -> None:
    served = client(write(DENSE, tmp_path / "m"))
    assert served.models()[0].dims == 40
    assert served.embed(EmbedJob(("w5",), dimensions=7)).data.shape == (1, 7)
    served.close()


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("change, said", [
    (lambda f: edit(f / "3_Dense" / "config.json", in_features=47),
     "3_Dense of .* takes vectors of width 47, but what stands before it gives 48: the Dense modules are out of order"),
    (lambda f: edit(f / "2_Dense" / "config.json", activation_function="torch.nn.modules.activation.Mish"),
     r"2_Dense/config.json: activation_function is 'torch.*Mish'; known: torch's Identity, Tanh"),
    (lambda f: edit(f / "2_Dense" / "config.json", module_input_name="token_embeddings"), "maps 'token_embeddings' to"),
    (lambda f: edit(f / "2_Dense" / "config.json", out_features=None), "2_Dense/config.json lacks 'out_features'"),
    (lambda f: (f / "2_Dense" / "config.json").unlink(), "2_Dense/config.json is missing"),
    (lambda f: (f / "2_Dense" / "model.safetensors").rename(f / "2_Dense" / "pytorch_model.bin"),
     r"2_Dense has no \*\.safetensors: it has PyTorch pickles only"),
    (lambda f: (f / "modules.json").write_text(json.dumps([
        {"type": "Transformer", "path": ""}, {"type": "Dense", "path": "2_Dense"}, {"type": "Pooling", "path": "1_Pooling"}])),
     "lists Transformer, Dense, Pooling; a Dense module is expected after Pooling"),
])
def test_dense_modules_that_do_not_fit_are_named(change, said: str, tmp_path: Path) -> None:
    folder = write(DENSE, tmp_path / "m")
    change(folder)
    with pytest.raises(CheckpointError, match=said):
        opened(folder, pooling="mean")


def test_dense_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    folder = write(DENSE, tmp_path / "m")
    file = folder / "2_Dense" / "model.safetensors"
    save_file(load_file(file) | {"linear.weight": np.zeros((48, 31), np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"2_Dense.linear.weight has shape \[48, 31\]; the config promises \[48, 32\]"):
        load(opened(folder))


# ---- what the family files refuse and accept

def test_modernberts_first_layer_alone_has_no_attention_norm(tmp_path: Path) -> None:
    folder = write(BY_NAME["modernbert"], tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    norm = tensors["layers.1.attn_norm.weight"]
    save_file(tensors | {"layers.0.attn_norm.weight": norm}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no use for layers\.0\.attn_norm\.weight"):
        build(folder, "host")
    save_file({name: x for name, x in tensors.items() if name != "layers.1.attn_norm.weight"}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no 'layers\.1\.attn_norm\.weight'"):
        build(folder, "host")


def test_modernberts_published_spelling_is_the_same_model() -> None:
    folder = BY_NAME["modernbert"].folder
    raw = json.loads((folder / "config.json").read_text())
    published = {k: v for k, v in raw.items() if k not in ("layer_types", "rope_parameters")} | {
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "layer_norm_eps": 1e-5}
    cls = find("modernbert").Config
    now = config_of(folder)
    for older in (published, {k: v for k, v in published.items() if k not in ("global_attn_every_n_layers", "local_rope_theta")}):
        then = read_config(cls, older)
        assert then.layer_types == now.layer_types
        assert [RopeSpec.of(8, 1.0, then.rope_parameters[kind]) for kind in then.rope_parameters] == [
            RopeSpec.of(8, 1.0, now.rope_parameters[kind]) for kind in then.rope_parameters]
    null = read_config(cls, published | {"local_rope_theta": None})
    assert null.rope_parameters["sliding_attention"]["rope_theta"] == 160000.0


NOMIC = {                                                      # nomic-embed-text-v1.5 as first published
    "model_type": "nomic_bert", "activation_function": "swiglu", "causal": False, "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "n_embd": 768, "n_head": 12, "n_inner": 3072,
    "n_layer": 12, "n_positions": 8192, "pad_vocab_size_multiple": 64, "parallel_block": False, "prenorm": False, "qkv_proj_bias": False,
    "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None, "type_vocab_size": 2, "use_rms_norm": False, "vocab_size": 30528,
}


def test_nomics_published_spelling() -> None:
    config = read_config(find("nomic_bert").Config, NOMIC)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.intermediate_size) == (768, 12, 12, 3072)
    assert RopeSpec.of(64, 1.0, config.rope_parameters) == RopeSpec(64, 1000.0)
    stretched = read_config(find("nomic_bert").Config, NOMIC | {"rotary_scaling_factor": 2})
    spec = RopeSpec.of(64, 1.0, stretched.rope_parameters)
    assert (spec.factor, spec.trained) == (2.0, 2048)


@pytest.mark.parametrize("key, value", [
    ("prenorm", True), ("activation_function", "gelu"), ("qkv_proj_bias", True), ("rotary_emb_fraction", 0.5), ("num_experts", 8),
    ("rotary_emb_scale_base", 512), ("causal", True)])
def test_nomic_variants_that_are_another_model_are_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {key} is {value!r}; expected "):
        read_config(find("nomic_bert").Config, NOMIC | {key: value})


@pytest.mark.parametrize("name, change, said", [
    ("modernbert", {"layer_types": ["full_attention"]}, "expected 5, each of full_attention or sliding_attention"),
    ("modernbert", {"layer_types": ["chunked_attention"] * 5}, "layer_types is"),
    ("modernbert", {"num_attention_heads": 3}, "hidden_size 32 cannot be cut into 3 heads"),
    ("xlm-roberta", {"pad_token_id": 80}, "max_position_embeddings 74 leaves no position after pad_token_id 80"),
    ("siglip-text", {"hidden_size": 30}, "hidden_size 30 cannot be cut into 4 heads"),
])
def test_configs_that_contradict_themselves(name: str, change: dict, said: str) -> None:
    raw = json.loads((BY_NAME[name].folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=said):
        read_config(find(raw["model_type"]).Config, raw | change)


@pytest.mark.parametrize("scaling", [{}, {"factor": 0.5}, {"factor": 2.0}, {"factor": "2"}])
def test_dynamic_rope_needs_its_numbers(scaling: dict) -> None:
    with pytest.raises(CheckpointError, match=r"factor|max_position_embeddings"):
        RopeSpec.of(8, 1e4, {"rope_type": "dynamic"} | scaling)


def test_dynamic_rope_follows_each_texts_own_length() -> None:
    spec = RopeSpec.of(8, 1e3, {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 16})
    together, plain = spec.table(Segments([3, 40, 16])), RopeSpec(8, 1e3)
    np.testing.assert_array_equal(together.cos[:3], plain.table(Segments([3])).cos)
    np.testing.assert_array_equal(together.cos[3:43], spec.table(Segments([40])).cos)
    np.testing.assert_array_equal(together.cos[43:], plain.table(Segments([16])).cos)
    assert np.abs(together.cos[3:43] - plain.table(Segments([40])).cos).max() > 0.1


def test_a_pad_token_within_a_text_stays_at_position_pad() -> None:
    model = build(BY_NAME["xlm-roberta"].folder, "host")
    batch = Batch.of([[0, 1, 7, 1, 2], [1], [9, 9]])
    assert model.positions(batch).tolist() == [2, 1, 3, 1, 4, 1, 2, 3]


# ---- real configs

REAL = {
    "BAAI__bge-m3": (1024, 8192, "cls"), "intfloat__multilingual-e5-base": (768, 512, None),
    "intfloat__multilingual-e5-large-instruct": (1024, 512, "mean"), "sentence-transformers__all-MiniLM-L6-v2": (384, 256, "mean"),
}


@pytest.mark.parametrize("name", REAL)
def test_real_configs_promise_what_is_published(name: str, data: Path) -> None:
    checkpoint = read(data / "checkpoints" / name)
    config = read_config(find(checkpoint.model_type).Config, checkpoint.config)
    assert (config.hidden_size, min(checkpoint.length_limit, config.max_length), checkpoint.pooling) == REAL[name]


@pytest.mark.parametrize("name, dims, limit", [
    ("modernbert", 768, 8192), ("siglip", 768, 64), ("bert", 768, 512), ("xlm-roberta", 768, 510)])
def test_the_references_default_configs(name: str, dims: int, limit: int, data: Path) -> None:
    raw = json.loads((data / "checkpoints" / "facts.json").read_text())["_defaults"][name]
    config = read_config(find(name).Config, raw)
    assert (getattr(config, "dims", config.hidden_size), config.max_length) == (dims, limit)
    if name == "modernbert":
        assert config.layer_types.count("full_attention") == 8 and config.local_attention // 2 == 64
