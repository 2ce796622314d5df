"""Bulk jobs while processes are killed and restarted: no document is lost, stored twice or stored with another one's vector."""
from __future__ import annotations

import gzip
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import postgres
from tests.faults.clients import DEADLY
from tests.faults.sites import LEASE_SECONDS, Site
from tests.here import missing
from tests.lanes import WorkerProcess, client_of, wait_until
from tests.postgres import Postgres
from tests.servers import serving

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

DOCUMENTS = 2_000


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    try:
        with postgres.running() as running:
            yield running
    except postgres.Absent as absent:
        missing(str(absent))


@pytest.fixture
def site(server: Postgres, tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, server)
    try:
        yield made
    finally:
        made.close()


def test_a_worker_killed_in_the_middle_of_a_chunk(site: Site) -> None:
    source = site.source(DOCUMENTS)
    first, _ = site.worker(), site.worker()
    command = site.embed(source)
    site.working()
    first.kill()
    report = site.ended(command)
    assert (report["exit_code"], report["embedded"], report["failed"]) == (0, DOCUMENTS, 0)
    site.right(DOCUMENTS)
    assert site.one("SELECT max(attempts) FROM embeddings_chunk") == 2, "the dead one's chunks were taken by the other"


def test_a_killed_worker_is_noticed_long_before_its_lease_ends_and_a_frozen_one_is_not_taken_for_dead(site: Site) -> None:
    site.environment["MLXCEL_BULK_LEASE_SECS"] = "600"
    source = site.source(DOCUMENTS)
    frozen = site.worker()
    command = site.embed(source)
    site.working()
    frozen.send_signal(signal.SIGSTOP)
    held = site.one("SELECT count(*) FROM embeddings_chunk WHERE state = 'running'")
    killed = site.worker()
    wait_until(lambda: site.one("SELECT count(*) FROM embeddings_chunk WHERE state = 'running'") > held, 30)
    killed.kill()
    site.worker()
    wait_until(lambda: site.one("SELECT count(*) FROM embeddings_chunk WHERE state <> 'done'") == held, 60, site.log.read_text)
    assert site.one("SELECT max(attempts) FROM embeddings_chunk WHERE state <> 'done'") == 1, "the frozen one has kept its chunks"
    frozen.send_signal(signal.SIGCONT)
    report = site.ended(command)
    assert (report["exit_code"], report["embedded"], report["failed"]) == (0, DOCUMENTS, 0)
    site.right(DOCUMENTS)
    assert not list((site.folder / "var" / "owners").iterdir())


def test_workers_killed_again_and_again(site: Site) -> None:
    chance, source = random.Random(4), site.source(DOCUMENTS)
    workers = [site.worker(), site.worker()]
    command = site.embed(source)
    site.working(1)
    for _ in range(6):
        time.sleep(chance.uniform(0.3, 2))
        workers.pop(0).kill()
        workers.append(site.worker())
    report = site.ended(command)
    assert (report["exit_code"], report["embedded"], report["failed"]) == (0, DOCUMENTS, 0), report
    site.right(DOCUMENTS)


def test_a_worker_that_was_frozen_longer_than_its_lease_stores_nothing_twice(site: Site) -> None:
    source = site.source(DOCUMENTS)
    first, _ = site.worker(), site.worker()
    command = site.embed(source)
    site.working()
    first.send_signal(signal.SIGSTOP)
    time.sleep(LEASE_SECONDS * 2.5)
    first.send_signal(signal.SIGCONT)
    report = site.ended(command)
    assert (report["exit_code"], report["embedded"]) == (0, DOCUMENTS)
    site.right(DOCUMENTS)


def test_workers_racing_for_leases(site: Site) -> None:
    """Every chunk is told three times to two workers at once; each is done once."""
    source = site.source(DOCUMENTS)
    command = site.embed(source)
    wait_until(lambda: site.one("SELECT count(*) FROM embeddings_job WHERE reading_until IS NULL") == 1, 60)
    keys = [row[0] for row in site.query("SELECT id FROM embeddings_chunk")]
    again = site.manage("shell", "-c", f"from mlxcel_site.celery import send; send({keys} * 2)")
    assert again.wait(60) == 0
    site.worker(), site.worker()
    report = site.ended(command)
    assert (report["exit_code"], report["embedded"]) == (0, DOCUMENTS)
    site.right(DOCUMENTS)
    assert site.one("SELECT max(attempts) FROM embeddings_chunk") == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["shut down", "crashed"])
