"""Scores into the bodies that clients expect: best first, equal scores in the order of the request."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import numpy as np
from django.conf import settings
from rest_framework.response import Response

from inference import answers
from inference.errors import InferenceFailed, InvalidNumericResult
from inference.wire import RerankResult

from .parsing import RerankRequest

COHERE = ("cohere", "cohere-ai")          # X-Fern-SDK-Name of their libraries, which read `document.text`


def render_rerank(request: RerankRequest, result: RerankResult, *, sdk: str = "") -> Response:
    """Jina's and Cohere's object, or text-embeddings-inference's array where the request had `texts`. `sdk`: the caller's library, where
    it says so."""
    scores = _checked(request, result)
    order = np.argsort(-scores, kind="stable")[:request.top_n].tolist()
    shown = _object if settings.RERANK_DOCUMENT_SHAPE == "object" or sdk in COHERE else _verbatim
    headers = answers.headers(result)
    if request.texts:
        return Response(_entries(request, scores, order, "score", "text", _verbatim), headers=headers)
    results = _entries(request, scores, order, "relevance_score", "document", shown)
    return Response({
        "id": f"rerank-{uuid4().hex}", "object": "list", "model": result.model, "results": results,
        **({"data": results} if request.top_k else {}),
        "usage": answers.usage(result), "meta": {"api_version": {"version": "1"}, "billed_units": {"search_units": 1}},
    }, headers=headers)


def _checked(request: RerankRequest, result: RerankResult) -> np.ndarray:
    """[N] f32: a score for each document, and one that a client can sort by."""
    scores = np.asarray(result.scores, np.float32)
    if len(scores) != len(request.documents):
        raise InferenceFailed(f"reranker returned {len(scores)} scores for {len(request.documents)} documents")
    low, high = (-np.inf, np.inf) if request.raw_scores else (0, 1)
    if not (np.isfinite(scores) & (scores >= low) & (scores <= high)).all():
        raise InvalidNumericResult("rerank inference returned an invalid numeric result")
    return scores


def _entries(request: RerankRequest, scores: np.ndarray, order: list[int], score: str, document: str,
             shown: Callable[[Any], Any]) -> list[dict[str, Any]]:
    returned = request.return_documents
    return [{"index": i, score: scores[i], **({document: shown(request.items[i])} if returned else {})} for i in order]


def _verbatim(item: Any) -> Any:
    return item


def _object(item: Any) -> Any:
    return {"text": item} if isinstance(item, str) else item
