"""What the commands over collections share: which model answers, and errors that are told, not traced."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, InterfaceError

from embeddings import spaces
from embeddings.models import Collection
from inference.client import InferenceClient, connect
from inference.config import Settings
from inference.errors import Busy, Conflict, InferenceFailed, ServiceError, TimedOut
from inference.wire import ModelSpec

FAILED, USAGE, NOTHING, INTERRUPTED = 1, 2, 3, 130


class CorpusCommand(BaseCommand):
    requires_migrations_checks = False       # the error of a missing table says the same without a query at each start

    def execute(self, *args: Any, **options: Any) -> str | None:
        try:
            return super().execute(*args, **options)
        except ServiceError as error:
            raise CommandError(str(error), returncode=code_of(error)) from error
        except (DatabaseError, InterfaceError) as error:
            raise CommandError(refused(error), returncode=FAILED) from error

    def out(self, line: str = "") -> None:
        self.stdout.write(line)


def code_of(error: ServiceError) -> int:
    """Wrong usage or configuration, unless it may go better the next time."""
    return FAILED if isinstance(error, Busy | TimedOut | InferenceFailed) else USAGE


def refused(error: Exception) -> str:
    """What a person needs to know of a database's error."""
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    hints = {"no such table": "create the tables with `manage.py migrate`", "does not exist": "create the tables with `manage.py migrate`",
             "locked": "another process has been writing for longer than the time-out", "full": "free some space",
             "disk I/O": "the disk may be full or failing"}
    hint = next((hint for part, hint in hints.items() if part in said), None)
    return f"The database refused: {said}" + (f" ({hint})" if hint else "")


def settings_for(model: str | None, backend: str | None = None, batch_tokens: int | None = None, reranker: str | None = None) -> Settings:
    """The environment's settings, serving only `model` (None: the environment's first) and `reranker`, if any."""
    settings = Settings.from_env()
    models = (model,) if model else settings.embedding_models[:1]
    changes: dict[str, Any] = {"embedding_models": models, "reranker_models": (reranker,) if reranker else ()}
    if backend:
        changes["backend"] = backend
    if batch_tokens:
        changes["batch_tokens"] = batch_tokens
    return replace(settings, **changes)


@contextmanager
def connected(settings: Settings) -> Iterator[InferenceClient]:
    """The service's client where there is one (MLXCEL_REDIS_URL), else the model in this process."""
    client = connect(Settings.from_env() if os.environ.get("MLXCEL_REDIS_URL") else settings)
    try:
        yield client
    finally:
        client.close()


def source_of(model: str) -> str:
    """A model's name as it can be found again from another directory."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def model_of(collection: Collection) -> str:
    """Where the collection's model comes from: the environment if it names one of that id, else where it came from the first time."""
    named = [name for name in Settings.from_env().embedding_models if name.rstrip("/").rpartition("/")[2] == collection.space.model_id]
    return named[0] if named else collection.model_source or collection.space.model_id


@contextmanager
def serving(collection: Collection, backend: str | None = None, reranker: str | None = None) -> Iterator[InferenceClient]:
    """A client that serves the collection's model, and a reranker beside it. Raises Conflict before any work where the model is not the
    same any more."""
    with connected(settings_for(model_of(collection), backend, reranker=reranker)) as client:
        spaces.served(collection, client)
        yield client


def described(client: InferenceClient, model: str | None) -> ModelSpec:
    """The embedding model `model`, by default the first. Raises Conflict where it is not served."""
    spec = client.describe("embedding", model if os.environ.get("MLXCEL_REDIS_URL") else None)
    if spec is None:
        raise Conflict(f"No embedding model {model!r} is served. Name one with --model or MLXCEL_EMBEDDING_MODEL." if model else
                       "No embedding model is served. Name one with --model or MLXCEL_EMBEDDING_MODEL.", code="model_not_served")
    return spec
