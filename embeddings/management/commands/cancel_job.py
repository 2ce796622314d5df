"""`manage.py cancel_job JOB`"""
from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from embeddings import jobs
from embeddings.management.corpus_command import FAILED, CorpusCommand


class Command(CorpusCommand):
    help = "Stops a bulk job: chunks that run are stored, no other one is begun. `embed_corpus --resume JOB` goes on with it."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("job", metavar="JOB")

    def handle(self, *args: Any, **o: Any) -> None:
        job = jobs.get(o["job"])
        if not jobs.cancel(job):
            raise CommandError(f"Job {job.pk} had ended already: {jobs.get(job.pk).state}", returncode=FAILED)
        self.out(f"Job {job.pk} was cancelled.")
