"""`manage.py serve` as a person meets it: a real process, real sockets, real signals."""
from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.lanes import WorkerProcess, client_of, redis_server, wait_until
from tests.rerankers import DOCUMENTS, PAIRINGS, QUERIES
from tests.servers import FAKE, ROOT, environment, free_port, refused, serving


@pytest.fixture
def var(tmp_path: Path) -> Path:
    return tmp_path / "var"


def test_start_answer_stop(var: Path) -> None:
    with serving(var, **FAKE) as server:
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).json()["model"] == "fake-8"
        assert httpx.get(f"{server.url}/admin/", follow_redirects=True).status_code == 200
        assert httpx.get(f"{server.url}/collections").json() == {"object": "list", "data": []}
        assert stat.S_IMODE((var / "secret_key").stat().st_mode) == 0o600 and stat.S_IMODE(var.stat().st_mode) == 0o700
        assert server.stop() < 5 and server.process.returncode == 0
        said = server.log.read_text()
    port = server.url.rpartition(":")[2]
    for line in (f"API    http://localhost:{port}/v1", f"docs   http://localhost:{port}/docs", f"admin  http://localhost:{port}/admin/",
                 "fake-8: 8 dim"):
        assert line in said
    assert (var / "secret_key").read_text() not in said and "Traceback" not in said


def test_ctrl_c(var: Path) -> None:
    """A terminal sends SIGINT to all processes of the group, and the server has answered something by then."""
    with serving(var, **FAKE) as server:
        httpx.get(f"{server.url}/health")
        started = time.monotonic()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(15) == 0 and time.monotonic() - started < 5
        assert "Traceback" not in server.log.read_text()


def test_the_secret_key_stays(var: Path) -> None:
    show = [sys.executable, "-c", "from mlxcel_site.settings import SECRET_KEY; print(SECRET_KEY)"]
    first, second = (subprocess.check_output(show, cwd=ROOT, env=environment(var), text=True) for _ in range(2))
    assert first == second and len(first.strip()) >= 50


def test_the_secret_key_is_one_for_processes_that_start_together(var: Path) -> None:
    show = [sys.executable, "-c", "from mlxcel_site.settings import SECRET_KEY; print(SECRET_KEY)"]
    processes = [subprocess.Popen(show, cwd=ROOT, env=environment(var), stdout=subprocess.PIPE) for _ in range(4)]
    assert len({process.communicate()[0] for process in processes}) == 1
    assert sorted(file.name for file in var.iterdir()) == ["mlxcel.sqlite3", "secret_key"]


def test_a_port_in_use(var: Path) -> None:
    with serving(var, **FAKE) as server:
        port = server.url.rpartition(":")[2]
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in refused(var, "--port", port, **FAKE)
    assert "cannot listen on port 70000" in refused(var, "--port", "70000", **FAKE)


