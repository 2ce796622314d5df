"""What travels between processes comes out as it went in, whatever is in it."""
from __future__ import annotations

from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from inference import errors
from inference.errors import InferenceFailed, InvalidRequest, ServiceError, UnsupportedCapability
from inference.messages import pack_error, pack_job, pack_result, pack_spec, unpack_job, unpack_reply, unpack_spec
from inference.wire import EmbedJob, EmbedResult, ModelSpec, RerankJob, RerankResult, Span, SplitJob
from tests.fakes import SPEC

texts = st.text(st.characters(codec=None), max_size=30)      # lone surrogates too
names = st.none() | texts
lanes = st.sampled_from(["interactive", "bulk"])
counts = st.integers(0, 2**31 - 1)
seconds = st.none() | st.floats(0, 1e6)
items = texts | st.lists(st.integers(-2**63, 2**63 - 1), max_size=8).map(tuple)
indices = st.lists(counts, max_size=5).map(tuple)


def many(strategy):
    return st.lists(strategy, max_size=5).map(tuple)


jobs = st.builds(
    EmbedJob, many(items), model=names, dimensions=st.none() | counts, instruction=names, normalize=st.none() | st.floats(-1, 9),
    truncate=st.booleans(), lane=lanes, timeout=seconds, partial=st.booleans()) | st.builds(
    RerankJob, texts, many(texts), model=names, instruction=names, raw_scores=st.booleans(), lane=lanes, timeout=seconds) | st.builds(
    SplitJob, many(texts), counts, counts, texts, names, lanes, seconds)
floats = arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=6))
integers = arrays.arrays(np.int32, arrays.array_shapes(min_dims=1, max_dims=1, min_side=0, max_side=6))
results = st.builds(
    EmbedResult, texts, floats, integers, integers, st.booleans(), indices, st.dictionaries(counts, texts, max_size=3),
    st.dictionaries(texts, st.floats(0, 9), max_size=4)) | st.builds(
    RerankResult, texts, arrays.arrays(np.float32, st.integers(0, 6)), integers, indices)
specs = st.builds(ModelSpec, aliases=many(texts), prompts=st.dictionaries(texts, texts, max_size=3), normalize=st.floats(-1, 9), **{
    f.name: {"str": texts, "int": counts, "bool": st.booleans()}[str(f.type)] for f in fields(ModelSpec)
    if str(f.type) in ("str", "int", "bool")})


@given(jobs)
def test_jobs(job):
    assert unpack_job(pack_job(job)) == job


@given(results)
def test_results_to_the_last_bit(result):
    found = unpack_reply(pack_result(result))
    assert type(found) is type(result)
    for f in fields(result):
        there, here = getattr(found, f.name), getattr(result, f.name)
        if isinstance(here, np.ndarray):
            assert (there.dtype, there.shape, there.tobytes()) == (here.dtype, here.shape, here.tobytes())
        else:
            assert there == here and type(there) is type(here)


@given(st.lists(st.lists(st.builds(Span, counts, counts, counts), max_size=4), max_size=4))
def test_spans(spans):
    assert unpack_reply(pack_result(spans)) == spans


@given(specs)
def test_descriptions(spec):
    assert unpack_spec(pack_spec(spec)) == spec


def everything(kind=ServiceError):
    return [kind, *(found for below in kind.__subclasses__() if below.__module__ == errors.__name__ for found in everything(below))]


@pytest.mark.parametrize("kind", everything())
def test_errors_keep_their_kind(kind):
    with pytest.raises(kind) as raised:
        unpack_reply(pack_error(kind("what \ud800 happened", param="input", code="c")))
    error = raised.value
    assert type(error) is kind and (error.message, error.param, error.code) == ("what \ud800 happened", "input", "c")


def test_an_error_without_a_code_has_its_kind_s():
    with pytest.raises(UnsupportedCapability) as error:
        unpack_reply(pack_error(UnsupportedCapability("no images")))
    assert error.value.code == "unsupported_capability"


def test_an_error_of_a_kind_unknown_here_is_one_of_inference():
    with pytest.raises(InferenceFailed, match="new"):
        unpack_reply(msgpack.packb({"error": ("NotYetInvented", "new", None, None)}))


def test_vectors_are_raw_little_endian_floats():
    data = np.array([[1.5, -2.25]], ">f4")
    packed = pack_result(EmbedResult("m", data, np.ones(1, np.int32), np.ones(1, np.int32)))
    assert data.astype("<f4").tobytes() in packed
    counts = np.ones(64, np.int32)
    assert len(pack_result(EmbedResult("m", np.zeros((64, 384), np.float32), counts, counts))) < 64 * 384 * 4 + 700


def test_what_a_newer_version_asks_for_is_refused_and_what_it_adds_to_a_description_ignored():
    with pytest.raises(InvalidRequest, match="one version"):
        unpack_job(msgpack.packb({"op": "embed", "items": ["a"], "in_colour": True}))
    with pytest.raises(InvalidRequest, match="one version"):
        unpack_job(msgpack.packb({"op": "generate"}))
    assert unpack_spec(msgpack.packb(msgpack.unpackb(pack_spec(SPEC)) | {"in_colour": True})) == replace(SPEC, state="ready")


def test_a_token_id_that_no_format_holds_is_bad_input():
    with pytest.raises(InvalidRequest, match="64 bits"):
        pack_job(EmbedJob(((2**64,),)))
