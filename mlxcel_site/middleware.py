"""What happens to a request before Django's views see it."""
from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase

from .auth import PAGES


class TrailingSlash:
    """`/v1/embeddings/` is `/v1/embeddings`. A redirect would turn a POST into a GET."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if not request.path_info.startswith(PAGES):
            request.path_info = request.path_info.rstrip("/") or "/"
        return self.get_response(request)


class ChunkedBody:
    """WSGI middleware: gives a body sent in chunks the length that Django asks for. At most one byte over the limit is read;
    Django then refuses it as it does any other body that is too long."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application = application

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("HTTP_TRANSFER_ENCODING", "").lower() == "chunked" and not environ.get("CONTENT_LENGTH"):
            body = _read(environ["wsgi.input"], settings.DATA_UPLOAD_MAX_MEMORY_SIZE + 1)
            environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(body), str(len(body))
        return self.application(environ, start_response)


def _read(stream: Any, limit: int) -> bytes:
    pieces, left = [], limit
    while left and (piece := stream.read(min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
