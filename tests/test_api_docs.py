"""docs/api.md is true: its examples are sent, in order, to a server over the real model, and answered as they say."""
from __future__ import annotations

import json
import re
import shutil
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import call_command
from django.test import Client, override_settings
from django.urls import get_resolver

from inference.client import get_client
from tests.rerankers import PAIRINGS
from tests.routes import addresses
from tests.servers import ROOT

TEXT = (ROOT / "docs/api.md").read_text()
EXAMPLE = re.compile(r"```http\n(GET|POST) (\S+)\n(.*?)```\n```json\n(.*?)```", re.DOTALL)
ANY = {"created", "revision"}      # of the machine, not of the model
NOTES = [
    {"id": "n1", "text": "The weather is lovely today.", "year": 2023},
    {"id": "n2", "text": "It is so sunny outside!", "year": 2024},
    {"id": "n3", "text": "He drove to the stadium.", "year": 2024},
]


@pytest.fixture
def http(db: None, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("MLXCEL_BACKEND", "host")
    tiny = shutil.copytree(next(p for p in PAIRINGS if p.name == "roberta").folder, tmp_path / "tiny-reranker")
    monkeypatch.setenv("MLXCEL_RERANKER_MODEL", str(tiny))
    get_client.cache_clear()
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in NOTES))
    call_command("embed_corpus", "notes", str(tmp_path / "notes.jsonl"), verbosity=0)
    with override_settings(PROPS=True):
        yield Client()
    get_client().close()
    get_client.cache_clear()


def same(told: Any, true: Any, where: str) -> None:
    """Equal in structure, words and counts; real numbers to the digits shown."""
    if where.rpartition(".")[2] in ANY or (isinstance(told, str) and told.startswith("rerank-")):
        return
    if isinstance(told, dict) and isinstance(true, dict):
        assert told.keys() == true.keys(), where
        for key in told:
            same(told[key], true[key], f"{where}.{key}")
    elif isinstance(told, list) and isinstance(true, list):
        assert len(told) == len(true), where
        for i, (a, b) in enumerate(zip(told, true, strict=True)):
            same(a, b, f"{where}[{i}]")
    elif where.endswith(".embedding") and isinstance(told, str):
        assert np.frombuffer(b64decode(true), "<f4") == pytest.approx(np.frombuffer(b64decode(told), "<f4"), abs=1e-5), where
    elif isinstance(told, float):
        assert true == pytest.approx(told, abs=0.5 * 10 ** -len(str(told).partition(".")[2]) + 1e-9), where
    else:
        assert told == true, where


def test_examples(http: Client) -> None:
    examples = EXAMPLE.findall(TEXT)
    assert len(examples) == TEXT.count("```http") == 10
    for method, path, body, told in examples:
        response = http.generic(method, path, body, content_type="application/json")
        same(json.loads(told), response.json(), f"{method} {path}")


def test_routes_are_listed(http: Client) -> None:
    """In the documentation and at /v1; other names of a route in the documentation alone."""
    also = {path for path, view in addresses(get_resolver()) if "schema" in getattr(view, "view_initkwargs", ()) and path != "/v1"}
    named = {path for path, _ in addresses(get_resolver())} - also
    listed = set(re.findall(r"`((?:GET|POST) /[^`]*)`", TEXT))
    assert {line.partition(" ")[2] for line in listed} == named
    assert {f"{method} {path}" for method, paths in http.get("/v1").json()["routes"].items() for path in paths} == listed
    assert [path for path in also if f"`{path.removesuffix('/{model}')}`" not in TEXT] == []