def test_listening_elsewhere_needs_a_key(var: Path) -> None:
    message = refused(var, "--host", "0.0.0.0", "--port", str(free_port()), **FAKE)
    assert "without an API key" in message and "--insecure-no-key" in message
    with serving(var, "--host", "0.0.0.0", "--api-key", 'a,"b', **FAKE) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        headers = {"Authorization": 'Bearer a,"b', "Host": "elsewhere.example"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        assert 'a,"b' not in server.log.read_text()
    with serving(var, "--host", "0.0.0.0", "--insecure-no-key", **FAKE) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 200


def test_keys_of_a_file_and_of_the_environment_add_up(var: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice\n")
    with serving(var, "--api-key-file", str(tmp_path / "keys"), "--api-key", "carol", **FAKE, MLXCEL_API_KEYS="bob") as server:
        for key, status in (("alice", 200), ("bob", 200), ("carol", 200), ("dave", 401)):
            assert httpx.get(f"{server.url}/v1/models", headers={"X-Api-Key": key}).status_code == status


@pytest.mark.parametrize(("settings", "arguments", "says"), [
    ({"MLXCEL_TRANSPORT": "no.such.Client"}, (), "MLXCEL_TRANSPORT='no.such.Client' cannot be loaded"),
    ({"MLXCEL_EMBEDDING_QUEUE_DEPTH": "many"}, (), "MLXCEL_EMBEDDING_QUEUE_DEPTH='many': expected a whole number"),
    ({"MLXCEL_API_KEYS": ","}, (), "MLXCEL_API_KEYS is set but holds no key"),
    (FAKE, ("--alias", "foo=bar"), "alias `foo` is for model `bar`, which is not served; served: `fake-8`"),
    ({}, ("--alias", "foo=bar"), "alias `foo` is for model `bar`, which is not served; served: `sentence-transformers/all-MiniLM-L6-v2`"),
    ({"WEB_CONCURRENCY": "2"}, (), "WEB_CONCURRENCY=2: with the local transport every web process would load its own copy"),
    ({}, ("--model", "/no/such/model"), "/no/such/model"),
    ({"MLXCEL_MODELS_DIR": "/no/such"}, (), "MLXCEL_MODELS_DIR=/no/such: there is no such directory (make it, or unset"),
    ({**FAKE, "DATABASE_URL": "sqlite:////no/such/folder/x.sqlite3"}, (), "unable to open database file"),
])
def test_what_cannot_work_is_said(var: Path, settings: dict[str, str], arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(var, "--port", str(free_port()), *arguments, **settings)


def test_bodies_over_the_wire(var: Path) -> None:
    """What only a real server can show: chunks, a body over the limit, a connection that ends early, HEAD."""
    with serving(var, **FAKE) as server:
        body = json.dumps({"input": ["a"] * 3000}).encode()
        chunked = httpx.post(f"{server.url}/v1/embeddings/", content=(body[i:i + 1000] for i in range(0, len(body), 1000)))
        assert len(chunked.json()["data"]) == 3000
        for content in (b" " * (64 * 2**20 + 1), (b" " * 2**20 for _ in range(65))):
            response = httpx.post(f"{server.url}/v1/embeddings", content=content, timeout=60)
            assert (response.status_code, response.json()["error"]["message"]) == (413, "Request body too large.")
        head = httpx.head(f"{server.url}/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as broken:
            broken.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "Traceback" not in server.log.read_text()


def test_requests_in_flight_are_answered_when_it_stops(var: Path) -> None:
    with serving(var, MLXCEL_TRANSPORT="tests.fakes.SlowClient") as server:
        answers: list[int] = []

        def call() -> None:
            answers.append(httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code)

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        time.sleep(0.8)
        assert server.stop() < 8
        for caller in callers:
            caller.join()
        assert answers == [200] * 4


def test_what_runs_is_finished_and_what_waits_is_refused_when_it_stops(var: Path) -> None:
    with serving(var, MLXCEL_TRANSPORT="tests.fakes.CrowdedClient") as server:
        answers: list[httpx.Response] = []

        def call(text: str) -> None:
            answers.append(httpx.post(f"{server.url}/v1/embeddings", json={"input": text}, timeout=30))

        callers = [threading.Thread(target=call, args=(f"text {i}",)) for i in range(12)]
        for caller in callers:
            caller.start()
        time.sleep(1)
        assert server.stop() < 6
        for caller in callers:
            caller.join()
        assert sorted({answer.status_code for answer in answers}) == [200, 503] and len(answers) == 12
        refused = [answer for answer in answers if answer.status_code == 503]
        assert len(refused) >= 9 and all(answer.headers["Retry-After"] == "1" for answer in refused)
        assert "shutting down" in refused[0].json()["error"]["message"] and "Traceback" not in server.log.read_text()


def test_a_mode_is_served_alone(var: Path) -> None:
    for arguments, message in (
            (("--reranking",), "MLXCEL_MODE=reranking (--reranking) needs a model of that kind, and MLXCEL_RERANKER_MODEL names none"),
            (("--pooling", "rank"), "MLXCEL_MODE=reranking"), (("--pooling", "none"), "MLXCEL_EMBEDDING_POOLING='none'"),
            (("--pooling", "rank", "--embeddings"), "contradicts --embeddings"), (("--api-prefix", "/a b"), "MLXCEL_API_PREFIX='/a b'"),
            (("--queue-depth", "0"), "MLXCEL_EMBEDDING_QUEUE_DEPTH='0': expected at least 1"),
            (("--embd-normalize", "0.5"), "MLXCEL_EMBEDDING_NORMALIZE='0.5'")):
        assert message in refused(var, "--port", str(free_port()), *arguments)


def test_options_reach_the_model(var: Path, minilm: Path) -> None:
    with serving(var, "--model", str(minilm), "--backend", "host", "--embeddings", "--pooling", "cls", "--embd-normalize", "-1", "--props",
                 "--embedding-max-length", "16", "--embedding-batch-size", "2", "--queue-depth", "4", "--timeout", "9") as server:
        assert httpx.get(f"{server.url}/props").json() == {"capabilities": {
            "generation": False, "serving_mode": "--embeddings",
            "embedding": {"model": minilm.name, "dim": 384, "pooling": "cls", "embd_normalize": -1, "multi_vector": False}}}
        answer = httpx.post(f"{server.url}/embedding", json={"content": "word " * 50})
        assert answer.headers["x-truncated-inputs"] == "1" and len(answer.json()[0]["embedding"][0]) == 384
        stages = [part.partition(";")[0] for part in answer.headers["Server-Timing"].split(", ")]
        assert stages == ["tokenize", "queue", "forward", "encode", "total"]
        refusal = httpx.post(f"{server.url}/v1/rerank", json={"query": "a", "documents": ["b"]})
        assert refusal.status_code == 501 and refusal.json()["detail"] == (
            "This server does not support reranking: it was started with --embeddings (MLXCEL_MODE=embeddings), "
            "which serves embeddings only.")
        assert httpx.post(f"{server.url}/v1/rerank", json={"query": "a"}).status_code == 400
        metrics = httpx.get(f"{server.url}/metrics").text
        assert f'mlxcel_model_requests_total{{instance="web",kind="embedding",lane="interactive",model="{minilm.name}"}} 2.0' in metrics


def test_everything_lies_under_the_prefix(var: Path) -> None:
    with serving(var, "--api-prefix", "ai/", "--api-key", "k", **FAKE) as server:
        key = {"X-Api-Key": "k"}
        assert httpx.post(f"{server.url}/ai/v1/embeddings/", json={"input": "a"}, headers=key).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", headers=key).status_code == 404
        assert [httpx.get(f"{server.url}{path}").status_code for path in ("/health", "/v1/health", "/ai/health")] == [200, 200, 401]
        assert httpx.get(f"{server.url}/ai/health", headers=key).status_code == 200
        page = httpx.get(f"{server.url}/ai/docs").text
        assert "/ai/openapi.json" in page and "/ai/static/" in page
        assert httpx.get(f"{server.url}/ai/static/drf_spectacular_sidecar/swagger-ui-dist/swagger-ui.css").status_code == 200
        assert httpx.get(f"{server.url}/ai/openapi.json").json()["servers"] == [{"url": "/ai"}]
        home = httpx.get(f"{server.url}/ai").text
        assert f"{server.url}/ai/v1" in home and 'href="/ai/health/ready"' in home
        assert httpx.get(f"{server.url}/ai/admin/", headers={"Accept": "text/html"}).headers["location"].startswith("/ai/admin/login/")
        assert "/ai/admin/" in server.log.read_text()


def test_secrets_are_never_printed(var: Path, tmp_path: Path) -> None:
    """Not in logs, nor in any page or answer, with every debugging aid on."""
    (tmp_path / "keys").write_text("file-s3cret\n")
    secrets = {"MLXCEL_API_KEYS": "env-s3cret", "DJANGO_SECRET_KEY": "django-s3cret" * 5}
    with serving(var, "--api-key", "option-s3cret", "--api-key-file", str(tmp_path / "keys"), **FAKE, **secrets, DJANGO_DEBUG="1",
                 MLXCEL_LOG_LEVEL="DEBUG", MLXCEL_PROPS="1") as server:
        key = {"Authorization": "Bearer option-s3cret"}
        said = [httpx.request(method, f"{server.url}{path}", headers={**key, **more}, follow_redirects=True).text
                for path in ("/", "/docs", "/openapi.json", "/props", "/metrics", "/v1/models", "/nothing", "/admin/", "/admin/nothing/",
                             "/v1/embeddings", "/health/ready")
                for method in ("GET", "POST") for more in ({}, {"Host": "elsewhere.example"}, {"Authorization": "Bearer wrong-s3cret"})]
        httpx.post(f"{server.url}/v1/embeddings", json={"input": "text-s3cret"}, headers=key)
        server.stop()
        assert "s3cret" not in "\n".join([*said, server.log.read_text()])
    for broken in ({"MLXCEL_THREADS": "many"}, {"DATABASE_URL": "postgres://me:db-s3cret@localhost:1/x"}):
        done = subprocess.run([sys.executable, "manage.py", "check"], cwd=ROOT, capture_output=True, text=True,
                              env=environment(var, **secrets, **broken))
        assert "s3cret" not in done.stdout + done.stderr


def test_json_logs_name_the_request_and_nothing_secret(var: Path) -> None:
    with serving(var, "--api-key", "k-secret", **FAKE, MLXCEL_LOG_FORMAT="json") as server:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "t-secret"}, headers={"X-Api-Key": "k-secret"})
        httpx.post(f"{server.url}/v1/embeddings", json={"input": "t-secret"}, headers={"X-Api-Key": "wrong-secret"})
        for told in ("192.0.2.7, 10.0.0.1", "no address\n"):
            httpx.get(f"{server.url}/v1/models", headers={"X-Api-Key": "k-secret", "X-Forwarded-For": told.strip()})
        server.stop()
        said = server.log.read_text()
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line.get("request_id") == answer.headers["x-request-id"]]
    assert (line["request"], line["code"], line["level"]) == ("POST /v1/embeddings", 200, "info") and line["ms"] > 0
    assert [line["ip"] for line in lines if line.get("request") == "GET /v1/models"] == ["192.0.2.7", "127.0.0.1"]
    assert "secret" not in said


def test_deployment_checks_are_clean_behind_https(var: Path) -> None:
    done = subprocess.run([sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"], cwd=ROOT,
                          env=environment(var, DJANGO_HTTPS="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_several_web_processes_share_a_port(var: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path) as broker:
        worker = WorkerProcess(broker.url, tmp_path / "worker.log")
        try:
            client = client_of(broker.url)
            worker.wait_ready(client)
            client.close()
            with serving(var, MLXCEL_REDIS_URL=broker.url) as server:
                wait_until(lambda: len(children(server.process.pid)) == 2, 30)
                for i in range(40):                       # a connection each: the system deals them out
                    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": f"text {i}"}).status_code == 200
                found = httpx.get(f"{server.url}/metrics").text
                assert 'mlxcel_http_requests_total{method="POST",route="/v1/embeddings",status="200"} 40.0' in found
                assert server.log.read_text().count("Ctrl-C stops the server.") == 1
                assert server.stop() < 6
        finally:
            worker.stop()


def children(pid: int) -> list[psutil.Process]:
    """Web processes that answer."""
    return [child for child in psutil.Process(pid).children() if "resource_tracker" not in " ".join(child.cmdline())
            and any(connection.status == "LISTEN" for connection in child.net_connections("tcp"))]


def test_several_web_processes_with_a_model_in_each_are_refused(var: Path) -> None:
    assert "own copy of each model" in refused(var, "--web-processes", "2", **FAKE)
    assert "expected 1 or more" in refused(var, "--web-processes", "0", **FAKE)


def test_another_web_server_with_several_processes_is_refused(var: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import mlxcel_site.wsgi"], cwd=ROOT, env=environment(var, GRANIAN_WORKERS="4"),
                          capture_output=True, text=True)
    assert done.returncode == 1 and "GRANIAN_WORKERS=4: with the local transport" in done.stderr.splitlines()[-1]


def test_a_reranker_alone(var: Path) -> None:
    """No embedder: the other routes say so, and the answer is the reference's."""
    pairing = PAIRINGS[0]
    with serving(var, "--reranker-model", str(pairing.folder), MLXCEL_EMBEDDING_MODEL="", MLXCEL_BACKEND="host") as server:
        answer = httpx.post(f"{server.url}/v1/rerank", json={"query": QUERIES[0], "documents": DOCUMENTS}).json()
        other = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"})
        log = server.log.read_text()
    with np.load(pairing.folder / "reference.npz") as stored:
        wanted = 1 / (1 + np.exp(-stored["logits"][:len(DOCUMENTS)]))
    scores = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert [scores[i] for i in range(len(DOCUMENTS))] == pytest.approx(wanted.tolist(), abs=1e-5)
    assert other.status_code == 501 and "bert: reranker, 60 tokens, sequence_classifier, host, f32" in log