def test_postgresql_restarted_during_a_job(site: Site, how: signal.Signals) -> None:
    source = site.source(DOCUMENTS)
    site.worker(), site.worker()
    command = site.embed(source)
    site.working()
    site.postgres.stop(how)
    time.sleep(2)
    site.postgres.start()
    report = site.ended(command)
    assert (report["exit_code"], report["embedded"], report["failed"]) == (0, DOCUMENTS, 0), report
    site.right(DOCUMENTS)


def test_redis_restarted_during_a_job(site: Site) -> None:
    """With it go all messages that nobody had taken."""
    source = site.source(DOCUMENTS)
    site.worker(), site.worker()
    command = site.embed(source)
    site.working()
    site.redis.stop()
    time.sleep(2)
    site.redis.start()
    report = site.ended(command)
    assert (report["exit_code"], report["embedded"], report["failed"]) == (0, DOCUMENTS, 0), report
    site.right(DOCUMENTS)


def test_a_job_started_while_redis_is_away(site: Site) -> None:
    source = site.source(300)
    site.redis.stop()
    command = site.embed(source)
    wait_until(lambda: site.one("SELECT count(*) FROM embeddings_job WHERE reading_until IS NULL") == 1, 60)
    site.redis.start()
    site.worker()
    report = site.ended(command)
    assert (report["exit_code"], report["embedded"]) == (0, 300)
    site.right(300)


def test_a_document_that_kills_its_worker(server: Postgres, tmp_path: Path) -> None:
    """A supervisor starts workers anew; the document ends alone, failed, with all others stored."""
    site = Site(tmp_path, server, "tests.faults.clients.MortalClient")
    try:
        site.environment["MLXCEL_BULK_LEASE_SECS"] = "60"
        command = site.embed(site.source(300, poison=f"a {DEADLY} text"))
        worker, deaths = site.worker(), 0
        while command.poll() is None:
            if worker.poll() is not None:
                worker, deaths = site.worker(), deaths + 1
                assert deaths <= 2 + 4, "a chunk of 256 is cut into 4, 16, 64 and 256 parts"
            time.sleep(0.1)
        report = site.ended(command)
        assert (report["exit_code"], report["embedded"], report["failed"]) == (1, 300, 1), report
        assert all(said in report["stderr"] for said in ("document 'poison'", "died", f"--retry-failed {report['job']}"))
        site.right(300)
        assert site.query("SELECT external_id FROM embeddings_faileddocument") == [("poison",)]
        print(f"{deaths} deaths")
    finally:
        site.close()


def test_a_document_that_kills_the_model_worker(server: Postgres, tmp_path: Path) -> None:
    """As before, but the bulk worker lives: the request is halved until the document stands alone."""
    site = Site(tmp_path, server, "inference.transports.lane.LaneClient")
    client, deaths = client_of(site.redis.url), 0
    model = WorkerProcess(site.redis.url, tmp_path / "model.log", TEST_DEADLY=DEADLY)
    try:
        model.wait_ready(client)
        site.worker()
        command = site.embed(site.source(60, poison=f"a {DEADLY} text"))
        while command.poll() is None:
            if model.process.poll() is not None:
                model, deaths = WorkerProcess(site.redis.url, tmp_path / "model.log", TEST_DEADLY=DEADLY), deaths + 1
                assert deaths < 15
            time.sleep(0.1)
        report = site.ended(command)
        assert (report["exit_code"], report["embedded"], report["failed"]) == (1, 60, 1), report
        site.right(60)
        assert site.query("SELECT external_id FROM embeddings_faileddocument") == [("poison",)]
        print(f"{deaths} deaths of the model worker")
    finally:
        client.close()
        model.kill()
        site.close()


