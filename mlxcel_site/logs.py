"""Logging: one readable line per request and event on stderr, or one JSON object with MLXCEL_LOG_FORMAT=json. Every line of a request
carries its id, which the answer carries too, as `x-request-id`. Bodies, headers and keys are never logged."""
from __future__ import annotations

import sys
import time
from typing import Any

import structlog
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse
from django_structlog.signals import bind_extra_request_finished_metadata, bind_extra_request_metadata, update_failure_response

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


@receiver(bind_extra_request_metadata)
def _start(request: HttpRequest, **_: Any) -> None:
    request.META["mlxcel.started"] = time.perf_counter()


@receiver(bind_extra_request_finished_metadata)
def _finish(request: HttpRequest, response: HttpResponse, log_kwargs: dict[str, Any], **_: Any) -> None:
    log_kwargs["ms"] = round((time.perf_counter() - request.META["mlxcel.started"]) * 1000, 1)
    _name(response)


@receiver(update_failure_response)
def _name(response: HttpResponse, **_: Any) -> None:
    response["x-request-id"] = structlog.contextvars.get_contextvars().get("request_id", "")
