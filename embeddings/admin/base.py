"""What every page here shares: read-only, counted with a bound, deleted through the functions that keep the search files right."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, TypeVar

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest

from inference.errors import ServiceError

M = TypeVar("M", bound=Model)

if TYPE_CHECKING:
    class ModelAdmin(admin.ModelAdmin[M]):
        pass
else:
    class ModelAdmin(admin.ModelAdmin):
        def __class_getitem__(cls, item):
            return cls

COUNTED = 10_000
"""Rows a list counts and pages through; beyond, it asks to be narrowed. Counting a million rows costs more than reading a page."""


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts no further than `COUNTED` rows; `capped` says that there are more."""

    @cached_property
    def _counted(self) -> int:
        rows = self.object_list
        if not isinstance(rows, QuerySet):
            return len(rows)
        return int(rows.order_by()[:COUNTED + 1].count())

    @cached_property
    def count(self) -> int:
        return min(self._counted, COUNTED)

    @property
    def capped(self) -> bool:
        return self._counted > COUNTED


class ReadOnlyAdmin(ModelAdmin[M]):
    """Rows are looked at, never typed in: vectors come from models, documents from `embed_corpus`."""

    fields: ClassVar[tuple[str, ...]] = ()
    actions_selection_counter = True
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    list_max_show_all = 0

    class Media:
        css = {"all": ["embeddings/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        return False


@contextmanager
def told(errors: list[str]) -> Iterator[None]:
    """A `ServiceError` inside becomes a message in `errors`: a model that is away must not take the page with it."""
    try:
        yield
    except ServiceError as error:
        errors.append(str(error))
