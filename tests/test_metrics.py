"""/metrics: what Prometheus reads."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families

from inference.engine import Engine
from inference.errors import Busy
from tests.fakes import FakeClient
from tests.servers import ROOT
from tests.test_rest import post

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def http(served: FakeClient) -> Client:
    return Client(raise_request_exception=False)


def scraped(http: Client) -> Samples:
    response = http.get("/metrics")
    assert response.status_code == 200 and response["Content-Type"].startswith("text/plain")
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(response.content.decode()) for sample in family.samples}


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


def test_requests_by_route_and_status(http: Client, served: FakeClient) -> None:
    before = scraped(http)
    post(http, {"input": "a"})
    post(http, {})
    http.get("/v1/models/nothing-of-the-kind")
    http.generic("BREW", "/no/such/path")
    served.fail = Busy("busy")
    post(http, {"input": "a"}, "/embedding")
    after = scraped(http)

    def grown(name: str, **labels: str) -> float:
        return of(after, name, **labels) - of(before, name, **labels)

    for method, route, status in (("POST", "/v1/embeddings", "200"), ("POST", "/v1/embeddings", "400"), ("POST", "/embedding", "503"),
                                  ("GET", "/v1/models/<path:model>", "404"), ("other", "unmatched", "404")):
        assert grown("mlxcel_http_requests_total", method=method, route=route, status=status) == 1, (method, route, status)
    assert grown("mlxcel_http_request_duration_seconds_count", method="POST", route="/v1/embeddings") == 2
    assert grown("mlxcel_http_errors_total", type="server_busy", status="503") == 1
    assert grown("mlxcel_http_errors_total", type="not_found_error", status="404") == 2
    assert of(after, "mlxcel_model_state", model="fake-8", kind="embedding", state="ready") == 1


def test_what_an_engine_counts(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(lambda: lambda sequences: [np.ones((1, 2), np.float32) for _ in sequences], pack_tokens=4)
    engine.submit([np.ones(3, np.int32), np.full(2, 7, np.int32)]).wait()
    engine.submit([np.ones(1, np.int32)], lane="bulk").wait()
    entry = {"state": "ready", "kind": "embedding", "tokenize_seconds": 0.5, "encode_seconds": 0.25, **engine.counters()}
    engine.close()
    monkeypatch.setattr(served, "health", lambda: {"status": "ok", "models": {"m": entry}})
    found = scraped(http)
    labels = {"model": "m", "kind": "embedding", "instance": "web"}
    assert of(found, "mlxcel_model_requests_total", **labels, lane="interactive") == 1 == of(
        found, "mlxcel_model_requests_total", **labels, lane="bulk")
    assert of(found, "mlxcel_model_queue_seconds_count", **labels, lane="interactive") == 2
    assert of(found, "mlxcel_model_queue_seconds_sum", **labels, lane="interactive") > 0
    assert (of(found, "mlxcel_model_pack_tokens_sum", **labels), of(found, "mlxcel_model_pack_tokens_count", **labels)) == (6, 3)
    assert of(found, "mlxcel_model_stage_seconds_total", **labels, stage="tokenize") == 0.5
    assert of(found, "mlxcel_model_stage_seconds_total", **labels, stage="forward") > 0
    for name in ("waiting", "rejected_total", "dropped_total"):
        assert (f"mlxcel_model_{name}", tuple(sorted({**labels, "lane": "bulk"}.items()))) in found
    assert of(found, "mlxcel_model_stalled_seconds", **labels) == 0


def test_instances_stand_by_themselves(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that several workers run: its own sums are left out, or they would count twice."""
    entry: dict[str, Any] = {"state": "ready", "kind": "embedding", "packs": 5, "tokens": 50, "queued_interactive": 3, "instances": {
        "a": {"packs": 2, "tokens": 20}, "b": {"packs": 3, "tokens": 30}}}
    monkeypatch.setattr(served, "health", lambda: {"status": "ok", "models": {"m": entry}})
    found = scraped(http)
    assert {dict(labels)["instance"]: value for (name, labels), value in found.items() if name == "mlxcel_model_pack_tokens_sum"} == {
        "a": 20, "b": 30}
    assert of(found, "mlxcel_model_queued", model="m", kind="embedding", lane="interactive") == 3


def test_models_that_cannot_be_asked_leave_the_rest(http: Client, served: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def health() -> None:
        raise Busy("Redis is away")

    monkeypatch.setattr(served, "health", health)
    assert any(name == "mlxcel_http_requests_total" for name, _ in scraped(http))


def test_several_processes_add_up(tmp_path: Path) -> None:
    code = ("import django; django.setup()\nfrom django.test import Client\nc = Client()\nc.get('/health')\n"
            "print(c.get('/metrics').content.decode())")
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "MLXCEL_TRANSPORT": "tests.fakes.FakeClient",
           "DJANGO_SETTINGS_MODULE": "mlxcel_site.settings", "DJANGO_ALLOWED_HOSTS": "testserver"}
    said = [subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env, text=True) for _ in range(2)]
    line = 'mlxcel_http_requests_total{method="GET",route="/health",status="200"}'
    assert [float(line_.split()[1]) for text in said for line_ in text.splitlines() if line_.startswith(line)] == [1, 2]
