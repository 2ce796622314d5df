"""The host backend's compiled kernels: against float64 formulas on ordinary and extreme values, bits, memory, and how they are compiled.

What every backend promises is in test_ops.py, which runs over these kernels too.
"""
from __future__ import annotations

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.batching import Segments
from inference.config import Settings
from inference.errors import CheckpointError, ConfigError
from inference.ops import host
from inference.ops.host import arena, blas, reading, team
from inference.transports.local import LocalClient
from inference.wire import EmbedJob
from tests.conftest import missing

if "numba" not in sys.modules:                             # host imports it where it is installed
    missing("numba is not installed: pip install 'mlxcel[cpu]'")

from inference.ops.host import fast, kernels, simd

F32, F64 = np.float32, np.float64
ROOT = Path(__file__).resolve().parent.parent
DENORMAL = np.array([1e-45, -1e-45, 1e-40, -1e-39, 1.1754942e-38, 0.0, -0.0], F32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


# ---- accuracy

def softmax(scores: np.ndarray, scale: float) -> np.ndarray:
    e = np.exp((scores.astype(F64) - scores.max(-1, keepdims=True)) * scale)
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 100, 257])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4, 3e37])
def test_attention_weights_are_a_softmax(length: int, spread: float) -> None:
    """Values of one in turn give the weights themselves. Scores of any size, and all equal."""
    q, k = np.ones((length, 1, 1), F32), (normal(length) * spread).astype(F32)[:, None, None]
    value = np.eye(length, dtype=F32)[:, None]
    got = fast.attention(q, k, np.ascontiguousarray(value), Segments(np.array([length])), False, None, 0.5) if length == 1 else \
        fast.attention(np.repeat(q, length, 2) / length, np.repeat(k, length, 2), value, Segments(np.array([length])), False, None, 0.5)
    want = softmax(np.repeat(k[None, :, 0, 0], length, 0), 0.5)
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=2e-4 if spread == 30 else 1e-5)
    np.testing.assert_allclose(got.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 0), (True, 2)])
def test_a_row_that_sees_nothing_sees_itself(causal: bool, window: int | None) -> None:
    """Every row hidden: nobody sees anybody."""
    x = normal(40, 2, 24)
    got = fast.attention(x, x, x, Segments(np.array([7, 33]), hidden=np.ones(40, bool)), causal, window, 0.2)
    np.testing.assert_array_equal(got.reshape(x.shape), x)


def test_denormal_queries_keys_and_values() -> None:
    x = np.resize(DENORMAL, (21, 1, 7))
    got = fast.attention(x, x, x, Segments(np.array([21])), False, None, 1.0)
    np.testing.assert_allclose(got, np.repeat(x.astype(F64).mean(0), 21, 0), atol=1e-44)


@pytest.mark.parametrize("function", [fast.gelu, fast.gelu_tanh, fast.silu])
def test_activations_of_denormals_are_half_of_them(function) -> None:
    np.testing.assert_allclose(function(DENORMAL[None])[0], DENORMAL / 2, atol=1e-43)


@pytest.mark.parametrize("width", [1, 3, 16, 37, 384])
def test_norms_of_denormal_and_of_equal_rows(width: int) -> None:
    weight, bias = normal(width, seed=1), normal(width, seed=2)
    for row in (np.resize(DENORMAL, width), np.full(width, 3 * 2.0 ** 50, F32), np.full(width, 1e-30, F32)):
        y = row.astype(F64)
        want = (y - y.mean()) / np.sqrt(y.var() + 1e-5) * weight + bias
        np.testing.assert_allclose(fast.LayerNorm(weight, bias, 1e-5)(row[None])[0], want, atol=1e-5)
    assert np.isnan(fast.LayerNorm(weight, bias, 1e-5)(np.full((1, width), np.nan, F32))).all()


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [
    (1, 1, 1), (1, 384, 1536), (13, 33, 7), (25, 100, 1025), (12, 32, 2500), (200, 65, 4100)])
