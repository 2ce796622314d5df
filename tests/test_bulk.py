"""Bulk runs store each document once, whole and in order, whatever fails, stops or changes in between."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embeddings import bulk, corpus, encoding, vectors
from embeddings.bulk import Bulk, Report
from embeddings.models import Collection, Document, Passage
from embeddings.sources import Problem, Record
from inference.errors import Busy, CheckpointError, InferenceFailed, InvalidRequest, ServiceError, TimedOut
from inference.wire import EmbedJob, EmbedResult
from tests import stored
from tests.fakes import SPEC, FakeClient

pytestmark = pytest.mark.django_db


class Quiet:
    def progress(self, report: Report) -> None: ...
    def problem(self, problem: Problem) -> None: ...
    def writing(self, now: bool) -> None: ...


@dataclass
class Moody(FakeClient):
    """A model with opinions on texts: `judge` raises for a job, `partly` says what is wrong with an item."""

    judge: Callable[[tuple[Any, ...]], None] = lambda items: None
    partly: Callable[[Any], str | None] = lambda item: None

    def embed(self, job: EmbedJob) -> EmbedResult:
        self.judge(job.items)
        result = super().embed(job)
        errors = {i: said for i, item in enumerate(job.items) if (said := self.partly(item))}
        good = [i for i in range(len(job.items)) if i not in errors]
        rows = np.array([i not in errors for i in range(len(job.items))], np.int32)
        return replace(result, data=result.data[good], rows=rows, errors=errors)


def records(texts: dict[str, str] | Iterable[str]) -> list[Record]:
    texts = texts if isinstance(texts, dict) else {text: text for text in texts}
    return [Record(f"file:{i}", id, text, {"n": i}) for i, (id, text) in enumerate(texts.items(), 1)]


def run(collection: Collection, source: Iterable[Record | Problem], client: FakeClient | None = None, **options: Any) -> Report:
    return Bulk(collection, client or FakeClient(), SPEC, options.pop("watcher", Quiet()), **options).run(source)


def contents(collection: Collection) -> dict[str, list[tuple[Any, ...]]]:
    held: dict[str, list[tuple[Any, ...]]] = {}
    for p in Passage.objects.filter(collection=collection).select_related("document").order_by("document_id", "part"):
        held.setdefault(p.document.external_id, []).append((p.part, p.start, p.end, bytes(p.vector), p.document.text))
    return held


def test_documents_are_stored_in_order_with_the_vectors_of_their_prompted_texts() -> None:
    collection, client = stored.collection(prompt="passage: "), FakeClient()
    report = run(collection, records(str(i) for i in range(1500)), client)
    rows = list(Document.objects.order_by("pk").values_list("external_id", flat=True))
    assert rows == [str(i) for i in range(1500)] and (report.read, report.embedded, report.passages) == (1500, 1500, 1500)
    for passage in Passage.objects.select_related("document")[::100]:
        held = vectors.decode(passage.vector, passage.rows, passage.dims, passage.dtype)[0]
        assert np.array_equal(held, client._vector("passage: " + passage.document.text))
    assert all(job.lane == "bulk" and job.partial for job in client.jobs) and report.tokens == 1500 * 4


def test_a_second_run_embeds_nothing_and_a_changed_text_only_itself() -> None:
    collection, client = stored.collection(), FakeClient()
    run(collection, records({"a": "one", "b": "two"}), client)
    before, client.jobs = contents(collection), []
    assert run(collection, records({"a": "one", "b": "two"}), client).unchanged == 2 and not client.jobs
    generation = Collection.objects.get().generation
    report = run(collection, records({"a": "one", "b": "changed"}), client)
    assert (report.unchanged, report.embedded) == (1, 1) and [job.items for job in client.jobs] == [("changed",)]
    assert contents(collection)["a"] == before["a"] and Document.objects.count() == 2
    now = Collection.objects.get()
    assert (now.generation, now.deletions) == (generation + 1, 1)


def test_changed_metadata_is_stored_without_embedding() -> None:
    collection, client = stored.collection(), FakeClient()
    run(collection, [Record("f:1", "a", "x", {"v": 1})], client)
    report = run(collection, [Record("f:1", "a", "x", {"v": 2})], client)
    assert (report.relabelled, report.embedded, len(client.jobs)) == (1, 0, 1) and Document.objects.get().metadata == {"v": 2}


def test_split_documents_have_passages_with_offsets_and_another_split_embeds_again() -> None:
    collection = stored.collection(split_tokens=4, split_overlap=1)
    text = "one two  three four five"
    run(collection, records({"a": text, "b": "short"}))
    assert [text[start:end] for _, start, end, *_ in contents(collection)["a"]] == ["one two", "two  three", "three four", "four five"]
    collection.split_tokens, collection.split_overlap = 0, 0
    report = run(collection, records({"a": text, "b": "short"}))
    assert report.embedded == 2 and [len(parts) for parts in contents(collection).values()] == [1, 1]
    assert set(Document.objects.values_list("split", flat=True)) == {"none"}


@pytest.mark.parametrize("text", [" \n\u2003", "\u200b\u200c\u200d\u2060\ufeff", "\u00ad", "\x01\x7f", "\u3164\u2800"])
@pytest.mark.parametrize(("policy", "expected"), [("skip", (1, 1, 0)), ("embed", (2, 0, 0)), ("fail", (1, 0, 1))])
def test_blank_documents(policy: str, expected: tuple[int, int, int], text: str) -> None:
    collection = stored.collection(blank=policy)
    report = run(collection, records({"a": text, "b": "\u200bx"}))
    assert (report.embedded, report.blank, report.failed) == expected


def test_an_item_that_fails_takes_only_its_document_along() -> None:
    collection = stored.collection(split_tokens=3)
    client = Moody(partly=lambda item: "not finite" if item == "bad" else None)
    report = run(collection, records({"a": "x y", "b": "x bad y", "c": "z"}), client)
    assert list(contents(collection)) == ["a", "c"] and report.problems == [Problem("file:2", "document 'b': not finite", "b")]


@pytest.mark.parametrize("error", [InferenceFailed, InvalidRequest, TimedOut])
def test_a_job_that_fails_is_halved_until_the_culprit_stands_alone(error: type[ServiceError]) -> None:
    def judge(items: tuple[Any, ...]) -> None:
        if "13" in items:
            raise error("the forward pass died")
    collection = stored.collection()
    report = run(collection, records(str(i) for i in range(200)), Moody(judge=judge))
    assert report.embedded == 199 and [p.message for p in report.problems] == ["document '13': the forward pass died"]
    assert list(contents(collection)) == [str(i) for i in range(200) if i != 13]


def test_a_failed_update_keeps_the_old_version() -> None:
    collection = stored.collection()
    run(collection, records({"a": "old"}))
    before = contents(collection)
    run(collection, records({"a": "bad"}), Moody(partly=lambda item: "no"))
    assert contents(collection) == before


def test_a_busy_model_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Busy, "retry_after", 0.01)
    refusals = iter([True] * 5)

    def judge(_: tuple[Any, ...]) -> None:
        if next(refusals, False):
            raise Busy("full")
    assert run(stored.collection(), records({"a": "x"}), Moody(judge=judge)).embedded == 1


def test_a_model_that_stays_busy_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Busy, "retry_after", 0.01)
    monkeypatch.setattr(encoding, "BUSY_SECONDS", 0.05)
    with pytest.raises(Busy):
        run(stored.collection(), records({"a": "x"}), FakeClient(fail=Busy("full")))


def test_a_model_that_cannot_be_loaded_ends_the_run_and_keeps_what_is_stored() -> None:
    def judge(items: tuple[Any, ...]) -> None:
        if "400" in items:
            raise CheckpointError("no such weights")
    collection = stored.collection()
    with pytest.raises(CheckpointError):
        run(collection, records(str(i) for i in range(1000)), Moody(judge=judge))
    stored_now = list(contents(collection))
    assert stored_now == [str(i) for i in range(len(stored_now))] and 0 < len(stored_now) <= 400


def test_unreadable_lines_go_on_and_are_counted_apart() -> None:
    collection = stored.collection()
    job = Bulk(collection, FakeClient(), SPEC, Quiet())
    report = job.run([Problem("f:1", "not JSON"), Problem("f:2", "too long", "known"), *records({"a": "x"})])
    assert (report.read, report.failed, report.unreadable, report.embedded) == (3, 2, 1, 1) and job.ids == {"known", "a"}


def test_a_dry_run_stores_nothing_even_without_a_collection() -> None:
    client = FakeClient()
    unsaved = Collection(name="new", space=stored.collection().space)
    assert run(unsaved, records("abc"), client, dry_run=True).embedded == 3
    assert not client.jobs and not Document.objects.exists()


def test_encoding_goes_on_while_the_database_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three jobs waiting for the model, one write must not stop it: both sides are seen busy at the same moment."""
    writing, overlapped = threading.Event(), threading.Event()

    def judge(_: tuple[Any, ...]) -> None:
        if writing.wait(0.05):
            overlapped.set()
    real = corpus.upsert

    def upsert(*args: Any) -> int:
        writing.set()
        time.sleep(0.02)
        try:
            return real(*args)
        finally:
            writing.clear()
    monkeypatch.setattr(corpus, "upsert", upsert)
    run(stored.collection(), records(str(i) for i in range(600)), Moody(judge=judge))
    assert overlapped.is_set()


