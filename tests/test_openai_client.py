"""The official OpenAI client, as its users use it, against a real server: over a fake model, and over the real one."""
from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest

from tests.fakes import FakeClient
from tests.servers import FAKE, serving


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("openai") / "var", "--api-key", "k1", **FAKE) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="k1", max_retries=0) as client:
        yield client


def test_the_default_mode_is_base64_and_exact(client: openai.OpenAI) -> None:
    texts = [f"text {i}" for i in range(40)]
    response = client.embeddings.create(model="fake-8", input=texts)
    vectors = np.array([entry.embedding for entry in response.data], np.float32)
    assert np.array_equal(vectors, np.stack([FakeClient()._vector(text) for text in texts]))
    assert [entry.index for entry in response.data] == list(range(40))
    assert (response.model, response.usage.prompt_tokens, response.usage.total_tokens) == ("fake-8", 160, 160)
    floats = client.embeddings.create(model="fake-8", input=texts, encoding_format="float")
    assert np.array_equal(vectors, np.array([entry.embedding for entry in floats.data], np.float32))


def test_token_ids_and_dimensions(client: openai.OpenAI) -> None:
    assert len(client.embeddings.create(model="fake-8", input=[1, 2, 3]).data) == 1
    response = client.embeddings.create(model="tests/fake-8", input=[[1, 2], [3]], dimensions=4, user="someone")
    assert [len(entry.embedding) for entry in response.data] == [4, 4] and response.usage.prompt_tokens == 3


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("fake-8", "model", "mlxcel")
    assert client.models.retrieve("fake-8") == model
    assert client.models.retrieve("tests/fake-8").id == "fake-8"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_typed_errors(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="fake-8", input="a", dimensions=9)
    assert (caught.value.param, caught.value.type, caught.value.code) == ("dimensions", "invalid_request_error", None)
    assert "must be between 1 and 8" in caught.value.message
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embeddings.create(model="fake-8", input=[[39509]])
    with pytest.raises(openai.BadRequestError, match="not the served embedding model"):
        client.embeddings.create(model="text-embedding-3-small", input="a")
    with pytest.raises(openai.AuthenticationError, match="Invalid API Key"):
        client.with_options(api_key="wrong").embeddings.create(model="fake-8", input="a")
    with pytest.raises(openai.NotFoundError, match="use /v1/embeddings"):
        client.with_options(base_url=f"{url}/v1").embeddings.create(model="fake-8", input="a")


def test_no_model_is_asked_once(tmp_path: Path) -> None:
    """501 says that another try is pointless; the client would make three."""
    with serving(tmp_path / "var", MLXCEL_EMBEDDING_MODEL="") as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.embeddings.create(model="x", input="a")
        assert caught.value.status_code == 501 and "does not support embeddings" in caught.value.message
        assert server.log.read_text().count("POST /v1/embeddings") == 1


def test_overload_and_lateness(tmp_path: Path) -> None:
    """503 is tried again after a second, 504 is not; each is what the client calls a server's fault."""
    arguments = ("--queue-depth", "1", "--timeout", "1")
    with serving(tmp_path / "var", *arguments, MLXCEL_TRANSPORT="tests.fakes.CrowdedClient") as server, \
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        with pytest.raises(openai.InternalServerError) as late:
            client.embeddings.create(model="fake-8", input="a")
        assert late.value.status_code == 504 and late.value.type == "server_timeout"
        assert server.log.read_text().count("POST /v1/embeddings") == 1
        with ThreadPoolExecutor(4) as callers:
            outcomes = list(callers.map(lambda i: _status(client.with_options(max_retries=0), f"text {i}"), range(4)))
        assert 503 in outcomes and set(outcomes) <= {503, 504}
    with pytest.raises(openai.APIStatusError) as large, serving(tmp_path / "var", **FAKE) as server, \
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        client.embeddings.create(model="fake-8", input="a" * (64 * 2**20))
    assert (large.value.status_code, large.value.type) == (413, "invalid_request_error")


def _status(client: openai.OpenAI, text: str) -> int:
    with pytest.raises(openai.InternalServerError) as caught:
        client.embeddings.create(model="fake-8", input=text)
    assert caught.value.status_code != 503 or caught.value.response.headers["Retry-After"] == "1"
    return caught.value.status_code


def test_the_real_model(tmp_path: Path, minilm: Path) -> None:
    with serving(tmp_path / "var", "--model", str(minilm), "--alias", f"text-embedding-3-small={minilm.name}", "--backend",
                 "host") as server, \
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        (model,) = client.models.list().data
        texts = ["The weather is lovely today.", "It is so sunny outside!", "He drove to the stadium."]
        together = client.embeddings.create(model=model.id, input=texts)
        vectors = np.array([entry.embedding for entry in together.data], np.float32)
        assert vectors.shape == (3, 384) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        assert vectors[0] @ vectors[1] > 0.6 > 0.2 > vectors[0] @ vectors[2]
        alone = [client.embeddings.create(model="text-embedding-3-small", input=text).data[0].embedding for text in texts]
        assert np.array_equal(vectors, np.array(alone, np.float32))
        with pytest.raises(openai.BadRequestError, match="tokens"):
            client.embeddings.create(model=model.id, input=["a", "word " * 1000], extra_body={"truncate": False})
        raw = client.embeddings.with_raw_response.create(model=model.id, input=["a", "word " * 1000])
        assert raw.headers["x-truncated-inputs"] == "1" and raw.parse().usage.prompt_tokens == 3 + 256
