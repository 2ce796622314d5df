"""The project's settings, read in an environment of the tests' own: nothing of the person who runs them is read or written.

pytest-django loads settings before any conftest, so the environment is made here. Processes that tests start inherit it,
and use the real settings.
"""
import atexit
import os
import tempfile

_home = tempfile.TemporaryDirectory(prefix="mlxcel-tests-", ignore_cleanup_errors=True)
atexit.register(_home.cleanup)

KEPT = {"MLXCEL_TEST_DATA", "MLXCEL_MODELS_DIR", "MLXCEL_TEST_DATABASE_URL", "MLXCEL_TEST_POSTGRES"}      # where what tests need lies
for name in [n for n in os.environ if n.startswith(("MLXCEL_", "DJANGO_")) or n == "DATABASE_URL"]:
    if name not in KEPT:
        del os.environ[name]
os.environ |= {
    "DJANGO_SETTINGS_MODULE": "mlxcel_site.settings",
    "MLXCEL_VAR_DIR": os.path.join(_home.name, "var"),
    "MLXCEL_CACHE_DIR": os.path.join(_home.name, "cache"),
    "MLXCEL_ALLOW_DOWNLOAD": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
if _database := os.environ.get("MLXCEL_TEST_DATABASE_URL"):      # tests.postgres
    os.environ["DATABASE_URL"] = _database

from mlxcel_site.settings import *  # noqa: E402, F403
