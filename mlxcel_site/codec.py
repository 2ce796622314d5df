"""JSON in and out, by orjson: numpy arrays are written without becoming Python lists, and a body is JSON whatever its Content-Type says."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import IO, Any

import orjson
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from inference.errors import InvalidRequest, ServiceError

# A backslash in JSON always begins an escape, so this walks escape by escape: a whole surrogate pair, half of one, or any other.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)


def loads(body: bytes) -> Any:
    """UTF-8 JSON, with or without a byte order mark. The last of two equal keys wins; half a surrogate pair (`\\ud800`) becomes U+FFFD.
    Raises InvalidRequest with the position for anything else, NaN and numbers beyond a double's range included."""
    body = body.removeprefix(b"\xef\xbb\xbf")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if "surrogate" in error.msg and "UTF-8" not in error.msg:
            mended = _ESCAPE.sub(lambda match: rb"\ufffd" if match[1] else match[0], body)
            if mended != body:
                return loads(mended)
        raise InvalidRequest(f"invalid request body: {_explain(error, body)}") from None


def _explain(error: orjson.JSONDecodeError, body: bytes) -> str:
    if not body.strip():
        return "it is empty; expected a JSON object"
    if body[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in body[:4]:
        return "not UTF-8 (it looks like UTF-16 or UTF-32)"
    if "UTF-8" in error.msg:
        return "not UTF-8"
    return f"not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"


class UnsupportedEncoding(ServiceError):
    status = 415
    type = "invalid_request_error"


class JSONParser(BaseParser):
    media_type = "*/*"

    def parse(self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None) -> Any:
        assert parser_context is not None
        encoding = parser_context["request"].headers.get("Content-Encoding", "").strip()
        if encoding.lower() not in ("", "identity"):
            raise UnsupportedEncoding(f"Content-Encoding `{encoding[:80]}` is not accepted; send the body as it is, without compression")
        return loads(parser_context["request"].body)       # Django's own reading, which holds to the body limit


class JSONRenderer(BaseRenderer):
    media_type = "application/json"
    format = "json"
    charset = None
    render_style = "binary"

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Mapping[str, Any] | None = None) -> bytes:
        return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)


class Negotiation(BaseContentNegotiation):
    """There is one format: `Accept: text/html` and a missing Content-Type get JSON too, not a 406 or 415."""

    def select_parser(self, request: Request, parsers: Iterable[BaseParser]) -> BaseParser:
        return next(iter(parsers))

    def select_renderer(
        self, request: Request, renderers: Iterable[BaseRenderer], format_suffix: str | None = None,
    ) -> tuple[BaseRenderer, str]:
        renderer = next(iter(renderers))
        return renderer, str(renderer.media_type)
