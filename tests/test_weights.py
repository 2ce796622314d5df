"""Checkpoints as they are found: sharded, in sub-folders, damaged, renamed, in every storage type."""
from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from inference import ops
from inference.errors import CheckpointError
from inference.weights import Weights, read_config

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(params=["host", "mlx"])
def backend(request: pytest.FixtureRequest) -> Any:
    return ops.backend(request.param)


def write(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: str, shape: list[int], end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


def test_shards_and_sub_folders(tmp_path: Path, backend: Any) -> None:
    save_file({"a.weight": X}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b.weight": X + 1}, tmp_path / "model-00002-of-00002.safetensors")
    for folder in ("2_Dense", ".cache"):
        (tmp_path / folder).mkdir()
        save_file({"linear.weight": X + 2}, tmp_path / folder / "model.safetensors")
    for other in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"a.weight": X}, tmp_path / other)
    w = Weights.open(tmp_path, backend)
    assert w.has("2_Dense.linear.weight")
    assert not w.has("linear.weight")
    got = [ops.numpy(w.tensor(name, (2, 3))) for name in ("a.weight", "b.weight", "2_Dense.linear.weight")]
    np.testing.assert_array_equal(got, [X, X + 1, X + 2])
    w.close()


def test_one_name_in_two_shards_is_refused(tmp_path: Path, backend: Any) -> None:
    for shard in ("model.safetensors", "weights.safetensors"):
        save_file({"a.weight": X}, tmp_path / shard)
    with pytest.raises(CheckpointError, match=r"a\.weight stands in both model\.safetensors and weights\.safetensors"):
        Weights.open(tmp_path, backend)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n"


@pytest.mark.parametrize(("content", "said"), [
    (LFS, "is a git-lfs pointer, not the weights: fetch them with `git lfs pull`"),
    (b"", r"\(0 bytes\) is not a safetensors file"),
    (b"PK\x03\x04 a zip archive of some length", "is not a safetensors file: it starts with b'PK"),
    (struct.pack("<Q", 500) + b"{}", "is cut off: its header needs 508 bytes and the file has 10"),
    (struct.pack("<Q", 2) + b"{]", "has a damaged header"),
    (struct.pack("<Q", 2) + b"[]", "has a damaged header"),
    (struct.pack("<Q", 8) + b'{"a": 1}', "has a damaged header"),
])
def test_files_that_are_not_what_they_seem(tmp_path: Path, backend: Any, content: bytes, said: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        Weights.open(tmp_path, backend)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(("header", "data", "said"), [
    ({"a": entry("F32", [2, 3], 24)}, b"\0" * 20, "is cut off: its tensors need"),
    ({"a": entry("F32", [2, 3], 20)}, b"\0" * 20, r"damaged header \(a: F32 \[2, 3\] in bytes 0 to 20\)"),
    ({"a": entry("F8_E4M3", [4], 4)}, b"\0" * 4, "a is of type F8_E4M3, which is not read; known: F64, F32"),
    ({"a": {"dtype": "F32"}}, b"", "damaged header"),
])
def test_headers_that_promise_what_the_file_does_not_hold(tmp_path: Path, backend: Any, header: Any, data: bytes, said: str) -> None:
    write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=said):
        Weights.open(tmp_path, backend)


@pytest.mark.parametrize(("files", "said"), [
    (["pytorch_model.bin", "config.json"], r"has no \*\.safetensors: it has PyTorch pickles only, .*; convert them"),
    (["model.pt"], "PyTorch pickles only"), (["model.onnx"], "ONNX files"),
    (["adapter_model.safetensors"], "it is a LoRA adapter, and neither that model nor its weights are here"),
    (["config.json", "README.md"], r"has no \*\.safetensors; it holds README\.md, config\.json"),
    ([], "; it is empty"),
])
def test_folders_without_weights(tmp_path: Path, backend: Any, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=said):
        Weights.open(tmp_path, backend)
    with pytest.raises(CheckpointError, match="is not a directory"):
        Weights.open(tmp_path / "nowhere", backend)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U32", "U16", "U8", "BOOL"])
