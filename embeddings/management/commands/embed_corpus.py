"""`manage.py embed_corpus COLLECTION SOURCE...`"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import IO, Any, cast

from django.conf import settings
from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, InterfaceError

from embeddings import corpus, jobs, sources, spaces, tables
from embeddings.bulk import Bulk, Report, Sifting
from embeddings.counted import counted
from embeddings.following import WORKER, Cutting, Following
from embeddings.index import get_index
from embeddings.management.corpus_command import (
    FAILED,
    INTERRUPTED,
    NOTHING,
    USAGE,
    CorpusCommand,
    code_of,
    connected,
    described,
    model_of,
    refused,
    serving,
    settings_for,
    source_of,
)
from embeddings.models import Collection, Job
from embeddings.progress import Interruptible, duration
from inference.errors import Conflict, ServiceError
from inference.wire import ModelSpec

EXIT_CODES = """exit codes:
  0    every document went in, or was in already, or was blank and skipped
  1    some failed: the others went in
  2    wrong usage or configuration
  3    nothing went in
  130  stopped with Ctrl-C: run the same command again to go on"""


def _split(text: str) -> tuple[int, int]:
    if text == "none":
        return 0, 0
    tokens, _, overlap = text.partition(":")
    try:
        pair = int(tokens), int(overlap or 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected none, TOKENS or TOKENS:OVERLAP, found {text!r}") from None
    if not 0 <= pair[1] < pair[0]:
        raise argparse.ArgumentTypeError(f"expected TOKENS of at least 1 and an OVERLAP smaller than it, found {text!r}")
    return pair


def _fields(text: str) -> list[str]:
    if not (names := [name.strip() for name in text.split(",") if name.strip()]):
        raise argparse.ArgumentTypeError("expected one or more field names, separated by commas")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


class Command(CorpusCommand):
    help = ("Embeds documents into a collection, which is made if there is none of that name. What is stored and unchanged is left alone, "
            "so a run that was stopped or killed goes on when it is started again. Options marked * are remembered by the collection.")

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        return super().create_parser(prog_name, subcommand, epilog=EXIT_CODES, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add("collection", nargs="?")
        add("source", nargs="*", metavar="SOURCE", help=".jsonl, .csv, .tsv (also .gz), .parquet, .txt, .md, a directory of .txt and .md "
            "files (ids are their paths in it), or - for JSONL on standard input")
        add("--model", help="* directory or name of the embedding model; default: MLXCEL_EMBEDDING_MODEL")
        add("--dimensions", type=_positive, metavar="N", help="* keep the first N components of each vector")
        add("--id-field", metavar="NAME", help="* field with the document's id; default: _id, else id")
        add("--text-field", type=_fields, metavar="NAME[,NAME...]", help="* fields to embed, joined by a space; default: text. "
            "All others become metadata")
        add("--prompt", help="* put before every document: the name of one of the checkpoint's prompts, or literal text; "
            "default: its prompt `document`, if it has one; '' for none")
        add("--query-prompt", help="* put before every query, likewise; default: its prompt `query`")
        add("--split", type=_split, metavar="none|TOKENS[:OVERLAP]", help="* cut documents into passages of at most TOKENS tokens")
        add("--blank", choices=["skip", "embed", "fail"], help="* documents without visible text; default: skip")
        add("--batch-tokens", type=_positive, metavar="N", help="tokens a forward pass takes at most")
        add("--limit", type=_positive, metavar="N", help="stop after the first N documents")
        add("--dry-run", action="store_true", help="read and compare everything, embed and store nothing")
        add("--prune", action="store_true", help="remove documents that the sources do not hold any more")
        add("--workers", choices=["local", "celery"], default="local",
            help="celery: cut the documents into chunks for bulk workers and wait for them "
            f" ({WORKER}); default: embed in this process")
        add("--resume", metavar="JOB", help="go on with a job that was cancelled or failed, or wait for one that runs")
        add("--retry-failed", metavar="JOB", help="try the failed documents of a job again")
        add("--backend", choices=["auto", "mlx", "host"])
        add("--json", action="store_true", help="the summary as JSON on standard output")

    def handle(self, *args: Any, **o: Any) -> None:
        if o["workers"] == "celery" and not settings.BULK_SENDER:
            raise CommandError("--workers celery needs a broker: set MLXCEL_REDIS_URL, here and for the workers", returncode=USAGE)
        if o["resume"] or o["retry_failed"]:
            return self._again(o)
        if not o["collection"] or not o["source"]:
            raise CommandError("expected a COLLECTION and at least one SOURCE, or --resume JOB, or --retry-failed JOB", returncode=USAGE)
        if o["prune"] and o["limit"]:
            raise CommandError("--prune needs the whole of the sources; it cannot be used with --limit", returncode=USAGE)
        total = sources.total(o["source"])
        tables.ensure(self.say)
        found = corpus.find(o["collection"])
        model = source_of(o["model"]) if o["model"] else model_of(found) if found else None
        used = settings_for(model, o["backend"], o["batch_tokens"])
        with connected(used) as client:
            spec = described(client, model)
            collection, options = self._collection(found, spec, model or next(iter(used.embedding_models), ""), o)
            self.say(f"Collection {collection.name}: {_described(collection)}")
            raws: Iterable[sources.Raw | sources.Problem] = sources.read(o["source"])
            if o["limit"]:
                raws, total = islice(raws, o["limit"]), min(total, o["limit"]) if total else None
            records = sources.documents(raws, collection.id_field, collection.text_fields)
            self._run(collection, options, client, spec, records, total, o)

    def _collection(self, found: Collection | None, spec: ModelSpec, source: str, o: dict[str, Any]) -> tuple[Collection, list[str]]:
        """The collection with the options of this run, and the names of those to remember. Nothing is saved yet."""
        space = spaces.space_for(
            spec, o["dimensions"] or (min(found.space.dims, spec.dims) if found else None),
            found.space.document_prompt if found and o["prompt"] is None else _prompt(spec, o["prompt"], "document"))
        given: dict[str, Any] = {}
        if o["id_field"] is not None:
            given["id_field"] = o["id_field"]
        if o["text_field"] is not None:
            given["text_fields"] = o["text_field"]
        if o["split"] is not None:
            given["split_tokens"], given["split_overlap"] = o["split"]
        if o["blank"] is not None:
            given["blank"] = o["blank"]
        if o["query_prompt"] is not None or not found:
            given["query_prompt"] = _prompt(spec, o["query_prompt"], "query")
        if given.get("split_tokens", 0) > spec.max_length:
            raise CommandError(f"--split {given['split_tokens']}: {spec.id} takes at most {spec.max_length} tokens", returncode=USAGE)
        if found is None:
            corpus.check_name(o["collection"])
            options = {"text_fields": ["text"], "model_source": source, **given}
            return Collection(name=o["collection"], space=space, **options), list(options)
        try:
            spaces.check(found, space)
        except Conflict as error:
            raise CommandError(f"{error} Embed into a collection of another name, or remove this one with "
                               f"`manage.py delete_corpus {found.name}` and run this again.", returncode=USAGE) from error
        for name, value in given.items():
            setattr(found, name, value)
        return found, list(given)

    def _run(self, collection: Collection, options: list[str], client: Any, spec: ModelSpec,
             records: Iterable[sources.Record | sources.Problem], total: int | None, o: dict[str, Any]) -> None:
        display = self._display(total)
        if o["workers"] == "celery" and not o["dry_run"]:
            self._wait(collection, o)
            whole = not o["limit"] and "-" not in o["source"]
            return self._job(Cutting(collection, display, o["source"], options=options, whole=whole), records, display, total, o)
        bulk = Bulk(collection, client, spec, display, options=options, dry_run=o["dry_run"])

        def work() -> None:
            with display:
                bulk.run(records)
                self._prune(collection, bulk.report, bulk.ids, o)
        stopped, code = _attempt(work)
        if not stopped and self._would_empty(bulk, o):
            stopped, code = _kept(bulk), USAGE
        elif stopped:
            stopped += f" What this run stored stays: {counted(bulk.report.embedded, 'document')}. {_go_on(code)}"
        self._end(collection, bulk.report, code, stopped, o)

    def _wait(self, collection: Collection, o: dict[str, Any]) -> None:
        """Until the jobs that hold documents of this collection have ended, so that these are stored, and unchanged, when they are read."""
        for job in jobs.unfinished(collection):
            left = counted(jobs.chunks(job)["waiting"], "document")
            self.say(f"Job {job.pk} is still at work on this collection: {left} left; waiting for it first")
            following, stopped, code = self._followed(job, job.read)
            if stopped:
                self._end(collection, following.report, code, stopped, o, following.job)

    def _job(self, cutting: Cutting, records: Iterable[sources.Record | sources.Problem], display: Interruptible, total: int | None,
             o: dict[str, Any]) -> None:
        def cut() -> None:
            with display:
                cutting.run(records)
        stopped, code = _attempt(cut)
        for old in cutting.superseded:
            self.say(f"Job {old} is replaced: its command had ended before it had read all of these sources.")
        if stopped:
            told = f"Job {cutting.job.pk} was cancelled; what is stored stays. " if cutting.job else ""
            return self._end(cutting.collection, cutting.report, code, f"{stopped} {told}{_go_on(code)}", o)
        if self._would_empty(cutting, o):
            return self._end(cutting.collection, cutting.report, USAGE, _kept(cutting), o, cutting.job)
        if cutting.job is None:
            return self._end(cutting.collection, cutting.report, code, None, o)
        self.say(f"Job {cutting.job.pk}: bulk workers embed its documents.")
        self._follow(cutting.job, total, o, cutting)

    def _again(self, o: dict[str, Any]) -> None:
        """--resume and --retry-failed: by the workers, or here where there are none."""
        if o["collection"] or (o["resume"] and o["retry_failed"]) or o["prune"] or o["dry_run"]:
            raise CommandError("--resume JOB and --retry-failed JOB stand alone: the job knows its documents", returncode=USAGE)
        job = jobs.get(o["resume"] or o["retry_failed"])
        if o["resume"]:
            if job.state in (Job.State.COMPLETED, Job.State.COMPLETED_WITH_ERRORS):
                self.say(f"Job {job.pk} had ended already: {job.state}")
            jobs.resume(job)
        elif count := jobs.retry(job):
            self.say(f"Tried again: {counted(count, 'document')}.")
        else:
            self.say(f"Job {job.pk} has no failed document to try again.")
        if settings.BULK_SENDER:
            return self._follow(job, job.read, o)
        with serving(job.collection, o["backend"]) as client:
            self._follow(job, job.read, o, client=client)

    def _follow(self, job: Job, total: int | None, o: dict[str, Any], cutting: Cutting | None = None, client: Any = None) -> None:
        following, stopped, code = self._followed(job, total, client)
        job, report = following.job, following.report
        if not stopped and job.state in (Job.State.FAILED, Job.State.CANCELLED):
            said = job.error if job.state == Job.State.FAILED else "The job was cancelled."
            if jobs.chunks(job)["waiting"]:
                go_on = f"Go on: manage.py embed_corpus --resume {job.pk}."
            else:
                go_on = "" if job.error == jobs.DIED else "Nothing of it is left to resume: run the command that made it again."
            stopped, code = f"{said} What is stored stays. {go_on}".rstrip(), FAILED
        elif report.failed and not code:
            self._mend(job)
        if cutting:
            report.problems[:0] = cutting.report.problems
            report.unreadable = cutting.report.unreadable
            if not code:
                self._prune(job.collection, report, cutting.ids, o)
        self._end(job.collection, report, code, stopped, o, job)

    def _mend(self, job: Job) -> None:
        """What can be done about its failures."""
        again, unread = jobs.failures(job)
        if again:
            self.say(f"Failed documents are tried again with: manage.py embed_corpus --retry-failed {job.pk}")
        if unread:
            self.say(f"{counted(unread, 'line')} could not be read, so nothing is stored of {'it' if unread == 1 else 'them'} to try again:"
                     " mend the source and run the command again.")

    def _would_empty(self, sifting: Sifting, o: dict[str, Any]) -> bool:
        """Whether --prune would remove all there is, for want of documents in the sources: an export that failed looks the same."""
        return bool(o["prune"] and sifting.collection.pk is not None and not sifting.ids and not sifting.report.unreadable)

    def _followed(self, job: Job, total: int | None, client: Any = None) -> tuple[Following, str | None, int]:
        """The job followed to its end, and what stopped that, with the exit code."""
        display = self._display(total)
        following = Following(job, display, self.say, client)

        def wait() -> None:
            with display:
                following.run()
        stopped, code = _attempt(wait)
        if code == INTERRUPTED and not client:
            stopped = (f"Job {job.pk} goes on without this command. Follow it: manage.py embed_corpus --resume {job.pk}. "
                       f"Stop it: manage.py cancel_job {job.pk}.")
        return following, stopped, code

    def _prune(self, collection: Collection, report: Report, ids: set[str], o: dict[str, Any]) -> None:
        if o["prune"] and ids and not report.unreadable:
            report.pruned = corpus.prune(collection, ids, dry_run=o["dry_run"])

    def _display(self, total: int | None) -> Interruptible:
        return Interruptible(cast(IO[str], self.stderr._out), total)

    def _end(self, collection: Collection, report: Report, code: int, stopped: str | None, o: dict[str, Any],
             job: Job | None = None) -> None:
        if (not code and report.failed) or (code in (FAILED, USAGE) and report.stored):
            code = FAILED
        if code in (0, FAILED) and not report.stored:
            code = NOTHING
        if report.embedded and not o["dry_run"] and not stopped:
            get_index().ensure(collection)
        self._summary(collection, report, code, stopped, o, job)
        if stopped and code != INTERRUPTED:
            raise CommandError(stopped, returncode=code)
        if code:
            sys.exit(code)

    def _summary(self, collection: Collection, report: Report, code: int, stopped: str | None, o: dict[str, Any],
                 job: Job | None) -> None:
        seconds = max(report.seconds, 1e-9)
        if o["json"]:
            counts = {name: getattr(report, name) for name in (
                "read", "embedded", "relabelled", "unchanged", "blank", "failed", "truncated", "pruned", "passages", "tokens")}
            self.out(json.dumps({
                "collection": collection.name, "model": collection.space.model_id, "fingerprint": collection.space.fingerprint,
                "job": job.pk if job else None, "dry_run": o["dry_run"], **counts, "seconds": round(seconds, 3),
                "documents_per_second": round(report.embedded / seconds, 1),
                "tokens_per_second": round(report.tokens / seconds, 1), "stopped": stopped, "exit_code": code,
                "problems": [{"position": problem.position, "message": problem.message} for problem in report.problems]}))
            return
        would = "would be " if o["dry_run"] else ""
        rows = [("read", report.read, ""), (would + "embedded", report.embedded, _passages(report)),
                ("unchanged", report.unchanged, ""), (would + "given new metadata", report.relabelled, ""),
                ("blank, skipped", report.blank, ""), ("failed", report.failed, ""),
                ("truncated", report.truncated, f"longer than {collection.space.max_length} tokens: --split embeds all of a document"),
                (would + "removed", report.pruned, "not in the sources any more")]
        for label, count, note in rows:
            if count or label in ("read", would + "embedded"):
                self.out(f"  {label:<24}{count:>12,}" + (f"   {note}" if note else ""))
        self.out(f"  {'wall time':<24}{duration(seconds):>12}   {report.embedded / seconds:,.1f} documents/s"
                 + (f", {report.tokens / seconds:,.0f} tokens/s" if report.tokens else ""))
        if o["prune"] and report.unreadable:
            self.say(f"Nothing was removed: {counted(report.unreadable, 'line')} could not be read, and may be of documents "
                     "that are stored.")
        if not report.read and not stopped:
            self.say("The sources hold no documents.")
        if stopped and code == INTERRUPTED:
            self.say(stopped)


def _attempt(work: Callable[[], None]) -> tuple[str | None, int]:
    """What stopped it, and the exit code."""
    try:
        work()
    except KeyboardInterrupt:
        return "Stopped.", INTERRUPTED
    except (DatabaseError, InterfaceError) as error:
        return refused(error) + ".", FAILED
    except ServiceError as error:
        return str(error).rstrip(".") + ".", code_of(error)
    return None, 0


def _kept(sifting: Sifting) -> str:
    name = sifting.collection.name
    return (f"The sources hold no documents{' but blank ones' if sifting.report.read else ''}, and --prune would remove all of collection "
            f"{name}: nothing was removed. To empty it: manage.py delete_corpus {name}.")


def _go_on(code: int) -> str:
    return f"{'Once that is mended, run' if code == USAGE else 'Run'} the same command again to go on."


def _prompt(spec: ModelSpec, given: str | None, usual: str) -> str:
    """A checkpoint's prompt by its name, else literal text; not given: the checkpoint's own for this use."""
    return spec.prompts.get(usual, "") if given is None else spec.prompts.get(given, given)


def _described(collection: Collection) -> str:
    space = collection.space
    said = [space.model_id, f"{space.dims} dimensions", f"fingerprint {space.fingerprint[:12]}"]
    for label, prompt in (("document prompt", space.document_prompt), ("query prompt", collection.query_prompt)):
        if prompt:
            said.append(f"{label} {prompt!r}")
    if collection.split_tokens:
        said.append(f"split {collection.split_tokens}:{collection.split_overlap}")
    return " · ".join(said)


def _passages(report: Report) -> str:
    if not report.passages:
        return ""
    passages = f"{counted(report.passages, 'passage')}, " if report.passages != report.embedded else ""
    return f"{passages}{counted(report.tokens, 'token')}"
