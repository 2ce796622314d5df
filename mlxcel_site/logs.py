"""Logging: one readable line per request and event on stderr, or one JSON object with MLXCEL_LOG_FORMAT=json. Every line of a request
carries its id, which the answer carries too, as `x-request-id`. Bodies, headers and keys are never logged."""
from __future__ import annotations

import ipaddress
import re
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import structlog
from django.core.signals import got_request_exception
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponseBase

SANE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

log = structlog.get_logger(__name__)

_SHARED: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
]


def _request_line(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """A finished request as one short line: status, time, method and path."""
    if event.get("event") == "request_finished":
        event["event"] = f"{event.pop('code')} {event.pop('ms', 0.0):8.1f} ms  {event.pop('request')}"
    return event


def configure(level: str, json: bool) -> dict[str, Any]:
    """Points structlog at the standard library's logging and returns Django's LOGGING."""
    shared = [*_SHARED[:-1], structlog.processors.TimeStamper(fmt="iso")] if json else _SHARED
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(), cache_logger_on_first_use=True)
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), pad_event_to=44, exception_formatter=structlog.dev.plain_traceback)
    render: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()] if json else [_request_line, console]
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"console": {
            "()": structlog.stdlib.ProcessorFormatter, "foreign_pre_chain": shared,
            "processors": [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render]}},
        "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "console"}},
        "root": {"handlers": ["console"], "level": level},
        "loggers": {
            "django": {"handlers": [], "propagate": True},
            "django.request": {"level": "CRITICAL"},     # the request line and mlxcel_site.errors say it already
            "django.security.DisallowedHost": {"level": "CRITICAL"},
        },
    }


class Logged:
    """Middleware: gives a request its id, and logs a line when it is answered. A caller's own `x-request-id` is taken where it can be
    nothing else than an id."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        began = time.perf_counter()
        shown = request.META.get("HTTP_X_REQUEST_ID", "")
        id = shown if SANE_ID.fullmatch(shown) else str(uuid.uuid4())
        with structlog.contextvars.bound_contextvars(request_id=id, ip=_address(request)):
            response = self.get_response(request)
            say = log.error if response.status_code >= 500 else log.info
            say("request_finished", code=response.status_code, ms=round((time.perf_counter() - began) * 1000, 1),
                request=f"{request.method} {request.get_full_path()}")
        response["x-request-id"] = id
        return response


def _address(request: HttpRequest) -> str:
    """The caller's, as the first proxy on the way says, where there is one."""
    nearest = str(request.META.get("REMOTE_ADDR", ""))
    told = request.META.get("HTTP_X_FORWARDED_FOR", "").partition(",")[0].strip()
    try:
        return str(ipaddress.ip_address(told)) if told else nearest
    except ValueError:
        return nearest


@receiver(got_request_exception)
def _failed(request: HttpRequest | None = None, **_: Any) -> None:
    """What no view handled, the admin's errors above all."""
    log.error("request_failed", request=f"{request.method} {request.get_full_path()}" if request else "", exc_info=True)
