"""Evaluation gives what the definitions of the measures give, and the published figures of the real model on real collections."""
from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import call_command

from embeddings import corpus, evaluation, spaces
from embeddings.evaluation import Judgement, evaluate, read_qrels, read_queries
from embeddings.index import get_index
from inference.client import connect
from inference.config import Settings
from inference.errors import Conflict, InvalidRequest
from tests import stored
from tests.fakes import FakeClient

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def var(settings: Any, tmp_path: Path) -> None:
    settings.VAR_DIR = tmp_path / "var"


def queries(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "queries.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def qrels(tmp_path: Path, text: str) -> str:
    (tmp_path / "qrels").write_text(text)
    return str(tmp_path / "qrels")


@pytest.mark.parametrize("text", ["q1 0 d1 1\nq1\t0\td2\t-1\n", "query-id\tcorpus-id\tscore\nq1\td1\t1\n\nq1\td2\t-1\n"])
def test_both_forms_of_judgements(tmp_path: Path, text: str) -> None:
    assert read_qrels(qrels(tmp_path, text)) == [Judgement("q1", "d1", 1), Judgement("q1", "d2", -1)]


@pytest.mark.parametrize(("text", "said"), [("q 0 d one\n", ":1: expected"), ("q\n", ":1: expected"),
                                            ("a\tb\tc\nq\td\t1.5\n", ":2: expected"),
                                            ("", "no judgements"), ("a\tb\tc\n", "no judgements"), ("q 0 d 1 9 9\n", ":1: expected")])
def test_judgements_that_cannot_be_read(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_qrels(qrels(tmp_path, text))


def test_queries_that_cannot_be_read(tmp_path: Path) -> None:
    assert read_queries(queries(tmp_path, {"_id": 1, "text": " a "})) == {"1": "a"}
    for row, said in (({"text": "x"}, "no field 'id'"), ({"_id": "1", "text": "\u200b"}, "query '1' has no visible text")):
        with pytest.raises(InvalidRequest, match=f"queries.jsonl:1: {said}"):
            read_queries(queries(tmp_path, row))
    (tmp_path / "queries.txt").touch()
    for path in (tmp_path / "queries.txt", tmp_path):
        with pytest.raises(InvalidRequest, match=r"can hold queries; expected \.jsonl, .* \.parquet, or - for JSONL on standard input"):
            read_queries(str(path))
    with pytest.raises(InvalidRequest, match=r"none\.jsonl does not exist"):
        read_queries(str(tmp_path / "none.jsonl"))


def test_figures_by_hand() -> None:
    """Query `a` finds its one relevant document first; `b` (absent among the queries) counts as zero: averages are halves."""
    collection, client = stored.collection(), FakeClient()
    corpus.upsert(collection, [stored.document(id, client._vector(id), text=id) for id in "abcdef"])
    asked = {"a": "a", "unjudged": "c"}
    judgements = [Judgement("a", "a", 1), Judgement("b", "b", 1), Judgement("a", "gone", 0)]
    result = evaluate(collection, asked, judgements, client=client)
    assert result.figures == pytest.approx(dict.fromkeys(evaluation.MEASURES, 0.5))
    assert (result.queries, result.unasked, result.judgements, result.documents, result.absent) == (1, 1, 3, 3, 1)
    assert [job.items for job in client.jobs] == [("a",)], "only judged queries, in one batch"


def test_figures_against_the_definition_on_random_vectors() -> None:
    rng, collection, client = np.random.default_rng(3), stored.collection(), FakeClient()
    corpus.upsert(collection, [stored.document(str(i), client._vector(str(i))) for i in range(150)])
    judgements = [Judgement(f"q{q}", str(d), int(rng.integers(0, 3))) for q in range(20) for d in rng.choice(150, 12, replace=False)]
    result = evaluate(collection, {f"q{q}": f"q{q}" for q in range(20)}, judgements, client=client)
    expected: dict[str, list[float]] = {name: [] for name in evaluation.MEASURES}
    documents = np.stack([client._vector(str(i)) for i in range(150)])
    for q in range(20):
        gain = np.zeros(150)
        for judgement in judgements:
            if judgement.query == f"q{q}":
                gain[int(judgement.document)] = judgement.relevance
        ranked = gain[np.argsort(-(documents.astype(float) @ client._vector(f"q{q}").astype(float)), kind="stable")][:100]
        discount, relevant = 1 / np.log2(np.arange(2, 12)), (gain > 0).sum()
        hits = np.flatnonzero(ranked > 0)
        expected["nDCG@10"].append((ranked[:10] * discount).sum() / (np.sort(gain)[::-1][:10] * discount).sum())
        expected["R@100"].append(len(hits) / relevant)
        expected["RR@10"].append(1 / (hits[0] + 1) if len(hits) and hits[0] < 10 else 0)
        expected["AP"].append(sum((i + 1) / (hit + 1) for i, hit in enumerate(hits)) / relevant)
    assert result.figures == pytest.approx({name: np.mean(values) for name, values in expected.items()})


def test_ids_that_do_not_meet_are_told() -> None:
    with pytest.raises(InvalidRequest, match="same query ids"):
        evaluate(stored.collection(), {"1": "x"}, [Judgement("01", "a", 1)], client=FakeClient())


def test_judged_documents_that_are_all_elsewhere_are_an_error() -> None:
    """They would give zeros, which look like a bad model."""
    collection, client = stored.collection(), FakeClient()
    for said in ("stored is nothing", "judged are ids such as 'doc-1', stored such as '1'"):
        with pytest.raises(InvalidRequest, match=f"None of the judged documents is in collection .*{said}"):
            evaluate(collection, {"q": "x"}, [Judgement("q", "doc-1", 1)], client=client)
        corpus.upsert(collection, [stored.document("1", client._vector("1"))])


def test_judged_documents_of_which_most_are_elsewhere_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection, client = stored.collection(), FakeClient()
    corpus.upsert(collection, [stored.document("d1", client._vector("d1"))])
    monkeypatch.setattr("embeddings.management.commands.evaluate_corpus.serving", lambda *_: nullcontext(client))
    told = {}
    for judged in ("d1 1\nq1 0 x 1\n", "d1 1\nq1 0 x 1\nq1 0 y 1\n"):
        err = io.StringIO()
        call_command("evaluate_corpus", collection.name, queries=queries(tmp_path, {"_id": "q1", "text": "d1"}),
                     qrels=qrels(tmp_path, f"q1 0 {judged}"), stdout=io.StringIO(), stderr=err)
        told[judged] = err.getvalue()
    assert [bool(line) for line in told.values()] == [False, True]
    assert "of 3 judged documents 2 are not in the collection" in told[judged]


def test_a_model_that_is_not_served() -> None:
    collection = stored.collection()
    corpus.upsert(collection, [stored.document("a", FakeClient()._vector("a"))])
    with pytest.raises(Conflict):
        evaluate(collection, {"1": "x"}, [Judgement("1", "a", 1)], client=FakeClient().without_model())


def test_ranking_of_the_reference_with_its_own_vectors(data: Path, minilm: Path) -> None:
    """The 50 golden documents of Cranfield, stored as the reference embedded them and searched with its query vectors through the index."""
    folder = data / "ir" / "cranfield"
    vectors, asked = np.load(folder / "golden_docs.npy"), np.load(folder / "golden_queries.npy")
    client = connect(Settings(embedding_models=(str(minilm),), backend="host"))
    spec = client.describe("embedding")
    client.close()
    assert spec is not None
    collection = corpus.create("golden", spaces.space_for(spec))
    corpus.upsert(collection, [stored.document(str(i), vector) for i, vector in enumerate(vectors)])
    found = get_index().search(collection, list(asked), 10)
    order = np.argsort(-(asked.astype(float) @ vectors.astype(float).T), axis=1, kind="stable")[:, :10]
    first = collection.documents.earliest("pk").pk
    assert [[scored.document - first for scored in hits] for hits in found] == order.tolist()
