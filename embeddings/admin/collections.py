from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from itertools import islice
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.template.defaultfilters import filesizeformat
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.text import Truncator

from inference.client import get_client
from inference.config import serving_command

from .. import corpus
from ..counted import counted
from ..index import get_index
from ..models import Collection, Document
from ..search import Hit, search
from .base import ReadOnlyAdmin, told
from .sizes import Sizes, sizes
from .spaces import explain
from .texts import excerpt

LIMITS = (10, 25, 100)


class SizedList(ChangeList):
    """Collections of a page with their sizes beside them, fetched for all at once."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list = list(self.result_list)
        found = sizes(self.result_list)
        for collection in self.result_list:
            collection.sizes = found[collection.pk]


def _object(value: str) -> dict[str, Any]:
    """The metadata filter a person typed."""
    if not value.strip():
        return {}
    try:
        found = json.loads(value)
    except ValueError as error:
        raise ValidationError(f'Not JSON: {error}. Write an object such as {{"language": "en"}}.') from None
    if not isinstance(found, dict):
        raise ValidationError(f'Found {type(found).__name__}, expected an object such as {{"language": "en"}}.')
    return found


class SearchForm(forms.Form):
    """A plain GET form: a search can be bookmarked and sent to someone."""

    use_required_attribute = True
    q = forms.CharField(label="Query", max_length=10_000, widget=forms.TextInput(attrs={"type": "search", "autocomplete": "off"}))
    limit = forms.ChoiceField(label="Results", choices=[(str(n), str(n)) for n in LIMITS], required=False)
    filter = forms.CharField(
        label="Metadata filter", required=False, max_length=10_000,
        help_text='Optional, a JSON object: {"language": "en", "year": {"gte": 1960, "lt": 1970}, "kind": ["report", "note"]}')

    def clean_limit(self) -> int:
        return int(self.cleaned_data["limit"] or LIMITS[0])

    def clean_filter(self) -> dict[str, Any]:
        return _object(self.cleaned_data["filter"])


@admin.register(Collection)
class CollectionAdmin(ReadOnlyAdmin[Collection]):
    list_display = ["name", "model_name", "documents", "passages", "dimensions", "size", "updated_at"]
    list_select_related = ["space"]
    search_fields = ["name"]
    search_help_text = "Part of a collection's name"
    ordering = ["name"]

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return SizedList

    @admin.display(description="model", ordering="space__model_id")
    def model_name(self, collection: Collection) -> str:
        return collection.space.model_id

    @admin.display
    def documents(self, collection: Collection) -> str:
        return f"{_sizes(collection).documents:,}"

    @admin.display
    def passages(self, collection: Collection) -> str:
        return f"{_sizes(collection).passages:,}"

    @admin.display(ordering="space__dims")
    def dimensions(self, collection: Collection) -> int:
        return collection.space.dims

    @admin.display(description="vectors")
    def size(self, collection: Collection) -> str:
        return filesizeformat(_sizes(collection).bytes)

    def get_urls(self) -> list[URLPattern]:
        return [path("<path:object_id>/search/", self.admin_site.admin_view(self.search_view), name="embeddings_collection_search"),
                *super().get_urls()]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        collection: Collection = context["original"]
        errors: list[str] = []
        spec = None
        with told(errors):
            spec = get_client().describe("embedding", collection.space.model_id)
        context |= {
            "title": f"Collection {collection.name}", "subtitle": None, "collection": collection, "space": collection.space,
            "explained": explain(collection.space), "sizes": sizes([collection])[collection.pk], "form": SearchForm(), "errors": errors,
            "spec": spec, "serve": _serve(collection), "text_fields": ", ".join(map(str, collection.text_fields)),
            "may_view_documents": _may_view_documents(self, request), "documents_url": _documents(collection)}
        return super().render_change_form(request, context, *args, **kwargs)

    def search_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Query -> ranked documents, each with its score and best passage. Failures of the model are told in the page."""
        collection = self.get_object(request, unquote(object_id))
        if not self.has_view_permission(request, collection):
            raise PermissionDenied
        if collection is None:
            raise Http404(f"There is no collection {object_id}")
        form = SearchForm(request.GET if "q" in request.GET else None)
        errors: list[str] = []
        result = None
        if form.is_valid():
            with told(errors):
                result = search(collection, form.cleaned_data["q"], client=get_client(), limit=form.cleaned_data["limit"],
                                filter=form.cleaned_data["filter"] or None)
        may_view = _may_view_documents(self, request)
        context = {
            **self.admin_site.each_context(request), "title": f"Search {collection.name}", "opts": self.opts, "original": collection,
            "collection": collection, "form": form, "errors": errors, "result": result, "media": self.media,
            "hits": _shown(result.hits, may_view) if result else [], "may_view_documents": may_view,
            "has_view_permission": True, "documents_url": _documents(collection)}
        return TemplateResponse(request, "admin/embeddings/collection/search.html", context)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> tuple[list[str], dict[str, int], set[str], list[str]]:
        """Counts instead of names: the list of a million documents would never arrive."""
        chosen = list(objs)
        found = sizes(chosen)
        lines = [f"{c.name}: {counted(found[c.pk].documents, 'document')}, {counted(found[c.pk].passages, 'passage')}, vectors of "
                 f"{filesizeformat(found[c.pk].bytes)}" for c in chosen]
        counts = {"collections": len(chosen), "documents": sum(s.documents for s in found.values()),
                  "passages": sum(s.passages for s in found.values())}
        lacking = set() if request.user.has_perm("embeddings.delete_document") else {"document"}
        return lines, counts, lacking, []

    def delete_model(self, request: HttpRequest, obj: Collection) -> None:
        """Files first: they can be made again from the rows, should the transaction fail, and need the collection's number."""
        get_index().drop(obj)
        corpus.drop(obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Collection]) -> None:
        for collection in queryset:
            self.delete_model(request, collection)


