"""Django's secret key: made once, kept beside the database, readable by its owner alone."""
from __future__ import annotations

import os
import secrets
from pathlib import Path


def secret_key(path: Path) -> str:
    """The key in `path`; the first caller writes it. Two processes that start together agree on one key: only one can create the link."""
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(50))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    key = path.read_text().strip()
    if len(key) < 50:
        raise SystemExit(f"{path} holds no usable secret key: expected at least 50 characters, found {len(key)}. Delete it for a new one")
    return key
