from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from django.contrib import admin
from django.db import connections
from django.db.models import Count, OuterRef, Q, QuerySet, Subquery, TextField
from django.db.models.functions import Coalesce, Substr
from django.http import HttpRequest
from django.urls import reverse
from django.utils.text import Truncator

from inference.client import InferenceClient, get_client
from inference.wire import EmbedJob, EmbedResult

from .. import corpus, spaces
from ..models import Collection, Document, Passage
from ..search import Hit, embed_queries, nearest
from .base import ReadOnlyAdmin, told
from .look import Look, similarity
from .texts import mark, sentences

BEGINNING = 140
"""Characters of a text shown in lists."""

PARTS = 100
"""Passages in the table of a document's page; the others are reached by their part number."""

NEIGHBOURS = 10

SENTENCES = 12
"""Sentences shown of a passage, the best ones."""

CHARACTERS = 12
"""Of a token, at most: how much of a passage that was cut is looked at to find what the model read."""


@admin.register(Document)
class DocumentAdmin(ReadOnlyAdmin[Document]):
    list_display = ["name", "collection", "seen", "passages", "beginning"]
    list_filter = ["collection", "truncated"]
    list_select_related = ["collection"]
    list_per_page = 50
    search_fields = ["external_id"]
    search_help_text = "Beginning of an external id, exactly as stored"
    ordering = ["-id"]
    sortable_by = ()

    def get_queryset(self, request: HttpRequest) -> QuerySet[Document]:
        """Rows of the list carry the beginning of their text, never all of it."""
        queryset = super().get_queryset(request)
        match = request.resolver_match
        if match is None or match.url_name != "embeddings_document_changelist":
            return queryset
        passages = Passage.objects.filter(document=OuterRef("pk")).order_by().values("document").annotate(n=Count("pk")).values("n")
        return queryset.defer("text", "metadata").annotate(
            _beginning=Substr("text", 1, BEGINNING + 1, output_field=TextField()), _passages=Coalesce(Subquery(passages), 0))

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Document], search_term: str) -> tuple[QuerySet[Document], bool]:
        """External ids that begin with the term, by the unique index on (collection, external id)."""
        if not search_term:
            return queryset, False
        if connections[queryset.db].vendor == "sqlite":
            # SQLite orders text by code point, and its LIKE takes no index: the range of all strings with this prefix does.
            within = Q(external_id__gte=search_term)
            if (beyond := _successor(search_term)) is not None:
                within &= Q(external_id__lt=beyond)
        else:
            within = Q(external_id__startswith=search_term)
        return queryset.filter(within, collection__in=list(Collection.objects.values_list("pk", flat=True))), False

    @admin.display(description="external id", ordering="external_id")
    def name(self, document: Document) -> str:
        return Truncator(document.external_id).chars(80)

    @admin.display(description="text")
    def beginning(self, document: Document) -> str:
        return Truncator(" ".join(document._beginning.split())).chars(BEGINNING)  # type: ignore[attr-defined]   # annotated in get_queryset

    @admin.display(description="tokens")
    def seen(self, document: Document) -> str:
        return f"{document.tokens:,}{', truncated' if document.truncated else ''}"

    @admin.display
    def passages(self, document: Document) -> int:
        count: int = document._passages  # type: ignore[attr-defined]   # annotated in get_queryset
        return count

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        document: Document = context["original"]
        collection = Collection.objects.select_related("space").get(pk=document.collection_id)
        space = collection.space
        passages = list(document.passages.defer("vector").order_by("part", "pk"))
        passages.sort(key=lambda p: p.space_id != space.pk)        # those that search sees come first
        query = request.GET.get("q", "").strip()
        errors: list[str] = []
        answer = None
        if query and passages:
            with told(errors):
                answer = Answer.to(query, collection, document, passages)
        chosen = _chosen(request.GET.get("part"), passages, answer)
        listed = _around(passages, chosen)
        vectors = dict(Passage.objects.filter(pk__in=[p.pk for p in listed]).values_list("pk", "vector"))
        for passage in listed:
            passage.vector = bytes(vectors.get(passage.pk, b""))
        look = Look(chosen, space) if chosen else None
        hits: list[Hit] = []
        neighbour_errors: list[str] = []
        if chosen:
            chosen.collection = collection
        if chosen and look and look.array is not None and look.summary and look.summary.finite and chosen.space_id == space.pk:
            with told(neighbour_errors):
                hits = list(islice((h for h in nearest(chosen, limit=NEIGHBOURS + 1) if h.document_id != document.pk), NEIGHBOURS))
        context |= {
            "title": f"Document {Truncator(document.external_id).chars(120)}", "subtitle": None, "document": document,
            "collection": collection, "space": space, "passages": passages,
            "listed": [(Look(p, space), answer.scores.get(p.pk) if answer else None) for p in listed],
            "unlisted": len(passages) - len(listed), "chosen": chosen, "look": look, "marked": mark(document.text, passages, chosen),
            "characters": len(document.text), "metadata": _table(document.metadata), "query": query, "answer": answer, "errors": errors,
            "neighbours": _beginnings(hits), "neighbour_errors": neighbour_errors,
            "cut_parts": [p.part for p in passages if p.tokens >= space.max_length] if document.truncated else [],
            "may_view_collection": self.admin_site.get_model_admin(Collection).has_view_permission(request),
            "documents_url": f"{reverse('admin:embeddings_document_changelist')}?collection__id__exact={collection.pk}"}
        return super().render_change_form(request, context, *args, **kwargs)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> tuple[list[str], dict[str, int], set[str], list[str]]:
        """The first hundred by name, all by number."""
        queryset: QuerySet[Document] = objs if isinstance(objs, QuerySet) else Document.objects.filter(pk__in=[o.pk for o in objs])
        count = queryset.count()
        lines = [Truncator(name).chars(120) for name in queryset.order_by("pk").values_list("external_id", flat=True)[:100]]
        if count > len(lines):
            lines.append(f"and {count - len(lines):,} more")
        passages = Passage.objects.filter(document__in=queryset.order_by().values_list("pk", flat=True)).count()
        return lines, {"documents": count, "passages": passages}, set(), []

    def delete_model(self, request: HttpRequest, obj: Document) -> None:
        corpus.delete(obj.collection, [obj.external_id])

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Document]) -> None:
        for collection in Collection.objects.filter(pk__in=queryset.order_by().values("collection")):
            corpus.delete(collection, list(queryset.filter(collection=collection).values_list("external_id", flat=True)))


