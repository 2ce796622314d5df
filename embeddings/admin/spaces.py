from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from ..models import VectorSpace
from ..spaces import FIELDS
from .base import ReadOnlyAdmin

NORMS = {-1.0: "as the model gives them", 0.0: "largest component scaled to 32767", 1.0: "components sum to 1", 2.0: "euclidean length 1"}


def explain(space: VectorSpace) -> list[tuple[str, Any, str]]:
    """(name, value, meaning) of everything the fingerprint is made of."""
    helps = {field.name: str(field.help_text) for field in VectorSpace._meta.fields}
    told = {"model_id": "the model every vector comes from", "weights_hash": "sha256 over its weight files",
            "pooling": "how token vectors become one", "normalize": NORMS.get(space.normalize, f"{space.normalize:g}-norm 1"),
            "multi_vector": "one vector a token, compared by MaxSim" if space.multi_vector else "one vector a passage, compared by cosine"}
    rows = []
    for name in FIELDS:
        value = getattr(space, name)
        shown: Any = "yes" if value is True else "no" if value is False else f"{value:g}" if isinstance(value, float) else value
        rows.append((name.replace("_", " ").replace("model id", "model"), shown, told.get(name) or helps[name]))
    return rows


@admin.register(VectorSpace)
class VectorSpaceAdmin(ReadOnlyAdmin[VectorSpace]):
    list_display = ["short", "model_id", "dims", "pooling", "max_length", "multi_vector", "created_at"]
    search_fields = ["fingerprint__startswith", "model_id"]
    search_help_text = "Beginning of a fingerprint, or part of a model's name"

    def has_delete_permission(self, request: HttpRequest, obj: VectorSpace | None = None) -> bool:
        return False

    @admin.display(description="fingerprint", ordering="fingerprint")
    def short(self, space: VectorSpace) -> str:
        return space.fingerprint[:12]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        space: VectorSpace = context["original"]
        context |= {"title": f"Vector space {space.fingerprint[:12]}", "subtitle": None, "space": space, "explained": explain(space),
                    "collections": space.collections.order_by("name")}
        return super().render_change_form(request, context, *args, **kwargs)
