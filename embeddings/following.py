"""What a command does with a job: cuts its sources into chunks, then waits, and mends what others left behind while it does."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from django.db import DatabaseError, InterfaceError, connection
from django.utils import timezone

from inference.client import InferenceClient

from . import chunks, jobs
from .bulk import Report, Sifting, Watcher
from .models import Collection, FailedDocument, Job
from .sources import Problem, Record

POLL_SECONDS, REAP_SECONDS = 0.3, 5.0
DATABASE_SECONDS = 120.0       # how long a database that is away is waited for
UNTAKEN_SECONDS = 10.0         # without any chunk in a worker's hands, until a person is told

WORKER = "celery -A mlxcel_site worker -Q bulk -P threads -c 2 --without-gossip --without-mingle"


class Cutting(Sifting):
    """Makes a job of what has changed in the sources. `superseded`: jobs of the same sources whose commands died, and that it replaces."""

    def __init__(self, collection: Collection, watcher: Watcher, sources: Iterable[str], *, options: Iterable[str] = (),
                 whole: bool = True) -> None:
        """`whole`: the sources are read to their end, and hold the same whenever they are read."""
        super().__init__(collection, watcher, options=options)
        self._sources, self._whole = list(sources), whole
        self.superseded: list[int] = []
        self.job = jobs.create(collection, self._sources) if collection.pk is not None else None
        self._supersede()
        self._told = 0

    def run(self, records: Iterable[Record | Problem]) -> Job | None:
        """None: the collection is new and no document is fit for it, so that there is neither. Raises what the database raises, and
        Conflict where the job was cancelled meanwhile. An interrupted job is cancelled."""
        try:
            waiting: list[Record] = []
            for changed in self._changed(records):
                waiting += changed
                if self.job:
                    jobs.keep_open(self.job, self.report)
                    self._tell(self.job)
                if len(waiting) >= 2 * jobs.CHUNK_DOCUMENTS:
                    full = len(waiting) - len(waiting) % jobs.CHUNK_DOCUMENTS
                    self._add(waiting[:full])
                    waiting = waiting[full:]
            if waiting:
                self._add(waiting)
            if self.report.stored:
                self._remember()
            if self.job:
                self._tell(self.job)
                self._supersede()      # again: a command that had just died was not known to be dead
                jobs.close(self.job, self.report)
        except BaseException:
            if self.job:
                with suppress(DatabaseError, InterfaceError):
                    jobs.cancel(self.job)
            raise
        return self.job

    def _add(self, records: list[Record]) -> None:
        self._remember()
        if self.job is None:
            self.job = jobs.create(self.collection, self._sources)
        jobs.add(self.job, records)

    def _supersede(self) -> None:
        if self.job and self._whole:
            self.superseded += jobs.supersede(self.job)

    def _tell(self, job: Job) -> None:
        for problem in self.report.problems[self._told:]:
            jobs.failed(job, problem)
        self._told = len(self.report.problems)


class Following:
    """Waits for the end of a job. With a client it does the chunks itself."""

    def __init__(self, job: Job, watcher: Watcher, say: Callable[[str], None], client: InferenceClient | None = None) -> None:
        self.job, self.watcher, self.client, self._say = job, watcher, client, say
        self.report = Report()
        self._failure = FailedDocument.objects.filter(job=job).order_by("-pk").values_list("pk", flat=True).first() or 0
        self._said = ""
        self._moved = time.monotonic()

    def run(self) -> Report:
        """Raises DatabaseError where the database stays away, jobs.Lost where the job is deleted."""
        reap, patience = time.monotonic(), time.monotonic() + DATABASE_SECONDS
        while True:
            try:
                if self._look().state != Job.State.RUNNING:
                    return self.report
                if time.monotonic() >= reap:
                    jobs.reap(idle=False)
                    reap = time.monotonic() + REAP_SECONDS
                if not self._work():
                    time.sleep(POLL_SECONDS)
                patience = time.monotonic() + DATABASE_SECONDS
            except (DatabaseError, InterfaceError) as error:
                if time.monotonic() > patience:
                    raise
                self._once(f"The database is away, waiting for it: {str(error).strip().splitlines()[0]}")
                connection.close()
                time.sleep(1)

    def _work(self) -> bool:
        """Whether a chunk was done here."""
        lease = jobs.take(job=self.job) if self.client else None
        return lease is not None and self.client is not None and chunks.run(lease, self.client)

    def _look(self) -> Job:
        self.job = job = jobs.get(self.job.pk)
        before, self.report = self.report.done, jobs.report(job)
        self.report.seconds = ((job.finished_at or timezone.now()) - job.created_at).total_seconds()
        for failure in FailedDocument.objects.filter(job=job, pk__gt=self._failure).order_by("pk"):
            self._failure = failure.pk
            problem = Problem(failure.position, f"document {failure.external_id!r}: {failure.message}", failure.external_id)
            self.report.problems.append(problem)
            self.watcher.problem(problem)
        self.watcher.progress(self.report)
        if self.report.done != before or (not self.client and jobs.worked_on()):      # by workers that may be busy with another job
            self._moved = time.monotonic()
        if job.state == Job.State.RUNNING and (told := jobs.told(job)):
            self._once(told if told == jobs.DIED else f"Waiting: {told}")
        elif not self.client and time.monotonic() - self._moved > UNTAKEN_SECONDS:
            self._once(f"No bulk worker takes a chunk. Start one with the same MLXCEL_REDIS_URL and DATABASE_URL: {WORKER}")
        return job

    def _once(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._say(line)
