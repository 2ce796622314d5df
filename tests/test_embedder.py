"""Items to vectors through the local transport with the real default model: options, limits, refusals, counts."""
from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from inference.client import connect
from inference.config import Settings
from inference.errors import CheckpointError, ConfigError, InvalidRequest, NotLoaded, TimedOut
from inference.transports.local import LocalClient
from inference.wire import EmbedJob

TEXTS = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")


@pytest.fixture(scope="module")
def client(minilm) -> Iterator[LocalClient]:
    client = LocalClient(Settings(embedding_models=(str(minilm),), backend="host", aliases={"small": minilm.name}))
    yield client
    client.close()


def embed(client, items=TEXTS, **options):
    return client.embed(EmbedJob(tuple(items), **options))


def test_result(client):
    result = embed(client)
    assert result.data.shape == (3, 384) and result.data.dtype == np.float32
    assert result.rows.tolist() == [1, 1, 1] and result.tokens.tolist() == [8, 9, 8] and result.truncated == () and not result.errors
    assert [v.shape for v in result.vectors()] == [(1, 384)] * 3


def test_token_ids_are_used_verbatim(client):
    text = embed(client, ["hello"])
    ids = embed(client, [(101, 7592, 102)])
    assert np.array_equal(text.data, ids.data)
    assert not np.array_equal(embed(client, [(7592,)]).data, ids.data)
    long = embed(client, [(101, *[7592] * 300)])
    assert long.tokens.tolist() == [256] and long.truncated == (0,)
    assert np.array_equal(long.data, embed(client, [(101, *[7592] * 255)]).data)


def test_texts_and_ids_in_one_job_keep_their_order(client):
    result = embed(client, ["hello", (101, 2088, 102), "world"])
    assert np.array_equal(result.data[1], result.data[2]) and not np.array_equal(result.data[0], result.data[1])


@pytest.mark.parametrize("dimensions", [1, 64, 383, 384])
def test_dimensions(client, dimensions):
    full, short = embed(client).data, embed(client, dimensions=dimensions).data
    want = full[:, :dimensions].astype(np.float64)
    assert short.shape == (3, dimensions)
    assert np.abs(short - want / np.linalg.norm(want, axis=1, keepdims=True)).max() < 1e-6


@pytest.mark.parametrize("kind", [-1, 0, 1, 2, 3, 7.5, 500])
@pytest.mark.parametrize("dimensions", [None, 100])
def test_normalisation(client, kind, dimensions):
    raw = embed(client, normalize=-1).data.astype(np.float64)
    got = embed(client, normalize=kind, dimensions=dimensions).data
    for rows, again in ((raw, False), (got.astype(np.float64), True)):
        size = {-1: lambda x: np.ones(len(x)), 0: lambda x: np.abs(x).max(1) / 32760, 2: lambda x: np.sqrt((x * x).sum(1))}.get(
            kind, lambda x: (np.abs(x) ** kind).sum(1) ** (1 / kind) if kind < 100 else np.abs(x).max(1))
        if again:
            assert np.abs(size(rows) - 1).max() < (2e-2 if kind == 500 else 1e-5)
        elif dimensions is None:
            assert np.abs(got - rows / size(rows)[:, None]).max() <= (2e-2 if kind == 500 else 1e-5 * max(1, np.abs(got).max()))


@pytest.mark.parametrize("kind", [-2, -0.5, float("nan"), float("inf")])
def test_normalisation_outside_its_domain(client, kind):
    with pytest.raises(InvalidRequest, match=r"embd_normalize .* is out of domain: pass -1"):
        embed(client, normalize=kind)


@pytest.mark.parametrize("items, message", [
    (("a", ""), r"input\[1\] is an empty string"), (((1,), ()), r"input\[1\] is an empty token list"),
    (((1, 30522),), r"input\[0\] contains token id 30522, which is >= vocab_size 30522"), (((-1,),), r"token id -1")])
def test_items_that_are_refused(client, items, message):
    with pytest.raises(InvalidRequest, match=message):
        embed(client, items)


@pytest.mark.parametrize("dimensions", [0, -1, 385])
def test_dimensions_out_of_range(client, dimensions):
    with pytest.raises(InvalidRequest, match="must be between 1 and 384"):
        embed(client, dimensions=dimensions)


