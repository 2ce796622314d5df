"""Every word of the vocabulary against its formula in float64, on both backends, with ordinary and extreme numbers."""
from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from inference import ops
from inference.batching import Batch, RopeSpec, Segments
from inference.errors import CheckpointError
from inference.ops import host
from inference.ops.host import blas, mixing, pointwise, steady
from inference.weights import Weights

F32, F64 = np.float32, np.float64
EXTREME = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-30, -1e-30, 1e-7, 0.5, -0.5, 3.0, -3.0, 5.5, -5.5, 13.0, -13.0, 88.0, -88.0, 1e4, -1e4,
                    1e19, -1e19, 3e38, -3e38, np.inf], F32)


class Side:
    """A backend seen from a test: numpy in, numpy out."""

    def __init__(self, name: str) -> None:
        self.name, self.backend = name, ops.backend(name)             # type: ignore[arg-type]

    def tensor(self, x: Any, dtype: str = "float32") -> Any:
        if self.name == "host":
            return np.array(x, F32)
        import mlx.core as mx
        return mx.array(np.array(x, F32)).astype(getattr(mx, dtype))


SIDES = {name: Side(name) for name in ("host", "mlx")}


EVERY_SIDE = [*SIDES, "plain"]


@contextmanager
def on(name: str) -> Iterator[Side]:
    """`plain` is host as it is without numba."""
    if name != "plain":
        yield SIDES[name]
        return
    with pytest.MonkeyPatch.context() as patch:
        for module, names in ((pointwise, ("gelu", "gelu_tanh", "silu", "LayerNorm", "RMSNorm")), (mixing, ("attention", "rope", "mean"))):
            for one in names:
                patch.setattr(host, one, getattr(module, one))
        patch.setattr(host, "_provider", blas.choose("numpy"))
        yield SIDES["host"]


@pytest.fixture(params=EVERY_SIDE)
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    with on(request.param) as side:
        yield side


Matmul = Callable[[np.ndarray, np.ndarray], np.ndarray]
MATMUL = {name: blas.choose(name).product for name in ("kernels", "numpy")}


@pytest.fixture(params=MATMUL, scope="module")
def matmul(request: pytest.FixtureRequest) -> Matmul:
    return lambda x, weight: MATMUL[request.param](weight, None)(x)


def close(got: Any, want: np.ndarray, absolute: float = 2e-6, relative: float = 2e-6) -> None:
    got = ops.numpy(got)
    assert got.dtype == F32
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(F64), want, atol=absolute, rtol=relative)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


# ---- pointwise

_erf = np.vectorize(math.erf, otypes=[F64])
FORMULAS = {
    "gelu": lambda x: np.where(x < -12, 0.0, x / 2 * (1 + _erf(x / math.sqrt(2)))),
    "gelu_tanh": lambda x: np.where(x < -12, 0.0, x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))),
    "silu": lambda x: np.where(x < -700, 0.0, x / (1 + np.exp(-np.maximum(x, -700)))),
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations(side: Side, name: str) -> None:
    finite = EXTREME[np.isfinite(EXTREME)]
    for x in (normal(70, 300) * 4, np.linspace(-9, 9, 4001, dtype=F32)[None], finite[None], finite[:, None]):
        close(getattr(ops, name)(side.tensor(x)), FORMULAS[name](x.astype(F64)))
    if name != "tanh":
        assert ops.numpy(getattr(ops, name)(side.tensor([[np.inf]])))[0, 0] == np.inf or name.startswith("gelu")
    assert np.isnan(ops.numpy(getattr(ops, name)(side.tensor([[np.nan, 1.0]])))).tolist() == [[True, False]]


def test_gelu_on_host_keeps_its_stated_bound() -> None:
    """1e-6 + 1e-7 |x| of absolute error, over every scale and every hundredth of the curved part."""
    x = np.concatenate([np.linspace(-14, 14, 2_000_001), -np.geomspace(1e-30, 1e30, 2001), np.geomspace(1e-30, 1e30, 2001)]).astype(F32)
    error = np.abs(ops.gelu(x[None])[0].astype(F64) - FORMULAS["gelu"](x.astype(F64)))
    assert (error <= 1e-6 + 1e-7 * np.abs(x)).all()
    assert error[np.abs(x) <= 14].max() <= 1e-6


def test_activations_by_the_names_of_configs() -> None:
    assert ops.activation("gelu_python") is ops.activation("gelu") is ops.gelu
    assert ops.activation("gelu_new") is ops.activation("gelu_pytorch_tanh") is ops.gelu_tanh
    with pytest.raises(CheckpointError, match="activation 'quick_gelu' is not implemented; known: gelu,"):
        ops.activation("quick_gelu")


