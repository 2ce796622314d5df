"""`manage.py evaluate_corpus COLLECTION --queries FILE --qrels FILE`"""
from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from embeddings import corpus
from embeddings.evaluation import DEPTH, evaluate, read_qrels, read_queries
from embeddings.management.corpus_command import CorpusCommand, serving


class Command(CorpusCommand):
    help = "Measures how well a collection answers judged queries (ir-measures)."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("collection")
        parser.add_argument("--queries", required=True, metavar="FILE", help="JSONL with _id and text")
        parser.add_argument("--qrels", required=True, metavar="FILE", help="TREC, or three columns separated by tabs under a header line")
        parser.add_argument("--depth", type=int, default=DEPTH, metavar="N", help=f"documents ranked for a query; default {DEPTH}")
        parser.add_argument("--backend", choices=["auto", "mlx", "host"])
        parser.add_argument("--json", action="store_true")

    def handle(self, *args: Any, **o: Any) -> None:
        collection = corpus.get(o["collection"])
        queries, judgements = read_queries(o["queries"]), read_qrels(o["qrels"])
        with serving(collection, o["backend"]) as client:
            result = evaluate(collection, queries, judgements, client=client, depth=o["depth"])
        if o["json"]:
            self.out(json.dumps({"collection": collection.name, "model": collection.space.model_id, **asdict(result)}))
            return
        for name, value in result.figures.items():
            self.out(f"{name:<10}{value:.5f}")
        self.out(f"{result.queries:,} queries, {result.judgements:,} judgements, {result.depth} documents ranked for each")
        if result.unasked:
            self.out(f"{result.unasked:,} judged queries are not in {o['queries']}; they count as zero")
        if result.absent:
            self.out(f"{result.absent:,} judged documents are not in the collection")
