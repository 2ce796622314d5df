"""One contract, whichever way the models are reached: the real default model in this process, and in a Celery worker over Redis."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.client import InferenceClient
from inference.config import Settings
from inference.errors import InvalidRequest, NotLoaded, TimedOut
from inference.transports.local import LocalClient
from inference.wire import STAGES, EmbedJob, RerankJob
from tests.lanes import RedisServer, WorkerProcess, client_of, redis_server
from tests.servers import ROOT

TEXTS = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.", "naïve 雨 🌧", "half a \ud83d pair")


@pytest.fixture(scope="module")
def local(minilm: Path) -> Iterator[LocalClient]:
    client = LocalClient(Settings(embedding_models=(str(minilm),), backend="host", aliases={"small": str(minilm.name)}))
    yield client
    client.close()


@pytest.fixture(scope="module")
def deployment(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, WorkerProcess]]:
    folder = tmp_path_factory.mktemp("deployment")
    with redis_server(folder) as redis:
        worker = WorkerProcess(redis.url, folder / "worker.log", model=str(minilm), MLXCEL_TRANSPORT="", MLXCEL_BACKEND="host",
                               MLXCEL_MODEL_ALIASES=f"small={minilm.name}")
        try:
            worker.wait_ready(client_of(redis.url))
            yield redis, worker
        finally:
            assert worker.stop() == 0, worker.log.read_text()
        said = worker.log.read_text()
        assert "Traceback" not in said and "is ready after" in said, said
        assert redis.remains() == []


@pytest.fixture(params=["local", "lane"])
def client(request: pytest.FixtureRequest) -> InferenceClient:
    if request.param == "local":
        return request.getfixturevalue("local")
    redis, _ = request.getfixturevalue("deployment")
    return client_of(redis.url)


def embed(client: InferenceClient, *items: Any, **options: Any) -> Any:
    return client.embed(EmbedJob(items or TEXTS, **options))


def test_description(client: InferenceClient, minilm: Path) -> None:
    client.load()
    (spec,) = client.models()
    assert spec == client.describe("embedding") == client.describe("embedding", "small") == client.describe("embedding", minilm.name)
    assert (spec.id, spec.kind, spec.dims, spec.max_length, spec.vocab_size, spec.pooling, spec.state) == (
        minilm.name, "embedding", 384, 256, 30522, "mean", "ready")
    assert client.describe("embedding", "another") is None and client.describe("reranker") is None


def test_results(client: InferenceClient) -> None:
    result = embed(client, *TEXTS[:3], (101, 7592, 102), "word " * 300)
    assert (result.data.shape, result.data.dtype, result.rows.dtype, result.tokens.dtype) == ((5, 384), np.float32, np.int32, np.int32)
    assert result.rows.tolist() == [1] * 5 and result.tokens.tolist() == [8, 9, 8, 3, 256] and result.truncated == (4,)
    assert np.abs(np.linalg.norm(result.data, axis=1) - 1).max() < 1e-6 and not result.errors and not result.multi_vector
    assert [vector.shape for vector in result.vectors()] == [(1, 384)] * 5
    assert embed(client, *()).data.shape == (len(TEXTS), 384)
    assert client.embed(EmbedJob(())).data.shape == (0, 384)


@pytest.mark.parametrize("options", [
    {}, {"dimensions": 7}, {"normalize": -1.0}, {"normalize": 0.0}, {"lane": "bulk"}, {"model": "small"}, {"partial": True},
    {"instruction": "has no effect here"}])
def test_both_ways_give_the_same_bits(client: InferenceClient, local: LocalClient, options: dict[str, Any]) -> None:
    mine, reference = embed(client, **options), embed(local, **options)
    assert mine.data.tobytes() == reference.data.tobytes() and mine.model == reference.model


@pytest.mark.parametrize(("items", "options", "message"), [
    (("",), {}, r"input\[0\] is an empty string"),
    (("a", ()), {}, r"input\[1\] is an empty token list"),
    (((30522,),), {}, r"input\[0\] contains token id 30522"),
    (("a",), {"dimensions": 385}, "`dimensions` must be between 1 and 384"),
    (("a",), {"normalize": -2.0}, "out of domain"),
    (("a", "word " * 300), {"truncate": False}, r"input\[1\] has 302 tokens, more than the model's limit of 256"),
    (("a",), {"model": "another"}, "model `another` is not the served embedding model"),
])
def test_refusals(client: InferenceClient, items: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        client.embed(EmbedJob(items, **options))
    assert error.value.param in ("input", "dimensions", "model", "embd_normalize", None)


def test_no_such_kind(client: InferenceClient) -> None:
    with pytest.raises(NotLoaded, match=r"^This server does not support reranking\. "):
        client.rerank(RerankJob("q", ("d",)))


def test_time_is_up(client: InferenceClient) -> None:
    with pytest.raises(TimedOut, match="timed out"):
        embed(client, *(f"{'word ' * 200}{i}" for i in range(2000)), timeout=0.3)
    assert embed(client, "and it goes on").data.shape == (1, 384)


def test_split(client: InferenceClient, local: LocalClient) -> None:
    text = "One sentence here. Another one there. " * 20
    spans = client.split([text, "short"], 32, 4, prompt="passage: ")
    assert spans == local.split([text, "short"], 32, 4, prompt="passage: ") and len(spans[0]) > 3 and len(spans[1]) == 1
    with pytest.raises(InvalidRequest, match="longer than the model's limit"):
        client.split([text], 257)


def test_many_callers_get_their_own(client: InferenceClient, local: LocalClient) -> None:
    texts = [f"text {i} {'and more ' * (i % 7)}" for i in range(40)]
    want = embed(local, *texts).data
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda text: embed(client, text).data[0], texts))
    assert np.array_equal(np.stack(found), want)


def test_health(client: InferenceClient, minilm: Path) -> None:
    embed(client)
    health = client.health()
    entry = health["models"][minilm.name]
    assert (health["status"], entry["state"], entry["kind"]) == ("ok", "ready", "embedding")
    for counters in entry.get("instances", {"here": entry}).values():
        assert {"requests_interactive", "packs", "tokens", *(f"{stage}_seconds" for stage in STAGES), "stalled_seconds"} <= counters.keys()


def test_timings(client: InferenceClient) -> None:
    timings = embed(client).timings
    assert timings.keys() == set(STAGES) and all(0 <= seconds < 60 for seconds in timings.values()) and timings["forward"] > 0


# ---- what runs where

def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


def test_callers_import_nothing_that_computes(deployment: tuple[RedisServer, WorkerProcess]) -> None:
    done = python("""
