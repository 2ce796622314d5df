"""What the web process imports when the models are elsewhere, and the import contracts of pyproject.toml."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.servers import FAKE, ROOT

HEAVY = ("mlx", "numba", "tokenizers", "transformers", "torch", "PIL", "safetensors", "huggingface_hub", "scipy", "pyarrow", "celery")
WEB = """
import json, sys
from django.test import Client
from mlxcel_site.wsgi import application
from django.core.management import call_command
call_command("migrate", verbosity=0)
http = Client(headers={"host": "localhost"})
for path in ("/", "/docs", "/openapi.json", "/v1/models", "/health/ready", "/collections", "/admin/login/"):
    assert http.get(path).status_code == 200, path
assert http.post("/v1/embeddings", {"input": "a"}, content_type="application/json").status_code == 200
print(json.dumps(sorted(sys.modules)))
"""


def test_the_web_process_stays_light() -> None:
    """With the models behind another transport, answering every kind of request imports nothing that computes."""
    done = subprocess.run([sys.executable, "-c", WEB], cwd=ROOT, env={**os.environ, **FAKE}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert not loaded & set(HEAVY)


def test_models_know_nothing_of_the_web() -> None:
    code = "import sys, inference.transports.local, inference.__main__; print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"django", "rest_framework", "mlxcel_site", "embeddings", "rerank"}


def test_import_contracts() -> None:
    done = subprocess.run([os.path.join(os.path.dirname(sys.executable), "lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True,
                          text=True)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