@pytest.mark.parametrize("width", [1, 7, 384, 20_000])
def test_norms(side: Side, width: int) -> None:
    weight, bias = normal(width, seed=1), normal(width, seed=2)
    w = {"weight": side.tensor(weight), "bias": side.tensor(bias)}
    large = normal(3, width) * 1e4 + 3e4
    for x, eps in ((normal(50, width), 1e-12), (large, 1e-5), (np.zeros((2, width), F32), 1e-5), (normal(5, 2, width), 1e-6)):
        y = x.astype(F64)
        centred = y - y.mean(-1, keepdims=True)
        if width > 1 or eps > 1e-12:
            want = centred / np.sqrt((centred ** 2).mean(-1, keepdims=True) + eps) * weight + bias
            absolute = 3e-4 if x is large else 1e-5
            close(side.backend.LayerNorm(w["weight"], w["bias"], eps)(side.tensor(x)), want, absolute, 1e-4 if x is large else 1e-5)
            close(side.backend.LayerNorm(w["weight"], None, eps)(side.tensor(x)), want - bias, absolute, 1e-4 if x is large else 1e-5)
        rms = y / np.sqrt((y ** 2).mean(-1, keepdims=True) + eps)
        close(side.backend.RMSNorm(w["weight"], eps, 0.0)(side.tensor(x)), rms * weight, 1e-5, 1e-5)
        close(side.backend.RMSNorm(w["weight"], eps, 1.0)(side.tensor(x)), rms * (1 + weight.astype(F64)), 1e-5, 1e-5)


# ---- shape

def test_operators_and_shapes(side: Side) -> None:
    x, y = normal(6, 8), normal(6, 8, seed=1)
    a, b = side.tensor(x), side.tensor(y)
    close(a + b, (x + y).astype(F64))
    close(a * b, (x * y).astype(F64))
    close(a * 0.5 + 1.0, (x * 0.5 + 1).astype(F64))
    for part, want in zip(ops.split(a, 2), (x[:, :4], x[:, 4:]), strict=True):
        close(part, want.astype(F64))
    close(ops.concat(*ops.split(a, 4)), x.astype(F64))
    close(ops.heads(a, 4), x.reshape(6, 4, 2).astype(F64))
    close(ops.rows(a, np.array([5, 0, 0])), x[[5, 0, 0]].astype(F64))
    close(ops.rows(ops.heads(a, 4), np.array([2])), x[[2]].reshape(1, 4, 2).astype(F64))


def test_put_and_put_add_leave_their_argument_alone(side: Side) -> None:
    x, values = normal(5, 3), normal(2, 3, seed=1)
    a, v = side.tensor(x), side.tensor(values)
    put, added = x.copy(), x.astype(F64)
    put[[3, 1]] = values
    np.add.at(added, [3, 3], values.astype(F64))
    close(ops.put(a, np.array([3, 1]), v), put.astype(F64))
    close(ops.put_add(a, np.array([3, 3]), v), added)
    np.testing.assert_array_equal(ops.numpy(a), x)


def test_nothing_changes_its_argument(side: Side) -> None:
    x, segments = normal(5, 8) * 3, Segments(np.array([2, 3]))
    a = side.tensor(x)
    h = ops.heads(a, 2)
    for result in (ops.gelu(a), ops.gelu_tanh(a), ops.silu(a), ops.relu(a), ops.tanh(a), ops.l2_normalize(a), ops.pool(a, segments, "mean"),
                   ops.attention(h, h, h, segments, causal=True), ops.rope(h, RopeSpec(4, 1e4).table(segments)),
                   side.backend.LayerNorm(side.tensor(np.ones(8)), None, 1e-5)(a)):
        ops.numpy(result)
    np.testing.assert_array_equal(ops.numpy(a), x)


