"""`manage.py ensure_admin`: a login for the admin, made once, printed every time."""
from __future__ import annotations

import os
import secrets
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, SystemCheckError
from django.db import DatabaseError

from embeddings import tables
from inference.errors import Conflict

USAGE = 2      # exit code of wrong usage or configuration


class Command(BaseCommand):
    help = ("Create an admin login with a random password if it does not exist yet, and print it. "
            "The password is kept in MLXCEL_VAR_DIR/USERNAME-password, which only its owner may read.")

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--username", default="admin", help="name of the login (admin)")

    def execute(self, *args: Any, **options: Any) -> str | None:
        try:
            return super().execute(*args, **options)
        except SystemCheckError as error:
            error.returncode = USAGE
            raise

    def handle(self, *args: Any, username: str, **options: Any) -> None:
        try:
            tables.ensure(lambda line: self.stderr.write(line, str))
            self._ensure(username)
        except Conflict as error:
            raise CommandError(str(error), returncode=USAGE) from error
        except DatabaseError as error:
            raise CommandError(f"The database {tables.database()} cannot be used: {error}", returncode=USAGE) from error
        except OSError as error:
            raise CommandError(f"{error.filename} cannot be read or written: {error.strerror}", returncode=USAGE) from error

    def _ensure(self, username: str) -> None:
        users = get_user_model()._default_manager
        kept = Path(settings.VAR_DIR) / f"{username}-password"
        user = users.filter(username=username).first()
        if user is None:
            # Written before the user is made: a run that dies in between leaves a password that the next run uses.
            password = kept.read_text("ascii").strip() if kept.exists() else _write(kept, secrets.token_urlsafe(12))
            get_user_model().objects.create_superuser(username, password=password)
        elif not kept.exists() or not user.check_password(password := kept.read_text("ascii").strip()):
            self.stdout.write(f"admin login   {username}, with the password you gave it (forgotten? manage.py changepassword {username})")
            return
        self.stdout.write(f"admin login   {username} / {password}   (kept in {kept})")


def _write(path: Path, secret: str) -> str:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        file.write(secret + "\n")
    return secret