@dataclass(frozen=True)
class Answer:
    """How a document answers a query: the score of each stored passage, and what each sentence of the best one scores alone. Of a passage
    that was cut to the model's limit these are the sentences that the model read."""

    query: str
    scores: dict[int, float]                       # by passage
    best: Passage
    sentences: list[tuple[str, float, int]]        # the best, in order: text, score, 0 ... 100 between the least and the most of all
    count: int                                     # of all sentences that were compared
    cut: bool                                      # the model did not read all of the best passage

    @property
    def score(self) -> float:
        return self.scores[self.best.pk]

    @classmethod
    def to(cls, query: str, collection: Collection, document: Document, passages: Sequence[Passage]) -> Answer | None:
        space = collection.space
        stored = {p.pk: p for p in passages if p.space_id == space.pk}
        scores: dict[int, float] = {}
        client = get_client()
        (asked,), *_ = embed_queries(collection, [query], client)
        for pk, blob in Passage.objects.filter(pk__in=list(stored)).values_list("pk", "vector").iterator(chunk_size=256):
            p = stored[pk]
            p.vector = bytes(blob)
            rows = Look(p, space).array
            if rows is None or not np.isfinite(rows).all():
                continue
            scores[pk] = similarity(asked, rows)
        if not scores:
            return None
        best = stored[max(scores, key=lambda pk: (scores[pk], -stored[pk].part))]
        cut = document.truncated and best.tokens >= space.max_length
        end = min(best.end, best.start + CHARACTERS * space.max_length) if cut else best.end
        spans = sentences(document.text, best.start, end)
        if len(spans) < 2:
            return cls(query, scores, best, [], 0, cut)
        texts = [document.text[s:e] for s, e in spans]
        result = _embed(collection, client, [*texts, document.text[spans[0][0]:spans[1][1]]])
        read = _read(result.tokens.tolist(), space.max_length) if cut else len(texts)
        found = [similarity(asked, rows) for rows in result.vectors()[:read]]
        least, most = min(found), max(found)
        shown = sorted(sorted(range(read), key=lambda i: -found[i])[:SENTENCES]) if read > 1 else []
        alone = [(texts[i], found[i], round(100 * (found[i] - least) / ((most - least) or 1))) for i in shown]
        return cls(query, scores, best, alone, read, cut)


def _read(tokens: Sequence[int], limit: int) -> int:
    """How many sentences the model read, or began to. tokens: of each sentence alone, then of the first two together, which shows how many
    each has only because it stands alone: special tokens and the prompt."""
    *alone, two = tokens
    around = alone[0] + alone[1] - two if two < limit else 2
    seen = around
    for count, each in enumerate(alone):
        if seen >= limit:
            return max(count, 1)
        seen += each - around
    return len(alone)


def _embed(collection: Collection, client: InferenceClient, texts: Sequence[str]) -> EmbedResult:
    """The texts' vectors, made as the collection's documents are."""
    spec, space = spaces.served(collection, client), collection.space
    items = tuple(space.document_prompt + text for text in texts)
    return client.embed(EmbedJob(items, model=spec.id, dimensions=None if space.dims == spec.dims else space.dims))


def _chosen(part: str | None, passages: list[Passage], answer: Answer | None) -> Passage | None:
    """The passage the page is about: the asked part, else the one that answers best, else the first."""
    if part is not None and part.isdecimal():
        for passage in passages:
            if str(passage.part) == part:
                return passage
    if answer:
        return answer.best
    return passages[0] if passages else None


def _around(passages: list[Passage], chosen: Passage | None) -> list[Passage]:
    """At most `PARTS` passages, the chosen one among them."""
    at = passages.index(chosen) if chosen else 0
    first = max(min(at - PARTS // 2, len(passages) - PARTS), 0)
    return passages[first:first + PARTS]


def _table(metadata: Any) -> list[tuple[str, str]]:
    """Metadata as names and readable values; what is no object stands under one empty name."""
    pairs = metadata.items() if isinstance(metadata, dict) else [("", metadata)] if metadata not in (None, "", []) else []
    return [(str(name), _readable(value)) for name, value in pairs]


def _readable(value: Any) -> str:
    if isinstance(value, str):
        return value
    line = json.dumps(value, ensure_ascii=False)
    return line if len(line) <= 100 else json.dumps(value, ensure_ascii=False, indent=2)


def _beginnings(hits: Sequence[Hit]) -> list[tuple[Hit, str]]:
    """Hits with the beginning of the passage that was found."""
    return [(hit, Truncator(" ".join((hit.text or "")[:4 * BEGINNING].split())).chars(BEGINNING)) for hit in hits]


def _successor(prefix: str) -> str | None:
    """The least string above all that begin with `prefix`, by code point; None where there is none. Surrogates are no characters."""
    for at in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[at])
        if code < 0x10FFFF:
            return prefix[:at] + chr(0xE000 if code == 0xD7FF else code + 1)
    return None