def test_tensors_of_no_open_backend_are_refused() -> None:
    with pytest.raises(TypeError, match=r"list is not a tensor of an open backend; open: .*host"):
        ops.gelu([1.0])
    with pytest.raises(ValueError, match="backend 'torch' does not exist; known: mlx, host"):
        ops.backend("torch")                                          # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mlx_outputs_keep_the_type_of_their_input(dtype: str) -> None:
    import mlx.core as mx

    side, segments = SIDES["mlx"], Segments(np.array([2, 3]))
    a, f32 = side.tensor(normal(5, 8), dtype), side.tensor(normal(8))
    h, kind = ops.heads(a, 2), getattr(mx, dtype)
    for result in (ops.gelu(a), ops.gelu_tanh(a), ops.silu(a), ops.relu(a), ops.tanh(a), a * 0.5 + 1.0,
                   ops.put(a, np.array([1]), f32[None]), ops.put_add(a, np.array([1]), f32[None]),
                   ops.rope(h, RopeSpec(4, 1e4).table(segments)), ops.attention(h, h, h, segments),
                   ops.attention(h, h, h, segments, causal=True, window=1),
                   side.backend.LayerNorm(f32, f32, 1e-5)(a), side.backend.RMSNorm(f32, 1e-5, 1.0)(a)):
        assert result.dtype == kind
    for mode in ("cls", "mean", "max", "lasttoken"):
        assert ops.pool(a, segments, mode).dtype == mx.float32        # type: ignore[arg-type]
    assert ops.l2_normalize(a).dtype == mx.float32


# ---- mixing

def test_rope(side: Side) -> None:
    segments = Segments(np.array([4, 3]))
    for width, dim in ((8, 8), (8, 4)):
        x, half = normal(7, 2, width), dim // 2
        angle = segments.positions[:, None, None] * (1e4 ** (-np.arange(half) / half))
        a, b = x[..., :half].astype(F64), x[..., half:dim].astype(F64)
        turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), x[..., dim:]]
        close(ops.rope(side.tensor(x), RopeSpec(dim, 1e4).table(segments)), np.concatenate(turned, -1))


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_depthwise_convolution_stays_within_its_segment(side: Side, taps: int, causal: bool, bias: bool) -> None:
    segments = Segments(np.array([1, 2, 7, 1, 3]))
    x, kernel, extra = normal(14, 6), normal(taps, 6), normal(6) if bias else np.zeros(6, F32)
    want, left = np.zeros((14, 6)), taps - 1 if causal else taps // 2
    for b in range(segments.count):
        own = segments.rows(b)
        for row in range(own.start, own.stop):
            want[row] = extra + sum(kernel[k] * x[row + k - left] for k in range(taps) if own.start <= row + k - left < own.stop)
    convolution = side.backend.Depthwise(side.tensor(kernel), side.tensor(extra) if bias else None)
    close(convolution(side.tensor(x), segments, causal=causal), want)


def test_depthwise_convolution_keeps_its_bits_beside_infinities_on_host() -> None:
    x, convolution = normal(5, 3), SIDES["host"].backend.Depthwise(normal(3, 3), None)
    beside = np.concatenate([np.full((2, 3), np.inf, F32), x, np.full((1, 3), np.nan, F32)])
    with np.errstate(invalid="ignore"):
        among = convolution(beside, Segments(np.array([2, 5, 1])))[2:7]
    np.testing.assert_array_equal(among.view(np.uint32), convolution(x, Segments(np.array([5]))).view(np.uint32))


def attention_formula(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: Segments,
                      causal: bool, window: int | None, scale: float) -> np.ndarray:
    """Row by row and head by head, as the docstring of ops.attention says it, in float64."""
    out, position, group = np.zeros(q.shape), segments.positions, q.shape[1] // k.shape[1]
    for b in range(segments.count):
        keys = np.arange(segments.total)[segments.keys(b)]
        for row in range(segments.total)[segments.rows(b)]:
            seen = [key for key in keys
                    if (not causal or position[key] <= position[row])
                    and (window is None or abs(int(position[key]) - int(position[row])) <= window)
                    and (segments.hidden is None or not segments.hidden[key])]
            for head in range(q.shape[1] if seen else 0):
                scores = scale * (k[seen, head // group].astype(F64) @ q[row, head].astype(F64))
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ v[seen, head // group].astype(F64) / weights.sum()
    return out.reshape(len(out), -1)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", EVERY_SIDE)
def test_attention(name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.one_of(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 9).map(lambda n: [n] * 3)))
    total, causal = sum(lengths), data.draw(st.booleans())
    window = data.draw(st.none() | st.integers(0, 5))
    parent = data.draw(st.none() | st.just(np.array([-1] + [0] * (len(lengths) - 1))))
    hidden = data.draw(st.none() | st.lists(st.booleans(), min_size=total, max_size=total).map(np.array))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    scale = data.draw(st.sampled_from([None, 0.1, 3.0]))
    segments = Segments(np.array(lengths), parent, hidden)
    q, k, v = normal(total, kv_heads * group, 8), normal(total, kv_heads, 8, seed=1), normal(total, kv_heads, 8, seed=2)
    with on(name) as side:
        got = ops.attention(side.tensor(q), side.tensor(k), side.tensor(v), segments, causal=causal, window=window, scale=scale)
        close(got, attention_formula(q, k, v, segments, causal, window, 8 ** -0.5 if scale is None else scale), 3e-6, 1e-5)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 40), (True, 40)])
