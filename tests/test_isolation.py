"""Tests touch nothing of the person who runs them."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from django.conf import settings

ROOT = Path(__file__).resolve().parent.parent


def test_state_and_cache_are_temporary() -> None:
    assert settings.VAR_DIR != ROOT / "var" and str(settings.VAR_DIR) == os.environ["MLXCEL_VAR_DIR"]
    assert not os.environ["MLXCEL_CACHE_DIR"].startswith(str(Path.home()))


def test_processes_inherit_the_isolation_and_the_real_settings() -> None:
    code = "import django; django.setup(); from django.conf import settings as s; print(s.SETTINGS_MODULE, s.VAR_DIR)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mlxcel_site.settings", os.environ["MLXCEL_VAR_DIR"]]