def test_storage_types(tmp_path: Path, backend: Any, dtype: str) -> None:
    values = np.array([[0, 1, 1], [0, 1, 0]]) if dtype == "BOOL" else np.array([[0, 1, 2], [100, 5, 96]])
    if dtype == "BF16":
        raw = (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    else:
        kinds = {"F": "<f", "I": "<i", "U": "<u", "B": "?"}
        size = {"64": 8, "32": 4, "16": 2, "8": 1}.get(dtype[1:], "")
        raw = values.astype(f"{kinds[dtype[0]]}{size}").tobytes()
    write(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, "x": entry(dtype, [2, 3], len(raw))}, raw)
    x = Weights.open(tmp_path, backend).tensor("x")
    np.testing.assert_array_equal(ops.numpy(x), values)
    if dtype in ("F16", "BF16") and backend.__name__.endswith("host"):
        assert x.dtype == np.float32


def test_every_half_becomes_the_same_number(tmp_path: Path) -> None:
    """All 65,536 bit patterns, infinities, NaN and denormals included."""
    import mlx.core as mx

    bits = np.arange(1 << 16, dtype="<u2")
    raw = bits.tobytes()
    write(tmp_path / "model.safetensors", {"half": entry("F16", [1 << 16], len(raw)), "brain": {
        "dtype": "BF16", "shape": [1 << 16], "data_offsets": [len(raw), 2 * len(raw)]}}, raw * 2)
    w = Weights.open(tmp_path, ops.backend("host"))
    np.testing.assert_array_equal(w.tensor("half"), bits.view("<f2").astype(np.float32))
    np.testing.assert_array_equal(w.tensor("brain"), np.array(mx.view(mx.array(bits), mx.bfloat16).astype(mx.float32)))


def test_the_file_may_change_after_loading(tmp_path: Path) -> None:
    save_file({"a": X}, tmp_path / "model.safetensors")
    x = Weights.open(tmp_path, ops.backend("host")).tensor("a")
    save_file({"a": X + 1}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(x, X)
    x += 1                                                                # an array of its own, not a window on the file


def opened(tmp_path: Path, backend: Any, **tensors: np.ndarray) -> Weights:
    save_file({name.replace("__", "."): x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    return Weights.open(tmp_path, backend)


def test_names_are_settled_before_they_are_asked_for(tmp_path: Path, backend: Any) -> None:
    w = opened(tmp_path, backend, bert__layer__a=X, layer__b=X, model__bert__c=X).strip("bert.", "model.")
    assert w.has("layer.a")
    assert w.has("layer.b")
    assert w.has("bert.c")                                                # one prefix, once
    assert w.at("layer").has("b")
    assert w.strip("layer.").has("a")
    with pytest.raises(CheckpointError, match="two tensors would be called 'same'"):
        w.rename(lambda name: "same")


def test_views_share_one_ledger_and_close_is_strict(tmp_path: Path, backend: Any) -> None:
    w = opened(tmp_path, backend, a__weight=X, b__weight=X, cls__weight=X)
    w.at("a").tensor("weight")
    with pytest.raises(CheckpointError, match=r"no use for b\.weight, cls\.weight$"):
        w.close()
    with pytest.raises(CheckpointError, match=r"no use for b\.weight$"):
        w.close([r"^cls\."])
    w.tensor("b.weight")
    w.close([r"^cls\."])
    many = opened(tmp_path, backend, **{f"x{i}": X for i in range(12)})
    with pytest.raises(CheckpointError, match="x5 and 4 more"):
        many.close()


def test_errors_name_the_tensor_and_both_shapes(tmp_path: Path, backend: Any) -> None:
    w = opened(tmp_path, backend, dense__weight=X, dense__bias=X[0], norm__weight=X[0]).at("dense")
    with pytest.raises(CheckpointError, match=r"^dense\.weight has shape \[2, 3\]; the config promises \[2, 4\]$"):
        w.tensor("weight", (2, 4))
    with pytest.raises(CheckpointError, match=r"no 'dense\.wieght'; nearest: dense\.weight"):
        w.tensor("wieght")
    root = opened(tmp_path, backend, dense__weight=X, dense__bias=X[0], norm__weight=X[0])
    with pytest.raises(CheckpointError, match=r"dense\.bias has shape \[3\]; the config promises \[2\]"):
        root.linear("dense", 3, 2)
    with pytest.raises(CheckpointError, match=r"no 'norm\.bias'"):
        root.layer_norm("norm", 3, 1e-5)
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape \[3\]; the config promises \[5\]"):
        root.rms_norm("norm", 5, 1e-5)
    root.linear("dense", 3, 2, bias=False)
    with pytest.raises(CheckpointError, match=r"no use for dense\.bias"):
        root.close([r"norm\."])


def test_linears_of_different_widths(tmp_path: Path, backend: Any) -> None:
    w = opened(tmp_path, backend, q__weight=X, k__weight=X[:1], q__bias=np.array([1, 2], np.float32), k__bias=np.array([3], np.float32))
    x = backend.read(next(iter(backend.load(_input(tmp_path)).values())))
    q, k = w.linears("q", "k", inputs=3, outputs=(2, 1))(x)
    np.testing.assert_allclose(ops.numpy(q), [[1, 2]] + np.ones((4, 3)) @ X.T, atol=1e-6)
    np.testing.assert_allclose(ops.numpy(k), [[3]] + np.ones((4, 3)) @ X[:1].T, atol=1e-6)


def _input(tmp_path: Path) -> Path:
    save_file({"x": np.ones((4, 3), np.float32)}, tmp_path / "input.st")
    (tmp_path / "input.st").rename(tmp_path / "input.safetensors.d")
    path = tmp_path / "inputs" / "x.safetensors"
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "input.safetensors.d").rename(path)
    return path


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantised_weights_have_their_bits_and_groups_read_off_their_shapes(tmp_path: Path, bits: int, group_size: int) -> None:
    import mlx.core as mx

    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((24, 64)).astype(np.float32), rng.standard_normal((5, 64)).astype(np.float32)
    words, scales, biases = mx.quantize(mx.array(weight), group_size, bits)
    want = np.array(mx.dequantize(words, scales, biases, group_size, bits))
    for name in ("host", "mlx"):
        mx.save_safetensors(str(tmp_path / "model.safetensors"), {"d.weight": words, "d.scales": scales, "d.biases": biases})
        w = Weights.open(tmp_path, ops.backend(name))
        table = w.embedding("d", 24, 64)
        np.testing.assert_allclose(ops.numpy(table(np.arange(24))), want, atol=1e-6)
        tensor = mx.array(x) if name == "mlx" else x
        np.testing.assert_allclose(ops.numpy(w.linear("d", 64, 24, bias=False)(tensor)), x @ want.T, atol=2e-5)
        np.testing.assert_allclose(ops.numpy(table.logits(tensor, np.array([7, 2]))), x @ want[[7, 2]].T, atol=2e-5)
        w.close()
        with pytest.raises(CheckpointError, match=r"d\.weight packs \[24, 96\] into \[24, \d+\] words with \[24, [12]\] scales; known: 2"):
            w.linear("d", 96, 24, bias=False)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"d.weight": words, "d.scales": scales})
    with pytest.raises(CheckpointError, match=r"d is quantised without biases \(mxfp4, .*known: affine"):
        Weights.open(tmp_path, ops.backend("host")).linear("d", 64, 24, bias=False)


