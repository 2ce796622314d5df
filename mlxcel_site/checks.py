"""Configuration that cannot work, said by name before it is met at run time."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured

from inference.config import Settings
from inference.errors import ConfigError

from .auth import load_keys

LOCAL_TRANSPORT = "inference.transports.local.LocalClient"


@register()
def check_model_settings(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    try:
        found = Settings.from_env()
    except ConfigError as error:
        return [Error(str(error), hint="manage.py serve --help lists every setting", id="mlxcel.E001")]
    return _check_processes(found.transport)


def _check_processes(transport: str) -> list[CheckMessage]:
    for name in ("GRANIAN_WORKERS", "WEB_CONCURRENCY"):
        value = os.environ.get(name, "")
        if transport == LOCAL_TRANSPORT and value.isdecimal() and int(value) > 1:
            return [Error(
                f"{name}={value}: with the local transport every web process would load its own copy of each model",
                hint=f"run one web process (unset {name}); its threads share the model", id="mlxcel.E003")]
    return []


@register()
def check_api_keys(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    try:
        load_keys(settings.API_KEYS, settings.API_KEY_FILE)
    except ConfigError as error:
        return [Error(str(error), id="mlxcel.E002")]
    return []


@register()
def check_document_shape(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    shape = settings.RERANK_DOCUMENT_SHAPE
    if shape in ("verbatim", "object"):
        return []
    return [Error(f"MLXCEL_RERANK_DOCUMENT_SHAPE={shape!r}: expected verbatim or object", id="mlxcel.E004")]


def require_sound_configuration() -> None:
    """Raises ImproperlyConfigured: a WSGI server does not run Django's checks."""
    if found := [*check_model_settings(None), *check_api_keys(None), *check_document_shape(None)]:
        raise ImproperlyConfigured("; ".join(f"{message.msg} ({message.hint})" if message.hint else str(message.msg) for message in found))