def test_products(rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias = normal(rows, inputs), normal(outputs, inputs, seed=1), normal(outputs, seed=2)
    want = x.astype(F64) @ weight.T.astype(F64) + bias
    scale = np.abs(x).astype(F64) @ np.abs(weight).T.astype(F64) + 1
    assert (np.abs(fast.Product(weight, bias)(x) - want) / scale).max() < 2e-6
    wide = normal(rows, 3 * inputs)
    np.testing.assert_array_equal(fast.Product(weight, None)(wide[:, inputs:2 * inputs]),
                                  fast.Product(weight, None)(wide[:, inputs:2 * inputs].copy()))


@pytest.mark.parametrize(("mode", "bound"), [("bf16x3", 2e-5), ("bf16", 8e-3)])
def test_the_arithmetic_of_split_products(mode: str, bound: float) -> None:
    """What MKL is given, multiplied in float64: three products of halves keep 16 bits of each factor, one keeps 8."""
    x, weight = normal(40, 384), normal(64, 384, seed=1)
    twice = mode == "bf16x3"
    a, b = (blas.from_bf16(blas.halves(f, low_first=i == 1, twice=twice)).astype(F64) for i, f in enumerate((x, weight)))
    got = a @ b.T
    scale = np.abs(x).astype(F64) @ np.abs(weight).T
    assert (np.abs(got - x.astype(F64) @ weight.T.astype(F64)) / scale).max() < bound / 2


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    exact = np.array([1.0, -2.5, 1 + 2 ** -7, 0.0, np.inf], F32)
    np.testing.assert_array_equal(blas.from_bf16(blas.to_bf16(exact)), exact)
    ties = np.array([1 + 2 ** -8, 1 + 3 * 2 ** -8], F32)
    np.testing.assert_array_equal(blas.from_bf16(blas.to_bf16(ties)), np.array([1.0, 1 + 2 ** -6], F32))


@pytest.mark.skipif(not simd.BF16_DOT, reason="this processor has no avx512_bf16")
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [
    (1, 1, 1), (1, 40, 384), (13, 33, 7), (50, 384, 1536), (12, 32, 2501), (30, 8, 16), (30, 8, 48)])
def test_bf16_products(rows: int, outputs: int, inputs: int) -> None:
    """Of the rounded factors, exactly but for the f32 sums; and every row for itself."""
    x, weight, bias = normal(rows, inputs), normal(outputs, inputs, seed=1), normal(outputs, seed=2)
    product = fast.HalfProduct(weight, bias)
    a, b = (blas.from_bf16(blas.to_bf16(factor)) for factor in (x, weight))
    scale = np.abs(a).astype(F64) @ np.abs(b).T.astype(F64) + 1
    got = product(x)
    assert (np.abs(got - (a.astype(F64) @ b.T.astype(F64) + bias)) / scale).max() < 2e-6
    np.testing.assert_array_equal(got, np.concatenate([product(x[i:i + 1]) for i in range(rows)]))


# ---- bits

@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=8), order=st.randoms(use_true_random=False),
       causal=st.booleans(), window=st.none() | st.integers(0, 20), heads=st.sampled_from([(1, 1, 5), (2, 1, 32), (4, 2, 40)]))
def test_a_segments_bits_do_not_depend_on_its_neighbours(lengths, order, causal, window, heads) -> None:
    count, kv, width = heads
    parts = [[normal(n, h, width, seed=7 * i + j) for j, h in enumerate((count, kv, kv))] for i, n in enumerate(lengths)]
    alone = [fast.attention(*part, Segments(np.array([n])), causal, window, 0.3) for part, n in zip(parts, lengths, strict=True)]
    shuffled = order.sample(range(len(lengths)), len(lengths))
    together = fast.attention(*(np.concatenate([parts[i][j] for i in shuffled]) for j in range(3)),
                              Segments(np.array([lengths[i] for i in shuffled])), causal, window, 0.3)
    np.testing.assert_array_equal(together, np.concatenate([alone[i] for i in shuffled]))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 60), width=st.integers(1, 70), offset=st.integers(0, 20))
