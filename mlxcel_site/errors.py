"""The only place that turns an exception into a body:

    {"error": {"message": ..., "type": ..., "param": null, "code": null}, "detail": message}

`detail` is what some clients read instead of `error`. The admin keeps Django's own pages.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import structlog
from django.core.exceptions import DisallowedHost, PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase
from django.views import defaults
from rest_framework import exceptions as rest

from inference.errors import Busy, InvalidRequest, NotFound, ServiceError, TooLarge, Unauthorized

from .metrics import ERRORS

log = structlog.get_logger(__name__)

NUMERIC_CODE = {"authentication_error", "unavailable_error"}     # llama-server's envelope: `code` is the status
TYPES = {400: "invalid_request_error", 403: "permission_error", 404: "not_found_error", 405: "invalid_request_error"}

LONGEST_PATH = 200      # characters that an error gives back
MESSAGES = {400: "the request could not be read", 403: "not allowed", 405: "is not allowed here"}


class Unavailable(ServiceError):
    """503 of the readiness route."""

    status = 503
    type = "unavailable_error"
    retry_after = 1


def respond(error: ServiceError) -> HttpResponse:
    """The answer to a ServiceError."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.should_retry is not None:
        headers["x-should-retry"] = str(error.should_retry).lower()
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _answer(error.status, error.told or error.message, error.type, param=error.param, code=error.code, headers=headers)


def _answer(status: int, message: str, type: str, *, param: str | None = None, code: str | None = None,
            headers: Mapping[str, str] | None = None) -> HttpResponse:
    ERRORS.labels(type, status).inc()
    error = {"message": message, "type": type, "param": param, "code": status if type in NUMERIC_CODE else code}
    body = {"error": error, "detail": message}
    content_type = "application/json; charset=utf-8" if status == 401 else "application/json"
    return HttpResponse(orjson.dumps(body), status=status, content_type=content_type, headers=headers)


def respond_to(error: Exception) -> HttpResponse:
    """The answer to any exception; one that nobody foresaw is logged and told without its details."""
    match error:
        case ServiceError():
            if error.status == 500:
                log.error("request_failed", error=str(error), exc_info=error.__cause__)
            elif error.told:
                log.warning("request_failed", error=str(error))
            return respond(error)
        case OperationalError() | InterfaceError():
            log.error("database_unavailable", error=str(error).strip().partition("\n")[0])
            return respond(Busy("The database cannot be used at the moment. Please try again later."))
        case RequestDataTooBig():
            return respond(TooLarge("Request body too large."))
        case DisallowedHost():
            return respond(InvalidRequest("the Host header is missing, or names a host this server does not answer to; list it in "
                                          "DJANGO_ALLOWED_HOSTS"))
        case SuspiciousOperation() | UnreadablePostError():
            return respond(InvalidRequest("the request could not be read"))
        case Http404():
            return respond(NotFound("not found"))
        case PermissionDenied():
            return _answer(403, "not allowed", TYPES[403])
        case rest.APIException():
            return _answer(error.status_code, str(error.detail), TYPES.get(error.status_code, "server_error"))
        case _:
            log.error("request_failed", error=repr(error), exc_info=error)
            return _answer(500, "internal server error; the log has it under the id in x-request-id", ServiceError.type)


def exception_handler(error: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """For views: REST_FRAMEWORK["EXCEPTION_HANDLER"]."""
    if not isinstance(error, rest.MethodNotAllowed):
        return respond_to(error)
    allowed = ", ".join(context["view"].allowed_methods)
    return _answer(405, f"{context['request'].method} is not allowed here; allowed: {allowed}", TYPES[405], headers={"Allow": allowed})


def _is_page(request: HttpRequest) -> bool:
    return request.path_info.startswith("/admin")


def handler400(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    return defaults.bad_request(request, exception) if _is_page(request) else respond_to(exception)


def handler403(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    return defaults.permission_denied(request, exception) if _is_page(request) else respond_to(exception)


def handler404(request: HttpRequest, exception: Exception | None) -> HttpResponseBase:
    if _is_page(request):
        return defaults.page_not_found(request, exception or Http404())
    once = re.sub(r"\A(/v\d+)(\1)+(?=/|\Z)", r"\1", request.path_info)
    hint = f"the base URL already ends in it: use {once}" if once != request.path_info else "the routes are listed at /docs"
    path = request.path if len(request.path) <= LONGEST_PATH else f"{request.path[:LONGEST_PATH]}…"
    return respond(NotFound(f"no such path: {request.method} {path}; {hint}"))


def handler500(request: HttpRequest) -> HttpResponseBase:
    """Django and the request log have the exception already."""
    if _is_page(request):
        return defaults.server_error(request)
    return _answer(500, "internal server error; the log has it under the id in x-request-id", ServiceError.type)


class Envelope:
    """Middleware with the last word: where Django itself answers an error with a page, be it with DJANGO_DEBUG=1, callers of the API still
    get the one body."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        status = response.status_code
        if status < 400 or _is_page(request) or response.get("Content-Type", "").startswith("application/json"):
            return response
        if status == 404:
            return handler404(request, None)
        if status >= 500:
            return handler500(request)
        message = MESSAGES.get(status, response.reason_phrase.lower())
        kept = {name: response[name] for name in ("Allow", "Retry-After") if name in response}
        return _answer(status, f"{request.method} {message}" if status == 405 else message, TYPES.get(status, TYPES[400]), headers=kept)
