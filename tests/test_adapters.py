"""LoRA adapters beside their base and apart from it, against peft; and everything that is no plain LoRA, by its name."""
from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inference import adapters, ops
from inference.batching import Batch
from inference.checkpoint import Checkpoint
from inference.config import Settings
from inference.errors import CheckpointError, ModelNotFound, ServiceError
from inference.loader import load, open_checkpoint
from inference.opened import Opened
from inference.resolve import resolve
from inference.weights import Weights
from inference.wire import EmbedJob
from tests.adapters import ADAPTERS, Adapter
from tests.checkpoints import client, write
from tests.late_interaction import LATE
from tests.test_families import cut

each_adapter = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
each_backend = pytest.mark.parametrize("backend", ["host", "mlx"])
BERT, QWEN = ADAPTERS[0], ADAPTERS[3]
FILES = ("adapter_config.json", "adapter_model.safetensors")


def base(adapter: Adapter, folder: Path) -> Path:
    return write(adapter.case, folder)


def beside(adapter: Adapter, folder: Path, **changes: Any) -> Path:
    """The adapter in the directory of its base."""
    return put(adapter, base(adapter, folder), **changes)


def put(adapter: Adapter, folder: Path, source: Path | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile((source or adapter.folder) / name, folder / name)
    path = folder / FILES[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def opened(name: Path | str, backend: str = "host", **settings: Any) -> Opened:
    options = Settings(**{"backend": backend} | settings)
    return open_checkpoint(Checkpoint.read(resolve(str(name), options)), options)


def model(opened: Opened) -> Any:
    family = opened.family
    w = adapters.weights(opened.checkpoint, opened.backend, family.PREFIXES)
    built = family.Model(w, opened.config)
    w.close(family.DROPPED)
    return built


def worst(adapter: Adapter, folder: Path, backend: str, reference: Path | None = None) -> float:
    with np.load((reference or adapter.folder) / "reference.npz") as stored:
        hidden = ops.numpy(model(opened(folder, backend))(Batch.of(cut(stored["ids"], stored["lengths"]))))
        return float(np.abs(hidden - stored["hidden"]).max())


@each_adapter
@each_backend
def test_equals_the_reference(adapter: Adapter, backend: str, tmp_path: Path) -> None:
    assert worst(adapter, beside(adapter, tmp_path / "m"), backend) <= 1e-5


@each_adapter
@each_backend
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed: the stored answers were compared instead")
def test_equals_the_live_reference(adapter: Adapter, backend: str, tmp_path: Path) -> None:
    from tests.adapters import make_adapter

    make_adapter(adapter, tmp_path / "a", seed=1)
    folder = put(adapter, base(adapter, tmp_path / "m"), tmp_path / "a")
    assert worst(adapter, folder, backend, tmp_path / "a") <= 1e-5


@each_adapter
def test_the_adapter_matters(adapter: Adapter, tmp_path: Path) -> None:
    assert worst(adapter, base(adapter, tmp_path / "m"), "host") > 1e-2


def test_published_names_of_the_base_and_of_the_adapter(tmp_path: Path) -> None:
    """A base with `bert.` before its names, and an adapter that was trained on the model with a head."""
    folder = beside(BERT, tmp_path / "m")
    for file, before, after in (("model.safetensors", "", "bert."), (FILES[1], "base_model.model.", "base_model.model.bert.")):
        tensors = load_file(folder / file)
        save_file({name.replace(before, after, 1) if before else after + name: x for name, x in tensors.items()}, folder / file)
    assert worst(BERT, folder, "host") <= 1e-5


@pytest.mark.parametrize("kept", [np.float16, "bfloat16"])
@each_backend
def test_half_precision_factors(backend: str, kept: Any, tmp_path: Path) -> None:
    folder = beside(BERT, tmp_path / "m")
    dtype = mx.bfloat16 if kept == "bfloat16" else mx.float16
    mx.save_safetensors(str(folder / FILES[1]), {name: mx.array(x).astype(dtype) for name, x in load_file(folder / FILES[1]).items()})
    assert 1e-6 < worst(BERT, folder, backend) < 0.3


# ---- an adapter apart from its base

@pytest.mark.parametrize("named", ["{base}", "../base", "org/base"])
def test_an_adapter_names_its_base(named: str, tmp_path: Path) -> None:
    found = base(BERT, tmp_path / "models" / "org__base")
    shutil.copytree(found, tmp_path / "base")
    folder = put(BERT, tmp_path / "adapter", base_model_name_or_path=named.format(base=found))
    spec = opened(folder, models_dir=tmp_path / "models").spec
    assert (spec.id, spec.dims, spec.family) == ("adapter", 32, "bert")
    assert spec.weights_hash == opened(beside(BERT, tmp_path / "together")).spec.weights_hash
    run, whole, plain = client(folder, models_dir=tmp_path / "models"), client(tmp_path / "together"), client(found)
    apart, together, without = (served.embed(EmbedJob(("w5 w6 w7",))).data for served in (run, whole, plain))
    np.testing.assert_array_equal(apart, together)
    assert np.abs(apart - without).max() > 1e-2


def test_side_files_of_the_adapter_come_before_those_of_its_base(tmp_path: Path) -> None:
    """As sentence-transformers saves a model with an adapter: modules, prompts and tokenizer beside it, no config.json."""
    write(BERT.case, tmp_path / "base", **{"1_Pooling__config": {"pooling_mode": "mean"}, "sentence_bert_config": {"max_seq_length": 40}})
    folder = put(BERT, tmp_path / "adapter", base_model_name_or_path="../base")
    plain = opened(folder).spec
    assert (plain.pooling, plain.max_length, dict(plain.prompts)) == ("mean", 40, {})
    (folder / "1_Pooling").mkdir()
    for name, content in (
            ("modules", [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]),
            ("1_Pooling/config", {"pooling_mode": "cls"}),
            ("config_sentence_transformers", {"prompts": {"query": "q: "}}), ("sentence_bert_config", {"max_seq_length": 30})):
        (folder / f"{name}.json").write_text(json.dumps(content))
    own = opened(folder).spec
    assert (own.pooling, own.max_length, dict(own.prompts)) == ("cls", 30, {"query": "q: "})


def test_a_late_interaction_adapter_with_its_own_projection(tmp_path: Path) -> None:
    """PyLate on a plain base: the projection stands beside the adapter."""
    late = next(case for case in LATE if case.name == "bert-pylate")
    folder = tmp_path / "adapter"
    shutil.copytree(late.folder, folder)
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(base / name)
    put(BERT, folder, base_model_name_or_path="../base")
    save_file({name: x for name, x in load_file(folder / FILES[1]).items() if "layer.2" not in name}, folder / FILES[1])
    run = client(folder)
    assert run.models()[0].multi_vector and run.models()[0].dims == 16
    assert run.embed(EmbedJob(("plants",), input_type="query")).data.shape == (32, 16)


def test_the_hash_covers_the_adapter(tmp_path: Path) -> None:
    plain, changed = opened(base(BERT, tmp_path / "a")).spec, opened(beside(BERT, tmp_path / "b")).spec
    stronger = opened(beside(BERT, tmp_path / "c", lora_alpha=17)).spec
    assert len({plain.weights_hash, changed.weights_hash, stronger.weights_hash}) == 3
    assert changed.bytes > plain.bytes and changed.parameters == plain.parameters


def test_a_configuration_that_merging_left_behind_changes_nothing(tmp_path: Path) -> None:
    folder = beside(BERT, tmp_path / "m")
    (folder / FILES[1]).unlink()
    assert opened(folder).spec.weights_hash == opened(base(BERT, tmp_path / "n")).spec.weights_hash


# ---- what is refused

def test_a_base_that_is_a_path_of_another_machine(tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "colpali"
    shutil.copytree(data / "checkpoints" / "vidore__colpali", folder)
    with pytest.raises(ModelNotFound) as caught:
        resolve(str(folder), Settings())
    for part in ("'./models/paligemma-3b-mix-448', a path on the machine it was trained on", "adapter_config.json", "beside the adapter"):
        assert part in caught.value.message


@pytest.mark.parametrize("named, said", [
    (None, "without a base model: base_model_name_or_path is None"), ("", "base_model_name_or_path is ''"),
    ("org/nowhere", "a LoRA adapter of 'org/nowhere', which was not found"), ("../adapter2", "which is an adapter itself")])
def test_bases_that_are_not_there(named: str | None, said: str, tmp_path: Path) -> None:
    put(BERT, tmp_path / "adapter2")
    with pytest.raises(ModelNotFound) as caught:
        resolve(str(put(BERT, tmp_path / "adapter", base_model_name_or_path=named)), Settings())
    assert said in caught.value.message


@pytest.mark.parametrize("changes, said", [
    ({"peft_type": "IA3"}, r"peft_type is 'IA3'; only plain LoRA adapters are merged, with 'LORA'"),
    ({"use_dora": True}, "use_dora is True"),
    ({"modules_to_save": ["classifier"]}, r"modules_to_save is \['classifier'\]"), ({"bias": "all"}, "bias is 'all'.*'none'"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"), ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\]"), ({"layer_replication": [[0, 2]]}, "layer_replication is"),
    ({"r": "four"}, "adapter_config.json: r is 'four'; expected a whole number"),
])
def test_kinds_that_are_no_plain_lora(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        opened(beside(BERT, tmp_path / "m", **changes))


QUERY = "base_model.model.encoder.layer.0.attention.self.query"


@pytest.mark.parametrize("change, said", [
    (lambda t: t | {"base_model.model.embeddings.word_embeddings.lora_embedding_A": np.zeros((4, 120), np.float32)},
     "holds base_model.model.embeddings.word_embeddings.lora_embedding_A, which is no factor of a linear layer"),
    (lambda t: t | {"base_model.model.embeddings.word_embeddings.weight": np.zeros((120, 32), np.float32)}, "is no factor"),
    (lambda t: t | {f"{QUERY}.lora_magnitude_vector": np.zeros(32, np.float32)}, "lora_magnitude_vector, which is no factor"),
    (lambda t: {k: x for k, x in t.items() if k != f"{QUERY}.lora_B.weight"},
     r"factors of encoder\.layer\.0\.attention\.self\.query are A \[4, 32\]; expected A \[4, 32\] and B \[32, 4\]"),
    (lambda t: t | {f"{QUERY}.lora_A.weight": np.zeros((5, 32), np.float32)}, r"are A \[5, 32\] and B \[32, 4\]; expected"),
    (lambda t: t | {"base_model.model.encoder.layer.9.attention.self.query.lora_A.weight": np.zeros((4, 32), np.float32)},
     r"changes encoder\.layer\.9\.attention\.self\.query, which is no linear layer of the base model"),
    (lambda t: t | {"base_model.model.encoder.layer.0.output.dense.lora_A.weight": np.zeros((4, 64), np.float32)},
     r"changes encoder\.layer\.0\.output\.dense, which target_modules of adapter_config\.json does not name"),
    (lambda t: {k: x for k, x in t.items() if "value" not in k}, "targets value, and .* has no factors for it; it has encoder"),
])
def test_factors_that_do_not_fit(change: Any, said: str, tmp_path: Path) -> None:
    folder = beside(BERT, tmp_path / "m")
    save_file(change(load_file(folder / FILES[1])), folder / FILES[1])
    with pytest.raises(CheckpointError, match=said):
        load(opened(folder))


def test_a_quantised_base_is_refused(tmp_path: Path) -> None:
    words, scales, biases = mx.quantize(mx.random.normal((64, 64)), group_size=64, bits=8)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"q.weight": words, "q.scales": scales, "q.biases": biases})
    with pytest.raises(CheckpointError, match=r"q\.weight is quantised and cannot be changed"):
        Weights.open(tmp_path, ops.backend("host")).change({"q.weight": lambda: np.zeros((64, 64), np.float32)})


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    folder = beside(BERT, tmp_path / "m")
    (folder / FILES[0]).unlink()
    with pytest.raises(CheckpointError, match=r"has adapter_model\.safetensors without adapter_config\.json"):
        opened(folder)
    folder = beside(BERT, tmp_path / "n")
    (folder / FILES[1]).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        opened(folder)
    folder = beside(BERT, tmp_path / "o")
    (folder / FILES[1]).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="PyTorch pickle"):
        opened(folder)
    folder = put(BERT, tmp_path / "p")
    (folder / FILES[0]).write_text("[]")
    with pytest.raises(ServiceError, match=r"adapter_config\.json is not a JSON object"):
        opened(folder)


@each_backend
def test_bfloat16_weights_stay_bfloat16_and_are_changed_in_f32(backend: str, tmp_path: Path) -> None:
    x = mx.random.normal((8, 8)).astype(mx.bfloat16)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"q.weight": x})
    delta = np.full((8, 8), 2.0**-12, np.float32)
    got = Weights.open(tmp_path, ops.backend(backend)).change({"q.weight": lambda: delta}).tensor("q.weight")
    want = np.array(x.astype(mx.float32)) + delta
    if backend == "mlx":
        assert got.dtype == mx.bfloat16
        want = np.array(mx.array(want).astype(mx.bfloat16).astype(mx.float32))
    np.testing.assert_array_equal(ops.numpy(got), want)