def test_a_rows_bits_do_not_depend_on_where_it_lies(rows, width, offset) -> None:
    x = normal(rows, width + offset)
    view, copy = x[:, offset:], x[:, offset:].copy()
    norms = fast.LayerNorm(normal(width), normal(width), 1e-6), fast.RMSNorm(normal(width), 1e-6, 1.0)
    for function in (fast.gelu, fast.gelu_tanh, fast.silu, *norms):
        whole = function(view)
        np.testing.assert_array_equal(whole, function(copy))
        np.testing.assert_array_equal(whole, np.concatenate([function(copy[i:i + 1]) for i in range(rows)]))


# ---- memory

def test_results_that_live_are_never_written_to_again() -> None:
    kept = [(i, arena.empty(100 + i, 80)) for i in range(20)]
    for i, array in kept:
        array[...] = i
    assert all((array == i).all() for i, array in kept)
    view = arena.empty(300, 100)[:, 10:20].reshape(-1, 5)
    view[...] = 7
    assert all(not np.shares_memory(view, arena.empty(300, 100)) for _ in range(5))
    assert (view == 7).all()


def test_memory_is_taken_again_and_given_back() -> None:
    done: list[bool] = []

    def run() -> None:
        first = arena.empty(512, 384).ctypes.data
        done.append(arena.empty(512, 384).ctypes.data == first)              # nobody kept it
        large = [arena.empty(1 << 12, 1 << 11) for _ in range(3)]            # an outsize pack: 96 MiB
        del large
        arena.empty(1 << 12, 1 << 12)
        done.append(sum(buffer.size for buffer in arena._mine().known) <= arena.KEPT + 2 * (1 << 24))
        done.append(arena.scratch(10) is arena.scratch(5))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [True, True, True]


