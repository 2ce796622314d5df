"""Bulk jobs as they stand in the database: cut into chunks, leased, finished, taken up again. Knows no broker and no model.

A chunk belongs to whoever set its `owner`, for some seconds at a time by the database's clock, or until its process ends where that is
seen sooner (`owners`). Whoever loses a lease finds out before anything is stored, because the same transaction stores the vectors and
marks the chunk done. A chunk whose owners keep dying is cut in four until the document that kills them stands alone and fails; such a
chunk runs alone in its process. Messages to workers only say
"there is work": losing one costs time.

Transactions lock in this order: collection, job, chunk.
"""
from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import orjson
from django.conf import settings
from django.db import transaction
from django.db.models import Count, DateTimeField, ExpressionWrapper, F, Q, QuerySet, Sum
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.module_loading import import_string

from inference.errors import Conflict, NotFound

from . import corpus, owners
from .bulk import Report
from .corpus import NewDocument
from .encoding import Failure
from .models import Chunk, Collection, FailedDocument, Job
from .sources import Problem, Record

CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 256, 1_000_000
DEATHS = 2                 # owners of a chunk that may die before it is cut up
PARTS = 4
RESEND, IDLE_RESEND = 60.0, 5.0      # seconds until the message of a waiting chunk counts as lost; where a worker has nothing to do
RESENT = 16                # messages sent again at a time
READING = 60.0             # seconds a command may be silent while it adds chunks
POSITION_CHARACTERS = 1200
DIED = ("The command that read the sources ended before it had read all. What it had cut into chunks is embedded; run the same "
        "command again for the rest.")


@dataclass(frozen=True, slots=True)
class Lease:
    """A chunk in someone's hands."""

    chunk: int
    job: Job
    owner: uuid.UUID
    records: list[Record]
    lock: owners.Lock | None = None      # tells others on this machine that its owner lives


class Lost(Exception):
    """The lease ran out and someone else has the chunk, or the job is gone."""


def lease_seconds() -> float:
    return float(settings.BULK_LEASE_SECONDS)


def get(pk: int | str) -> Job:
    job = Job.objects.select_related("collection__space").filter(pk=pk).first() if str(pk).isdecimal() and int(pk) < 2 ** 63 else None
    if job is None:
        raise NotFound(f"There is no job {pk}", code="job_not_found")
    return job


def newest(count: int) -> list[Job]:
    return list(Job.objects.select_related("collection").order_by("-pk")[:count])


def unfinished(collection: Collection) -> list[Job]:
    """Running jobs of a collection, saved or not, whose sources were read to their end, oldest first."""
    settle()
    return list(Job.objects.filter(collection=collection.pk, state=Job.State.RUNNING, reading_until=None).order_by("pk"))


# --- making ---------------------------------------------------------------------------------------------------------------------------

def create(collection: Collection, sources: Sequence[str]) -> Job:
    """A job that chunks are still added to: `add` them, then `close` it."""
    return Job.objects.create(collection=collection, sources=list(sources), reading_until=_in(READING))


def add(job: Job, records: Sequence[Record]) -> list[int]:
    """Chunks of these documents, sent to the workers. Raises Conflict where the job was cancelled meanwhile."""
    return _add(job, _parts(records))


def keep_open(job: Job, report: Report) -> None:
    """Tells of what was read so far, and that the command is alive. Raises Conflict where the job was cancelled meanwhile."""
    if not _running(job).update(reading_until=_in(READING), **_read(report)):
        raise Conflict(f"Job {job.pk} was stopped by someone else", code="job_stopped")


def failed(job: Job, problem: Problem) -> None:
    """A line that could not be read."""
    FailedDocument.objects.create(job=job, position=problem.position[:POSITION_CHARACTERS], external_id=problem.known or "",
                                  message=problem.message, document=b"")
    Job.objects.filter(pk=job.pk).update(failed=F("failed") + 1)


def supersede(job: Job) -> list[int]:
    """Ends jobs of the same sources whose commands died while they read, as `job` reads them anew: what waits of them is in its chunks, or
    will be. Returns their numbers."""
    ended = []
    dead = Job.objects.filter(collection=job.collection, sources=job.sources, state=Job.State.RUNNING, reading_until__lt=Now())
    for old in dead.exclude(pk=job.pk).order_by("pk"):
        with transaction.atomic():
            _lock(old)
            if dead.filter(pk=old.pk).update(
                    state=Job.State.FAILED, finished_at=Now(),
                    error=f"The command that read the sources ended before it had read all. Job {job.pk} reads them again."):
                Chunk.objects.filter(job=old, state=Chunk.State.PENDING).delete()
                ended.append(old.pk)
    return ended


