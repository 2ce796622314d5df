"""Invariants x cases x backends: what every family must hold, whoever wrote it."""
from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from inference import families, ops
from inference.batching import Batch
from inference.errors import CheckpointError
from inference.weights import Weights, read_config
from tests.families import CASES, Case

BACKENDS = ("host", "mlx")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def family_of(folder: Path) -> tuple[ModuleType, dict[str, Any]]:
    raw = json.loads((folder / "config.json").read_text())
    return families.model_types()[raw["model_type"]], raw


def build(folder: Path, backend: str) -> Any:
    family, raw = family_of(folder)
    w = Weights.open(folder, ops.backend(backend)).strip(*family.PREFIXES)
    model = family.Model(w, read_config(family.Config, raw))
    w.close(family.DROPPED)
    return model


def config_of(folder: Path) -> Any:
    family, raw = family_of(folder)
    return read_config(family.Config, raw)


@cache
def built(case: Case, backend: str) -> Any:
    return build(case.folder, backend)


def reference_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "reference.npz") as stored:
        return dict(stored)


def cut(rows: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(rows, np.cumsum(lengths)[:-1])]


def inputs_of(reference: dict[str, np.ndarray]) -> tuple[list[list[int]], list[list[int]]]:
    return cut(reference["ids"], reference["lengths"]), cut(reference["type_ids"], reference["lengths"])


