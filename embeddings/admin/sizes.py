"""Counts and bytes of collections. Two grouped queries for all of them, and once a generation: counting a million rows is not free."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.core.cache import cache
from django.db.models import Count, Q, Sum
from django.db.models.functions import Length

from ..models import Collection, Document, Passage


@dataclass(frozen=True, slots=True)
class Sizes:
    documents: int = 0
    truncated: int = 0
    tokens: int = 0
    characters: int = 0
    passages: int = 0
    rows: int = 0
    bytes: int = 0        # of the vectors as stored, without the database's own overhead


def sizes(collections: Iterable[Collection]) -> dict[int, Sizes]:
    """Sizes by primary key. A collection's figures are kept until its `generation` moves."""
    keys = {c.pk: f"embeddings.sizes:{c.token}:{c.generation}" for c in collections}
    found = cache.get_many(keys.values())
    known: dict[int, Sizes] = {pk: found[key] for pk, key in keys.items() if key in found}
    missing = [pk for pk in keys if pk not in known]
    if missing:
        documents = {row.pop("collection"): row for row in Document.objects.filter(collection__in=missing).order_by().values("collection").annotate(
            documents=Count("pk"), truncated=Count("pk", filter=Q(truncated=True)), tokens=Sum("tokens"), characters=Sum(Length("text")))}
        passages = {row.pop("collection"): row for row in Passage.objects.filter(collection__in=missing).order_by().values("collection").annotate(
            passages=Count("pk"), rows=Sum("rows"), bytes=Sum(Length("vector")))}
        fresh = {pk: Sizes(**documents.get(pk, {}), **passages.get(pk, {})) for pk in missing}
        cache.set_many({keys[pk]: value for pk, value in fresh.items()}, timeout=3600)
        known |= fresh
    return known
