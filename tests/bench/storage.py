"""How fast vectors go into PostgreSQL, and what pgvector finds: `make bench-storage`, on a throwaway server.

Documents with one vector of 384 dimensions, in transactions of 512 (what a bulk run writes) and 2,000; of five rounds the best, as other
work on the machine only ever slows a round down, and the median. Then a graph over them, asked as `index_check` does.
"""
from __future__ import annotations

import os
import time
from statistics import median

import numpy as np

DIMS, DOCUMENTS, ROUNDS = 384, 20_000, 5
CLUSTERS = 500
TEXT = "the text of a passage, of the length that texts have " * 4


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django
    django.setup()
    from django.core.management import call_command

    from embeddings import corpus
    from embeddings.index import get_index
    from tests import stored

    call_command("migrate", verbosity=0)
    random = np.random.default_rng(0)
    centres = random.standard_normal((CLUSTERS, DIMS))
    vectors = stored.unit(centres[random.integers(CLUSTERS, size=DOCUMENTS)] + 0.6 * random.standard_normal((DOCUMENTS, DIMS)))
    documents = [corpus.NewDocument(str(i), TEXT, [corpus.NewPassage(0, len(TEXT), 50, vectors[i:i + 1])], {"n": i})
                 for i in range(DOCUMENTS)]
    copy = corpus._copy
    for label, write in (("INSERT", lambda *args: corpus._create(*args[:-1])), ("COPY", copy)):
        corpus._copy = write
        for size in (512, 2000):
            rates, cpu = [], []
            for _ in range(ROUNDS):
                collection = stored.collection(f"{label.lower()}-{size}", dims=DIMS)
                started, before = time.perf_counter(), _cpu()
                for at in range(0, DOCUMENTS, size):
                    corpus.upsert(collection, documents[at:at + size])
                rates.append(DOCUMENTS / (time.perf_counter() - started))
                cpu.append([1e6 * (after - b) / DOCUMENTS for after, b in zip(_cpu(), before, strict=True)])
                corpus.drop(collection)
            here, server = zip(*cpu, strict=True)
            print(f"{label:7}{size:6} documents a transaction {max(rates):9,.0f} vectors/s, median {median(rates):,.0f}; CPU a vector: "
                  f"here {min(here):.0f} us, median {median(here):.0f}, PostgreSQL {min(server):.0f} us, median {median(server):.0f}; "
                  f"load {os.getloadavg()[0]:.1f}", flush=True)
    corpus._copy = copy
    collection = stored.collection("graph", dims=DIMS)
    corpus.upsert(collection, documents)
    started = time.perf_counter()
    get_index().build(collection)  # type: ignore[attr-defined]
    print(f"graph over {DOCUMENTS:,} vectors built in {time.perf_counter() - started:.1f} s", flush=True)
    call_command("index_check", "graph")


def _cpu() -> tuple[float, float]:
    """CPU seconds of this process and of its PostgreSQL backend."""
    from pathlib import Path

    from django.db import connection
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        fields = Path(f"/proc/{cursor.fetchone()[0]}/stat").read_text().rpartition(")")[2].split()
    return time.process_time(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