def rewrite(case: Case, folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    """The case's checkpoint with its tensors changed."""
    (folder / "config.json").write_text((case.folder / "config.json").read_text())
    save_file(change(load_file(case.folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def assert_matches(folder: Path, model: Any, tolerance: float) -> None:
    reference = reference_of(folder)
    batch = Batch.of(*inputs_of(reference))
    hidden = model(batch)
    assert np.abs(ops.numpy(hidden) - reference["hidden"]).max() <= tolerance
    for mode in ("cls", "mean", "max", "lasttoken"):
        pooled = ops.numpy(ops.pool(hidden, batch.segments, mode))
        assert pooled.dtype == np.float32
        assert np.abs(pooled - reference[mode]).max() <= tolerance, mode


def test_files_and_cases_are_the_same_set() -> None:
    assert {info.name for info in iter_modules(families.__path__)} == {case.family for case in CASES}
    assert {case.folder for case in CASES} == {path.parent for path in CASES[0].folder.parent.glob("*/made_by.json")}


def test_registry_names_the_file_that_claims_a_model_type() -> None:
    assert families.find("BERT") is families.model_types()["bert"]
    assert families.find("gpt-neo") is None


def test_second_claim_of_a_model_type_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "usurper.py").write_text('MODEL_TYPES = ("bert",)\n')
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    families.model_types.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"'bert' is claimed by both inference\.families\.bert and inference\.families\.usurper"):
            families.model_types()
    finally:
        families.model_types.cache_clear()


@each_case
def test_family_file_names_no_array_library(case: Case) -> None:
    text = (Path(families.__path__[0]) / f"{case.family}.py").read_text()
    assert not [word for word in ("numpy", "mlx", "np.", "mx.", ".shape") if word in text]


@each_case
@each_backend
def test_equals_the_reference(case: Case, backend: str) -> None:
    assert_matches(case.folder, built(case, backend), case.tolerance)


@each_case
@each_backend
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: the stored answers were compared instead")
def test_equals_the_live_reference(case: Case, backend: str, tmp_path: Path) -> None:
    from tests.make_golden import make

    make(case, tmp_path, seed=1)
    assert_matches(tmp_path, build(tmp_path, backend), case.tolerance)


@each_case
@each_backend
def test_a_batch_equals_its_rows(case: Case, backend: str) -> None:
    """Bit for bit on host: what stands beside a row may not even change its rounding."""
    model, reference = built(case, backend), reference_of(case.folder)
    sequences, types = inputs_of(reference)
    together = ops.numpy(model(Batch.of(sequences, types)))
    alone = np.concatenate([ops.numpy(model(Batch.of([ids], [kinds]))) for ids, kinds in zip(sequences, types, strict=True)])
    if backend == "host":
        np.testing.assert_array_equal(together, alone)
    else:
        assert np.abs(together - alone).max() <= case.tolerance


@each_case
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_neighbours_leave_a_row_its_bits_on_host(case: Case, data: st.DataObject) -> None:
    limit, vocabulary = max(case.lengths), case.config["vocab_size"]
    lengths = data.draw(st.lists(st.integers(1, limit), min_size=1, max_size=24))
    place = data.draw(st.integers(0, len(lengths) - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 16)))
    sequences = [rng.integers(0, vocabulary, n).tolist() for n in lengths]
    model, batch = built(case, "host"), Batch.of(sequences)
    hidden, one = model(batch), Batch.of([sequences[place]])
    alone = model(one)
    np.testing.assert_array_equal(hidden[batch.segments.rows(place)], alone)
    for mode in ("mean", "max", "cls", "lasttoken"):
        np.testing.assert_array_equal(ops.pool(hidden, batch.segments, mode)[place], ops.pool(alone, one.segments, mode)[0])


@each_case
def test_threads_with_packs_of_their_own_do_not_meet_on_host(case: Case) -> None:
    """One model, two threads, different packs at once: every result is the one a single thread gives."""
    model, rng = built(case, "host"), np.random.default_rng(5)
    packs = [Batch.of([rng.integers(0, case.config["vocab_size"], n).tolist() for n in rng.integers(1, max(case.lengths), 12)])
             for _ in range(8)]
    expected, wrong = [model(pack) for pack in packs], []

    def work(mine: list[int]) -> None:
        for _ in range(10):
            wrong.extend(i for i in mine if not np.array_equal(model(packs[i]), expected[i]))

    threads = [threading.Thread(target=work, args=(range(k, 8, 2),)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@each_case
@each_backend
def test_builds_and_runs_on_a_thread_of_its_own(case: Case, backend: str) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            assert_matches(case.folder, build(case.folder, backend), case.tolerance)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures, failures


@each_case
@each_backend
def test_published_names_and_their_surplus_load_too(case: Case, backend: str, tmp_path: Path) -> None:
    def publish(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        surplus = {name: np.zeros(shape, np.float32) for name, shape in case.surplus.items()}
        return {case.published + name: x for name, x in tensors.items()} | surplus

    assert_matches(case.folder, build(rewrite(case, tmp_path, publish), backend), case.tolerance)


@each_case
@each_backend
def test_half_precision_files_give_near_vectors_of_the_right_type(case: Case, backend: str, tmp_path: Path) -> None:
    """mlx computes in the file's own type, host widens to f32 at load; neither may give NaN or leak another type."""
    import mlx.core as mx

    reference = reference_of(case.folder)
    for dtype in (mx.float16, mx.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        (folder / "config.json").write_text((case.folder / "config.json").read_text())
        tensors = mx.load(str(case.folder / "model.safetensors"))
        mx.save_safetensors(str(folder / "model.safetensors"), {name: x.astype(dtype) for name, x in tensors.items()})
        hidden = build(folder, backend)(Batch.of(*inputs_of(reference)))
        assert hidden.dtype == (np.float32 if backend == "host" else dtype)
        got, want = ops.numpy(hidden), reference["hidden"]
        cosine = (got * want).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1)
        assert np.isfinite(got).all()
        assert cosine.mean() >= 0.999                     # a single row of the reference, run in bf16, falls to 0.996
        assert cosine.min() >= 0.99


@each_case
@each_backend
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_quantised_checkpoints_agree_with_their_dequantised_selves(case: Case, backend: str, bits: int, tmp_path: Path) -> None:
    """As MLX writes them: tables too, one layer with bits and groups of its own, and what does not fit left as it was."""
    import mlx.core as mx

    packed, plain = {}, {}
    for name, x in mx.load(str(case.folder / "model.safetensors")).items():
        group, own = (64, 8) if ".1." in name and x.shape[-1] % 64 == 0 else (32, bits)
        if x.ndim != 2 or x.shape[-1] % group:
            packed[name] = plain[name] = x
            continue
        words, scales, biases = mx.quantize(x, group, own)
        stem = name.removesuffix(".weight")
        packed |= {name: words, f"{stem}.scales": scales, f"{stem}.biases": biases}
        plain[name] = mx.dequantize(words, scales, biases, group, own)
    hidden = []
    for tensors, side in ((packed, backend), (plain, "host")):
        folder = tmp_path / str(len(hidden))
        folder.mkdir()
        (folder / "config.json").write_text((case.folder / "config.json").read_text())
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
        hidden.append(ops.numpy(build(folder, side)(Batch.of(*inputs_of(reference_of(case.folder))))))
    got, want = (rows / np.linalg.norm(rows, axis=-1, keepdims=True) for rows in hidden)
    apart = 1 - (got * want).sum(-1).min()
    assert apart <= 1e-4


@each_case
@each_backend
def test_missing_superfluous_and_misshapen_tensors_are_named(case: Case, backend: str, tmp_path: Path) -> None:
    name, weight = next((name, x) for name, x in load_file(case.folder / "model.safetensors").items() if x.ndim == 2 and ".0." in name)
    short = name
    for prefix in family_of(case.folder)[0].PREFIXES:
        short = short.removeprefix(prefix)

    def changed(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> str:
        with pytest.raises(CheckpointError) as caught:
            build(rewrite(case, tmp_path, change), backend)
        return str(caught.value)

    assert repr(short) in changed(lambda t: {n: x for n, x in t.items() if n != name})
    assert "no use for stray.weight" in changed(lambda t: t | {"stray.weight": weight})
    rows, width = weight.shape
    assert changed(lambda t: t | {name: np.zeros((rows, width + 1), np.float32)}) == (
        f"{short} has shape [{rows}, {width + 1}]; the config promises [{rows}, {width}]")


@each_case
@each_backend
def test_ids_and_positions_outside_their_tables_are_refused(case: Case, backend: str) -> None:
    model, vocabulary = built(case, backend), case.config["vocab_size"]
    for ids in ([vocabulary], [-1]):
        with pytest.raises(IndexError, match=f"table of {vocabulary} rows"):
            model(Batch.of([ids]))
    positions = next((x for name, x in load_file(case.folder / "model.safetensors").items() if ".position_embedding" in name), None)
    if positions is not None:                             # rotation has no table
        limit = config_of(case.folder).max_length
        model(Batch.of([[2] * limit]))
        with pytest.raises(IndexError, match=f"table of {len(positions)} rows"):
            model(Batch.of([[2] * (limit + 1)]))


@each_case
@each_backend
def test_the_last_token_moves_the_first_row_unless_the_family_is_causal(case: Case, backend: str) -> None:
    model, rng = built(case, backend), np.random.default_rng(3)
    ids = rng.integers(2, case.config["vocab_size"] - 1, min(max(case.lengths), 20)).tolist()         # what windows of a few layers reach
    a, b = (ops.numpy(model(Batch.of([x])))[0] for x in (ids, [*ids[:-1], ids[-1] + 1]))
    assert (np.abs(a - b).max() <= 1e-6) if case.causal else (np.abs(a - b).max() > 1e-4)


def test_bert_refuses_what_it_does_not_implement() -> None:
    family, raw = family_of(CASES[0].folder)
    for change, said in (
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'; expected 'absolute'"),
        ({"hidden_size": 30}, "hidden_size 30 cannot be cut into 4 heads"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'; expected a whole number"),
        ({"vocab_size": None}, "config.json lacks 'vocab_size'"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read_config(family.Config, raw | change)
    with pytest.raises(CheckpointError, match="activation 'mish' is not implemented; known: gelu"):
        family.Model(Weights.open(CASES[0].folder, ops.backend("host")), read_config(family.Config, raw | {"hidden_act": "mish"}))