def test_small_weights_share_memory_for_as_long_as_one_of_them_lives() -> None:
    first, second, large = arena.lasting(1000), arena.lasting(1000), arena.lasting(arena.SLAB // 4)
    assert first.ctypes.data % 64 == second.ctypes.data % 64 == large.ctypes.data % 64 == 0
    assert not np.shares_memory(first, second)
    assert arena._slab() is not None and not np.shares_memory(arena._slab(), large)
    many = [arena.lasting(arena.SLAB // 5) for _ in range(6)]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(many) for b in many[:i])
    slab = arena._slab
    del first, second, many
    gc.collect()
    assert slab() is None


def test_packs_on_many_threads_take_the_same_memory_one_after_another() -> None:
    """A request may run its pack on its caller's thread, and a server has many callers' threads."""
    found: SimpleQueue[int] = SimpleQueue()
    stay = threading.Event()

    def run() -> None:
        with team.pack():
            address = arena.empty(512, 384).ctypes.data
        found.put(address)
        stay.wait(10)

    threads = [threading.Thread(target=run) for _ in range(12)]
    addresses = set()
    for thread in threads:
        thread.start()
        addresses.add(found.get(timeout=10))
    stay.set()
    for thread in threads:
        thread.join()
    assert len(addresses) == 1


def test_an_exception_in_the_middle_of_a_pack_leaves_the_next_one_alone() -> None:
    x, product = normal(300, 64), fast.Product(normal(96, 64, seed=1), normal(96, seed=2))
    want = fast.gelu(product(x)).copy()

    def fails() -> None:
        kept = product(x)
        kept[...] = np.nan
        raise RuntimeError(fast.gelu(kept).sum())

    for _ in range(3):
        with pytest.raises(RuntimeError):
            fails()
        gc.collect()
        np.testing.assert_array_equal(fast.gelu(product(x)), want)


# ---- choice and compilation

def test_what_a_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blas.choose("numpy").name.startswith("numpy")
    assert blas.choose().name.startswith("kernels (")
    with pytest.raises(ConfigError, match=r"MLXCEL_HOST_PRECISION=bf16 with MLXCEL_HOST_BLAS=numpy is not possible.*f32 only"):
        blas.choose("numpy", "bf16")
    monkeypatch.setattr(blas, "cpu_flags", lambda: frozenset({"avx512f"}))
    with pytest.raises(ConfigError, match=r"bf16x3.*auto.*mkl: .*; kernels: three bf16 products gain nothing"):
        blas.choose("auto", "bf16x3")
    monkeypatch.setattr(fast, "BF16_DOT", False)
    with pytest.raises(ConfigError, match="no avx512_bf16"):
        blas.choose("kernels", "bf16")


@pytest.mark.parametrize("rows", [1, 2, 7, 30])
def test_rows_that_lie_whole_pages_apart_give_the_same_bits(rows: int) -> None:
    product = fast.Product(normal(100, 2048), normal(100, seed=1))
    x, apart = normal(rows, 2048, seed=2), np.zeros((rows, 2049), F32)
    apart[:, :2048] = x
    np.testing.assert_array_equal(product(x), product(apart[:, :2048]))
    np.testing.assert_array_equal(product(x)[-1:], product(x[-1:]))


def test_a_joined_weight_and_its_parts() -> None:
    host.prepare()
    parts = [(normal(n, 20, seed=n), None if n == 3 else normal(n, seed=9), None) for n in (8, 3, 5)]
    whole = [fast.Product(weight, bias)(normal(4, 20)) for weight, bias, _ in parts]
    for got, want in zip(host.Linears(parts)(normal(4, 20)), whole, strict=True):
        np.testing.assert_array_equal(got, want)


PROGRAM = """
import logging; logging.basicConfig(format="%(levelname)s %(message)s")
import numpy as np
from inference import ops
from inference.ops.host import jit
x = np.ones((2, 40), np.float32)
host = ops.backend("host")
print(float(ops.gelu(x)[0, 0]), host.provider().name, jit.config.CACHE_DIR)
"""
WITHOUT_NUMBA = PROGRAM.replace("import numpy", "import sys; sys.modules['numba'] = None\nimport numpy", 1).replace(
    "from inference.ops.host import jit\n", "").replace(", jit.config.CACHE_DIR", "")


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=True)


def test_without_numba_the_results_are_the_same() -> None:
    done = run(WITHOUT_NUMBA)
    value, provider = done.stdout.split()[:2]
    assert provider != "kernels" and float(value) == pytest.approx((1 + math.erf(0.5 ** 0.5)) / 2, abs=1e-6) and not done.stderr


def test_a_cache_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    """A file stands where the directory should be made: no user, root included, can write there."""
    (tmp_path / "file").write_text("")
    done = run(PROGRAM, NUMBA_CACHE_DIR=str(tmp_path / "file" / "kernels"))
    assert done.stdout.startswith("0.84134") and done.stderr.count("WARNING") == done.stderr.count("\n") == 1
    assert "compiled kernels cannot be kept in" in done.stderr
    assert not Path(done.stdout.split()[-1]).exists()       # what was compiled instead went with the process


def test_a_cache_that_was_filled_and_made_read_only_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inference.ops.host import jit

    source = tmp_path / "kept"
    monkeypatch.setattr(jit.config, "CACHE_DIR", str(source))
    folder = Path(jit._cache_dir())
    assert folder.parent == source
    (folder / "kernel.nbi").write_text("compiled")

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(jit.tempfile, "TemporaryFile", refuse)
    copy = Path(jit._cache_dir())
    assert copy != folder and (copy / "kernel.nbi").read_text() == "compiled"
    shutil.rmtree(copy)


def test_scratch_holds_what_attention_lays_out() -> None:
    assert kernels.scratch_size(1, 1) >= 2 * simd.WIDTH + kernels.QUERIES
    assert kernels.scratch_size(512, 64) == simd.WIDTH + kernels.QUERIES + 512 * 64 * 2 + kernels.QUERIES * 512


# ---- a whole model

@pytest.mark.parametrize("precision", ["f32", pytest.param("bf16", marks=pytest.mark.skipif(not simd.BF16_DOT, reason="no avx512_bf16"))])
def test_vectors_are_the_same_to_the_bit_for_any_threads_and_neighbours(minilm: Path, precision: str) -> None:
    """1, 2 and 4 threads; alone, in a batch and in another order; in one request and from four callers at once."""
    texts = [("the sea and the wind " * n)[:4 * n * n] for n in range(1, 25)]
    want: np.ndarray | None = None
    for threads in (1, 2, 4):
        client = LocalClient(Settings(embedding_models=(str(minilm),), backend="host", threads=threads, host_precision=precision))
        together = client.embed(EmbedJob(tuple(texts))).data
        want = together if want is None else want
        np.testing.assert_array_equal(together, want)
        np.testing.assert_array_equal(client.embed(EmbedJob(tuple(texts[::-1]), lane="bulk")).data[::-1], want)
        np.testing.assert_array_equal(np.concatenate([client.embed(EmbedJob((text,))).data for text in texts]), want)
        got: dict[int, np.ndarray] = {}

        def call(i: int, client: LocalClient = client, got: dict[int, np.ndarray] = got) -> None:
            got[i] = client.embed(EmbedJob(tuple(texts[i::4]))).data

        callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        for i in range(4):
            np.testing.assert_array_equal(got[i], want[i::4])
        spec = client.describe("embedding")
        assert spec is not None and spec.precision == precision and spec.provider.startswith("kernels (")
        client.close()
    host.prepare("auto", "f32", 1)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 80), outputs=st.integers(1, 300), inputs=st.integers(1, 100), threads=st.integers(2, 5))
