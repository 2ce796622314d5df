"""`manage.py list_jobs [JOB]`"""
from __future__ import annotations

import json
from typing import Any

from django.core.management.base import CommandParser

from embeddings import jobs
from embeddings.management.corpus_command import CorpusCommand
from embeddings.rendering import render_job, render_job_in_full


class Command(CorpusCommand):
    help = "Lists the newest bulk jobs, or shows one with its failed documents."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("job", nargs="?", metavar="JOB")
        parser.add_argument("--limit", type=int, default=20, metavar="N", help="jobs to list; default 20")
        parser.add_argument("--json", action="store_true")

    def handle(self, *args: Any, **o: Any) -> None:
        jobs.settle()
        if o["job"]:
            shown = render_job_in_full(jobs.get(o["job"]))
            if o["json"]:
                return self.out(json.dumps(shown))
            for name, value in shown.items():
                if name not in ("object", "failures") and value not in (None, "", []):
                    told = ", ".join(f"{k} {v:,}" for k, v in value.items() if v) if isinstance(value, dict) else value
                    self.out(f"  {name:<14}{told}")
            for failure in shown["failures"]:
                self.out(f"{failure['position']}: {failure['message']}")
            return None
        rows = [render_job(job) for job in jobs.newest(o["limit"])]
        if o["json"]:
            return self.out(json.dumps(rows))
        if not rows:
            return self.out("There are no jobs.")
        self.out(f"{'job':>6}  {'collection':<24}{'state':<23}{'read':>10}{'embedded':>10}{'failed':>8}  made")
        for row in rows:
            counts = row["documents"]
            self.out(f"{row['id']:>6}  {row['collection']:<24}{row['state']:<23}{counts['read']:>10,}{counts['embedded']:>10,}"
                     f"{counts['failed']:>8,}  {row['created_at'][:19]}")
        return None
