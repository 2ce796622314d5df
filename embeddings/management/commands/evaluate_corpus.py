"""`manage.py evaluate_corpus COLLECTION --queries FILE --qrels FILE`"""
from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from embeddings import corpus, sources
from embeddings.counted import counted
from embeddings.evaluation import DEPTH, evaluate, read_qrels, read_queries
from embeddings.management.corpus_command import CorpusCommand, serving

MANY = 0.5      # share of the judged documents; collections are often judged in part


class Command(CorpusCommand):
    help = "Measures how well a collection answers judged queries (ir-measures)."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("collection")
        parser.add_argument("--queries", required=True, metavar="FILE", help=f"{sources.RECORDS} with _id and text, {sources.STDIN}")
        parser.add_argument("--qrels", required=True, metavar="FILE", help="TREC, or three columns separated by tabs under a header line")
        parser.add_argument("--depth", type=int, default=DEPTH, metavar="N", help=f"documents ranked for a query; default {DEPTH}")
        parser.add_argument("--backend", choices=["auto", "mlx", "host"])
        parser.add_argument("--json", action="store_true")

    def handle(self, *args: Any, **o: Any) -> None:
        collection = corpus.get(o["collection"])
        queries, judgements = read_queries(o["queries"]), read_qrels(o["qrels"])
        with serving(collection, o["backend"]) as client:
            result = evaluate(collection, queries, judgements, client=client, depth=o["depth"])
        if result.absent > MANY * result.documents:
            self.say(f"Warning: of {result.documents:,} judged documents {result.absent:,} are not in the collection, so the figures say "
                     "little: was all of it embedded, and under the ids that the judgements use?")
        if o["json"]:
            self.out(json.dumps({"collection": collection.name, "model": collection.space.model_id, **asdict(result)}))
            return
        for name, value in result.figures.items():
            self.out(f"{name:<10}{value:.5f}")
        self.out(f"{counted(result.queries, 'query', 'queries')}, {counted(result.judgements, 'judgement')}, "
                 f"{counted(result.depth, 'document')} ranked for each")
        if result.unasked:
            self.out(f"Not in {o['queries']}, and counted as zero: {counted(result.unasked, 'judged query', 'judged queries')}")
        if result.absent:
            self.out(f"Not in the collection: {result.absent:,} of {counted(result.documents, 'judged document')}")