def test_jobs_grow_for_a_fast_model_and_shrink_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    run(stored.collection("fast"), records(str(i) for i in range(3000)), client)
    assert max(len(job.items) for job in client.jobs) == bulk.LARGEST
    monkeypatch.setattr(bulk, "SECONDS", (0.0, 0.001))
    slow = Moody(judge=lambda _: time.sleep(0.005))
    run(stored.collection("slow"), records(str(i) for i in range(400)), slow)
    assert sorted({len(job.items) for job in slow.jobs}) == [bulk.SMALLEST, 16, bulk.FIRST]


class Stop(Exception):
    pass


class Stopper(Quiet):
    """Ends a run at its n-th event, of whatever kind."""

    def __init__(self, after: int) -> None:
        self.left = after

    def progress(self, report: Report) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stop

    def writing(self, now: bool) -> None:
        if not now:
            self.progress(Report())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(0, 12), max_size=4), size=st.integers(1, 700), split=st.booleans())
def test_a_run_stopped_anywhere_and_started_again_ends_as_one_undisturbed(stops: list[int], size: int, split: bool) -> None:
    options = {"split_tokens": 4} if split else {}
    source = records({str(i): f"text of {i} " * (1 + i % 3) for i in range(size)})
    Collection.objects.all().delete()
    whole, stopped = stored.collection("whole", **options), stored.collection("stopped", **options)
    run(whole, source)
    for after in stops:
        try:
            run(stopped, source, watcher=Stopper(after))
        except Stop:
            held = contents(stopped)
            assert list(held) == [str(i) for i in range(len(held))], "a prefix of the source, each once"
    run(stopped, source)
    assert contents(stopped) == contents(whole)


def test_two_writers_of_the_same_documents_store_them_once() -> None:
    collection = stored.collection()
    documents = [stored.document(id, np.eye(8, dtype=np.float32)[0], text=id) for id in "abc"]
    assert (corpus.upsert(collection, documents), corpus.upsert(collection, documents)) == (3, 0)
    assert Document.objects.count() == Passage.objects.count() == 3


def test_deleting_and_pruning() -> None:
    collection, other = stored.collection(), stored.collection("other")
    for each in (collection, other):
        run(each, records(str(i) for i in range(1200)))
    assert corpus.delete(collection, ["0", "0", "nobody"]) == 1
    assert corpus.prune(collection, {str(i) for i in range(600)}, dry_run=True) == 600
    assert corpus.prune(collection, {str(i) for i in range(600)}) == 600
    assert list(contents(collection)) == [str(i) for i in range(1, 600)] and other.documents.count() == 1200
    assert corpus.drop(collection) == 599 and other.passages.count() == 1200
