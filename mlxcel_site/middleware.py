"""What happens to a request before Django's views see it."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase

from inference.errors import NotFound

from .auth import HEALTH, PAGES, READY
from .errors import respond


class Hostless:
    """Load balancers ask for health in HTTP/1.0, without a Host."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if not request.META.get("HTTP_HOST") and request.path_info.rstrip("/") in HEALTH | READY:
            allowed = next(iter(settings.ALLOWED_HOSTS), "localhost")
            request.META["HTTP_HOST"] = "localhost" if allowed == "*" else allowed.lstrip(".")
        return self.get_response(request)


class TrailingSlash:
    """`/v1/embeddings/` is `/v1/embeddings`. A redirect would turn a POST into a GET."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if not request.path_info.startswith(PAGES):
            request.path_info = request.path_info.rstrip("/") or "/"
        return self.get_response(request)


class Prefix:
    """WSGI middleware: everything lies under `prefix`, such as `/ai`; only HEALTH answers beside it too, to probes of the process."""

    def __init__(self, application: Callable[..., Iterable[bytes]], prefix: str) -> None:
        self.application, self.prefix = application, prefix

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == self.prefix or path.startswith(f"{self.prefix}/"):
            environ |= {"SCRIPT_NAME": self.prefix, "PATH_INFO": path[len(self.prefix):] or "/", "mlxcel.prefix": self.prefix}
        elif path.rstrip("/") not in HEALTH:
            response = respond(NotFound(f"no such path; everything here lies under {self.prefix}"))
            start_response(f"{response.status_code} {response.reason_phrase}", list(response.items()))
            return [response.content]
        return self.application(environ, start_response)