def close(job: Job, report: Report) -> None:
    """No more chunks will come. A job that ends without it keeps `reading_until`: its sources were not read to the end."""
    with transaction.atomic():
        _lock(job)
        _running(job).update(reading_until=None, **_read(report))
        _finish(job)


def retry(job: Job) -> int:
    """Puts the job's failed documents into new chunks. Returns how many there are; lines that could not be read stay as they are, and a
    job that has nothing else is left alone."""
    if not (rows := list(FailedDocument.objects.filter(job=job).exclude(document=b"").order_by("pk"))):
        return 0
    with transaction.atomic():
        _lock(job)
        count, _ = FailedDocument.objects.filter(pk__in=[row.pk for row in rows]).delete()
        _read_no_more(job)
        Job.objects.filter(pk=job.pk).update(failed=F("failed") - count, state=Job.State.RUNNING, finished_at=None, error="")
    job.refresh_from_db()
    _add(job, _parts(record for row in rows for record in _unpack(row.document)))
    return len(rows)


def resume(job: Job) -> None:
    """Goes on with what is left of a job that was cancelled or failed, or whose messages were lost."""
    with transaction.atomic():
        _lock(job)
        left = Chunk.objects.filter(job=job).exclude(state=Chunk.State.DONE)
        _read_no_more(job)
        if left.exists() or job.state == Job.State.RUNNING:
            Job.objects.filter(pk=job.pk).update(state=Job.State.RUNNING, finished_at=None, error="")
            left.filter(state=Chunk.State.PENDING).update(sent_at=None)
        _finish(job)
    send()


def cancel(job: Job) -> bool:
    """Chunks that run are stored, no other one is begun. False: the job had ended."""
    return bool(_running(job).update(state=Job.State.CANCELLED, finished_at=Now()))


def fail(job: Job, message: str) -> None:
    """Stops a job that cannot go on. Its chunks wait for `resume`."""
    _running(job).update(state=Job.State.FAILED, error=message, finished_at=Now())


# --- working --------------------------------------------------------------------------------------------------------------------------

def suspect(chunk: int) -> bool:
    """Whether a process died that had this chunk: it is to be alone in the next one, so that a death tells whose fault it was."""
    return Chunk.objects.filter(pk=chunk, attempts__gt=0).exists()


def take(chunk: int | None = None, job: Job | None = None, *, suspects: bool = True) -> Lease | None:
    """A lease on `chunk`, or on any chunk that waits (of `job`). None: there is none, or someone else was faster.

    `suspects`: False takes none; who takes one sees to it that the process does nothing else meanwhile.
    """
    # The chunk's own columns decide: a condition behind a join would not be looked at again when two wait for the same row.
    waiting = Chunk.objects.filter(state=Chunk.State.PENDING, job__in=Job.objects.filter(state=Job.State.RUNNING))
    if job is not None:
        waiting = waiting.filter(job=job)
    if not suspects:
        waiting = waiting.filter(attempts=0)
    while chunk is None:
        if (first := waiting.order_by("pk").values_list("pk", flat=True).first()) is None:
            return None
        if (lease := take(first)) is not None:
            return lease
    owner = uuid.uuid4()
    lock = owners.hold(owner)
    if not waiting.filter(pk=chunk).update(state=Chunk.State.RUNNING, owner=owner, lease_until=_in(lease_seconds()),
                                           attempts=F("attempts") + 1):
        owners.release(owner, lock)
        return None
    row = Chunk.objects.select_related("job__collection__space").filter(pk=chunk, owner=owner).first()
    if row is None:
        owners.release(owner, lock)
        return None
    return Lease(row.pk, row.job, owner, _unpack(row.documents), lock)


def renew(lease: Lease) -> None:
    """Raises Lost."""
    if not _mine(lease).update(lease_until=_in(lease_seconds())):
        raise Lost


def give_back(lease: Lease, why: str = "") -> None:
    """In order, so that it does not count as a death. The chunk is sent again after a while; `why` is what its job waits for."""
    with transaction.atomic():
        Job.objects.select_for_update().filter(pk=lease.job.pk).first()
        if _mine(lease).update(state=Chunk.State.PENDING, owner=None, lease_until=None, attempts=F("attempts") - 1, sent_at=Now()) and why:
            _running(lease.job).update(error=why)


