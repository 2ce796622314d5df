"""Vectors of two spaces never meet: everything that changes a vector changes the fingerprint, and a difference is told by name."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from embeddings import corpus, spaces
from embeddings.models import VectorSpace
from inference.errors import Conflict, InvalidRequest
from inference.wire import ModelSpec
from tests import stored
from tests.fakes import SPEC, FakeClient

pytestmark = pytest.mark.django_db

CHANGES = {
    "model_id": replace(SPEC, id="other"), "weights_hash": replace(SPEC, weights_hash="1" * 64), "pooling": replace(SPEC, pooling="cls"),
    "normalize": replace(SPEC, normalize=-1.0), "dims": replace(SPEC, dims=9), "max_length": replace(SPEC, max_length=33),
    "multi_vector": replace(SPEC, multi_vector=True),
}


def test_the_fingerprint_is_a_fixed_function_of_its_fields() -> None:
    """Written out once with hashlib and json: a change of the form would make every stored collection unreadable."""
    import hashlib
    text = ('{"dims":8,"document_prompt":"passage: ","max_length":32,"model_id":"fake-8","multi_vector":false,"normalize":2.0,'
            '"pooling":"mean","weights_hash":"' + "0" * 64 + '"}')
    assert spaces.space_for(SPEC, prompt="passage: ").fingerprint == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("field", CHANGES)
def test_whatever_changes_vectors_changes_the_fingerprint(field: str) -> None:
    assert spaces.space_for(CHANGES[field]).fingerprint != spaces.space_for(SPEC).fingerprint


@pytest.mark.parametrize("spec", [replace(SPEC, backend="mlx"), replace(SPEC, precision="bf16"), replace(SPEC, revision="abc"),
                                  replace(SPEC, prompts={}), replace(SPEC, normalize=2)])
def test_whatever_does_not_change_them_does_not(spec: ModelSpec) -> None:
    assert spaces.space_for(spec).fingerprint == spaces.space_for(SPEC).fingerprint


def test_a_saved_space_keeps_its_fingerprint() -> None:
    saved = VectorSpace.objects.get(pk=stored.collection(normalize=1.5, prompt="ä \U0001f600 ").space_id)
    assert spaces.fingerprint(saved) == saved.fingerprint


@pytest.mark.parametrize("dims", [0, -1, 9])
def test_dimensions_outside_the_models_width_are_refused(dims: int) -> None:
    with pytest.raises(InvalidRequest, match=f"8 dimensions; expected 1 to 8, found {dims}"):
        spaces.space_for(SPEC, dims)


@pytest.mark.parametrize("field", CHANGES)
def test_a_difference_names_both_sides(field: str) -> None:
    held = stored.collection()
    with pytest.raises(Conflict) as raised:
        spaces.check(held, spaces.space_for(CHANGES[field]))
    assert field in str(raised.value) and held.space.fingerprint[:12] in str(raised.value) and "'tests'" in str(raised.value)


def test_a_collection_of_fewer_dimensions_is_served_by_the_same_model() -> None:
    held = corpus.create("half", spaces.space_for(SPEC, 4))
    assert spaces.served(held, FakeClient()) == SPEC


def test_a_model_that_is_not_served_is_a_conflict_that_says_how_to_serve_it() -> None:
    held = stored.collection(model_source="tests/fake-8")
    with pytest.raises(Conflict, match=r"fake-8, which is not served.*manage.py serve --model tests/fake-8"):
        spaces.served(held, FakeClient().without_model())


def test_the_same_name_over_other_weights_is_a_conflict() -> None:
    held = stored.collection()
    with pytest.raises(Conflict, match="weights_hash"):
        spaces.served(held, FakeClient(spec=replace(SPEC, weights_hash="f" * 64)))


@pytest.mark.parametrize("vector", [np.ones(7, np.float32), np.ones((2, 8), np.float32)])
def test_a_vector_of_another_shape_is_never_stored(vector: np.ndarray) -> None:
    held = stored.collection()
    with pytest.raises(Conflict, match="single vectors of 8 dimensions"):
        corpus.upsert(held, [stored.document("good", np.ones(8, np.float32)), stored.document("bad", vector)])
    assert not held.documents.exists()
