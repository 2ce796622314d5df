"""The admin login is made once, printed every time, and readable by its owner only."""
from __future__ import annotations

import io
import re
import stat
from pathlib import Path

import pytest
from django.contrib.auth import authenticate, get_user_model
from django.core.management import call_command

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def var(tmp_path: Path, settings: object) -> Path:
    settings.VAR_DIR = tmp_path  # type: ignore[attr-defined]
    return tmp_path


def run(*options: str) -> str:
    out = io.StringIO()
    call_command("ensure_admin", *options, stdout=out)
    return out.getvalue()


def printed_password(text: str) -> str:
    found = re.search(r"admin / (\S+)", text)
    assert found, text
    return found[1]


def test_the_printed_login_works_and_stays_the_same(var: Path) -> None:
    first = run()
    user = authenticate(username="admin", password=printed_password(first))
    assert user is not None and user.is_superuser
    assert run() == first and get_user_model().objects.count() == 1


def test_only_the_owner_may_read_the_password(var: Path) -> None:
    run()
    assert stat.S_IMODE((var / "admin-password").stat().st_mode) == 0o600


def test_a_run_that_died_before_the_user_was_made_is_completed(var: Path) -> None:
    (var / "admin-password").write_text("kept-from-before\n")
    assert printed_password(run()) == "kept-from-before"
    assert authenticate(username="admin", password="kept-from-before")


@pytest.mark.parametrize("changed", ["password", "file"])
def test_a_password_that_is_no_longer_known_is_never_printed_or_reset(var: Path, changed: str) -> None:
    old = printed_password(run())
    user = get_user_model().objects.get()
    if changed == "password":
        user.set_password("chosen-by-a-person")
        user.save()
    else:
        (var / "admin-password").unlink()
    text = run()
    assert old not in text and "changepassword admin" in text
    assert authenticate(username="admin", password="chosen-by-a-person" if changed == "password" else old)
