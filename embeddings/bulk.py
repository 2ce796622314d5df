"""Bulk embedding: read, leave out what is up to date, encode with a few jobs in flight, store in order. Whole chunks or nothing.

The caller's thread reads and talks to the database; encoder threads split and embed meanwhile. Every chunk is one transaction, so a run
that ends at any moment has stored whole documents, and the next one finds them by their content hash and goes on.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Protocol

from django.db import transaction

from inference.client import InferenceClient
from inference.wire import ModelSpec

from . import corpus, storable
from .corpus import NewDocument
from .encoding import Encoder, Failure
from .models import Collection
from .sources import Problem, Record

IN_FLIGHT = 4                        # jobs at the model: one runs, the others keep it from waiting
SMALLEST, FIRST, LARGEST = 8, 32, 512      # documents a job
SECONDS = (1.0, 6.0)                 # from submission to end, others in between: less makes the next jobs larger, more makes them smaller
KEPT_PROBLEMS = 1_000


@dataclass
class Report:
    """Counts of documents, unless it says otherwise."""

    read: int = 0
    embedded: int = 0
    relabelled: int = 0              # only the metadata had changed
    unchanged: int = 0
    blank: int = 0                   # skipped
    failed: int = 0                  # lines that cannot be read included
    truncated: int = 0
    pruned: int = 0
    unreadable: int = 0              # failed ones of which not even the id is known
    passages: int = 0
    tokens: int = 0
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)      # the first KEPT_PROBLEMS

    @property
    def stored(self) -> int:
        return self.embedded + self.relabelled + self.unchanged

    @property
    def done(self) -> int:
        return self.stored + self.blank + self.failed


class Watcher(Protocol):
    """Is told of everything as it happens."""

    def progress(self, report: Report) -> None: ...
    def problem(self, problem: Problem) -> None: ...
    def writing(self, now: bool) -> None:
        """A transaction begins or has ended. May raise, after it has ended, to stop the run."""


class Sifting:
    """Leaves out what a collection holds already. `ids`: all that the source holds and the collection may keep.

    `options` are the collection's that are to be remembered. A collection that is not saved is made, and its options are saved, with the
    first document that is in it, so that a run in which nothing goes in leaves nothing behind.
    """

    def __init__(self, collection: Collection, watcher: Watcher, *, options: Iterable[str] = (), dry_run: bool = False) -> None:
        self.collection, self.watcher, self.dry_run = collection, watcher, dry_run
        self._options: list[str] | None = list(options)      # None: they are remembered
        self.report = Report()
        self.ids: set[str] = set()
        self._started = time.monotonic()

    def _changed(self, records: Iterable[Record | Problem]) -> Iterator[list[Record]]:
        """Documents that are not stored as they are, in order, a look-up's worth at a time."""
        chunk: list[Record] = []
        for record in records:
            self.report.read += 1
            if isinstance(record, Problem):
                self._failed(record)
            elif record.blank:
                self._blank(record, chunk)
            else:
                chunk.append(record)
            if len(chunk) == corpus.IN_LIST:
                yield self._sift(chunk)
                chunk = []
        yield self._sift(chunk)

    def _blank(self, record: Record, chunk: list[Record]) -> None:
        if self.collection.blank == "embed":
            chunk.append(record)
        elif self.collection.blank == "skip":
            self.report.blank += 1
        else:
            self._failed(Problem(record.position, f"document {record.id!r} is blank", record.id))

    def _sift(self, chunk: list[Record]) -> list[Record]:
        held, split = corpus.held(self.collection, [record.id for record in chunk]), corpus.split_name(self.collection)
        changed: list[Record] = []
        relabelled: dict[str, dict[str, Any]] = {}
        for record in chunk:
            self.ids.add(record.id)
            stored = held.get(record.id)
            if stored is None or stored.split != split or stored.content_hash != corpus.content_hash(record.text):
                changed.append(record)
            elif not storable.same(stored.metadata, record.metadata):
                relabelled[record.id] = record.metadata
            else:
                self.report.unchanged += 1
        if relabelled and not self.dry_run:
            with self._writing(), transaction.atomic():
                self._remember()
                corpus.relabel(self.collection, relabelled)
        self.report.relabelled += len(relabelled)
        if self.dry_run:
            self.report.embedded += len(changed)
            changed = []
        self._tick()
        return changed

    def _failed(self, problem: Problem) -> None:
        self.report.failed += 1
        if problem.known is None:
            self.report.unreadable += 1
        else:
            self.ids.add(problem.known)
        if len(self.report.problems) < KEPT_PROBLEMS:
            self.report.problems.append(problem)
        self.watcher.problem(problem)

    def _remember(self) -> None:
        if self._options is not None and not self.dry_run:
            corpus.remember(self.collection, self._options)
            self._options = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self.watcher.writing(True)
        try:
            yield
        finally:
            self.watcher.writing(False)

    def _tick(self) -> None:
        self.report.seconds = time.monotonic() - self._started
        self.watcher.progress(self.report)


