"""The index answers as brute force over the database does, whatever was written, removed, rebuilt, damaged or written by others."""
from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.db import transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embeddings import corpus, index, segments, vectors
from embeddings.index import ExactIndex
from embeddings.models import Collection, Document, Passage
from embeddings.scoring import Scored
from inference.errors import NotFound
from tests import stored

pytestmark = pytest.mark.django_db
RNG = np.random.default_rng(7)


def brute(collection: Collection, query: np.ndarray, limit: int, without: int | None = None) -> list[tuple[int, int]]:
    """(document, passage) by the definition, in float64, a row at a time."""
    space, scored = collection.space, []
    for passage in Passage.objects.filter(document__collection=collection):
        matrix = vectors.decode(passage.vector, passage.rows, passage.dims, passage.dtype).astype(np.float64)
        similarity = matrix @ np.atleast_2d(query).astype(np.float64).T
        score = similarity.max(axis=0).sum()
        if not space.multi_vector and space.normalize != 2:
            score /= np.linalg.norm(matrix) * np.linalg.norm(query)
        if passage.pk != without:
            scored.append((-round(score, 9), passage.document_id, passage.pk))
    best: dict[int, tuple[float, int, int]] = {}
    for row in sorted(scored):
        best.setdefault(row[1], row)
    return [(document, pk) for _, document, pk in sorted(best.values())][:limit]


def answer(found: list[Scored]) -> list[tuple[int, int]]:
    return [(scored.document, scored.passage) for scored in found]


def check(exact: ExactIndex, collection: Collection, rows: int = 1, limit: int = 5) -> None:
    query = RNG.standard_normal((rows, collection.space.dims)).astype(np.float32)
    (found,) = exact.search(collection, [query], limit)
    assert answer(found) == brute(collection, query, limit)


def some(collection: Collection, ids: list[int], passages: int = 1, rows: int = 1) -> list[corpus.NewDocument]:
    shape = (rows, collection.space.dims) if collection.space.multi_vector else (collection.space.dims,)
    make: Any = stored.unit if collection.space.normalize == 2 else np.asarray
    return [stored.document(str(id), *(make(RNG.standard_normal(shape)) for _ in range(passages)), text=f"{id} {RNG.random()}")
            for id in ids]


