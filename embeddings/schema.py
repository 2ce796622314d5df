"""What the OpenAPI document says of these routes. `SCHEMAS` are named components; `x-errors` lists the error statuses of an operation,
which the project fills in with the one error body."""
from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiExample, OpenApiParameter, extend_schema

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))


def _object(properties: dict[str, Any], required: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": required.split()} if required else {}), **more}


def _list(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _optional(fields: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fields for which null is the same as absent."""
    def nullable(field: dict[str, Any]) -> dict[str, Any]:
        kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
        return {**field, "type": [*kinds, "null"], **({"enum": [*field["enum"], None]} if "enum" in field else {})}

    return {name: nullable(field) for name, field in fields.items()}


TOKEN_IDS = _list({"type": "integer", "minimum": 0}, minItems=1)
FIELDS = _optional({
    "model": {**STRING, "description": "A served model: its id, its full repository id or an alias. The first one when absent."},
    "encoding_format": {"type": "string", "enum": ["float", "base64"], "default": "float",
                        "description": "base64: little-endian float32 bytes, bit for bit the numbers of `float`. "
                                       "Also accepted as `encoding_type` or `embedding_type`."},
    "dimensions": {**INTEGER, "minimum": 1,
                   "description": "Keep the first n components, then normalise again. Also `output_dimension`."},
    "instruction": {**STRING, "description": "For models that define a format for one. Others ignore it, and the answer's header "
                                              "`x-ignored-fields` says so."},
    "input_type": {**STRING, "description": "`query`, `document` or another prompt of the checkpoint: puts that prompt before each "
                                            "text. Ignored by checkpoints without prompts. Multi-vector models read `query` and "
                                            "`document` differently; absent, all texts are documents. Also `prompt_name` or `task`."},
    "multi_embedding": {**BOOLEAN, "default": False,
                        "description": "true: each item's `object` is `multi-embedding`; an error where the model is not a "
                                       "multi-vector one. Such a model gives its rows in any case."},
    "embd_normalize": {**INTEGER, "minimum": -1,
                       "description": "-1 none, 0 max-absolute int16, 1 taxicab, 2 euclidean, above 2 that p-norm. "
                                      "The checkpoint's own when absent. Also `normalize`: true or false."},
    "truncate": {**BOOLEAN, "default": True, "description": "false: an input over the model's limit is an error instead of being cut."},
}) | {"user": {"description": "Ignored."}}
UNKNOWN = "Unknown fields are ignored, unless the server runs with MLXCEL_STRICT_FIELDS=1."
USAGE = _object({
    "prompt_tokens": INTEGER, "total_tokens": INTEGER,
    "truncated_inputs": {**INTEGER, "description": "Inputs that were cut to the model's limit; absent when none was."},
}, "prompt_tokens total_tokens")

SCHEMAS: dict[str, Any] = {
    "Usage": USAGE,
    "TextPart": _object({"type": {**STRING, "const": "text"}, "text": STRING}, "type text"),
    "EmbeddingInput": {"description": "What to embed. Token ids are used as they are; no special tokens are added to them.", "oneOf": [
        {**STRING, "minLength": 1}, _list({**STRING, "minLength": 1}, minItems=1), TOKEN_IDS, _list(TOKEN_IDS, minItems=1),
        _list(_ref("TextPart"), minItems=1)]},
    "EmbeddingRequest": _object({"input": _ref("EmbeddingInput"), **FIELDS}, "input", description=UNKNOWN),
    "NativeEmbeddingRequest": _object({"content": _ref("EmbeddingInput"), **FIELDS}, "content",
                                      description=f"`input` is another name of `content`. {UNKNOWN}"),
    "NativeEmbeddingResponse": _list(_object({
        "index": INTEGER, "embedding": _list(_list(NUMBER), description="One row; one a token for multi-vector models.")},
        "index embedding")),
    "EmbeddingResponse": _object({
        "object": {**STRING, "const": "list"},
        "data": _list(_object({
            "object": {"type": "string", "enum": ["embedding", "multi-embedding"]}, "index": INTEGER,
            "embedding": {"oneOf": [_list(NUMBER), _list(_list(NUMBER)), STRING],
                          "description": "A list of rows for multi-vector models; a string with `encoding_format` base64."},
            "shape": _list(INTEGER, description="[rows, width], with base64 of a multi-vector model only.")}, "object index embedding")),
        "model": STRING, "usage": _ref("Usage")}, "object data model usage"),
    "Collection": _object({
        "id": {**STRING, "description": "The collection's name."}, "object": {**STRING, "const": "collection"},
        "created": INTEGER, "updated": INTEGER, "documents": INTEGER, "model": STRING, "dims": INTEGER, "pooling": STRING,
        "normalize": NUMBER, "max_length": INTEGER, "multi_vector": BOOLEAN,
        "fingerprint": {**STRING, "description": "Of everything that makes two vectors comparable."},
        "document_prompt": STRING, "query_prompt": STRING, "split_tokens": INTEGER, "split_overlap": INTEGER,
    }, "id object documents model dims"),
    "CollectionList": _object({"object": {**STRING, "const": "list"}, "data": _list(_ref("Collection"))}, "object data"),
    "SearchRequest": _object({
        "query": {**STRING, "minLength": 1},
        **_optional({
            "limit": {**INTEGER, "minimum": 1, "maximum": 1000, "default": 10, "description": "Documents to return at most."},
            "filter": _object({}, description="Only documents whose metadata fits: `{\"lang\": \"en\"}` equal, `[..]` any of, "
                                              "`{\"gte\": 1960, \"lt\": 1970}` between; also gt, lte, ne, in.", additionalProperties=True),
            "include_text": {**BOOLEAN, "default": False},
            "rerank": {"type": ["string", "boolean"],
                       "description": "A served reranker, `true` for the first: it judges the best documents once more, by their best "
                                      "passages."},
            "candidates": {**INTEGER, "minimum": 1, "maximum": 1000,
                           "description": "How many documents the reranker is given: at least `limit`, five times that when absent."},
        })}, "query"),
    "SearchResponse": _object({
        "object": {**STRING, "const": "list"}, "collection": STRING, "model": STRING,
        "reranker": {**STRING, "description": "Where one was asked."},
        "exact": {**BOOLEAN, "description": "Whether every document was compared."},
        "data": _list(_object({
            "id": {**STRING, "description": "The document's own id."},
            "score": {**NUMBER, "description": "Similarity of query and passage."},
            "rerank_score": {**NUMBER, "description": "Of the reranker, where one was asked; it decides the order."},
            "part": {**INTEGER, "description": "The passage that matched best, counted from 0."},
            "start": {**INTEGER, "description": "Its first character."}, "end": {**INTEGER, "description": "One past its last character."},
            "text": STRING, "metadata": _object({}, additionalProperties=True)}, "id score part start end metadata")),
        "usage": _ref("Usage")}, "object collection model exact data usage"),
    "Job": _object({
        "id": INTEGER, "object": {**STRING, "const": "job"}, "collection": STRING,
        "state": {"type": "string", "enum": ["running", "completed", "completed_with_errors", "failed", "cancelled"]},
        "sources": _list(STRING), "error": {"type": ["string", "null"], "description": "Why it stopped, or what it waits for."},
        "created_at": {**STRING, "format": "date-time"}, "finished_at": {"type": ["string", "null"], "format": "date-time"},
        "documents": _object(dict.fromkeys(
            ("read", "embedded", "unchanged", "relabelled", "blank", "failed", "truncated", "waiting"), INTEGER), "read embedded failed"),
        "passages": INTEGER, "tokens": INTEGER,
        "reading": {**BOOLEAN, "description": "The command still reads the sources; this and what follows with one job only."},
        "chunks": _object(dict.fromkeys(("pending", "running", "done"), INTEGER)),
        "failures": _list(_object({
            "id": {"type": ["string", "null"], "description": "The document's own id, where it could be read."},
            "position": {**STRING, "description": "`file:line`"}, "message": STRING}, "id position message"),
            description="The first hundred."),
    }, "id object collection state documents"),
    "JobList": _object({"object": {**STRING, "const": "list"}, "data": _list(_ref("Job"))}, "object data"),
}

NAME = OpenApiParameter("name", str, OpenApiParameter.PATH, description="Name of a collection.")


def _request(name: str, value: Any) -> OpenApiExample:
    return OpenApiExample(name, value=value, request_only=True)


def _response(name: str, value: Any) -> OpenApiExample:
    return OpenApiExample(name, value=value, response_only=True)


create_embeddings = extend_schema(
    operation_id="createEmbeddings", summary="Embed texts or token ids", tags=["Embeddings"],
    request={"application/json": _ref("EmbeddingRequest")}, responses={200: _ref("EmbeddingResponse")},
    extensions={"x-errors": [501, 503, 504]},
    examples=[
        _request("One text", {"input": "The weather is lovely today."}),
        _request("Several texts, cut to 64 dimensions", {
            "input": ["The weather is lovely today.", "He drove to the stadium."], "dimensions": 64}),
        _request("Token ids, as base64", {"input": [[101, 7592, 102]], "encoding_format": "base64"}),
        _response("One text", {
            "object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.0191, 0.1201, 0.1596]}],
            "model": "all-MiniLM-L6-v2", "usage": {"prompt_tokens": 8, "total_tokens": 8}}),
    ])
create_native_embeddings = extend_schema(
    operation_id="createNativeEmbeddings", summary="Embed, in llama-server's form", tags=["Embeddings"],
    description="The body of `/v1/embeddings`, where `content` is another name of `input`; the answer is a bare list, and each embedding a "
                "list of rows. `encoding_format` is checked and makes no difference. Also at `/embeddings`.",
    request={"application/json": _ref("NativeEmbeddingRequest")}, responses={200: _ref("NativeEmbeddingResponse")},
    extensions={"x-errors": [501, 503, 504]},
    examples=[
        _request("One text", {"content": "The weather is lovely today."}),
        _request("Several texts", {"content": ["The weather is lovely today.", "He drove to the stadium."]}),
        _response("One text", [{"index": 0, "embedding": [[0.0191, 0.1201, 0.1596]]}]),
    ])
list_collections = extend_schema(
    operation_id="listCollections", summary="List the collections", tags=["Collections"], responses={200: _ref("CollectionList")})
retrieve_collection = extend_schema(
    operation_id="retrieveCollection", summary="One collection", tags=["Collections"], parameters=[NAME],
    responses={200: _ref("Collection")}, extensions={"x-errors": [404]})
search_collection = extend_schema(
    operation_id="searchCollection", summary="Search a collection", tags=["Collections"], parameters=[NAME],
    description="The query is embedded with the collection's model, which has to be served. A document that was split into passages "
                "appears once, with its best passage.",
    request={"application/json": _ref("SearchRequest")}, responses={200: _ref("SearchResponse")},
    extensions={"x-errors": [404, 409, 501, 503, 504]},
    examples=[
        _request("A question", {"query": "how do plants make sugar", "limit": 3, "include_text": True}),
        _request("Judged once more by a reranker", {"query": "how do plants make sugar", "limit": 3, "rerank": True, "candidates": 50}),
        _request("Among some documents only", {"query": "how do plants make sugar", "filter": {"topic": "biology"}}),
    ])
JOB = OpenApiParameter("job", int, OpenApiParameter.PATH, description="Number of a job.")
list_jobs = extend_schema(
    operation_id="listJobs", summary="List the newest bulk jobs", tags=["Collections"], responses={200: _ref("JobList")})
retrieve_job = extend_schema(
    operation_id="retrieveJob", summary="One bulk job, with its chunks and failures", tags=["Collections"], parameters=[JOB],
    responses={200: _ref("Job")}, extensions={"x-errors": [404]})
