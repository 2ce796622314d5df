"""Models, health and the two pages for people."""
from __future__ import annotations

import time
from typing import Any

from django.conf import settings
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from embeddings.models import Collection
from inference.client import InferenceClient, get_client
from inference.errors import NotFound, ServiceError
from inference.wire import ModelSpec

from . import schema
from .errors import Unavailable

STARTED = int(time.time())
NOT_READY = {"loading": "Loading model", "failed": "A configured model failed to load; the log says why"}


def describe(model: ModelSpec) -> dict[str, Any]:
    """OpenAI's model object; what it does not know is in `meta`."""
    capabilities = {"embedding": model.kind == "embedding", "rerank": model.kind == "reranker", "images": model.images,
                    "multi_vector": model.multi_vector, "instructions": model.instructions}
    return {
        "id": model.id, "object": "model", "created": STARTED, "owned_by": "mlxcel", "aliases": list(model.aliases),
        "capabilities": [name for name, has in capabilities.items() if has], "state": model.state,
        "meta": {
            "family": model.family, "dims": model.dims, "max_length": model.max_length, "vocab_size": model.vocab_size,
            "pooling": model.pooling, "normalize": model.normalize, "multi_vector": model.multi_vector, "prompts": dict(model.prompts),
            "backend": model.backend, "precision": model.precision, "parameters": model.parameters, "size": model.bytes,
            "revision": model.revision, **({"scoring": model.scoring} if model.scoring else {})}}


def find_model(client: InferenceClient, name: str) -> ModelSpec:
    """The served model that answers to `name`. Raises NotFound (404)."""
    served = client.models()
    if found := [model for model in served if model.answers_to(name)]:
        return found[0]
    listed = ", ".join(f"`{model.id}`" for model in served) or "none"
    raise NotFound(f"model `{name[:80]}` is not served here; served: {listed}", param="model", code="model_not_found")


class Models(APIView):
    @schema.list_models
    def get(self, request: Request) -> Response:
        return Response({"object": "list", "data": [describe(model) for model in get_client().models()]})


class OneModel(APIView):
    @schema.retrieve_model
    def get(self, request: Request, model: str) -> Response:
        return Response(describe(find_model(get_client(), model)))


class Health(APIView):
    @schema.health
    def get(self, request: Request) -> Response:
        return Response({"status": "ok"})


class Ready(APIView):
    @schema.ready
    def get(self, request: Request) -> Response:
        status = get_client().health()["status"]
        if status != "ok":
            raise Unavailable(NOT_READY.get(status, str(status)))
        return Response({"status": "ok"})


def home(request: HttpRequest) -> HttpResponse:
    """What is here. Collections are shown to whoever may use the API without a key, or is logged in to the admin."""
    keyed = bool(settings.API_KEYS or settings.API_KEY_FILE)
    collections = Collection.objects.select_related("space").annotate(document_count=Count("documents")).order_by("name")
    return render(request, "mlxcel_site/home.html", {
        **_models(), "keyed": keyed, "origin": request.build_absolute_uri("/").rstrip("/"),
        "collections": None if keyed and not request.user.is_staff else collections})


def _models() -> dict[str, Any]:
    """The served models, or why there are none: this page is where a person looks when something is wrong."""
    try:
        return {"models": get_client().models()}
    except ServiceError as error:
        return {"problem": str(error)}
