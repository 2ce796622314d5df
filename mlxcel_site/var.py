"""The directory of everything this server writes, which nobody but its owner may look into."""
from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

from .secret_key import secret_key


def prepare(folder: Path) -> None:
    """Makes the directory, and those above it that are missing. Raises ImproperlyConfigured where that cannot be."""
    try:
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        if not folder.is_dir():
            raise NotADirectoryError(None, "it is not a directory")
    except OSError as error:
        raise _unusable(folder, error) from None


def key(folder: Path) -> str:
    """The secret key that is kept in it. Raises ImproperlyConfigured where none can be read or written."""
    try:
        return secret_key(folder / "secret_key")
    except OSError as error:
        raise _unusable(folder, error) from None


def private(database: Path) -> None:
    """An SQLite file that is not there yet, for its owner alone; SQLite gives the files beside it the same permissions."""
    with suppress(OSError):      # it is there, or cannot be made: then whoever opens it says so
        os.close(os.open(database, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def _unusable(folder: Path, error: OSError) -> ImproperlyConfigured:
    return ImproperlyConfigured(f"MLXCEL_VAR_DIR={folder} cannot be used: {error.strerror}. Name a directory that this user may write to.")