@pytest.fixture
def small_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few rows, so that small tests write, merge and rewrite files."""
    monkeypatch.setattr(index, "TAIL_BYTES", 8 * 4 * 6)


@pytest.mark.parametrize("form", ["cosine", "divided", "maxsim"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(["add", "add", "replace", "delete", "reopen", "search"]), st.integers(1, 9)), max_size=14))
def test_random_histories(form: str, steps: list[tuple[str, int]], tmp_path: Path, small_tail: None) -> None:
    shutil.rmtree(tmp_path / "index", ignore_errors=True)
    exact, known = ExactIndex(tmp_path / "index"), 0
    with transaction.atomic():
        collection = stored.collection(normalize=-1.0 if form == "divided" else 2.0, multi_vector=form == "maxsim")
        for step, count in steps:
            if step == "add":
                corpus.upsert(collection, some(collection, list(range(known, known + count)), passages=1 + count % 3, rows=1 + count % 4))
                known += count
            elif step == "replace":
                corpus.upsert(collection, some(collection, list(range(min(count, known))), passages=1 + count % 2))
            elif step == "delete":
                corpus.delete(collection, [str(RNG.integers(0, max(known, 1))) for _ in range(count)])
            elif step == "reopen":
                exact = ExactIndex(tmp_path / "index")
            else:
                check(exact, collection, 1 if form != "maxsim" else count)
        check(exact, collection, 3 if form == "maxsim" else 1)
        check(ExactIndex(tmp_path / "index"), collection)
        assert exact.stats(collection).passages == Passage.objects.filter(collection=collection).count()
        transaction.set_rollback(True)


@pytest.fixture
def filled(small_tail: None) -> Iterator[Collection]:
    collection = stored.collection()
    for at in range(0, 60, 20):
        corpus.upsert(collection, some(collection, list(range(at, at + 20))))
    return collection


def test_files_are_used_and_few(filled: Collection, tmp_path: Path) -> None:
    exact = ExactIndex(tmp_path)
    check(exact, filled)
    for at in range(60, 200, 10):
        corpus.upsert(filled, some(filled, list(range(at, at + 10))))
        check(exact, filled)
    stats = exact.stats(filled)
    assert stats.passages == 200 and stats.unindexed <= 6 and stats.segments <= 5 and stats.bytes > 200 * 32
    names = {path.name for path in exact.folder(filled).iterdir() if path.is_dir()}
    assert len(names) == stats.segments, "segments nobody names are removed"


def test_many_removed_passages_are_written_out_of_the_files(filled: Collection, tmp_path: Path) -> None:
    exact = ExactIndex(tmp_path)
    check(exact, filled)
    corpus.delete(filled, [str(i) for i in range(10)])
    check(exact, filled)
    assert exact.stats(filled).removed == 10
    corpus.delete(filled, [str(i) for i in range(10, 40)])
    check(exact, filled)
    assert exact.stats(filled).removed == 0 and exact.stats(filled).passages == 20
    check(ExactIndex(tmp_path), filled)


def spoil_vectors(folder: Path) -> None:
    path = next(folder.glob("*/vectors"))
    data = bytearray(path.read_bytes())
    data[5] ^= 64
    path.write_bytes(data)


def truncate_ids(folder: Path) -> None:
    path = next(folder.glob("*/ids"))
    path.write_bytes(path.read_bytes()[:-8])


def edit(folder: Path, **changes: Any) -> None:
    current = folder / "CURRENT"
    current.write_text(json.dumps(json.loads(current.read_text()) | changes))


@pytest.mark.parametrize("damage", [
    spoil_vectors, truncate_ids, lambda f: shutil.rmtree(next(f.glob("*/vectors")).parent), lambda f: (f / "CURRENT").write_bytes(b"{"),
    lambda f: (f / "CURRENT").unlink(), lambda f: edit(f, token="another"), lambda f: edit(f, fingerprint="f" * 64),
    lambda f: edit(f, generation=10**6), lambda f: edit(f, format=0), lambda f: edit(f, extra=1)])
def test_damaged_and_foreign_files_are_rebuilt(filled: Collection, tmp_path: Path, damage: Any) -> None:
    check(ExactIndex(tmp_path), filled)
    damage(ExactIndex(tmp_path).folder(filled))
    exact = ExactIndex(tmp_path)
    check(exact, filled)
    manifest = segments.read(exact.folder(filled), str(filled.token), filled.space.fingerprint)
    assert manifest.count == 60, "and the next process finds them whole"


def test_files_of_a_database_that_was_put_back_are_not_believed(filled: Collection, tmp_path: Path) -> None:
    """As after restoring an older copy and writing on: same collection, generation past the files', other rows under the same ids."""
    check(ExactIndex(tmp_path), filled)
    last = Passage.objects.latest("id").pk
    Passage.objects.filter(pk=last - 3).delete()
    Collection.objects.update(generation=100)
    check(ExactIndex(tmp_path), filled)


def test_a_second_process_takes_over_what_the_first_wrote(filled: Collection, tmp_path: Path) -> None:
    first, second = ExactIndex(tmp_path), ExactIndex(tmp_path)
    for at in range(60, 160, 20):
        for exact in (first, second):
            check(exact, filled)
        corpus.upsert(filled, some(filled, list(range(at, at + 20))))
        corpus.delete(filled, [str(at - 30)])
        check(second, filled)
    check(first, filled)
    check(ExactIndex(tmp_path), filled)


def test_while_another_process_writes_the_tail_is_searched_from_memory(filled: Collection, tmp_path: Path) -> None:
    exact = ExactIndex(tmp_path)
    with segments.writing(exact.folder(filled)) as mine:
        assert mine
        check(exact, filled)
        assert exact.stats(filled).segments == 0
    corpus.upsert(filled, some(filled, [100]))
    check(exact, filled)
    assert exact.stats(filled).segments == 1