def store(lease: Lease, encoded: Sequence[NewDocument | Failure]) -> None:
    """Everything of a chunk, in one transaction with its end. Raises Lost, and stores nothing, where the lease is someone else's.

    May be repeated when the database broke off: what is stored already stays as it is.
    """
    documents = [result for result in encoded if isinstance(result, NewDocument)]
    failures = [result for result in encoded if isinstance(result, Failure)]
    with transaction.atomic():
        corpus.upsert(lease.job.collection, documents)
        _lock(lease.job)
        if not _mine(lease).update(state=Chunk.State.DONE, documents=b"", lease_until=None):
            if Chunk.objects.filter(pk=lease.chunk, owner=lease.owner, state=Chunk.State.DONE).exists():
                return
            raise Lost
        _record(lease.job, failures)
        Job.objects.filter(pk=lease.job.pk).update(
            error="", embedded=F("embedded") + len(documents), failed=F("failed") + len(failures),
            truncated=F("truncated") + sum(d.truncated for d in documents),
            passages=F("passages") + sum(len(d.passages) for d in documents),
            tokens=F("tokens") + sum(p.tokens for d in documents for p in d.passages))
        _finish(lease.job)


# --- mending --------------------------------------------------------------------------------------------------------------------------

def reap(*, idle: bool = False) -> None:
    """Takes chunks from owners that died, cuts up those that kill, ends jobs that are done or whose command died, sends lost messages
    again.

    Called by everyone who waits: it does not matter by how many, or when. `idle`: a worker that has nothing to do asks.
    """
    gone = owners.dead()
    dead = Chunk.objects.filter(Q(lease_until__lt=Now()) | Q(owner__in=gone), state=Chunk.State.RUNNING)
    for pk, job in list(dead.values_list("pk", "job")):
        with transaction.atomic():
            Job.objects.select_for_update().filter(pk=job).first()
            if (chunk := dead.filter(pk=pk).select_for_update().first()) is not None:
                _bury(chunk)
    owners.forget(gone)
    settle()
    send(idle=idle)


def settle() -> None:
    """Ends running jobs of which nothing is left."""
    for job in Job.objects.filter(state=Job.State.RUNNING):
        left = job.chunks.exclude(state=Chunk.State.DONE).exists()
        if not left and job.reading_until is None:
            with transaction.atomic():
                _lock(job)
                _finish(job)
        elif not left:
            _running(job).filter(reading_until__lt=Now()).update(state=Job.State.FAILED, finished_at=Now(), error=DIED)


def send(*, idle: bool = False) -> None:
    """Sends waiting chunks to the workers whose message was never sent, or may be lost."""
    stale = Chunk.objects.filter(state=Chunk.State.PENDING, job__state=Job.State.RUNNING).filter(
        Q(sent_at=None) | Q(sent_at__lt=_in(-IDLE_RESEND if idle else -RESEND)))
    _send(list(stale.order_by("pk").values_list("pk", flat=True)[:RESENT]))