@dataclass(frozen=True)
class Example:
    size: int
    eps: float = 1e-5
    act: str | None = None
    causal: bool = False
    kinds: list[str] = field(default_factory=list)
    rope: dict[str, Any] = field(default_factory=dict)


def test_config_takes_its_fields_and_leaves_the_rest() -> None:
    assert read_config(Example, {"size": 3, "dropout": 0.1}) == Example(3)
    assert read_config(Example, {"size": 3, "eps": 1, "act": None, "kinds": ["a"], "rope": {"theta": 1}, "causal": True}) == Example(
        3, 1.0, None, True, ["a"], {"theta": 1})


@pytest.mark.parametrize(("raw", "said"), [
    ({}, r"config\.json lacks 'size' \(a whole number\)"), ({"size": None}, "lacks 'size'"),
    ({"size": 3.0}, r"size is 3\.0; expected a whole number"), ({"size": True}, "size is True; expected a whole number"),
    ({"size": 3, "eps": "1e-5"}, "eps is '1e-5'; expected a number"), ({"size": 3, "act": 4}, "act is 4; expected a string"),
    ({"size": 3, "causal": 0}, "causal is 0; expected true or false"), ({"size": 3, "kinds": "a"}, "kinds is 'a'; expected a list"),
    ({"size": 3, "rope": []}, r"rope is \[\]; expected an object"),
])
def test_config_of_the_wrong_type_names_key_value_and_what_is_accepted(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_config(Example, raw)


def test_config_settles_older_spellings_first() -> None:
    @dataclass(frozen=True)
    class Renamed:
        depth: int

        @staticmethod
        def rename(raw: dict[str, Any]) -> dict[str, Any]:
            return {"depth": raw.get("n_layer"), **raw}

    assert read_config(Renamed, {"n_layer": 2}).depth == read_config(Renamed, {"depth": 2}).depth == 2
