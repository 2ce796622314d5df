"""How fast vectors go into PostgreSQL: `python -m tests.postgres tests.bench.storage` on a throwaway server.

Documents with one vector of 384 dimensions each, in transactions of 512 (what a bulk run writes) and 2,000, new and again (replacing).
"""
from __future__ import annotations

import os
import time

import numpy as np

DIMS, DOCUMENTS = 384, 20_000
TEXT = "the text of a passage, of the length that texts have " * 4


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django
    django.setup()
    from django.core.management import call_command

    from embeddings import corpus
    from tests import stored

    call_command("migrate", verbosity=0)
    vectors = np.random.default_rng(0).standard_normal((DOCUMENTS, 1, DIMS)).astype(np.float32)
    for label, insert in (("INSERT", corpus._create), ("COPY", corpus._copy)):
        corpus._copy = insert
        for size in (512, 2000):
            collection = stored.collection(f"{label.lower()}-{size}", dims=DIMS)
            for turn in ("new", "replaced"):
                text = f"{turn} {TEXT}"
                documents = [corpus.NewDocument(str(i), text, [corpus.NewPassage(0, len(text), 50, vectors[i])], {"n": i})
                             for i in range(DOCUMENTS)]
                started, cpu = time.perf_counter(), time.process_time()
                for at in range(0, DOCUMENTS, size):
                    corpus.upsert(collection, documents[at:at + size])
                seconds = time.perf_counter() - started
                print(f"{label:7}{size:6} a transaction, {turn:9}{DOCUMENTS / seconds:9,.0f} vectors/s "
                      f"({(time.process_time() - cpu) / seconds:4.0%} of a core here)", flush=True)


if __name__ == "__main__":
    main()
