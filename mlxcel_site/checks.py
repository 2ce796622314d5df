"""Configuration that cannot work, said by name before it is met at run time."""
from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured

from inference.client import transport
from inference.config import LANE, LOCAL, MODE_KIND, Settings
from inference.errors import ConfigError

from .auth import load_keys
from .environment import misspelt


@register()
def check_model_settings(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    try:
        found = Settings.from_env()
        if found.transport != LOCAL:      # which is heavy to import, and always there
            transport(found)
    except ConfigError as error:
        return [Error(str(error), hint="manage.py serve --help lists every setting", id="mlxcel.E001")]
    return [*_check_processes(found.transport), *_check_mode(found), *_check_aliases(found), *_check_directories(found),
            *_check_prefix(os.environ.get("MLXCEL_API_PREFIX", ""))]


def _check_mode(found: Settings) -> list[CheckMessage]:
    if not found.mode or found.models(MODE_KIND[found.mode]) or found.transport != LOCAL:
        return []
    name = "MLXCEL_EMBEDDING_MODEL" if found.mode == "embeddings" else "MLXCEL_RERANKER_MODEL"
    return [Error(f"MLXCEL_MODE={found.mode} (--{found.mode}) needs a model of that kind, and {name} names none",
                  hint="--model or MLXCEL_EMBEDDING_MODEL name embedding models, --reranker-model or MLXCEL_RERANKER_MODEL rerankers",
                  id="mlxcel.E004")]


def _check_aliases(found: Settings) -> list[CheckMessage]:
    """By the configured names alone, which may be directories: what a model is called exactly is known when it is loaded."""
    if found.transport != LOCAL:
        return []
    configured = (*found.embedding_models, *found.reranker_models)
    known = {target for target in found.aliases.values() if any(target in model.replace("--", "/") for model in configured)}
    if not (problem := found.unanswered((*configured, *sorted(known - {*configured})))):
        return []
    return [Error(problem, hint="an alias is NAME=MODEL, MODEL being the id or the full repository id of a served model", id="mlxcel.E007")]


def _check_directories(found: Settings) -> list[CheckMessage]:
    """Model workers have their own MLXCEL_MODELS_DIR. The cache is made where it is missing."""
    expected = {"PROMETHEUS_MULTIPROC_DIR": os.environ.get("PROMETHEUS_MULTIPROC_DIR") or None,
                "MLXCEL_MODELS_DIR": found.models_dir if found.transport != LANE else None}
    problems = [Error(f"{name}={path}: there is no such directory", hint=f"make it, or unset {name}", id="mlxcel.E008")
                for name, path in expected.items() if path and not Path(path).is_dir()]
    nearest = next(path for path in (found.cache_dir, *found.cache_dir.absolute().parents) if path.exists())
    if not nearest.is_dir():
        problems.append(Error(f"MLXCEL_CACHE_DIR={found.cache_dir}: {nearest} is not a directory", hint="name one that can be made",
                              id="mlxcel.E008"))
    return [*problems]


def _check_prefix(text: str) -> list[CheckMessage]:
    if re.fullmatch(r"/?([\w.~-]+/?)*", text.strip(), re.ASCII):
        return []
    return [Error(f"MLXCEL_API_PREFIX={text!r} is not a path", hint="expected such as /ai or /ai/v2, of letters, digits and . _ ~ -",
                  id="mlxcel.E005")]


def _check_processes(transport: str) -> list[CheckMessage]:
    for name in ("GRANIAN_WORKERS", "WEB_CONCURRENCY"):
        value = os.environ.get(name, "")
        if transport == LOCAL and value.isdecimal() and int(value) > 1:
            return [Error(
                f"{name}={value}: with the local transport every web process would load its own copy of each model",
                hint=f"run one web process (unset {name}), whose threads share the model, or model workers (MLXCEL_REDIS_URL)",
                id="mlxcel.E003")]
    return []


@register()
def check_api_keys(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    try:
        load_keys(settings.API_KEYS, settings.API_KEY_FILE)
    except ConfigError as error:
        return [Error(str(error), id="mlxcel.E002")]
    return []


@register()
def check_choices(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    choices = {"RERANK_DOCUMENT_SHAPE": ("verbatim", "object"), "INDEX": ("auto", "exact")}
    return [Error(f"MLXCEL_{name}={getattr(settings, name)!r}: expected {' or '.join(known)}", id="mlxcel.E006")
            for name, known in choices.items() if getattr(settings, name) not in known]


@register()
def check_database_file(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    database = settings.DATABASES["default"]
    folder = Path(str(database["NAME"])).parent
    if not database["ENGINE"].endswith("sqlite3") or ":" in str(database["NAME"]) or folder.is_dir():
        return []
    return [Error(f"DATABASE_URL names a file in {folder}, and there is no such directory", hint="make it, or name another file",
                  id="mlxcel.E009")]


@register()
def check_names(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    return [Warning(f"{name} is no setting, and has no effect", hint=f"was {meant} meant?", id="mlxcel.W001") for name, meant in misspelt()]


def require_sound_configuration() -> None:
    """Raises ImproperlyConfigured: a WSGI server does not run Django's checks."""
    if found := [*check_model_settings(None), *check_api_keys(None), *check_choices(None)]:
        raise ImproperlyConfigured("; ".join(f"{message.msg} ({message.hint})" if message.hint else str(message.msg) for message in found))
