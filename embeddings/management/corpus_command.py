"""What the commands over collections share: which model answers, and errors that are told, not traced."""
from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, SystemCheckError
from django.db import DatabaseError, InterfaceError

from embeddings import spaces, tables
from embeddings.models import Collection
from inference.client import InferenceClient, connect
from inference.config import LANE, Settings, how_to_serve
from inference.errors import Busy, Conflict, InferenceFailed, InvalidRequest, NotFound, ServiceError, TimedOut, told
from inference.wire import ModelSpec

FAILED, USAGE, NOTHING, INTERRUPTED = 1, 2, 3, 130

_UNWRITABLE = ("SQLite keeps files beside its own, even to read: let this user write to the directory, "
               "or copy it and name the copy with MLXCEL_VAR_DIR")
_CONFIGURATION = {
    "no such table": "embed_corpus makes the tables", "does not exist": "create it, and its tables with `manage.py migrate`",
    "readonly database": _UNWRITABLE, "unable to open database file": _UNWRITABLE}
_PASSING = {"locked": "another process has been writing for longer than the time-out", "full": "free some space",
            "disk I/O": "the disk may be full or failing"}


class CorpusCommand(BaseCommand):
    requires_migrations_checks = False       # the error of a missing table says the same without a query at each start

    def execute(self, *args: Any, **options: Any) -> str | None:
        if options["verbosity"] < 2:
            logging.getLogger("inference").setLevel(logging.WARNING)     # which backend opened is a server's news, not a command's
        try:
            said = super().execute(*args, **options)
            self.stdout.flush()
            return said
        except BrokenPipeError:      # whoever reads, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(FAILED)
        except NotFound as error:
            hint = (f" in {tables.database()}. `manage.py embed_corpus NAME SOURCE` makes one"
                    if error.code == "collection_not_found" else "")
            raise CommandError(f"{error}{hint}", returncode=USAGE) from error
        except ServiceError as error:
            raise CommandError(told(error), returncode=code_of(error)) from error
        except SystemCheckError as error:
            error.returncode = USAGE
            raise
        except (DatabaseError, InterfaceError) as error:
            raise CommandError(refused(error), returncode=USAGE if _hint(str(error), _CONFIGURATION) else FAILED) from error
        except OSError as error:
            raise CommandError(f"{error.filename or 'A file'} cannot be read or written: {error.strerror or error}",
                               returncode=USAGE) from error

    def out(self, line: str = "") -> None:
        self.stdout.write(line)

    def say(self, line: str) -> None:
        """On standard error, in the usual colour: it is no error."""
        self.stderr.write(line, str)


def code_of(error: ServiceError) -> int:
    """Wrong usage or configuration, unless it may go better the next time."""
    return FAILED if isinstance(error, Busy | TimedOut | InferenceFailed) else USAGE


def refused(error: Exception) -> str:
    """What a person needs to know of a database's error."""
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "no such table" in said:
        return f"{tables.database()} holds nothing yet: `manage.py embed_corpus NAME SOURCE` makes its tables and a collection"
    if said.startswith(("relation ", "column ")) and "does not exist" in said:
        return tables.lacking()
    hint = _hint(said, _CONFIGURATION | _PASSING)
    return f"The database {tables.database()} refused: {said}" + (f" ({hint})" if hint else "")


def _hint(said: str, hints: dict[str, str]) -> str | None:
    return next((hint for part, hint in hints.items() if part in said), None)


def settings_for(model: str | None, backend: str | None = None, batch_tokens: int | None = None, reranker: str | None = None) -> Settings:
    """The environment's settings, serving only `model` (None: the environment's first) and `reranker`, if any. Raises InvalidRequest for
    options that model workers, which are configured themselves, would ignore."""
    settings = Settings.from_env()
    if settings.transport == LANE and (option := "--backend" if backend else "--batch-tokens" if batch_tokens else None):
        raise InvalidRequest(f"{option} has no effect on model workers, which MLXCEL_REDIS_URL says to use: set it where they are started")
    models = (model,) if model else settings.embedding_models[:1]
    changes: dict[str, Any] = {"embedding_models": models, "reranker_models": (reranker,) if reranker else ()}
    if backend:
        changes["backend"] = backend
    if batch_tokens:
        changes["batch_tokens"] = batch_tokens
    return replace(settings, **changes)


@contextmanager
def connected(settings: Settings) -> Iterator[InferenceClient]:
    """A client of the model workers where there are any (MLXCEL_REDIS_URL), else with the model in this process."""
    client = connect(settings)
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
    remote = Settings.from_env().redis_url is not None       # else the client serves nothing but this model
    names = (model, model.rstrip("/").rpartition("/")[2]) if model and remote else (None,)
    spec = next(filter(None, (client.describe("embedding", name) for name in names)), None)
    if spec is None and remote:
        raise Conflict(f"{f'The model {model} is not' if model else 'No embedding model is'} served. {how_to_serve(model or 'MODEL')}",
                       code="model_not_served")
    if spec is None:
        raise Conflict("No embedding model is served. Name one with --model or MLXCEL_EMBEDDING_MODEL.", code="model_not_served")
    return spec
