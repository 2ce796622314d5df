"""`manage.py export_corpus COLLECTION OUT`"""
from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from embeddings import corpus, export
from embeddings.management.corpus_command import USAGE, CorpusCommand


class Command(CorpusCommand):
    help = "Writes the vectors of a collection into OUT.npy (with OUT.ids.jsonl beside it) or OUT.parquet (with texts and metadata)."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("collection")
        parser.add_argument("out", type=Path)

    def handle(self, *args: Any, **o: Any) -> None:
        collection, path = corpus.get(o["collection"]), o["out"]
        writers = {".npy": export.to_npy, ".parquet": export.to_parquet}
        if path.suffix not in writers:
            raise CommandError(f"{path}: expected a name that ends in {' or '.join(writers)}", returncode=USAGE)
        count = writers[path.suffix](collection, path)
        beside = f" and {path.with_suffix('.ids.jsonl')}" if path.suffix == ".npy" else ""
        self.out(f"{count:,} vectors written to {path}{beside}")
