"""Bulk jobs: every document once, whoever dies, is cancelled, comes back or races. On both databases (make test-postgres)."""
from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections
from django.db.models.functions import Now
from django.test import Client
from django.urls import reverse

from embeddings import chunks, corpus, encoding, jobs, owners, spaces, vectors
from embeddings.bulk import Report
from embeddings.following import Cutting, Following
from embeddings.jobs import Lost
from embeddings.models import Chunk, Collection, Document, FailedDocument, Job, Passage
from embeddings.sources import Problem, Record
from inference.errors import Busy, CheckpointError, Conflict, InferenceFailed, InvalidRequest, NotLoaded
from tests import stored
from tests.fakes import SPEC, FakeClient
from tests.test_bulk import Moody, Quiet, records

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "CHUNK_DOCUMENTS", 16)


def cut(count: int = 50, collection: Collection | None = None, watcher: Any = None, **texts: str) -> Job:
    collection = collection or stored.collection()
    source = records({f"d{i}": f"text number {i}" for i in range(count)} | texts)
    job = Cutting(collection, watcher or Quiet(), ["memory"]).run(source)
    assert job is not None
    return job


def work(job: Job, client: FakeClient | None = None) -> Job:
    """Does what waits, as one worker after another."""
    while (lease := jobs.take(job=job)) is not None:
        if not chunks.run(lease, client or FakeClient()):
            break
    return jobs.get(job.pk)


def die(job: Job) -> None:
    """The owners of all leases are gone, and time passes."""
    Chunk.objects.filter(job=job, state=Chunk.State.RUNNING).update(lease_until=Now() - timedelta(seconds=1))
    jobs.reap()


def right(job: Job, count: int) -> None:
    """Every document once, with the vector of its own text."""
    assert Document.objects.filter(collection=job.collection).count() == Passage.objects.filter(collection=job.collection).count() == count
    for passage in Passage.objects.filter(collection=job.collection).select_related("document"):
        held = vectors.decode(passage.vector, passage.rows, passage.dims, passage.dtype)[0]
        assert np.array_equal(held, FakeClient()._vector(passage.document.text)), passage.document.external_id


def test_a_job_is_cut_embedded_and_ended() -> None:
    job = cut(50)
    assert sorted(job.chunks.values_list("count", flat=True)) == [2, 16, 16, 16] and jobs.chunks(job)["waiting"] == 50
    job = work(job)
    right(job, 50)
    assert (job.state, job.read, job.embedded, job.failed, job.tokens) == ("completed", 50, 50, 0, 250)
    assert job.finished_at and all(chunk.documents == b"" or bytes(chunk.documents) == b"" for chunk in job.chunks.all())


def test_chunks_are_bounded_in_characters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "CHUNK_CHARACTERS", 100)
    job = cut(0, long="x" * 300, **{str(i): "y" * 30 for i in range(7)})
    assert list(job.chunks.order_by("pk").values_list("count", flat=True)) == [1, 3, 3, 1]


def test_a_job_of_what_is_stored_already_ends_at_once() -> None:
    collection = stored.collection()
    work(cut(20, collection))
    job = jobs.get(cut(20, collection).pk)
    assert (job.state, job.unchanged, job.embedded, job.chunks.count()) == ("completed", 20, 0, 0)


def test_a_new_collection_is_made_with_the_first_document_that_is_fit_for_it() -> None:
    new = Collection(name="new", space=spaces.space_for(SPEC), text_fields=["text"], blank="fail")
    assert Cutting(new, Quiet(), [], options=["text_fields", "blank"]).run([Problem("f:1", "not JSON"), *records({"a": " "})]) is None
    assert not Collection.objects.exists() and not Job.objects.exists()
    job = Cutting(new, Quiet(), [], options=["text_fields", "blank"]).run([Problem("f:1", "not JSON"), *records({"a": "x"})])
    assert job is not None and job.collection == Collection.objects.get(name="new", blank="fail")
    assert jobs.get(job.pk).failed == 1 and job.chunks.count() == 1