def test_attention_over_long_segments(side: Side, causal: bool, window: int | None) -> None:
    """Long enough for host to take its queries in several blocks, with a short neighbour on each side."""
    segments = Segments(np.array([3, 620, 5]))
    q, k, v = normal(628, 4, 8), normal(628, 2, 8, seed=1), normal(628, 2, 8, seed=2)
    assert mixing.SCORES // (4 * 620) < 620
    got = ops.attention(side.tensor(q), side.tensor(k), side.tensor(v), segments, causal=causal, window=window)
    close(got, attention_formula(q, k, v, segments, causal, window, 8 ** -0.5), 3e-6, 1e-5)


def test_attention_with_scores_that_overflow_exp(side: Side) -> None:
    q, k, v = normal(9, 2, 4) * 300, normal(9, 2, 4, seed=1) * 300, normal(9, 2, 4, seed=2)
    segments = Segments(np.array([4, 5]))
    got = ops.attention(side.tensor(q), side.tensor(k), side.tensor(v), segments)
    close(got, attention_formula(q, k, v, segments, False, None, 0.5), 1e-4, 1e-4)


def test_a_segment_does_not_see_its_neighbours(side: Side) -> None:
    """Infinity next door would poison any weight that is not exactly zero."""
    q = normal(7, 2, 4)
    q[:3] = np.nan
    segments = Segments(np.array([3, 4]))
    x = side.tensor(q)
    assert np.isfinite(ops.numpy(ops.attention(x, x, x, segments))[3:]).all()