class Bulk(Sifting):
    """One run over one collection, with the model at hand."""

    def __init__(
            self, collection: Collection, client: InferenceClient, spec: ModelSpec, watcher: Watcher, *, options: Iterable[str] = (),
            dry_run: bool = False) -> None:
        super().__init__(collection, watcher, options=options, dry_run=dry_run)
        self.client, self.spec = client, spec

    def run(self, records: Iterable[Record | Problem]) -> Report:
        """Raises what the database or the model raises; everything reported as embedded is stored by then."""
        self._started = time.monotonic()
        with _Encoders(self.collection, self.client, self.spec) as encoders:
            waiting: deque[Record] = deque()
            for changed in self._changed(records):
                waiting += changed
                while len(waiting) >= encoders.size:
                    self._feed(encoders, waiting)
            while waiting:
                self._feed(encoders, waiting)
            while encoders.busy:
                self._store(encoders.take())
        if self.report.stored:
            self._remember()
        self._tick()
        return self.report

    def _feed(self, encoders: _Encoders, waiting: deque[Record]) -> None:
        encoders.submit([waiting.popleft() for _ in range(min(encoders.size, len(waiting)))])
        if encoders.busy >= IN_FLIGHT:
            self._store(encoders.take())

    def _store(self, encoded: Sequence[NewDocument | Failure]) -> None:
        documents = [result for result in encoded if isinstance(result, NewDocument)]
        if documents:
            with self._writing(), transaction.atomic():
                self._remember()
                corpus.upsert(self.collection, documents)
        self.report.embedded += len(documents)
        self.report.truncated += sum(document.truncated for document in documents)
        self.report.passages += sum(len(document.passages) for document in documents)
        self.report.tokens += sum(passage.tokens for document in documents for passage in document.passages)
        for failure in encoded:
            if isinstance(failure, Failure):
                self._failed(Problem(failure.record.position, f"document {failure.record.id!r}: {failure.message}", failure.record.id))
        self._tick()


class _Encoders:
    """Threads that encode jobs; results are taken in the order of submission. `size` follows what the model takes for a job."""

    def __init__(self, collection: Collection, client: InferenceClient, spec: ModelSpec) -> None:
        self.size = FIRST
        self._stop = Event()
        self._encoder = Encoder.of(collection, client, spec, self._stop)
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "encode")
        self._jobs: deque[tuple[float, Future[tuple[list[NewDocument | Failure], float]]]] = deque()      # submitted when, to finish when
        self._warm = False

    def __enter__(self) -> _Encoders:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def busy(self) -> int:
        return len(self._jobs)

    def submit(self, records: list[Record]) -> None:
        self._jobs.append((time.monotonic(), self._pool.submit(self._timed, records)))

    def _timed(self, records: list[Record]) -> tuple[list[NewDocument | Failure], float]:
        return self._encoder.encode(records), time.monotonic()

    def take(self) -> list[NewDocument | Failure]:
        submitted, job = self._jobs.popleft()
        encoded, finished = job.result()
        if self._warm:      # the first job also loads the model
            if finished - submitted < SECONDS[0]:
                self.size = min(self.size * 2, LARGEST)
            elif finished - submitted > SECONDS[1]:
                self.size = max(self.size // 2, SMALLEST)
        self._warm = True
        return encoded