def test_only_one_gets_a_lease() -> None:
    job = cut(16)
    chunk = job.chunks.get().pk
    assert jobs.take(chunk) and jobs.take(chunk) is None and jobs.take(job=job) is None


@pytest.mark.usefixtures("several_writers")
@pytest.mark.django_db(transaction=True)
def test_of_many_who_race_for_a_lease_one_gets_it() -> None:
    job = cut(160)
    got: list[int] = []
    start = threading.Barrier(6)

    def race() -> None:
        start.wait()
        for chunk in job.chunks.order_by("pk").values_list("pk", flat=True):
            if jobs.take(chunk):
                got.append(chunk)
        connections.close_all()
    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(job.chunks.order_by("pk").values_list("pk", flat=True))


def test_an_owner_that_comes_back_too_late_stores_nothing() -> None:
    job = cut(16)
    late = jobs.take(job=job)
    assert late
    encoded = chunks._encode(late, FakeClient(), threading.Event())
    die(job)
    with pytest.raises(Lost):
        jobs.store(late, encoded)
    with pytest.raises(Lost):
        jobs.renew(late)
    assert not Document.objects.exists()
    right(work(job), 16)


def test_storing_again_after_a_commit_of_unknown_outcome_counts_once() -> None:
    job = cut(16)
    lease = jobs.take(job=job)
    assert lease
    encoded = chunks._encode(lease, FakeClient(), threading.Event())
    jobs.store(lease, encoded)
    jobs.store(lease, encoded)
    right(jobs.get(job.pk), 16)
    assert jobs.get(job.pk).embedded == 16


def test_a_chunk_whose_owner_died_is_done_by_the_next() -> None:
    job = cut(16)
    assert jobs.take(job=job)
    die(job)
    right(work(job), 16)


def test_an_owner_whose_process_died_here_is_seen_before_its_lease_ends() -> None:
    job = cut(16)
    lease = jobs.take(job=job)
    assert lease and lease.lock is not None
    jobs.reap()
    assert jobs.chunks(job)["running"] == 1 and owners.dead() == []
    os.close(lease.lock)                # as the end of a process does
    assert owners.dead() == [lease.owner]
    jobs.reap()
    assert jobs.chunks(job)["pending"] == 1 and owners.dead() == []
    with pytest.raises(Lost):
        jobs.renew(lease)
    right(work(job), 16)


def test_no_file_is_left_of_owners(settings: Any, tmp_path: Path) -> None:
    settings.VAR_DIR = tmp_path
    job = cut(40)
    lease = jobs.take(job=job)
    assert lease and jobs.take(lease.chunk) is None
    assert [path.name.endswith(str(lease.owner)) for path in (tmp_path / "owners").iterdir()] == [True]
    assert chunks.run(lease, FakeClient())
    right(work(job), 40)
    assert not list((tmp_path / "owners").iterdir())


def test_without_locks_leases_decide(settings: Any, tmp_path: Path) -> None:
    settings.VAR_DIR = tmp_path / "file"
    settings.VAR_DIR.write_text("not a directory")
    job = cut(16)
    lease = jobs.take(job=job)
    assert lease and lease.lock is None
    jobs.reap()
    assert jobs.chunks(job)["running"] == 1
    assert chunks.run(lease, FakeClient())
    right(jobs.get(job.pk), 16)


def test_a_document_that_kills_its_worker_ends_alone_and_failed() -> None:
    """A worker that dies is one that took a lease and never came back."""
    job = cut(40, poison="deadly")
    deaths = 0
    while (lease := jobs.take(job=job)) is not None:
        if any(record.text == "deadly" for record in lease.records):
            deaths += 1
            die(job)
        else:
            assert chunks.run(lease, FakeClient())
    job = jobs.get(job.pk)
    right(job, 40)
    assert (job.state, job.embedded, job.failed) == ("completed_with_errors", 40, 1)
    failure = FailedDocument.objects.get()
    assert failure.external_id == "poison" and "died 2 times" in failure.message
    assert deaths == 2 + 2, "cut from 16 to 4 to 1"