def test_a_command_killed_while_it_reads_its_sources(site: Site) -> None:
    """What it had cut is embedded; the job ends by itself, and the same command again completes it."""
    rows = "".join(json.dumps({"_id": f"d{i}", "text": f"text number {i} " + "of many " * 40}) + "\n" for i in range(DOCUMENTS)).encode()
    source = site.folder / "corpus.jsonl.gz"
    os.mkfifo(source)      # a disk from which nothing comes any more before the end of the file
    command = site.embed(source, "--model", "fake-8")
    with source.open("wb", buffering=0) as pipe:
        pipe.write(gzip.compress(rows, 0)[:-1000])
        wait_until(lambda: site.one("SELECT coalesce(sum(count), 0) FROM embeddings_chunk") >= 512, 60)
        command.kill()
        command.wait(30)
    assert site.query("SELECT state, reading_until IS NULL FROM embeddings_job") == [("running", False)]
    source.unlink()
    source.write_bytes(gzip.compress(rows))
    site.query("UPDATE embeddings_job SET reading_until = now() RETURNING id")      # a minute passes
    shown = site.ended(site.manage("list_jobs", "1", "--json"))
    assert (shown["state"], shown["reading"]) == ("running", False) and "run the same command again" in shown["error"]
    command = site.embed(source, "--model", "fake-8")
    wait_until(lambda: site.query("SELECT state FROM embeddings_job WHERE id = 1") == [("failed",)], 60)
    site.worker()
    report = site.ended(command)
    assert (report["exit_code"], report["embedded"]) == (0, DOCUMENTS) and "Job 1 is replaced" in report["stderr"], report
    site.right(DOCUMENTS)


def test_cancel_and_resume(site: Site) -> None:
    worker = site.worker()
    command = site.embed(site.source(DOCUMENTS))
    site.working()
    job = site.one("SELECT max(id) FROM embeddings_job")
    assert site.manage("cancel_job", str(job)).wait(60) == 0
    report = site.ended(command)
    assert report["exit_code"] == 1 and "cancelled" in report["stopped"] and 0 < report["embedded"] < DOCUMENTS
    resumed = site.manage("embed_corpus", "--resume", str(job), "--json")
    report = site.ended(resumed)
    assert (report["exit_code"], report["embedded"], report["job"]) == (0, DOCUMENTS, job)
    site.right(DOCUMENTS)
    worker.terminate()
    assert worker.wait(30) == 0


def test_a_command_that_is_interrupted_leaves_its_job_running(site: Site) -> None:
    site.worker()
    command = site.embed(site.source(DOCUMENTS))
    site.working()
    command.send_signal(signal.SIGINT)
    report = site.ended(command)
    assert report["exit_code"] == 130 and f"--resume {report['job']}" in report["stopped"]
    wait_until(lambda: site.query("SELECT state FROM embeddings_job") == [("completed",)], 120)
    site.right(DOCUMENTS)


def test_five_thousand_documents_under_online_load(server: Postgres, tmp_path: Path) -> None:
    """Over one model worker: searches in the collection that is being filled and requests for embeddings are answered."""
    site = Site(tmp_path, server, "inference.transports.lane.LaneClient")
    model = WorkerProcess(site.redis.url, tmp_path / "model.log")
    client = client_of(site.redis.url)
    try:
        model.wait_ready(client)
        _load(site)
        wait_until(lambda: site.redis.remains() == [], 31, site.redis.remains)
    finally:
        client.close()
        model.kill()
        site.close()


def _load(site: Site) -> None:
    site.worker(), site.worker()
    settings = {name: value for name, value in site.environment.items() if name.startswith("MLXCEL_") or name == "DATABASE_URL"}
    settings.pop("MLXCEL_VAR_DIR")
    with serving(site.folder / "web", **settings) as web, httpx.Client(base_url=web.url, timeout=20) as caller:
        command = site.embed(site.source(5_000))
        wait_until(lambda: caller.get("/collections/c").status_code == 200, 60)
        before = time.monotonic()
        took: list[float] = []
        while command.poll() is None:
            for call in (lambda: caller.post("/collections/c/search", json={"query": f"text number {len(took)}", "limit": 3}),
                         lambda: caller.post("/v1/embeddings", json={"input": "x"}), lambda: caller.get("/jobs")):
                started = time.monotonic()
                response = call()
                took.append(time.monotonic() - started)
                assert response.status_code == 200, response.text
            time.sleep(0.05)
        report = site.ended(command)
        assert (report["exit_code"], report["embedded"]) == (0, 5_000)
        site.right(5_000)
        job = caller.get(f"/jobs/{report['job']}").json()
    assert job["state"] == "completed" and job["chunks"] == {"pending": 0, "running": 0, "done": 20}
    print(json.dumps({"seconds": round(time.monotonic() - before, 1), "documents_per_second": report["documents_per_second"],
                      "requests": len(took), "p50_ms": round(1000 * statistics.median(took), 1),
                      "p95_ms": round(1000 * statistics.quantiles(took, n=20)[-1], 1)}))
