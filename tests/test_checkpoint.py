"""Model directories: what is read from them, and what is refused by name."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from inference.checkpoint import Checkpoint
from inference.errors import CheckpointError
from inference.resolve import Source

MODULES = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
           for i, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")])]


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "model"
    write(root / "config.json", {"model_type": "BERT", "architectures": ["BertModel"]})
    save_file({"x": np.zeros(2, np.float32)}, root / "model.safetensors")
    return root


def read(root: Path) -> Checkpoint:
    return Checkpoint.read(Source(root, root.name, "", "", "directory"))


def test_the_real_default(minilm):
    c = read(minilm)
    assert (c.model_type, c.architecture, c.pooling, c.normalize, c.length_limit) == ("bert", "BertModel", "mean", True, 256)
    assert c.modules == ("Transformer", "Pooling", "Normalize")
    assert [f.name for f in c.weight_files] == ["model.safetensors"] and c.bytes == 90868376


def test_a_plain_export(folder):
    c = read(folder)
    assert (c.model_type, c.modules, c.pooling, c.length_limit) == ("bert", (), None, 8192)


@pytest.mark.parametrize("config, mode", [
    ({"pooling_mode": "cls"}, "cls"), ({"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": True}, "lasttoken"),
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"), ({"pooling_mode_max_tokens": True}, "max"),
    ({"pooling_mode_lasttoken": True}, "lasttoken"), ({}, "mean")])
def test_pooling(folder, config, mode):
    write(folder / "1_Pooling" / "config.json", config)
    assert read(folder).pooling == mode


@pytest.mark.parametrize("config, part", [
    ({"pooling_mode": "attention"}, "'attention'"), ({"pooling_mode": 3}, "3"),
    ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
    ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"), ({"include_prompt": False}, "include_prompt"),
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "pooling_mode_cls_token, pooling_mode_mean_tokens")])
def test_poolings_that_are_refused_by_name(folder, config, part):
    write(folder / "1_Pooling" / "config.json", config)
    with pytest.raises(CheckpointError, match=part):
        read(folder)


@pytest.mark.parametrize("files, limit", [
    ({"sentence_bert_config.json": {"max_seq_length": 256}, "tokenizer_config.json": {"model_max_length": 512}}, 256),
    ({"sentence_xlm-roberta_config.json": {"max_seq_length": 128}}, 128),
    ({"tokenizer_config.json": {"model_max_length": 1000000000000000019884624838656}}, 8192),
    ({"tokenizer_config.json": {"model_max_length": 512}}, 512), ({"sentence_bert_config.json": {"max_seq_length": None}}, 8192)])
def test_length_limits(folder, files, limit):
    for name, value in files.items():
        write(folder / name, value)
    assert read(folder).length_limit == limit


def test_a_resaved_checkpoint_keeps_its_limit(folder, data):
    for file in (data / "checkpoints" / "_traps" / "all-MiniLM-L6-v2-resaved-4.45.2").iterdir():
        shutil.copy(file, folder)
    assert read(folder).length_limit == 256


def test_prompts(folder):
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "q: ", "document": None}})
    assert read(folder).prompts == {"query": "q: "}


def test_old_exports_keep_the_transformer_in_a_sub_folder(tmp_path):
    root = tmp_path / "old"
    write(root / "modules.json", [MODULES[0] | {"path": "0_Transformer"}, *MODULES[1:]])
    write(root / "0_Transformer" / "config.json", {"model_type": "bert"})
    save_file({"x": np.zeros(2, np.float32)}, root / "0_Transformer" / "model.safetensors")
    assert read(root).trunk == root / "0_Transformer"
    assert [f.parent.name for f in read(root).weight_files] == ["0_Transformer"]


def test_dense_folders_belong_to_the_weights(folder):
    (folder / "2_Dense").mkdir()
    save_file({"linear.weight": np.zeros((1, 2), np.float32)}, folder / "2_Dense" / "model.safetensors")
    save_file({"x": np.zeros(1, np.float32)}, folder / "consolidated.safetensors")
    assert [str(f.relative_to(folder)) for f in read(folder).weight_files] == ["model.safetensors", "2_Dense/model.safetensors"]


def test_git_lfs_pointers(data):
    with pytest.raises(CheckpointError, match=r"git-lfs pointer.*git lfs pull"):
        read(data / "checkpoints" / "_traps" / "git-lfs-pointers")


def test_a_weight_file_that_is_a_pointer(folder):
    write(folder / "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        _ = read(folder).weight_files


@pytest.mark.parametrize("files, part", [
    ({"adapter_config.json": {"base_model_name_or_path": "org/base"}}, "LoRA adapter of 'org/base'"),
    ({"pytorch_model.bin": "x"}, "PyTorch pickles"), ({"model-q4.gguf": "x"}, "GGUF"), ({"model.onnx": "x"}, "ONNX"), ({}, "it holds")])
def test_other_kinds_of_weights(folder, files, part):
    (folder / "model.safetensors").unlink()
    for name, value in files.items():
        write(folder / name, value)
    with pytest.raises(CheckpointError, match=part):
        _ = read(folder).weight_files


def test_an_adapter_alone(tmp_path):
    write(tmp_path / "adapter_config.json", {"base_model_name_or_path": "org/base"})
    with pytest.raises(CheckpointError, match=r"no config.json: it is a LoRA adapter of 'org/base'"):
        read(tmp_path)


@pytest.mark.parametrize("name, content, part", [
    ("config.json", "{", "not JSON"), ("config.json", "[]", "expected a JSON object"), ("config.json", "{}", "no model_type"),
    ("config.json", '{"model_type": "bert", "normalize": "yes"}', "normalize is 'yes'"), ("modules.json", "{}", "not a list"),
    ("modules.json", '[{"path": ""}]', "not a list of modules"), ("sentence_bert_config.json", "nonsense", "not JSON"),
    ("modules.json", '[{"type": "x.CNN", "path": ""}]', "'CNN'"), ("modules.json", '[{"type": "x.Dense", "path": "../y"}]', "outside")])
def test_broken_files_are_named(folder, name, content, part):
    write(folder / name, content)
    with pytest.raises(CheckpointError, match=part) as error:
        read(folder)
    assert name in str(error.value)


def test_the_weights_hash_follows_the_content_and_nothing_else(folder, tmp_path):
    first = read(folder).weights_hash(tmp_path / "cache")
    assert first == read(folder).weights_hash(tmp_path / "cache") == read(folder).weights_hash(tmp_path / "another")
    write(folder / "README.md", "changed")
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert read(moved).weights_hash(tmp_path / "cache") == first
    save_file({"x": np.ones(2, np.float32)}, folder / "model.safetensors")
    assert read(folder).weights_hash(tmp_path / "cache") != first


def test_a_cache_that_cannot_be_written_costs_only_time(folder, tmp_path):
    (tmp_path / "file").write_text("")
    assert read(folder).weights_hash(tmp_path / "file") == read(folder).weights_hash(tmp_path / "cache")