import json, sys
from inference.client import get_client
from inference.wire import EmbedJob
client = get_client()
client.load(); client.models(); client.embed(EmbedJob(("a",))); client.split(["a b c"], 8); client.health()
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))""", MLXCEL_REDIS_URL=deployment[0].url)
    assert done.returncode == 0, done.stderr
    heavy = {"mlx", "numba", "tokenizers", "transformers", "torch", "PIL", "safetensors", "huggingface_hub", "celery", "kombu", "django"}
    assert not set(json.loads(done.stdout)) & heavy


def test_workers_know_nothing_of_django_s_settings(deployment: tuple[RedisServer, WorkerProcess]) -> None:
    """kombu imports django.utils wherever Django is installed, but no project of it."""
    done = python("""
import sys
import inference.app
from django.conf import settings
assert not settings.configured
print(*sorted(name for name in sys.modules if name.startswith(("mlxcel_site", "embeddings", "rest_framework"))))""",
                  MLXCEL_REDIS_URL=deployment[0].url)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_worker_does_not_fork(deployment: tuple[RedisServer, WorkerProcess]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "inference.app", "worker", "-P", "solo"], cwd=ROOT, capture_output=True, text=True,
        timeout=60, env={**environment, "MLXCEL_REDIS_URL": deployment[0].url, "MLXCEL_WORKER_MODEL": "/no/such"})
    assert done.returncode != 0 and "start them with -P threads" in done.stderr + done.stdout


@pytest.mark.parametrize(("settings", "says"), [
    ({"MLXCEL_REDIS_URL": ""}, "MLXCEL_REDIS_URL is not set"),
    ({"MLXCEL_REDIS_URL": "redis://localhost:notaport"}, "error: MLXCEL_REDIS_URL='redis://localhost:notaport': the port is not a number"),
    ({"MLXCEL_WORKER_MODEL": "", "MLXCEL_EMBEDDING_MODEL": "a,b"}, "MLXCEL_WORKER_MODEL is not set, and a worker serves one model"),
    ({"MLXCEL_WORKER_MODEL": "/no/such/model"}, "/no/such/model"),
    ({"MLXCEL_TRANSPORT": "tests.engines.BrokenClient"}, "no such weights"),
])
def test_a_worker_that_cannot_serve_says_why_and_ends(
        deployment: tuple[RedisServer, WorkerProcess], tmp_path: Path, settings: dict[str, str], says: str) -> None:
    worker = WorkerProcess(deployment[0].url, tmp_path / "log", **{"MLXCEL_TRANSPORT": "", **settings})
    status = worker.process.wait(60)
    said = worker.log.read_text()
    assert status not in (0, None) and says in said and "Traceback" not in said, (status, said)


def test_commands_use_the_workers(deployment: tuple[RedisServer, WorkerProcess], minilm: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("".join(json.dumps({"_id": str(i), "text": text}) + "\n" for i, text in enumerate(TEXTS[:4])))

    def manage(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-X", "importtime", "manage.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120,
            env={**os.environ, "MLXCEL_VAR_DIR": str(tmp_path / "var"), "MLXCEL_REDIS_URL": deployment[0].url, **more})

    assert manage("migrate", "-v0").returncode == 0
    done = manage("embed_corpus", "c", str(corpus), "--split", "64", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["embedded"] == 4, done.stdout
    assert " tokenizers" not in done.stderr and " numba" not in done.stderr
    found = manage("search_corpus", "c", "sunshine", "--json")
    assert json.loads(found.stdout)["hits"][0]["external_id"] in ("0", "1"), found.stdout
    refused = manage("embed_corpus", "d", str(corpus), "--model", "org/another")
    assert refused.returncode == 2 and "The model org/another is not served. Start a worker for it" in refused.stderr
    refused = manage("embed_corpus", "d", str(corpus), "--backend", "host")
    assert refused.returncode == 2 and "--backend has no effect on model workers" in refused.stderr