def test_host_never_holds_more_scores_than_it_says() -> None:
    import tracemalloc

    length, heads = 4000, 4
    segments, x = Segments(np.array([length])), normal(length, heads, 8)
    ops.attention(x, x, x, segments)
    tracemalloc.start()
    ops.attention(x, x, x, segments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * (2 * mixing.SCORES + 8 * x.size)        # all of them would be 256 MB


# ---- ends

def test_pooling(side: Side) -> None:
    for lengths in ([3, 1, 6], [4, 4], [5], [2, 9, 2, 1]):
        segments, x = Segments(np.array(lengths)), normal(sum(lengths), 8)
        parts = [x[segments.rows(b)].astype(F64) for b in range(segments.count)]
        formulas = {"cls": lambda p: p[0], "mean": lambda p: p.mean(0), "max": lambda p: p.max(0), "lasttoken": lambda p: p[-1]}
        for mode, formula in formulas.items():
            close(ops.pool(side.tensor(x), segments, mode), np.stack([formula(p) for p in parts]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pooling 'last' does not exist; known: cls, mean, max, lasttoken"):
        ops.pool(side.tensor(x), segments, "last")                    # type: ignore[arg-type]


def test_l2_normalize(side: Side) -> None:
    x = np.concatenate([normal(4, 8), np.zeros((1, 8), F32), normal(1, 8) * 1e-12, normal(1, 8) * 1e12])
    y = x.astype(F64)
    close(ops.l2_normalize(side.tensor(x)), y / np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), 1e-9))


# ---- products on host: a row's bits depend on the row and the weight alone

MINILM = [(1152, 384), (384, 384), (1536, 384), (384, 1536)]
TINY = [(1, 8), (2, 24), (3, 32), (8, 16), (64, 32), (96, 32), (32, 64), (200, 48)]


@pytest.mark.parametrize(("outputs", "inputs"), TINY + MINILM)
def test_products_do_not_depend_on_neighbours(matmul: Matmul, outputs: int, inputs: int) -> None:
    x, weight = normal(1400, inputs), normal(outputs, inputs, seed=1)
    whole = matmul(x, weight)
    np.testing.assert_allclose(whole, x.astype(F64) @ weight.T.astype(F64), atol=4e-6 * inputs ** 0.5 * 4, rtol=1e-5)
    rng = np.random.default_rng(2)
    counts = [*range(1, 34), 47, 63, 64, 65, 96, 127, 129, 255, 256, 257, 447, 448, 449, 511, 512, 513, 640, 1023, 1024, 1025, 1300]
    for count in counts:
        start = int(rng.integers(0, len(x) - count + 1))
        part = matmul(x[start:start + count], weight)
        np.testing.assert_array_equal(part, whole[start:start + count], err_msg=f"{count} rows from {start}")


@settings(max_examples=25, deadline=None)
@given(shape=st.tuples(st.integers(1, 130), st.integers(1, 130)), start=st.integers(0, 80), count=st.integers(1, 80))
def test_products_of_any_shape_do_not_depend_on_neighbours(matmul: Matmul, shape: tuple[int, int], start: int, count: int) -> None:
    x, weight = normal(160, shape[1]), normal(*shape, seed=1)
    np.testing.assert_array_equal(matmul(x[start:start + count], weight), matmul(x, weight)[start:start + count])


def test_a_shape_is_measured_once_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, measure = [], steady._measure
    monkeypatch.setattr(steady, "_calls", {})
    monkeypatch.setattr(steady, "_measure", lambda prepare, *shape: measured.append(shape) or measure(prepare, *shape))
    threads = [threading.Thread(target=blas.choose("numpy").product, args=(normal(24, 16), None)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert measured == [(24, 16)]


def test_numpys_blas_is_left_one_thread() -> None:
    from threadpoolctl import threadpool_info

    blas.choose("numpy")
    assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} <= {1}


def test_rows_keep_their_bits_through_a_layer_of_minilms_size(tmp_path_factory: pytest.TempPathFactory, side: Side) -> None:
    """Alone, in a pack of 512 and of 1,300 rows, and with two threads at work on different packs."""
    from inference.families import bert

    if side.name != "host":
        pytest.skip("mlx promises 1e-5, not bits")
    config = bert.Config(vocab_size=50, hidden_size=384, num_hidden_layers=1, num_attention_heads=12, intermediate_size=1536,
                         max_position_embeddings=512)
    folder, tensors = tmp_path_factory.mktemp("minilm"), {}

    shapes = {"embeddings.word_embeddings.weight": (50, 384), "embeddings.position_embeddings.weight": (512, 384),
              "embeddings.token_type_embeddings.weight": (2, 384)}
    layer = "encoder.layer.0."
    square = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    dense = dict.fromkeys(square, (384, 384)) | {"intermediate.dense": (1536, 384), "output.dense": (384, 1536)}
    for name, (rows, width) in dense.items():
        shapes |= {f"{layer}{name}.weight": (rows, width), f"{layer}{name}.bias": (rows,)}
    for name in ("embeddings.", f"{layer}attention.output.", f"{layer}output."):
        shapes |= {f"{name}LayerNorm.weight": (384,), f"{name}LayerNorm.bias": (384,)}
    for seed, (name, shape) in enumerate(shapes.items()):
        tensors[name] = normal(*shape, seed=seed) * F32(0.2)
    save_file(tensors, folder / "model.safetensors")
    model = bert.Model(Weights.open(folder, ops.backend("host")), config)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 50, n).tolist() for n in (1, 2, 3, 7, 19, 40, 64, 128, 250, 512)]
    alone = [model(Batch.of([text])) for text in texts]
    packs = [[5, 1, 7, 0, 8], [9], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 8], [2, 3, 4], [6, 6, 6]]
    wrong: list[tuple[int, int]] = []

    def run(mine: list[int]) -> None:
        for p in mine:
            batch = Batch.of([texts[i] for i in packs[p]])
            hidden = model(batch)
            wrong.extend((p, b) for b, i in enumerate(packs[p]) if not np.array_equal(hidden[batch.segments.rows(b)], alone[i]))

    run([0, 1, 2, 3, 4])
    threads = [threading.Thread(target=run, args=(mine,)) for mine in ([0, 2, 4, 1], [1, 3, 2, 0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_blocks_of_rows_leave_pointwise_results_alone() -> None:
    """A block's edge, a view with strides and a single row give the bits of the whole."""
    x = normal(2 * pointwise.BLOCK // 96 + 5, 192)
    norms = (module.LayerNorm(normal(192), normal(192), 1e-6) for module in (host, pointwise))
    plain = (pointwise.gelu, pointwise.gelu_tanh, pointwise.silu)
    for function in (ops.gelu, ops.gelu_tanh, ops.silu, ops.relu, ops.tanh, *norms, *plain):
        whole = function(x)
        for rows in (slice(0, 1), slice(3, 90), slice(80, 200), slice(len(x) - 1, None)):
            np.testing.assert_array_equal(function(x[rows]), whole[rows])
    half = ops.split(x, 2)[1]
    np.testing.assert_array_equal(ops.gelu(half), ops.gelu(half.copy()))