def test_shared_operations_give_the_same_bits(rows, outputs, inputs, threads) -> None:
    x, product = normal(rows, inputs), fast.Product(normal(outputs, inputs, seed=1), normal(outputs, seed=2))
    heads, segments = normal(rows, 4, 20), Segments(np.array([rows]))
    with pytest.MonkeyPatch.context() as patch, team.pack():
        patch.setattr(fast, "SHARED", 0)
        results = []
        for size in (1, threads):
            team.resize(size)
            results.append((product(x), fast.attention(heads, heads, heads, segments, True, None, 0.3)))
        team.resize(1)
    for one, many in zip(*results, strict=True):
        np.testing.assert_array_equal(one, many)


def test_nothing_is_shared_while_two_packs_run_and_an_error_reaches_its_caller() -> None:
    done: list[tuple[int, int]] = []
    team.resize(3)
    try:
        with team.pack():
            with team.pack():
                assert not team.share(lambda i, n: done.append((i, n)), 8)
            assert team.share(lambda i, n: done.append((i, n)), 2) and sorted(done) == [(0, 2), (1, 2)]
            with pytest.raises(ZeroDivisionError):
                team.share(lambda i, n: 1 // (i - 1), 3)
            done.clear()
            assert team.share(lambda i, n: done.append((i, n)), 8) and sorted(done) == [(i, 6) for i in range(6)]
    finally:
        team.resize(1)


# ---- MKL

@pytest.fixture(scope="module")
def mkl():
    library = blas._load_mkl()
    if library is None:
        pytest.skip("MKL is not installed: pip install 'mlxcel[cpu-intel]'")
    return library


def test_mkl_multiplies_steadily(mkl) -> None:
    x, weight, bias = normal(200, 384), normal(96, 384, seed=1), normal(96, seed=2)
    product = blas.choose("mkl").product(weight, bias)
    np.testing.assert_allclose(product(x), x.astype(F64) @ weight.T + bias, atol=1e-4)
    np.testing.assert_array_equal(product(x)[7:12], product(x[7:12]))


@pytest.mark.parametrize(("split", "bound"), [(True, 2e-5), (False, 8e-3)])
def test_mkls_bf16_products_are_those_of_the_halves(mkl, split: bool, bound: float) -> None:
    """The same calls as with AMX, which processors without it answer slowly."""
    x, weight, bias = normal(40, 384), normal(64, 384, seed=1), normal(64, seed=2)
    got = blas.MklHalves(mkl, weight, bias, split)(x) - bias
    a, b = (blas.from_bf16(blas.halves(f, low_first=i == 1, twice=split)).astype(F64) for i, f in enumerate((x, weight)))
    scale = np.abs(x).astype(F64) @ np.abs(weight).T
    assert (np.abs(got - a @ b.T) / scale).max() < 1e-6
    assert (np.abs(got - x.astype(F64) @ weight.T.astype(F64)) / scale).max() < bound / 2


# ---- from the file into panels

def stored(path: Path, dtype: str, values: np.ndarray) -> reading.Stored:
    """The bits of `values`, as a file says they are `dtype`."""
    header = json.dumps({"w": {"dtype": dtype, "shape": list(values.shape), "data_offsets": [0, values.nbytes]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    return reading.Stored(reading.load(path)["w"])


@pytest.mark.parametrize("outputs", [1, fast.WIDTH - 1, fast.WIDTH, 3 * fast.WIDTH + fast.LANES + 1])
@pytest.mark.parametrize("inputs", [1, fast.LANES, 2 * fast.LANES + 3, 5000])
def test_panels_hold_the_weight(outputs: int, inputs: int) -> None:
    weight = normal(outputs, inputs)
    panels = fast.Product(weight, None).panels
    rows = panels.transpose(0, 2, 1).reshape(-1, inputs)
    np.testing.assert_array_equal(rows[:outputs], weight)
    assert not rows[outputs:].any()


@pytest.mark.parametrize("dtype", ["F32", "F16", "F64", "BF16"])
def test_a_weight_in_its_file_is_the_one_that_is_read(tmp_path: Path, dtype: str) -> None:
    """Over more rows than are converted at once."""
    values = normal(300, 1001)
    bits = {"F16": np.float16, "F64": np.float64}.get(dtype)
    weight = stored(tmp_path / "w.safetensors", dtype, blas.to_bf16(values) if dtype == "BF16" else values.astype(bits or np.float32))
    want = blas.from_bf16(blas.to_bf16(values)) if dtype == "BF16" else values.astype(bits or np.float32).astype(np.float32)
    np.testing.assert_array_equal(reading.read(weight.entry), want)
    np.testing.assert_array_equal(reading.whole(weight), want)
    np.testing.assert_array_equal(fast.Product(weight, None).panels, fast.Product(want, None).panels)
    joined = reading.Joined([weight, want[:7], weight])
    np.testing.assert_array_equal(fast.Product(joined, None).panels, fast.Product(np.concatenate([want, want[:7], want]), None).panels)


def test_a_file_that_shrinks_under_its_reader_and_a_weight_of_integers(tmp_path: Path) -> None:
    weight = stored(tmp_path / "w.safetensors", "F32", normal(64, 64))
    with (tmp_path / "w.safetensors").open("r+b") as file:
        file.truncate(4000)
    with pytest.raises(CheckpointError, match=r"w\.safetensors was cut off while w was read"):
        fast.Product(weight, None)
    with pytest.raises(CheckpointError, match=r"w is a weight of type I8; expected F64, F32, F16, BF16"):
        stored(tmp_path / "i.safetensors", "I8", np.ones((4, 4), np.int8))
