"""Search: a query's best documents in a collection, each with its best passage. Commands, the API and the admin call the same functions."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from django.conf import settings
from numpy.typing import NDArray

from inference import fields
from inference.client import InferenceClient
from inference.errors import InvalidRequest
from inference.wire import EmbedJob, ModelSpec, RerankJob

from . import filters, spaces, vectors
from .index import get_index
from .models import Collection, Passage
from .scoring import Scored

MAX_LIMIT = 1_000
CANDIDATES = 5                   # times the limit: how many documents a reranker is given, unless told otherwise
QUERIES_PER_JOB = 512


@dataclass(frozen=True)
class Hit:
    """A document, scored by its best passage: part, and characters [start, end) of the document's text."""

    document_id: int
    external_id: str
    score: float
    part: int
    start: int
    end: int
    text: str | None = None          # of the passage, where asked for
    metadata: dict[str, Any] = field(default_factory=dict)
    rerank_score: float | None = None     # of the passage's text, where a reranker was asked


@dataclass(frozen=True)
class SearchResult:
    hits: list[Hit]
    exact: bool
    tokens: int                      # of the query, as the model saw it, and of the pairs that a reranker saw
    reranker: str = ""               # the served id
    truncated: int = 0               # how many inputs were cut to their model's limit: the query, pairs of a reranker


def search(collection: Collection, query: str, *, client: InferenceClient, limit: int = 10, filter: Mapping[str, Any] | None = None,
           include_text: bool = False, rerank: str | bool = False, candidates: int | None = None) -> SearchResult:
    """The `limit` best documents for a query.

    rerank: a served reranker, True for the first: it is given the best passages of the `candidates` best documents (CANDIDATES times the
    limit by default), and its scores decide.

    Raises InvalidRequest for an empty query, a limit outside 1 to MAX_LIMIT, candidates outside limit to MAX_LIMIT or a filter that is
    none; Conflict where the collection's model is not served or its vectors would not be comparable; NotLoaded where no reranker is
    served; what `client.embed` and `client.rerank` raise.
    """
    if not isinstance(query, str) or not query:
        raise InvalidRequest("query: expected a text that is not empty", param="query")
    _check_limit(limit)
    if filter is not None:
        filters.parse(filter)        # a wrong filter is told before a model runs
    reranker = _reranker(client, rerank)
    retrieved = _candidates(limit, candidates, bool(reranker))
    (vector,), tokens, cut = embed_queries(collection, [query], client)
    index = get_index()
    documents = None if not filter else filters.matching(collection, _generation(collection), filter)
    answers = index.search(collection, [vector], retrieved, documents=documents)
    found, exact = answers[0], answers.exact
    if reranker is None:
        return SearchResult(_hits(found, include_text), exact, tokens, truncated=cut)
    hits, seen, cut_pairs = _reranked(query, _hits(found, include_text=True), client, reranker)
    return SearchResult([hit if include_text else replace(hit, text=None) for hit in hits[:limit]], exact, tokens + seen,
                        reranker.id, cut + cut_pairs)


def nearest(passage: Passage, limit: int = 10) -> list[Hit]:
    """The documents nearest to a stored passage, itself left out. Needs no model."""
    _check_limit(limit)
    vector = vectors.decode(passage.vector, passage.rows, passage.dims, passage.dtype)
    (found,) = get_index().search(passage.collection, [vector], limit, without=passage.pk)
    return _hits(found, include_text=True)


def embed_queries(collection: Collection, queries: Sequence[str], client: InferenceClient) -> tuple[list[NDArray[Any]], int, int]:
    """A vector [Q, D] f32 per query, the tokens of all, and how many were cut to the limit. Q is 1 unless the space is multi-vector."""
    spec = spaces.served(collection, client)
    dims = collection.space.dims
    rows: list[NDArray[Any]] = []
    tokens = cut = 0
    for at in range(0, len(queries), QUERIES_PER_JOB):
        items = tuple(collection.query_prompt + query for query in queries[at:at + QUERIES_PER_JOB])
        result = client.embed(EmbedJob(items, model=spec.id, dimensions=None if dims == spec.dims else dims, input_type="query"))
        rows += result.vectors()
        tokens += int(result.tokens.sum())
        cut += len(result.truncated)
    return rows, tokens, cut


def ranked(collection: Collection, queries: Sequence[str], *, client: InferenceClient, limit: int) -> list[list[Scored]]:
    """By query its best documents: ids and scores only, embedded as one batch."""
    embedded, *_ = embed_queries(collection, queries, client)
    return get_index().search(collection, embedded, limit)


def _check_limit(limit: int) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"limit: expected 1 to {MAX_LIMIT}, found {limit}", param="limit")


def _reranker(client: InferenceClient, wanted: str | bool) -> ModelSpec | None:
    if wanted is False:
        return None
    name = wanted if isinstance(wanted, str) else None
    return fields.served(client, "reranker", name, accept_any=settings.ACCEPT_ANY_MODEL, param="rerank")


def _candidates(limit: int, wanted: int | None, reranking: bool) -> int:
    """How many documents to retrieve."""
    if wanted is not None and not (reranking and limit <= wanted <= MAX_LIMIT):
        told = f"expected {limit} (the limit) to {MAX_LIMIT}, found {wanted}" if reranking else "they are for a reranker, and none is asked"
        raise InvalidRequest(f"candidates: {told}", param="candidates")
    return (wanted or min(CANDIDATES * limit, MAX_LIMIT)) if reranking else limit


def _reranked(query: str, hits: list[Hit], client: InferenceClient, reranker: ModelSpec) -> tuple[list[Hit], int, int]:
    """All of `hits` in the order of their passages' relevance, equal ones in the order they were found; the tokens of all pairs, and how
    many were cut."""
    if not hits:
        return [], 0, 0
    result = client.rerank(RerankJob(query, tuple(hit.text or "" for hit in hits), model=reranker.id))
    order = np.argsort(-result.scores, kind="stable")
    return [replace(hits[i], rerank_score=float(str(result.scores[i]))) for i in order], int(result.tokens.sum()), len(result.truncated)


def _generation(collection: Collection) -> int:
    return Collection.objects.values_list("generation", flat=True).get(pk=collection.pk)


def _hits(found: list[Scored], include_text: bool) -> list[Hit]:
    """In order; a passage that was removed while it was searched for is left out."""
    rows = Passage.objects.select_related("document").defer("vector").in_bulk([scored.passage for scored in found])
    return [Hit(row.document_id, row.document.external_id, scored.score, row.part, row.start, row.end,
                row.document.text[row.start:row.end] if include_text else None, row.document.metadata)
            for scored in found if (row := rows.get(scored.passage))]
