"""`manage.py index_check COLLECTION`"""
from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
from django.core.management.base import CommandParser

from embeddings import corpus, vectors
from embeddings.counted import counted
from embeddings.index import get_index
from embeddings.management.corpus_command import FAILED, CorpusCommand
from embeddings.models import Collection, Passage
from inference.errors import InvalidRequest

ENOUGH = 0.95


class Command(CorpusCommand):
    help = ("Measures how many of the exact best documents the collection's index finds (recall), asked with vectors of the collection "
            f"itself. Exit code 1 below {ENOUGH}.")

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("collection", metavar="COLLECTION")
        parser.add_argument("--build", action="store_true", help="make pgvector's graph first, however small the collection is")
        parser.add_argument("--queries", type=int, default=100, metavar="N", help="passages to ask with; default 100")
        parser.add_argument("--limit", type=int, default=10, metavar="N", help="documents for each; default 10")
        parser.add_argument("--json", action="store_true")

    def handle(self, *args: Any, **o: Any) -> None:
        collection, index = corpus.get(o["collection"]), get_index()
        exact = getattr(index, "exact", index)
        if o["build"]:
            if exact is index:
                raise InvalidRequest("--build makes pgvector's graph: DATABASE_URL has to name a PostgreSQL, and MLXCEL_INDEX not be exact")
            started = time.perf_counter()
            added = index.build(collection)  # type: ignore[attr-defined]
            self.say(f"Added {counted(added, 'passage')} in {time.perf_counter() - started:.1f} s")
        sample = _sample(collection, o["queries"])
        if not sample:
            raise InvalidRequest(f"Collection {collection.name!r} is empty")
        for engine in (index, exact):
            engine.search(collection, sample[:1], o["limit"])      # opens files, reads the tail
        recalls, times, exact_times, approximate = [], [], [], False
        for query in sample:
            started = time.perf_counter()
            answers = index.search(collection, [query], o["limit"])
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
            (right,) = exact.search(collection, [query], o["limit"])
            exact_times.append(time.perf_counter() - started)
            approximate |= not answers.exact
            wanted = {scored.document for scored in right}
            recalls.append(len(wanted & {scored.document for scored in answers[0]}) / max(len(wanted), 1))
        found = {"collection": collection.name, "exact": not approximate, "queries": len(sample), "limit": o["limit"],
                 "recall": round(statistics.fmean(recalls), 4), "worst": round(min(recalls), 4),
                 "ms": _milliseconds(times), "exact_ms": _milliseconds(exact_times)}
        if o["json"]:
            self.out(json.dumps(found))
        else:
            self.out(f"  {'index':<12}{'exact: every passage is compared' if not approximate else 'pgvector, HNSW'}")
            self.out(f"  {'recall@' + str(o['limit']):<12}{found['recall']:.4f}   worst {found['worst']:.2f} of "
                     f"{counted(len(sample), 'query', 'queries')}")
            self.out(f"  {'a search':<12}{found['ms']['p50']:.1f} ms   p95 {found['ms']['p95']:.1f} ms")
            self.out(f"  {'exact':<12}{found['exact_ms']['p50']:.1f} ms   p95 {found['exact_ms']['p95']:.1f} ms")
        if found["recall"] < ENOUGH:
            sys.exit(FAILED)


def _sample(collection: Collection, count: int) -> list[np.ndarray]:
    """Vectors from all over the collection, a little off: a stored vector itself is too easy to find."""
    ids = np.fromiter(Passage.objects.filter(collection=collection).order_by("id").values_list("id", flat=True).iterator(), np.int64)
    random = np.random.default_rng(0)
    chosen = random.choice(ids, min(count, len(ids)), replace=False).tolist()
    rows = Passage.objects.filter(pk__in=chosen).values_list("vector", "rows", "dims", "dtype")
    sample = []
    for row in rows:
        vector = vectors.decode(*row).astype(np.float32)
        noise = random.standard_normal(vector.shape).astype(np.float32)
        sample.append(vector + 0.1 * noise * np.linalg.norm(vector) / np.linalg.norm(noise))
    return sample


def _milliseconds(times: list[float]) -> dict[str, float]:
    return {"p50": round(1000 * statistics.median(times), 2), "p95": round(1000 * float(np.quantile(times, 0.95)), 2)}
