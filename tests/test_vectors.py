"""Vectors go through bytes unchanged, and nothing that is not a vector goes in or comes out."""
from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from embeddings import vectors

SHAPES = arrays.array_shapes(min_dims=1, max_dims=2, max_side=40)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(arrays.arrays(np.float32, SHAPES, elements=FLOATS))
def test_single_precision_survives_bit_for_bit(array: np.ndarray) -> None:
    stored = vectors.encode(array)
    decoded = vectors.decode(stored.data, stored.rows, stored.dims, stored.dtype)
    assert decoded.tobytes() == np.atleast_2d(array).tobytes() and decoded.shape == np.atleast_2d(array).shape


@given(arrays.arrays(np.float16, SHAPES, elements=st.floats(width=16, allow_nan=False, allow_infinity=False)), st.booleans())
def test_half_precision_and_strided_input_survive(array: np.ndarray, flipped: bool) -> None:
    array = np.atleast_2d(array)
    array = array[:, ::-1] if flipped else array.T
    stored = vectors.encode(array, vectors.MULTI)
    assert np.array_equal(vectors.decode(stored.data, stored.rows, stored.dims, stored.dtype), array)


@given(st.lists(SHAPES.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=FLOATS)), max_size=5),
       st.sampled_from(vectors.DTYPES), st.booleans())
def test_many_are_encoded_as_each_is(several: list[np.ndarray], dtype: str, alike: bool) -> None:
    several = [np.atleast_2d(array)[:, :1] for array in several] if alike else several
    try:
        each = [vectors.encode(array, dtype) for array in several]
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            vectors.encode_many(several, dtype)
    else:
        assert vectors.encode_many(several, dtype) == each


@pytest.mark.parametrize("wrong", [np.zeros((0, 3)), np.zeros((1, 2, 3)), np.array([[1, np.inf, 1]])])
def test_of_many_one_that_is_none_is_refused(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"shape|not finite"):
        vectors.encode_many([np.ones((1, 3)), wrong])


def test_the_decoder_of_the_docs() -> None:
    stored = vectors.encode(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert np.frombuffer(stored.data, stored.dtype).reshape(stored.rows, stored.dims).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_bytes_are_little_endian_whatever_the_machine_or_the_array() -> None:
    assert vectors.encode(np.array([1.0], ">f4")).data == b"\x00\x00\x80\x3f" and sys.byteorder in ("little", "big")


@pytest.mark.parametrize("array", [np.zeros((0, 3)), np.zeros((2, 0)), np.zeros((1, 2, 3)), np.zeros(0)])
def test_other_shapes_are_refused(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="shape"):
        vectors.encode(array)


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "<f4"), (np.inf, "<f4"), (1e39, "<f4"), (1e5, "<f2")])
def test_numbers_that_are_not_finite_once_stored_are_refused(value: float, dtype: str) -> None:
    with pytest.raises(ValueError, match="not finite"):
        vectors.encode(np.array([1.0, value]), dtype)


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "float32", "|O"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="stored as <f4 or <f2"):
        vectors.encode(np.zeros(3), dtype)
    with pytest.raises(ValueError, match="stored as <f4 or <f2"):
        vectors.decode(b"\0" * 12, 1, 3, dtype)


@pytest.mark.parametrize(("rows", "dims"), [(1, 2), (2, 2), (0, 3), (-1, -3), (3, 1 << 40)])
def test_sizes_that_do_not_agree_are_refused(rows: int, dims: int) -> None:
    with pytest.raises(ValueError, match="take"):
        vectors.decode(b"\0" * 12, rows, dims, "<f4")


def test_decoded_vectors_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        vectors.decode(bytearray(12), 1, 3, "<f4")[0, 0] = 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.booleans())
def test_many_vectors_decode_as_one_by_one(counts: list[int], mixed: bool) -> None:
    rng = np.random.default_rng(0)
    matrices = [rng.standard_normal((n, 4)).astype(np.float16).astype(np.float32) for n in counts]
    stored = [vectors.encode(m, vectors.MULTI if mixed and i % 2 else vectors.SINGLE) for i, m in enumerate(matrices)]
    together = vectors.decode_many([s.data for s in stored], np.array(counts, np.int64), 4, [s.dtype for s in stored], vectors.SINGLE)
    assert together.dtype == "<f4" and np.array_equal(together, np.concatenate(matrices))