def _bury(chunk: Chunk) -> None:
    """A chunk whose owner is gone: once more, in parts, or, standing alone, as failed."""
    if chunk.attempts < DEATHS:
        Chunk.objects.filter(pk=chunk.pk).update(state=Chunk.State.PENDING, owner=None, lease_until=None, sent_at=None)
        return
    records = _unpack(chunk.documents)
    Chunk.objects.filter(pk=chunk.pk).update(state=Chunk.State.DONE, owner=None, lease_until=None, documents=b"")
    if len(records) == 1:
        said = f"the process that embedded it, and nothing else, died {chunk.attempts} times"
        _record(chunk.job, [Failure(records[0], said)])
        Job.objects.filter(pk=chunk.job_id).update(failed=F("failed") + 1)
        return
    size = -(-len(records) // PARTS)
    parts = [records[at:at + size] for at in range(0, len(records), size)]
    Chunk.objects.bulk_create(      # suspect already: the next death cuts them up again
        Chunk(job=chunk.job, documents=_pack(part), count=len(part), attempts=DEATHS - 1) for part in parts)


# --- looking --------------------------------------------------------------------------------------------------------------------------

def reading(job: Job) -> bool:
    """Whether its command reads the sources, as far as anyone knows."""
    return job.state == Job.State.RUNNING and job.reading_until is not None and job.reading_until >= timezone.now()


def worked_on() -> bool:
    """Whether a chunk of any running job is in someone's hands."""
    running = Job.objects.filter(state=Job.State.RUNNING)
    return Chunk.objects.filter(job__in=running, state=Chunk.State.RUNNING, lease_until__gt=Now()).exists()


def told(job: Job) -> str:
    """Why it stopped, or what it waits for."""
    died = job.state == Job.State.RUNNING and job.reading_until is not None and not reading(job)
    return job.error or (DIED if died else "")


def report(job: Job) -> Report:
    """What is done so far. Read the job anew before."""
    return Report(read=job.read, embedded=job.embedded, relabelled=job.relabelled, unchanged=job.unchanged, blank=job.blank,
                  failed=job.failed, truncated=job.truncated, passages=job.passages, tokens=job.tokens,
                  unreadable=FailedDocument.objects.filter(job=job, external_id="").count() if job.failed else 0)


def failures(job: Job) -> tuple[int, int]:
    """Failed documents that can be tried again, and those that cannot: nothing is stored of what failed as it was read."""
    rows = FailedDocument.objects.filter(job=job)
    unread = rows.filter(document=b"").count()
    return rows.count() - unread, unread


def chunks(job: Job) -> dict[str, int]:
    """Chunks by state, and the documents that are not done: pending, running, done, waiting."""
    rows = {state: (count, documents) for state, count, documents in
            Chunk.objects.filter(job=job).order_by().values_list("state").annotate(Count("pk"), Sum("count"))}
    counts = {str(state): rows.get(state, (0, 0))[0] for state in Chunk.State}
    return counts | {"waiting": sum(rows.get(state, (0, 0))[1] for state in (Chunk.State.PENDING, Chunk.State.RUNNING))}


# --- within ---------------------------------------------------------------------------------------------------------------------------

def _add(job: Job, parts: Iterable[list[Record]]) -> list[int]:
    with transaction.atomic():
        if not _running(job).select_for_update().exists():
            raise Conflict(f"Job {job.pk} was stopped by someone else", code="job_stopped")
        keys = [row.pk for row in Chunk.objects.bulk_create(Chunk(job=job, documents=_pack(part), count=len(part)) for part in parts)]
    _send(keys)
    return keys


def _send(keys: list[int]) -> None:
    """Where no broker is configured, nobody is told: whoever runs the chunks looks for them."""
    if keys and settings.BULK_SENDER:
        Chunk.objects.filter(pk__in=keys).update(sent_at=Now())
        import_string(settings.BULK_SENDER)(keys)


def _parts(records: Iterable[Record]) -> Iterator[list[Record]]:
    part: list[Record] = []
    size = 0
    for record in records:
        if part and (len(part) == CHUNK_DOCUMENTS or size + len(record.text) > CHUNK_CHARACTERS):
            yield part
            part, size = [], 0
        part.append(record)
        size += len(record.text)
    if part:
        yield part


def _pack(records: Sequence[Record]) -> Any:
    return zlib.compress(orjson.dumps([(r.position, r.id, r.text, r.metadata) for r in records]), 1)


def _unpack(data: bytes | memoryview) -> list[Record]:
    return [Record(*fields) for fields in orjson.loads(zlib.decompress(data))]


def _record(job: Job, failures: Sequence[Failure]) -> None:
    FailedDocument.objects.bulk_create([
        FailedDocument(job=job, position=f.record.position[:POSITION_CHARACTERS], external_id=f.record.id, message=f.message,
                       document=_pack([f.record])) for f in failures], batch_size=100)


def _finish(job: Job) -> None:
    """Ends the locked job if nothing is left."""
    done = Job.objects.filter(pk=job.pk, state=Job.State.RUNNING, reading_until=None)
    if not Chunk.objects.filter(job=job).exclude(state=Chunk.State.DONE).exists():
        done.filter(failed=0).update(state=Job.State.COMPLETED, finished_at=Now(), error="")
        done.filter(failed__gt=0).update(state=Job.State.COMPLETED_WITH_ERRORS, finished_at=Now(), error="")


def _lock(job: Job) -> None:
    if not Job.objects.select_for_update().filter(pk=job.pk).exists():
        raise Lost


def _read_no_more(job: Job) -> None:
    """Of a job that had ended, no command reads the sources any more."""
    Job.objects.filter(pk=job.pk).exclude(state=Job.State.RUNNING).exclude(reading_until=None).update(reading_until=_in(-1))


def _running(job: Job) -> QuerySet[Job]:
    return Job.objects.filter(pk=job.pk, state=Job.State.RUNNING)


def _mine(lease: Lease) -> QuerySet[Chunk]:
    return Chunk.objects.filter(pk=lease.chunk, owner=lease.owner, state=Chunk.State.RUNNING)


def _read(report: Report) -> dict[str, int]:
    return {name: getattr(report, name) for name in ("read", "unchanged", "relabelled", "blank")}


def _in(seconds: float) -> Any:
    """A moment by the database's clock: the clocks of the workers may differ."""
    return ExpressionWrapper(Now() + timedelta(seconds=seconds), output_field=DateTimeField())
