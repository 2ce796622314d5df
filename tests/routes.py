"""The addresses of the API, as the URL patterns have them."""
from __future__ import annotations

import re
from typing import Any

from django.urls import URLPattern


def addresses(resolver: Any) -> list[tuple[str, Any]]:
    """(`/collections/{name}`, its view) of every route but the admin's."""
    found: list[tuple[str, Any]] = []
    for entry in resolver.url_patterns:
        if isinstance(entry, URLPattern):
            found.append(("/" + re.sub("<[a-z]+:([a-z]+)>", r"{\1}", str(entry.pattern)), entry.callback))
        elif entry.app_name != "admin":
            found += addresses(entry)
    return found