def test_a_document_that_kills_the_model_ends_alone_and_failed() -> None:
    def judge(items: tuple[Any, ...]) -> None:
        if "deadly" in items:
            raise InferenceFailed("the model worker died")
    job = work(cut(40, poison="deadly"), Moody(judge=judge))
    right(job, 40)
    assert job.state == "completed_with_errors" and FailedDocument.objects.get().message == "the model worker died"


def test_a_model_that_dies_once_fails_no_document() -> None:
    dies = iter([True])

    def judge(_: tuple[Any, ...]) -> None:
        if next(dies, False):
            raise InferenceFailed("the model worker was restarted")
    job = work(cut(1), Moody(judge=judge))
    assert (job.state, job.embedded) == ("completed", 1)


@pytest.mark.parametrize("error", [
    NotLoaded("nobody serves it"), InvalidRequest("model `fake-8` is not the served model `other`", param="model"), Busy("full")])
def test_a_model_that_is_away_makes_the_job_wait(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(Busy, "retry_after", 0.01)
    job = work(cut(16), FakeClient(fail=error))
    chunk = job.chunks.get()
    assert (job.state, chunk.state, chunk.attempts, job.failed) == ("running", "pending", 0, 0) and job.error == error.message
    right(work(job), 16)
    assert jobs.get(job.pk).error == ""


def test_a_model_that_nobody_serves_makes_the_job_wait() -> None:
    job = work(cut(16), FakeClient().without_model())
    assert job.state == "running" and "not served" in job.error


@pytest.mark.parametrize("client", [FakeClient(fail=CheckpointError("no such weights")), FakeClient(spec=None)])
def test_what_cannot_go_on_stops_the_job_and_can_be_resumed(client: FakeClient) -> None:
    if client.spec is None:
        client = FakeClient(spec=replace(SPEC, weights_hash="1" * 64))
    job = work(cut(40), client)
    assert job.state == "failed" and job.error and job.finished_at and not Document.objects.exists()
    jobs.resume(job)
    right(work(job), 40)
    assert jobs.get(job.pk).state == "completed"


def test_cancelling_and_resuming() -> None:
    job = cut(40)
    lease = jobs.take(job=job)
    assert lease and jobs.cancel(job) and not jobs.cancel(job)
    assert chunks.run(lease, FakeClient()), "what runs is stored"
    assert jobs.take(job=job) is None and jobs.get(job.pk).state == "cancelled"
    jobs.resume(job)
    right(work(job), 40)
    assert jobs.get(job.pk).state == "completed"


def test_failed_documents_are_tried_again_without_the_sources() -> None:
    bad = Moody(partly=lambda item: "not finite" if item.endswith("7") else None)
    job = work(cut(40), bad)
    assert (job.state, job.failed, job.embedded) == ("completed_with_errors", 4, 36)
    assert jobs.retry(job) == 4
    job = work(job)
    right(job, 40)
    assert (job.state, job.failed, job.embedded) == ("completed", 0, 40) and not FailedDocument.objects.exists()


def test_lines_that_cannot_be_read_are_kept_as_failures() -> None:
    job = Cutting(stored.collection(), Quiet(), []).run([Problem("f:1", "not JSON"), *records({"a": "x"})])
    assert job is not None
    job = work(job)
    assert (job.state, job.failed, job.embedded) == ("completed_with_errors", 1, 1)
    assert jobs.retry(job) == 0 and jobs.get(job.pk).state == "completed_with_errors"


def test_a_command_that_died_while_reading_ends_its_job() -> None:
    job = jobs.create(stored.collection(), [])
    jobs.add(job, records({"a": "x"}))
    Job.objects.update(reading_until=Now() - timedelta(seconds=1))
    jobs.settle()
    assert jobs.get(job.pk).state == "running", "a chunk is left"
    work(job)
    jobs.settle()
    job = jobs.get(job.pk)
    assert job.state == "failed" and "run the same command again" in job.error
    right(job, 1)


def abandoned(collection: Collection, *ids: str) -> Job:
    """A job whose command died after it had cut these documents."""
    job = jobs.create(collection, ["memory"])
    jobs.add(job, records({id: f"text of {id}" for id in ids}))
    Job.objects.filter(pk=job.pk).update(reading_until=Now() - timedelta(seconds=1))
    return jobs.get(job.pk)


def test_the_same_sources_read_again_replace_a_job_whose_command_died() -> None:
    collection = stored.collection()
    old, other = abandoned(collection, "a", "b"), jobs.create(collection, ["memory"])
    cutting = Cutting(collection, Quiet(), ["memory"])
    job = cutting.run(records({id: f"text of {id}" for id in "abc"}))
    assert job is not None and cutting.superseded == [old.pk]
    old = jobs.get(old.pk)
    assert old.state == "failed" and f"Job {job.pk} reads them again" in old.error and not jobs.chunks(old)["waiting"]
    assert jobs.reading(jobs.get(other.pk)), "another one that reads them now is left alone"
    right(work(job), 3)
    jobs.resume(old)
    assert jobs.get(old.pk).state == "failed"


def test_other_sources_leave_it_to_be_finished() -> None:
    collection = stored.collection()
    old = abandoned(collection, "a")
    for cutting in (Cutting(collection, Quiet(), ["others"]), Cutting(collection, Quiet(), ["memory"], whole=False)):
        cutting.run(records({"b": "x"}))
        assert not cutting.superseded and jobs.get(old.pk).state == "running"


def test_one_that_was_cancelled_while_it_was_read_is_never_called_complete() -> None:
    job = abandoned(stored.collection(), "a")
    assert jobs.cancel(job)
    jobs.resume(job)
    work(job)
    jobs.settle()
    job = jobs.get(job.pk)
    assert (job.state, job.error, job.embedded) == ("failed", jobs.DIED, 1)


def test_what_a_dead_command_left_is_told_everywhere(admin_client: Client, command: Callable[..., Any]) -> None:
    job = abandoned(stored.collection(), "a")
    page = admin_client.get(reverse("admin:embeddings_job_change", args=[job.pk])).content.decode()
    assert "ended before it had read all of the sources" in page and "run the same command again" in page
    assert "run the same command again" in admin_client.get(reverse("admin:embeddings_job_changelist")).content.decode()
    shown = command("list_jobs", str(job.pk))[1]
    assert (shown["state"], shown["reading"], shown["error"]) == ("running", False, jobs.DIED)
    for _ in range(2):
        code, report, err = command("embed_corpus", "--resume", str(job.pk))
        assert (code, report["embedded"]) == (1, 1) and "run the same command again" in err and "--resume" not in err
    assert command("list_jobs", str(job.pk))[1]["state"] == "failed"


def test_a_job_that_was_cancelled_takes_no_more_chunks() -> None:
    job = jobs.create(stored.collection(), [])
    jobs.cancel(job)
    with pytest.raises(Conflict, match="stopped"):
        jobs.add(job, records({"a": "x"}))
    with pytest.raises(Conflict, match="stopped"):
        jobs.keep_open(job, Report())


def test_a_dropped_collection_takes_its_jobs_along() -> None:
    job = cut(40)
    lease = jobs.take(job=job)
    corpus.drop(job.collection)
    assert lease and not chunks.run(lease, FakeClient()) and not Job.objects.exists()


@pytest.fixture
def sent(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    told: list[int] = []
    settings.BULK_SENDER = f"{__name__}.sender"
    monkeypatch.setitem(globals(), "sender", told.extend)
    yield told


def test_messages_carry_chunks_once_and_lost_ones_are_sent_again(sent: list[int]) -> None:
    job = cut(16 * 20)
    keys = list(job.chunks.order_by("pk").values_list("pk", flat=True))
    assert sent == keys
    jobs.reap(idle=True)
    assert sent == keys
    Chunk.objects.update(sent_at=Now() - timedelta(seconds=10))
    jobs.reap()
    assert sent == keys
    jobs.reap(idle=True)
    assert sent[len(keys):] == keys[:jobs.RESENT], "an idle worker finds what was lost, a few at a time"
    Chunk.objects.update(sent_at=Now() - timedelta(seconds=jobs.RESEND + 1))
    jobs.cancel(job)
    jobs.reap(idle=True)
    assert len(sent) == len(keys) + jobs.RESENT


def test_vectors_wait_for_a_database_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    job, real, away = cut(16), jobs.store, iter([True, True])

    def store(*args: Any) -> None:
        if next(away, False):
            raise OperationalError("the server closed the connection unexpectedly")
        real(*args)
    monkeypatch.setattr(chunks.time, "sleep", lambda _: None)
    monkeypatch.setattr(chunks.connection, "close", lambda: None)
    monkeypatch.setattr(jobs, "store", store)
    right(work(job), 16)


def test_the_one_who_waits_sees_progress_and_failures() -> None:
    seen: list[Problem] = []

    class Watching(Quiet):
        def problem(self, problem: Problem) -> None:
            seen.append(problem)
    job = cut(40)
    bad = Moody(partly=lambda item: "not finite" if item.endswith("7") else None)
    report = Following(job, Watching(), lambda line: None, bad).run()
    assert (report.read, report.embedded, report.failed, report.done) == (40, 36, 4, 40) and len(seen) == 4
    assert seen[0] == Problem("file:8", "document 'd7': not finite", "d7")


@pytest.mark.parametrize("busy", [True, False])
def test_that_no_worker_takes_a_chunk_is_not_said_while_they_are_busy_with_another_job(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job, other = cut(16), cut(16, stored.collection("other"))
    assert jobs.take(job=other)
    other.chunks.update(lease_until=Now() + timedelta(seconds=60 if busy else -1))
    looks = iter(range(5))

    def look(_: Following) -> bool:
        time.sleep(0.02)
        return next(looks, None) is not None or jobs.cancel(job)
    said: list[str] = []
    monkeypatch.setattr("embeddings.following.UNTAKEN_SECONDS", 0.05)
    monkeypatch.setattr(jobs, "reap", lambda **_: None)
    monkeypatch.setattr(Following, "_work", look)
    Following(job, Quiet(), said.append).run()
    assert [line.partition(".")[0] for line in said] == ([] if busy else ["No bulk worker takes a chunk"])


# --- commands, API, admin -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def command(served: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any], str]]:
    monkeypatch.setenv("MLXCEL_EMBEDDING_MODEL", "fake-8")

    def run(*args: str) -> tuple[int, dict[str, Any], str]:
        out, err, code = io.StringIO(), io.StringIO(), 0
        err.isatty = lambda: False  # type: ignore[method-assign]
        try:
            call_command(*args, "--json", stdout=out, stderr=err)
        except CommandError as error:
            code = error.returncode
            err.write(str(error))
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, json.loads(out.getvalue() or "{}"), err.getvalue()
    return run


def test_resume_and_retry_without_workers_do_the_work_here(command: Callable[..., Any]) -> None:
    job = cut(40)
    jobs.cancel(job)
    code, report, err = command("embed_corpus", "--resume", str(job.pk))
    assert (code, report["embedded"], report["job"]) == (0, 40, job.pk), err
    assert command("embed_corpus", "--retry-failed", str(job.pk))[0] == 0
    right(job, 40)


def test_lines_that_could_not_be_read_are_to_be_mended_in_their_source(command: Callable[..., Any]) -> None:
    job = Cutting(stored.collection(), Quiet(), []).run([Problem("f:1", "not JSON"), *records({"a": "x", "b": "bad"})])
    assert job is not None
    work(job, Moody(partly=lambda item: "not finite" if item == "bad" else None))
    _, _, err = command("embed_corpus", "--resume", str(job.pk))
    assert f"Job {job.pk} had ended already: completed_with_errors" in err
    assert f"--retry-failed {job.pk}" in err and "mend the source" in err
    code, _, err = command("embed_corpus", "--retry-failed", str(job.pk))
    assert code == 1 and "Tried again: 1 document." in err and "--retry-failed" not in err
    assert "1 line could not be read, so nothing is stored of it to try again: mend the source" in err
    ended = jobs.get(job.pk).finished_at
    code, _, err = command("embed_corpus", "--retry-failed", str(job.pk))
    assert code == 1 and "has no failed document to try again" in err and "mend the source" in err and "--retry-failed" not in err
    assert "Tried again" not in err and jobs.get(job.pk).finished_at == ended


@pytest.fixture
def worked(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bulk workers do what a command waits for."""
    settings.BULK_SENDER = "builtins.list"
    monkeypatch.setattr(Following, "_work", lambda following: work(following.job) is not None)


def lines(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"_id": f"d{i}", "text": f"text number {i}", "n": i + 1}) + "\n" for i in range(count)))
    return str(path)


@pytest.mark.usefixtures("worked")
def test_a_job_whose_command_is_gone_is_waited_for_before_the_sources_are_read_again(
        command: Callable[..., Any], tmp_path: Path) -> None:
    job, source = cut(40), lines(tmp_path / "c.jsonl", 50)
    code, report, err = command("embed_corpus", "tests", source, "--workers", "celery")
    assert f"Job {job.pk} is still at work on this collection: 40 documents left; waiting for it first" in err
    assert (code, report["unchanged"], report["embedded"]) == (0, 40, 10) and report["job"] != job.pk
    assert jobs.get(job.pk).state == "completed"
    assert "still at work" not in command("embed_corpus", "tests", source, "--workers", "celery")[2]


@pytest.mark.usefixtures("worked")
def test_a_dry_run_waits_for_no_job(command: Callable[..., Any], tmp_path: Path) -> None:
    job, source = cut(40), lines(tmp_path / "c.jsonl", 50)
    _, report, err = command("embed_corpus", "tests", source, "--workers", "celery", "--dry-run")
    assert report["embedded"] == 50 and "waiting" not in err and jobs.get(job.pk).state == "running"


def test_who_stops_waiting_for_an_earlier_job_leaves_it_running(
        command: Callable[..., Any], tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: Following) -> bool:
        raise KeyboardInterrupt
    settings.BULK_SENDER = "builtins.list"
    monkeypatch.setattr(Following, "_work", stop)
    job = cut(40)
    code, report, err = command("embed_corpus", "tests", lines(tmp_path / "c.jsonl", 50), "--workers", "celery")
    assert (code, report["job"], Job.objects.get().state) == (130, job.pk, "running") and f"--resume {job.pk}" in report["stopped"], err


@pytest.mark.parametrize(("args", "said"), [
    (("embed_corpus",), "COLLECTION"), (("embed_corpus", "c"), "SOURCE"), (("embed_corpus", "--resume", "999"), "no job 999"),
    (("embed_corpus", "--resume", "x"), "no job x"), (("embed_corpus", "c", "f", "--resume", "1"), "stand alone"),
    (("embed_corpus", "c", "f", "--workers", "celery"), "MLXCEL_REDIS_URL")])
def test_wrong_usage_is_told(command: Callable[..., Any], args: tuple[str, ...], said: str) -> None:
    code, _, err = command(*args)
    assert code == 2 and said in err


def test_jobs_are_listed_shown_and_cancelled(command: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    job = cut(40)
    out = io.StringIO()
    call_command("list_jobs", stdout=out)
    assert f"{job.pk:>6}  tests" in out.getvalue() and "running" in out.getvalue()
    call_command("cancel_job", str(job.pk), stdout=out)
    with pytest.raises(CommandError, match="ended already: cancelled"):
        call_command("cancel_job", str(job.pk))
    out = io.StringIO()
    call_command("list_jobs", str(job.pk), stdout=out)
    assert "pending 3" in out.getvalue() and "cancelled" in out.getvalue()


def test_jobs_over_http(client: Client) -> None:
    bad = Moody(partly=lambda item: "not finite" if item.endswith("7") else None)
    job = work(cut(40), bad)
    body = client.get(f"/jobs/{job.pk}").json()
    assert body["state"] == "completed_with_errors" and body["documents"] == {
        "read": 40, "embedded": 36, "unchanged": 0, "relabelled": 0, "blank": 0, "failed": 4, "truncated": 0, "waiting": 0}
    assert body["chunks"] == {"pending": 0, "running": 0, "done": 3} and len(body["failures"]) == 4
    assert body["failures"][0] == {"id": "d7", "position": "file:8", "message": "not finite"}
    assert [row["id"] for row in client.get("/jobs").json()["data"]] == [job.pk]
    for absent in ("999", "x", "9" * 30, "-1", "1%00"):
        response = client.get(f"/jobs/{absent}")
        assert response.status_code == 404 and "no job" in response.json()["error"]["message"], absent


def test_the_admin_shows_jobs_and_cancels_them(admin_client: Client) -> None:
    job = work(cut(20, poison="bad"), Moody(partly=lambda item: "<b>not finite</b>" if item == "bad" else None))
    running = cut(20, stored.collection("other"))
    page = admin_client.get(reverse("admin:embeddings_job_changelist")).content.decode()
    assert "completed_with_errors" in page or "Completed With Errors" in page
    assert "done" in admin_client.get(reverse("admin:embeddings_job_change", args=[job.pk])).content.decode()
    failures = admin_client.get(reverse("admin:embeddings_faileddocument_changelist")).content.decode()
    assert "&lt;b&gt;not finite" in failures and "poison" in failures
    admin_client.post(reverse("admin:embeddings_job_changelist"), {"action": "cancel", "_selected_action": [running.pk]})
    assert jobs.get(running.pk).state == "cancelled"


def test_the_admin_deletes_no_job_that_runs(admin_client: Client) -> None:
    done, running = work(cut(20)), cut(20, stored.collection("other"))
    lists, delete = reverse("admin:embeddings_job_changelist"), reverse("admin:embeddings_job_delete", args=[running.pk])
    page = admin_client.get(reverse("admin:embeddings_job_change", args=[running.pk])).content.decode()
    assert "deletelink" not in page and admin_client.post(delete, {"post": "yes"}).status_code == 403
    chosen = {"action": "delete_selected", "_selected_action": [done.pk, running.pk], "post": "yes"}
    said = admin_client.post(lists, chosen, follow=True).content.decode()
    assert f"Nothing was deleted: job {running.pk} runs still. Cancel first." in said and Job.objects.count() == 2
    jobs.cancel(running)
    admin_client.post(lists, chosen)
    assert not Job.objects.exists()


def test_who_may_only_look_may_not_cancel(client: Client) -> None:
    user = User.objects.create_user("guest", password="x", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_job"))
    client.force_login(user)
    job = cut(20)
    client.post(reverse("admin:embeddings_job_changelist"), {"action": "cancel", "_selected_action": [job.pk]})
    assert jobs.get(job.pk).state == "running"


def test_records_survive_packing() -> None:
    record = Record("f:1", "ä\U0001f600", "x\n" * 1000, {"a": [1, None, {"b": 0.1}]})
    assert jobs._unpack(jobs._pack([record])) == [record]


def test_a_chunk_that_someone_died_with_is_suspect_and_left_to_those_who_run_it_alone() -> None:
    job = cut(16)
    chunk = job.chunks.get().pk
    assert not jobs.suspect(chunk) and jobs.take(chunk, suspects=False)
    die(job)
    assert jobs.suspect(chunk) and jobs.take(chunk, suspects=False) is None and jobs.take(chunk)
