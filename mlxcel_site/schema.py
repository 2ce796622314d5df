"""The OpenAPI document: what drf-spectacular finds, completed by the named components and the one error body."""
from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema

from embeddings.schema import SCHEMAS as EMBEDDINGS
from rerank.schema import SCHEMAS as RERANK

STATUS = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}
MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"}, "object": {"type": "string", "const": "model"}, "created": {"type": "integer"},
        "owned_by": {"type": "string", "const": "mlxcel"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "aliases": {"type": "array", "items": {"type": "string"}, "description": "Other names it answers to."},
        "capabilities": {"type": "array", "items": {
            "type": "string", "enum": ["embedding", "rerank", "images", "multi_vector", "instructions"]}},
        "state": {"type": "string", "enum": ["cold", "loading", "ready", "failed", "stale"]},
        "meta": {"type": "object", "additionalProperties": True,
                 "description": "family, dims, max_length, vocab_size, pooling, normalize, multi_vector, prompts, backend, precision, "
                                "parameters, size (bytes), revision, scoring (of a reranker), and llama-server's names for some of "
                                "them: n_ctx, n_embd, n_vocab, n_params, ftype"},
    }}
OLLAMA = {
    "type": "object", "required": ["name", "model"], "additionalProperties": True, "description": "As Ollama lists models.",
    "properties": {"name": {"type": "string"}, "model": {"type": "string"}}}
PROPS = {
    "type": "object", "required": ["capabilities"], "properties": {"capabilities": {
        "type": "object", "required": ["generation"], "description": "A kind of which nothing is served is absent.", "properties": {
            "generation": {"type": "boolean"}, "serving_mode": {"type": "string", "enum": ["--embeddings", "--reranking"]},
            "embedding": {"type": "object", "required": ["model", "dim", "pooling", "embd_normalize", "multi_vector"], "properties": {
                "model": {"type": "string"}, "dim": {"type": "integer"}, "pooling": {"type": "string"},
                "embd_normalize": {"type": "number"}, "multi_vector": {"type": "boolean"}}},
            "reranking": {"type": "object", "required": ["model", "kind"], "properties": {
                "model": {"type": "string"}, "kind": {"type": "string"}}}}}}}
MODELS = {"type": "object", "required": ["object", "data"],
          "properties": {"models": {"type": "array", "items": OLLAMA}, "object": {"type": "string", "const": "list"},
                         "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}}
ERROR = {
    "type": "object", "required": ["error", "detail"],
    "properties": {
        "error": {
            "type": "object", "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": ["string", "integer", "null"]}}},
        "detail": {"type": "string", "description": "The message once more."}}}

ERRORS: dict[int, tuple[str, str, str]] = {
    400: ("BadRequest", "The request cannot be understood.", "`dimensions` must be between 1 and 384 for this model, got 1000"),
    401: ("Unauthorized", "No API key, or one the server does not know.", "Invalid API Key"),
    404: ("NotFound", "No such thing.", "there is no collection `books`"),
    408: ("BodyTimeout", "The body did not arrive in time.", "only 16 bytes of the 2000 announced by Content-Length came within 10 s"),
    409: ("Conflict", "The collection's model is not served.", "the model of this collection is not served"),
    413: ("TooLarge", "The body is over 64 MiB.", "Request body too large."),
    415: ("UnsupportedEncoding", "The body is compressed.",
          "Content-Encoding `gzip` is not accepted; send the body as it is, without compression"),
    500: ("ServerError", "Something failed inside.", "internal server error; the log has it under the id in x-request-id"),
    501: ("NotImplemented", "No model of this kind is served. Not worth a retry.", "This server does not support embeddings."),
    503: ("Busy", "Too many requests are waiting, or the model is loading. `Retry-After` says when to come back.",
          "All slots are busy. Please try again later."),
    504: ("TimedOut", "The request took too long. Not worth a retry.", "Embedding request timed out. Please try again later."),
}
TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 500: "server_error", 501: "not_implemented",
         503: "server_busy", 504: "server_timeout"}      # else invalid_request_error
OF_BODIES = (400, 408, 413, 415)
HEADERS = {
    503: {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
    501: {"x-should-retry": {"schema": {"type": "string", "const": "false"}}},
    504: {"x-should-retry": {"schema": {"type": "string", "const": "false"}}},
}

list_models = extend_schema(operation_id="listModels", summary="List the served models", tags=["Models"],
                            responses={200: {"$ref": "#/components/schemas/ModelList"}})
props = extend_schema(
    operation_id="props", summary="What this server can do", tags=["Models"], responses={200: {"$ref": "#/components/schemas/Props"}},
    description="Where the server runs with MLXCEL_PROPS=1; else 501.", extensions={"x-errors": [501]})
retrieve_model = extend_schema(operation_id="retrieveModel", summary="One served model", tags=["Models"],
                               responses={200: {"$ref": "#/components/schemas/Model"}}, extensions={"x-errors": [404]})
health = extend_schema(operation_id="health", summary="Whether the process answers", tags=["Health"], auth=[],
                       responses={200: {"$ref": "#/components/schemas/Status"}})
ready = extend_schema(operation_id="ready", summary="Whether every configured model can be used", tags=["Health"], auth=[],
                      responses={200: {"$ref": "#/components/schemas/Status"}}, extensions={"x-errors": [503]})


def _error_response(status: int) -> dict[str, Any]:
    _, description, message = ERRORS[status]
    error = {"message": message, "type": TYPES.get(status, "invalid_request_error"), "param": "dimensions" if status == 400 else None,
             "code": 401 if status == 401 else None}
    example = {"error": error, "detail": message}
    return {"description": description, "headers": HEADERS.get(status, {}),
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}, "example": example}}}


def complete(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """Drf-spectacular's hook: adds components, and to each operation the errors its `x-errors` lists, those of bodies where it takes one,
    401 where it wants a key, and 500. No operation that exists answers 405."""
    components = result["components"]
    components.setdefault("schemas", {}).update({
        **EMBEDDINGS, **RERANK, "Model": MODEL, "Props": PROPS, "ModelList": MODELS, "Status": STATUS, "Error": ERROR})
    components["responses"] = {ERRORS[status][0]: _error_response(status) for status in sorted(ERRORS)}
    for path in result["paths"].values():
        for operation in path.values():
            body = operation.get("requestBody", {})
            if body:
                body["required"] = True
            keyed = any(operation.get("security", ()))
            statuses = {*operation.pop("x-errors", ()), 500, *(OF_BODIES if body else ()), *([401] if keyed else ())}
            for status in sorted(statuses):
                operation["responses"][str(status)] = {"$ref": f"#/components/responses/{ERRORS[status][0]}"}
    return result
