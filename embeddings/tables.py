"""The database's tables. An SQLite file is nobody's but this program's, so every command that writes makes or updates them. On PostgreSQL
only `serve` and `migrate` do: other machines work on it as well."""
from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from django.core.management import call_command
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from inference.errors import Conflict


def database() -> str:
    """Where it is, for a person."""
    return str(connection.settings_dict["NAME"])


def lacking() -> str:
    """What a person is told where they have to make the tables."""
    return f"The database {database()} lacks tables of this version: run `manage.py migrate` first"


def ensure(say: Callable[[str], None], *, anywhere: bool = False) -> None:
    """Tables as this version needs them, on SQLite, or `anywhere`. Raises Conflict where a person has to make them, and what the database
    raises."""
    if not _missing():
        return
    if connection.vendor != "sqlite" and not anywhere:
        raise Conflict(lacking(), code="tables_missing")
    with _alone():
        if _missing():
            say(f"Making the tables in {database()}")
            call_command("migrate", verbosity=0, interactive=False)


def _missing() -> bool:
    executor = MigrationExecutor(connection)
    return bool(executor.migration_plan(executor.loader.graph.leaf_nodes()))


@contextmanager
def _alone() -> Iterator[None]:
    """Two commands that start on an empty directory at the same moment: one makes the tables, the other waits."""
    if connection.vendor != "sqlite":      # has a directory of its own, elsewhere
        yield
        return
    folder = os.open(Path(database()).parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
