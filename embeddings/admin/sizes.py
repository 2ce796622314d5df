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
    documents: int
    truncated: int
    tokens: int
    characters: int
    passages: int
    rows: int
    bytes: int        # of the vectors as stored, without the database's own overhead


def sizes(collections: Iterable[Collection]) -> dict[int, Sizes]:
    """Sizes by primary key. A collection's figures are kept until its `generation` moves."""
    keys = {c.pk: f"embeddings.sizes:{c.token}:{c.generation}" for c in collections}
    found = cache.get_many(keys.values())
    known: dict[int, Sizes] = {pk: found[key] for pk, key in keys.items() if key in found}
    missing = [pk for pk in keys if pk not in known]
    if missing:
        documents = Document.objects.filter(collection__in=missing).order_by().values_list("collection").annotate(
            n=Count("pk"), cut=Count("pk", filter=Q(truncated=True)), seen=Sum("tokens"), length=Sum(Length("text")))
        passages = Passage.objects.filter(collection__in=missing).order_by().values_list("collection").annotate(
            n=Count("pk"), all_rows=Sum("rows"), stored=Sum(Length("vector")))
        texts = {pk: figures for pk, *figures in documents}
        stored = {pk: figures for pk, *figures in passages}
        fresh = {pk: Sizes(*texts.get(pk, (0, 0, 0, 0)), *stored.get(pk, (0, 0, 0))) for pk in missing}
        cache.set_many({keys[pk]: value for pk, value in fresh.items()}, timeout=3600)
        known |= fresh
    return known
