"""`manage.py delete_corpus COLLECTION [--id ID ...]`"""
from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from embeddings import corpus
from embeddings.counted import counted
from embeddings.index import get_index
from embeddings.management.corpus_command import FAILED, CorpusCommand


class Command(CorpusCommand):
    help = "Removes a collection with its documents, vectors and search files, or single documents of it."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("collection")
        parser.add_argument("--id", nargs="+", metavar="ID", help="only these documents")
        parser.add_argument("--no-input", "--yes", action="store_true", help="do not ask")

    def handle(self, *args: Any, **o: Any) -> None:
        collection = corpus.get(o["collection"])
        if o["id"]:
            count = corpus.delete(collection, o["id"])
            absent = len(o["id"]) - count
            self.out(f"{count:,} of {counted(len(o['id']), 'document')} removed")
            if absent:
                raise CommandError(f"{absent:,} of them {'was' if absent == 1 else 'were'} not there", returncode=FAILED)
            return
        count = collection.documents.count()
        question = f"Remove collection {collection.name} with {counted(count, 'document')}? [y/N] "
        try:
            agreed = o["no_input"] or input(question).strip().lower() in ("y", "yes")
        except EOFError:
            raise CommandError("Nothing was removed: nobody answered. --yes does not ask.", returncode=FAILED) from None
        if not agreed:
            raise CommandError("Nothing was removed", returncode=FAILED)
        get_index().drop(collection)
        self.out(f"Collection {collection.name} removed, {counted(corpus.drop(collection), 'document')}")