def test_a_directory_that_cannot_be_written_does_not_stop_a_search(filled: Collection, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "index").write_text("a file where the directory should be")
    exact = ExactIndex(tmp_path / "index")
    query = RNG.standard_normal(8).astype(np.float32)
    assert answer(exact.search(filled, [query], 5)[0]) == brute(filled, query, 5)
    assert "searched from memory" in caplog.text


@pytest.mark.parametrize("failing", ["finish", "add"])
def test_a_full_disk_leaves_the_old_files_in_place(filled: Collection, tmp_path: Path, monkeypatch: Any, failing: str) -> None:
    exact = ExactIndex(tmp_path)
    check(exact, filled)
    before = (exact.folder(filled) / "CURRENT").read_bytes()
    corpus.upsert(filled, some(filled, list(range(60, 90))))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(segments.Writer, failing, full)
    check(exact, filled)
    assert (exact.folder(filled) / "CURRENT").read_bytes() == before
    assert len([p for p in exact.folder(filled).iterdir() if p.is_dir()]) == 1, "nothing half-written stays"
    monkeypatch.undo()
    check(ExactIndex(tmp_path), filled)


def test_equal_vectors_keep_the_order_of_the_corpus_across_segments(tmp_path: Path, small_tail: None) -> None:
    collection, exact = stored.collection(dims=13), ExactIndex(tmp_path)
    vector = stored.unit(RNG.standard_normal(13))
    for at in range(0, 90, 30):
        corpus.upsert(collection, [stored.document(str(i), vector) for i in range(at, at + 30)])
        exact.search(collection, [vector], 1)
    (found,) = exact.search(collection, [stored.unit(RNG.standard_normal(13))], 40)
    assert [scored.document for scored in found] == sorted(Document.objects.values_list("pk", flat=True))[:40]
    assert len({scored.score for scored in found}) == 1


def test_maxsim_of_all_negative_similarities_is_not_lifted_by_padding(tmp_path: Path) -> None:
    collection, query = stored.collection(dims=2, multi_vector=True), np.array([[1.0, 0.0]], np.float32)
    long, short = np.tile([-0.9, 0.1], (7, 1)), np.array([[-0.2, 0.5]])
    corpus.upsert(collection, [stored.document("long", long), stored.document("short", short)])
    (found,) = ExactIndex(tmp_path).search(collection, [query], 2)
    assert [round(scored.score, 2) for scored in found] == [-0.2, -0.9]


def test_masks_come_before_the_limit(filled: Collection, tmp_path: Path) -> None:
    exact, query = ExactIndex(tmp_path), RNG.standard_normal(8).astype(np.float32)
    everything = [document for document, _ in brute(filled, query, 60)]
    worst = np.array(sorted(everything[-3:]), np.int64)
    (found,) = exact.search(filled, [query], 5, documents=worst)
    assert [scored.document for scored in found] == everything[-3:]
    assert exact.search(filled, [query], 5, documents=np.empty(0, np.int64)) == [[]]
    first = brute(filled, query, 1)[0][1]
    assert answer(exact.search(filled, [query], 5, without=first)[0]) == brute(filled, query, 5, without=first)


def test_an_empty_collection_answers_nothing(tmp_path: Path) -> None:
    assert ExactIndex(tmp_path).search(stored.collection(), [np.ones(8, np.float32)], 5) == [[]]


def test_a_dropped_collection_is_not_found(filled: Collection, tmp_path: Path) -> None:
    exact = ExactIndex(tmp_path)
    check(exact, filled)
    exact.drop(filled)
    assert not exact.folder(filled).exists()
    corpus.drop(Collection.objects.get(pk=filled.pk))
    with pytest.raises(NotFound):
        exact.search(filled, [np.ones(8, np.float32)], 1)
