"""Which vectors may be compared: the fingerprint of a vector space, made from a model and how it is used."""
from __future__ import annotations

import hashlib
import json

from inference.client import InferenceClient
from inference.config import how_to_serve
from inference.errors import Conflict, InvalidRequest
from inference.wire import ModelSpec

from .models import Collection, VectorSpace

FIELDS = ("model_id", "weights_hash", "pooling", "normalize", "dims", "document_prompt", "max_length", "multi_vector")
"""What the fingerprint covers. Backend and precision are left out: they change a vector by rounding only."""


def fingerprint(space: VectorSpace) -> str:
    """sha256, hex, over the canonical JSON of FIELDS: sorted keys, no spaces, ASCII."""
    values = {name: getattr(space, name) for name in FIELDS} | {"normalize": float(space.normalize)}
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def space_for(spec: ModelSpec, dims: int | None = None, prompt: str = "") -> VectorSpace:
    """The space `spec` gives with the first `dims` components (None: all) and `prompt` before every document. Not saved."""
    dims = spec.dims if dims is None else dims
    if not 1 <= dims <= spec.dims:
        raise InvalidRequest(f"{spec.id} gives {spec.dims} dimensions; expected 1 to {spec.dims}, found {dims}", param="dimensions")
    space = VectorSpace(
        model_id=spec.id, weights_hash=spec.weights_hash, pooling=spec.pooling, normalize=spec.normalize, dims=dims,
        document_prompt=prompt, max_length=spec.max_length, multi_vector=spec.multi_vector, revision=spec.revision)
    space.fingerprint = fingerprint(space)
    return space


def check(collection: Collection, offered: VectorSpace) -> None:
    """Raises Conflict, naming both sides of whatever differs, unless `offered` is the space of the collection."""
    held = collection.space
    if held.fingerprint == offered.fingerprint:
        return
    differences = [f"{name} {_short(getattr(held, name))} is not {_short(getattr(offered, name))}"
                   for name in FIELDS if getattr(held, name) != getattr(offered, name)]
    raise Conflict(
        f"Collection {collection.name!r} holds vectors of {held.model_id} ({held.fingerprint[:12]}); what is asked for or served gives "
        f"{offered.model_id} ({offered.fingerprint[:12]}): {'; '.join(differences)}. Vectors of the two cannot be compared.",
        code="fingerprint_mismatch")


def served(collection: Collection, client: InferenceClient) -> ModelSpec:
    """The served model whose vectors belong into the collection. Raises Conflict where it is not served or is not the same any more."""
    space = collection.space
    spec = client.describe("embedding", space.model_id)
    if spec is None:
        source = collection.model_source or space.model_id
        raise Conflict(
            f"Collection {collection.name!r} holds vectors of {space.model_id}, which is not served here. {how_to_serve(source)}",
            code="model_not_served")
    dims = space.dims if space.dims <= spec.dims else spec.dims
    check(collection, space_for(spec, dims, space.document_prompt))
    return spec


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:36] + "...'"
