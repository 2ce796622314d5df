"""Models, health and the two pages for people."""
from __future__ import annotations

import time
from typing import Any

from django.conf import settings
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from embeddings.models import Collection
from inference.client import InferenceClient, get_client
from inference.config import Settings
from inference.errors import NotFound, NotLoaded, ServiceError
from inference.wire import ModelSpec

from . import schema
from .errors import Unavailable

STARTED = int(time.time())
ROUTES = {
    "POST": ["/v1/embeddings", "/embedding", "/v1/rerank", "/collections/{name}/search"],
    "GET": ["/", "/v1", "/v1/models", "/v1/models/{model}", "/props", "/collections", "/collections/{name}", "/jobs", "/jobs/{job}",
            "/health", "/health/ready", "/metrics", "/docs", "/openapi.json"]}
NOT_READY = {
    "loading": "Loading model", "failed": "A configured model failed to load; the log says why",
    "stale": "A model's worker is gone, or makes no progress", "unserved": "No model worker has registered yet"}


def describe(model: ModelSpec) -> dict[str, Any]:
    """OpenAI's model object; what it does not know is in `meta`, under llama-server's names where it has one (`n_ctx`, `size`, ...)."""
    capabilities = {"embedding": model.kind == "embedding", "rerank": model.kind == "reranker", "images": model.images,
                    "multi_vector": model.multi_vector, "instructions": model.instructions}
    return {
        "id": model.id, "object": "model", "created": STARTED, "owned_by": "mlxcel", "aliases": list(model.aliases),
        "tags": [], "capabilities": [name for name, has in capabilities.items() if has], "state": model.state,
        "meta": {
            "family": model.family, "dims": model.dims, "max_length": model.max_length, "vocab_size": model.vocab_size,
            "pooling": model.pooling, "normalize": model.normalize, "multi_vector": model.multi_vector, "prompts": dict(model.prompts),
            "backend": model.backend, "precision": model.precision, "parameters": model.parameters, "size": model.bytes,
            "revision": model.revision, **({"scoring": model.scoring} if model.scoring else {}),
            "n_ctx": model.max_length, "n_embd": model.dims, "n_vocab": model.vocab_size, "n_params": model.parameters,
            "ftype": model.precision}}


def _ollama(model: ModelSpec) -> dict[str, Any]:
    """The entry of Ollama's list, which llama-server puts beside OpenAI's."""
    described = describe(model)
    return {"name": model.id, "model": model.id, "modified_at": "", "size": model.bytes, "digest": model.weights_hash, "type": "model",
            "description": "", "tags": [], "capabilities": described["capabilities"], "parameters": "",
            "details": {"parent_model": "", "format": "safetensors", "family": model.family, "families": [model.family],
                        "parameter_size": str(model.parameters), "quantization_level": model.precision}}


def capabilities(client: InferenceClient, mode: str) -> dict[str, Any]:
    """llama-server's `capabilities` of /props: of each kind the model that answers where a request names none; absent where none does."""
    served = client.models()
    embedder = next((model for model in served if model.kind == "embedding"), None)
    reranker = next((model for model in served if model.kind == "reranker"), None)
    found: dict[str, Any] = {"generation": False}
    if mode:
        found["serving_mode"] = f"--{mode}"
    if embedder:
        found["embedding"] = {"model": embedder.id, "dim": embedder.dims, "pooling": embedder.pooling,
                              "embd_normalize": int(embedder.normalize) if embedder.normalize.is_integer() else embedder.normalize,
                              "multi_vector": embedder.multi_vector}
    if reranker:
        found["reranking"] = {"model": reranker.id, "kind": reranker.scoring}
    return found


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
        served = get_client().models()
        return Response({"models": [_ollama(model) for model in served], "object": "list", "data": [describe(model) for model in served]})


class OneModel(APIView):
    @schema.retrieve_model
    def get(self, request: Request, model: str) -> Response:
        return Response(describe(find_model(get_client(), model)))


class Props(APIView):
    @schema.props
    def get(self, request: Request) -> Response:
        if not settings.PROPS:
            raise NotLoaded("This server does not show its properties. Start it with `manage.py serve --props`, or set MLXCEL_PROPS=1")
        return Response({"capabilities": capabilities(get_client(), Settings.from_env().mode)})


class Health(APIView):
    @schema.health
    def get(self, request: Request) -> Response:
        return Response({"status": "ok"})


class Ready(APIView):
    @schema.ready
    def get(self, request: Request) -> Response:
        health = get_client().health()
        if (status := health["status"]) != "ok":
            known = request.META.get("mlxcel.admitted", True)      # who shows no key is told a status and nothing of models
            raise Unavailable((known and health.get("error")) or NOT_READY.get(status, str(status)))
        return Response({"status": "ok"})


class Base(APIView):
    """The base URL of OpenAI's clients, as a person opens it."""

    def get(self, request: Request) -> Response:
        return Response({
            "name": "mlxcel", "docs": request.build_absolute_uri(reverse("docs")), "openapi": request.build_absolute_uri(reverse("schema")),
            "routes": ROUTES})


@csrf_exempt
@require_safe
def home(request: HttpRequest) -> HttpResponse:
    """What is here. Collections are shown to whoever may use the API without a key, or is logged in to the admin."""
    keyed = bool(settings.API_KEYS or settings.API_KEY_FILE)
    collections = Collection.objects.select_related("space").annotate(document_count=Count("documents")).order_by("name")
    return render(request, "mlxcel_site/home.html", {
        **_models(), "keyed": keyed, "origin": request.build_absolute_uri(reverse("home")).rstrip("/"),
        "collections": None if keyed and not request.user.is_staff else collections})


def _models() -> dict[str, Any]:
    """The served models, or why there are none: this page is where a person looks when something is wrong."""
    try:
        return {"models": get_client().models()}
    except ServiceError as error:
        return {"problem": str(error)}