def _sizes(collection: Collection) -> Sizes:
    found: Sizes = collection.sizes  # type: ignore[attr-defined]   # set by SizedList
    return found


def _documents(collection: Collection) -> str:
    return f"{reverse('admin:embeddings_document_changelist')}?collection__id__exact={collection.pk}"


def _serve(collection: Collection) -> str:
    """The command that makes the collection searchable."""
    return serving_command(shlex.quote(collection.model_source or collection.space.model_id))


def _may_view_documents(model_admin: admin.ModelAdmin[Collection], request: HttpRequest) -> bool:
    return model_admin.admin_site.get_model_admin(Document).has_view_permission(request)


def _shown(hits: Iterable[Hit], may_view: bool) -> list[dict[str, Any]]:
    """Hits for the page; texts in one query, and only for those who may read documents."""
    hits = list(hits)
    documents = Document.objects.only("text", "metadata").in_bulk([h.document_id for h in hits]) if may_view else {}
    top = max((h.score for h in hits), default=0.0)
    rows = []
    for hit in hits:
        document = documents.get(hit.document_id)
        rows.append({"hit": hit, "score": f"{hit.score:.4f}", "share": max(min(hit.score / top, 1.0), 0.0) * 100 if top > 0 else 0,
                     "excerpt": excerpt(document.text, hit.start, hit.end) if document else None,
                     "metadata": _brief(document.metadata) if document else []})
    return rows


def _brief(metadata: Any) -> list[tuple[str, str]]:
    """The first few plain values, to recognise a document by."""
    plain = ((str(name), str(value)) for name, value in metadata.items() if isinstance(value, str | int | float) and value != "") \
        if isinstance(metadata, dict) else iter(())
    return [(Truncator(name).chars(30), Truncator(value).chars(70)) for name, value in islice(plain, 4)]
