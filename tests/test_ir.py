"""Retrieval figures of the real default model, from file to figure through the commands, against those of sentence-transformers.

The expected figures are the data's own `reference.json`: float32, at most 256 tokens, title and text, exact cosine.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOLERANCE = {"nDCG@10": 0.0005, "R@100": 0.001, "RR@10": 0.002, "AP": 0.001}


@pytest.mark.parametrize("collection", [
    pytest.param("cranfield"), pytest.param("cisi", marks=pytest.mark.ir), pytest.param("npl", marks=pytest.mark.ir)])
@pytest.mark.timeout(3000)
def test_figures(collection: str, data: Path, minilm: Path, tmp_path: Path) -> None:
    folder = data / "ir" / collection
    env = {**os.environ, "MLXCEL_VAR_DIR": str(tmp_path), "MLXCEL_BACKEND": "host", "DJANGO_SETTINGS_MODULE": "mlxcel_site.settings"}

    def manage(*arguments: str) -> str:
        done = subprocess.run([sys.executable, "manage.py", *arguments], env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    manage("migrate", "-v0")
    embedded = json.loads(manage("embed_corpus", collection, str(folder / "corpus.jsonl"), "--text-field", "title,text", "--json"))
    reference = json.loads((folder / "reference.json").read_text())
    assert embedded["read"] == reference["docs"] and embedded["truncated"] == reference["doc_tokens"]["truncated_docs"]
    figures = json.loads(manage("evaluate_corpus", collection, "--queries", str(folder / "queries.jsonl"),
                                "--qrels", str(folder / "qrels.trec"), "--json"))
    for name, expected in reference["figures"].items():
        assert abs(figures["figures"][name] - expected) <= TOLERANCE[name], (name, figures)
