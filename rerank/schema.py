"""What the OpenAPI document says of these routes; see embeddings/schema.py."""
from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiExample, extend_schema

STRING, INTEGER, NUMBER = ({"type": kind} for kind in ("string", "integer", "number"))
FLAG = {"type": "boolean", "default": False}
TEXT = {"type": "object", "properties": {"text": STRING}, "required": ["text"]}
ITEM: dict[str, Any] = {"oneOf": [{**STRING, "minLength": 1}, TEXT]}
ITEMS = {"type": "array", "items": ITEM, "minItems": 1}
_FIELDS: dict[str, dict[str, Any]] = {
    "model": {**STRING, "description": "A served reranker: its id, its full repository id or an alias. The first one when absent."},
    "top_n": {**INTEGER, "minimum": 1, "description": "Return the best n only; more than there are is fine. Also `top_k`."},
    "return_documents": {**FLAG, "description": "Send each document back as it was sent. Also `return_text`."},
    "raw_scores": {**FLAG, "description": "Logits instead of probabilities."},
    "instruction": {**STRING, "description": "What makes a document relevant; for generative rerankers, an error for others."},
}
OPTIONS: dict[str, Any] = {     # null is the same as absent
    **{name: {**field, "type": [field["type"], "null"]} for name, field in _FIELDS.items()}, "user": {"description": "Ignored."}}
ABOUT = "Unknown fields are ignored, unless the server runs with MLXCEL_STRICT_FIELDS=1."

SCHEMAS: dict[str, Any] = {
    "RerankRequest": {"type": "object", "properties": {"query": ITEM, "documents": ITEMS, **OPTIONS}, "required": ["query", "documents"],
                      "description": ABOUT},
    "RerankTextsRequest": {"type": "object", "properties": {"query": ITEM, "texts": ITEMS, **OPTIONS}, "required": ["query", "texts"],
                           "description": f"The form of text-embeddings-inference. {ABOUT}"},
    "RerankResponse": {
        "type": "object", "required": ["id", "object", "model", "results", "usage", "meta"],
        "properties": {
            "id": STRING, "object": {**STRING, "const": "list"}, "model": STRING,
            "results": {"type": "array", "description": "Best first; equal scores in the order of the request.", "items": {
                "type": "object", "required": ["index", "relevance_score"],
                "properties": {
                    "index": {**INTEGER, "description": "Of the document in the request, counted from 0."},
                    "relevance_score": {**NUMBER, "description": "A probability, or a logit with `raw_scores`."},
                    "document": {**ITEM, "description": "With `return_documents` only."}}}},
            "data": {"type": "array", "items": {"type": "object"}, "description": "`results` once more, where the request had `top_k`."},
            "usage": {"$ref": "#/components/schemas/Usage"},
            "meta": {"type": "object", "properties": {}, "additionalProperties": True, "description": "For Cohere's clients."}}},
    "RerankTextsResponse": {"type": "array", "items": {
        "type": "object", "required": ["index", "score"], "properties": {"index": INTEGER, "score": NUMBER, "text": ITEM}}},
}


def _ref(*names: str) -> dict[str, Any]:
    return {"oneOf": [{"$ref": f"#/components/schemas/{name}"} for name in names]}


QUERY = "What is the capital of China?"
DOCUMENTS = ["The capital of China is Beijing.", "Gravity is a force that attracts two bodies towards each other.", "Berlin is in Germany."]

create_rerank = extend_schema(
    operation_id="createRerank", summary="Score documents against a query", tags=["Reranking"],
    description="Also at `/rerank`, `/v1/reranking` and `/reranking`. The body decides the form of the answer: an object for `documents`, "
                "an array for `texts`.",
    request={"application/json": _ref("RerankRequest", "RerankTextsRequest")},
    responses={200: _ref("RerankResponse", "RerankTextsResponse")}, extensions={"x-errors": [501, 503, 504]},
    examples=[
        OpenApiExample("The two best documents", request_only=True, value={
            "query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}),
        OpenApiExample("As text-embeddings-inference has it", request_only=True, value={"query": QUERY, "texts": DOCUMENTS}),
        OpenApiExample("The two best documents", response_only=True, value={
            "id": "rerank-6f1c", "object": "list", "model": "ms-marco-MiniLM-L6-v2",
            "results": [{"index": 0, "relevance_score": 0.9999217, "document": DOCUMENTS[0]},
                        {"index": 2, "relevance_score": 3.35e-05, "document": DOCUMENTS[2]}],
            "usage": {"prompt_tokens": 56, "total_tokens": 56},
            "meta": {"api_version": {"version": "1"}, "billed_units": {"search_units": 1}}}),
    ])
