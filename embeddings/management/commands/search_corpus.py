"""`manage.py search_corpus COLLECTION "query"`"""
from __future__ import annotations

import json
import os
import shutil
import textwrap
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from embeddings import corpus
from embeddings.management.corpus_command import USAGE, CorpusCommand, serving
from embeddings.search import Hit, search

SNIPPET = 300      # characters of a passage shown without --text


class Command(CorpusCommand):
    help = "Searches a collection: exact cosine (MaxSim for multi-vectors), each document with its best passage."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("collection")
        parser.add_argument("query")
        parser.add_argument("--limit", type=int, default=10, metavar="N")
        parser.add_argument("--filter", metavar="JSON", help='by metadata, e.g. \'{"lang": ["en", "de"], "year": {"gte": 1960}}\'')
        parser.add_argument("--rerank", metavar="MODEL", help="a reranker that judges the best documents once more, by their best passages")
        parser.add_argument("--candidates", type=int, metavar="N", help="how many documents it is given (five times the limit)")
        parser.add_argument("--text", action="store_true", help="the whole passage instead of its beginning")
        parser.add_argument("--backend", choices=["auto", "mlx", "host"])
        parser.add_argument("--json", action="store_true")

    def handle(self, *args: Any, **o: Any) -> None:
        collection = corpus.get(o["collection"])
        condition = None
        if o["filter"] is not None:
            try:
                condition = json.loads(o["filter"])
            except ValueError as error:
                raise CommandError(f"--filter is not JSON: {error}", returncode=USAGE) from None
        # A service is asked for the reranker by name; in this process it is the only one, wherever it came from.
        rerank = bool(o["rerank"]) and (o["rerank"] if os.environ.get("MLXCEL_REDIS_URL") else True)
        with serving(collection, o["backend"], o["rerank"]) as client:
            result = search(collection, o["query"], client=client, limit=o["limit"], filter=condition,
                            include_text=o["text"] or not o["json"], rerank=rerank, candidates=o["candidates"])
        if o["json"]:
            left_out = {*(() if o["text"] else ("text",)), *(() if result.reranker else ("rerank_score",))}
            hits = [{k: v for k, v in asdict(hit).items() if k not in left_out} for hit in result.hits]
            self.out(json.dumps({"collection": collection.name, "query": o["query"], "exact": result.exact, "tokens": result.tokens,
                                 **({"reranker": result.reranker} if result.reranker else {}), "hits": hits}))
            return
        for rank, hit in enumerate(result.hits, 1):
            self._show(rank, hit, o["text"])
        if not result.hits:
            self.out("Nothing found.")

    def _show(self, rank: int, hit: Hit, whole: bool) -> None:
        part = f"  part {hit.part}, characters {hit.start}-{hit.end}" if hit.part or hit.start else ""
        score = f"{hit.score:.4f}" if hit.rerank_score is None else f"{hit.rerank_score:.4f} (similarity {hit.score:.4f})"
        self.out(f"{rank:>3}. {self.style.SUCCESS(score)}  {self.style.WARNING(hit.external_id)}{part}")
        text = " ".join((hit.text or "").split())
        if not whole and len(text) > SNIPPET:
            text = text[:SNIPPET].rsplit(" ", 1)[0] + " ..."
        for line in textwrap.wrap(text, max(shutil.get_terminal_size().columns - 6, 40)):
            self.out(f"     {line}")
