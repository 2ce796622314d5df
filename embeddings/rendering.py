"""Results into the bodies that clients expect. Vectors stay numpy until they are bytes."""
from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np
from rest_framework.response import Response

from inference import answers
from inference.wire import EmbedResult

from . import jobs
from .models import Collection, Job
from .parsing import EmbedRequest

if TYPE_CHECKING:
    from .search import SearchResult


SHOWN_FAILURES = 100


def render_embeddings(request: EmbedRequest, result: EmbedResult) -> Response:
    """OpenAI's list. A vector is a list of numbers, or base64 of its little-endian float32 bytes; of a multi-vector model it is a list of
    rows, or base64 of all rows and their `shape`. Items are of another `object` only where rows were asked for by name: OpenAI's
    clients know no other than `embedding`."""
    encode = {"float": _floats, "base64": _base64}[request.encoding_format]
    vectors = [rows if result.multi_vector else rows[0] for rows in _rows(result)]
    kind = "multi-embedding" if request.multi_embedding else "embedding"
    return Response({
        "object": "list",
        "data": [{"object": kind, "index": i, **encode(vector)} for i, vector in enumerate(vectors)],
        "model": result.model,
        "usage": answers.usage(result),
    }, headers=_headers(request, result))


def render_native(request: EmbedRequest, result: EmbedResult) -> Response:
    """llama-server's bare list. An embedding is a list of rows, whatever `encoding_format` says: one row, or one a token of a multi-vector
    model."""
    return Response([{"index": i, "embedding": rows} for i, rows in enumerate(_rows(result))], headers=_headers(request, result))


def _headers(request: EmbedRequest, result: EmbedResult) -> dict[str, str]:
    ignored = {"x-ignored-fields": ", ".join(request.ignored)} if request.ignored else {}
    return answers.headers(result) | ignored


def _rows(result: EmbedResult) -> list[np.ndarray]:
    """[rows[i], D] little-endian f32 per item, contiguous."""
    return np.split(np.ascontiguousarray(result.data, dtype="<f4"), np.cumsum(result.rows)[:-1])


def _floats(vector: np.ndarray) -> dict[str, Any]:
    return {"embedding": vector}


def _base64(vector: np.ndarray) -> dict[str, Any]:
    encoded = {"embedding": b64encode(vector.tobytes()).decode("ascii")}
    return {**encoded, "shape": list(vector.shape)} if vector.ndim == 2 else encoded


def render_collection(collection: Collection) -> dict[str, Any]:
    """`documents` is an annotation of the query (see views)."""
    space = collection.space
    return {
        "id": collection.name, "object": "collection", "created": int(collection.created_at.timestamp()),
        "updated": int(collection.updated_at.timestamp()), "documents": collection.document_count,  # type: ignore[attr-defined]
        "model": space.model_id, "dims": space.dims, "pooling": space.pooling, "normalize": space.normalize, "max_length": space.max_length,
        "multi_vector": space.multi_vector, "fingerprint": space.fingerprint, "document_prompt": space.document_prompt,
        "query_prompt": collection.query_prompt, "split_tokens": collection.split_tokens, "split_overlap": collection.split_overlap,
    }


def render_job(job: Job) -> dict[str, Any]:
    """Counts of documents; times in UTC, ISO 8601."""
    return {
        "id": job.pk, "object": "job", "collection": job.collection.name, "state": job.state, "sources": job.sources,
        "error": jobs.told(job) or None, "created_at": job.created_at.isoformat(),
        "finished_at": job.finished_at.isoformat() if job.finished_at else None,
        "documents": {name: getattr(job, name) for name in ("read", "embedded", "unchanged", "relabelled", "blank", "failed", "truncated")},
        "passages": job.passages, "tokens": job.tokens}


def render_job_in_full(job: Job) -> dict[str, Any]:
    """With its chunks and its first failures."""
    counts = jobs.chunks(job)
    body = render_job(job)
    body["documents"]["waiting"] = counts.pop("waiting")
    failures = job.failures.order_by("pk").values_list("external_id", "position", "message")[:SHOWN_FAILURES]
    return {**body, "reading": jobs.reading(job), "chunks": counts,
            "failures": [{"id": id or None, "position": position, "message": message} for id, position, message in failures]}


def render_hits(collection: Collection, result: SearchResult, *, include_text: bool) -> Response:
    """Best first. `id` is the document's own id; `part`, `start` and `end` are the passage that matched best,
    and `score` is its similarity; where a reranker was asked, its `rerank_score` decides the order."""
    return Response({
        "object": "list", "collection": collection.name, "model": collection.space.model_id,
        **({"reranker": result.reranker} if result.reranker else {}), "exact": result.exact,
        "data": [{
            "id": hit.external_id, "score": hit.score, **({"rerank_score": hit.rerank_score} if result.reranker else {}),
            "part": hit.part, "start": hit.start, "end": hit.end,
            **({"text": hit.text} if include_text else {}), "metadata": hit.metadata,
        } for hit in result.hits],
        "usage": answers.usage_of(result.tokens, result.truncated),
    }, headers=answers.headers_of(result.truncated))