def test_truncation_can_be_refused(client):
    embed(client, ["word " * 200], truncate=False)
    with pytest.raises(InvalidRequest, match=r"input\[1\] has 302 tokens, more than the model's limit of 256"):
        embed(client, ["a", "word " * 300], truncate=False)
    with pytest.raises(InvalidRequest, match=r"input\[0\] has at least .* tokens"):
        embed(client, ["word " * 300_000], truncate=False)
    with pytest.raises(InvalidRequest, match=r"input\[0\] has 300 tokens"):
        embed(client, [(1,) * 300], truncate=False)


def test_an_item_over_the_limit_is_reported(client):
    assert embed(client, ["a", "word " * 300]).truncated == (1,)


def test_blank_texts_are_the_special_tokens(client):
    assert np.array_equal(embed(client, [" \n"]).data, embed(client, [(101, 102)]).data)


def test_a_timeout_is_an_error(client):
    with pytest.raises(TimedOut):
        embed(client, ["word " * 200] * 300 + ["x"], timeout=0.01)
    assert embed(client).data.shape == (3, 384)


def test_many_callers_at_once_get_what_one_gets(client):
    texts = [f"{'word ' * (n % 40)} number {n}" for n in range(200)]
    alone = embed(client, texts).data
    with ThreadPoolExecutor(16) as pool:
        jobs = [texts[i:i + 7] for i in range(0, 200, 7)]
        parts = list(pool.map(lambda job: embed(client, job, lane="bulk" if len(job[0]) % 2 else "interactive").data, jobs))
    assert np.array_equal(np.concatenate(parts), alone)


def test_names(client, minilm):
    assert client.describe("embedding").id == minilm.name == client.describe("embedding", "small").id
    assert client.describe("embedding", "other") is None and client.describe("reranker") is None
    with pytest.raises(InvalidRequest, match=f"model `other` is not the served embedding model `{minilm.name}`"):
        embed(client, model="other")


def test_health_and_counters(client):
    embed(client)
    health = client.health()
    counters = health["models"][client.models()[0].id]
    assert health["status"] == "ok" and counters["state"] == "ready" and counters["packs"] > 0 and counters["tokenize_seconds"] > 0


def test_nothing_is_loaded_before_it_is_asked_for(minilm):
    client = LocalClient(Settings(embedding_models=(str(minilm),), backend="host"))
    spec = client.describe("embedding")
    assert spec.state == "cold" and spec.dims == 384 and spec.parameters == 22_713_728 and len(spec.weights_hash) == 64
    client.load()
    assert client.describe("embedding").state == "ready"
    client.close()


def test_settings_override_the_checkpoint(minilm):
    client = LocalClient(Settings(embedding_models=(str(minilm),), backend="host", pooling="cls", normalize=-1.0, max_length=16))
    spec = client.describe("embedding")
    assert (spec.pooling, spec.normalize, spec.max_length) == ("cls", -1.0, 16)
    result = client.embed(EmbedJob(("word " * 20,)))
    assert result.tokens.tolist() == [16] and abs(np.linalg.norm(result.data) - 1) > 0.1
    client.close()


def test_a_model_that_is_not_there(tmp_path):
    client = LocalClient(Settings(embedding_models=(str(tmp_path / "nothing"),)))
    with pytest.raises(NotLoaded, match=r"This server does not support embeddings.*nothing.*was not found"):
        client.describe("embedding")
    with pytest.raises(NotLoaded):
        embed(client)
    with pytest.raises(CheckpointError):
        client.load()
    assert client.models() == [] and client.health()["status"] == "failed"


def test_no_model_at_all():
    client = LocalClient(Settings(embedding_models=()))
    assert client.models() == [] and client.describe("embedding") is None and client.health()["status"] == "ok"
    with pytest.raises(NotLoaded, match="does not support embeddings"):
        embed(client)


def test_split(client):
    spans, = client.split(["one two three four five six seven eight nine ten"], 6)
    assert len(spans) == 3 and all(s.tokens <= 6 for s in spans)
    for tokens, overlap, part in ((1000, 0, "limit of 256"), (6, 9, "overlap"), (2, 0, "no room")):
        with pytest.raises(InvalidRequest, match=part):
            client.split(["text"], tokens, overlap)


@pytest.mark.parametrize("transport", ["nowhere.Client", "inference.client.Nothing", "x"])
def test_an_unknown_transport_is_named(transport):
    with pytest.raises(ConfigError, match="MLXCEL_TRANSPORT"):
        connect(Settings(transport=transport))
