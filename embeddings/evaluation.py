"""How well a collection answers judged queries: nDCG@10, R@100, RR@10 and AP, computed by ir-measures."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from inference.client import InferenceClient
from inference.errors import InvalidRequest

from . import search, sources
from .models import Collection, Document

MEASURES = ("nDCG@10", "R@100", "RR@10", "AP")
DEPTH = 100        # documents ranked for each query


@dataclass(frozen=True)
class Judgement:
    query: str
    document: str
    relevance: int


@dataclass(frozen=True)
class Evaluation:
    figures: dict[str, float]          # by measure, averaged over the judged queries
    queries: int                       # judged and asked
    unasked: int                       # judged, but not among the queries; they count as zero
    judgements: int
    documents: int                     # judged ones, each counted once
    absent: int                        # of these, not in the collection
    depth: int


def read_queries(path: str) -> dict[str, str]:
    """Queries by id, from records with `_id` or `id` and `text`. Raises InvalidRequest, with the line where one is wrong."""
    if Path(path).is_dir() or (Path(path).exists() and sources.kind_of(Path(path)) not in sources.RECORD_FILES):
        raise InvalidRequest(f"{path} is not of a kind that can hold queries; expected {sources.RECORDS}, {sources.STDIN}, with the fields "
                             "_id and text", param="queries")
    queries: dict[str, str] = {}
    for record in sources.documents(sources.read([path])):
        if isinstance(record, sources.Problem):
            raise InvalidRequest(f"{record.position}: {record.message}", param="queries")
        if record.blank:
            raise InvalidRequest(f"{record.position}: query {record.id!r} has no visible text", param="queries")
        queries[record.id] = record.text
    return queries


def read_qrels(path: str) -> list[Judgement]:
    """TREC lines, `query 0 document relevance`, or tab-separated with a header line, `query document relevance`."""
    judgements = []
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="qrels") from None
    tabbed = bool(lines) and len(lines[0].split("\t")) == 3
    for number, line in enumerate(lines, 1):
        if not line.strip() or (tabbed and number == 1):
            continue
        parts = line.split("\t") if tabbed else line.split()
        try:
            query, document, relevance = parts if tabbed else (parts[0], *parts[2:])
            judgements.append(Judgement(query, document, int(relevance)))
        except (ValueError, IndexError):
            raise InvalidRequest(f"{path}:{number}: expected `query 0 document relevance` (TREC), or three columns separated by tabs "
                                 f"under a header line; found {line[:80]!r}", param="qrels") from None
    if not judgements:
        raise InvalidRequest(f"{path} holds no judgements", param="qrels")
    return judgements


def evaluate(collection: Collection, queries: dict[str, str], judgements: Iterable[Judgement], *,
             client: InferenceClient, depth: int = DEPTH) -> Evaluation:
    """Ranks `depth` documents for every judged query. Raises what `search` raises, and InvalidRequest where no query is judged or the
    collection holds none of the judged documents."""
    import ir_measures  # a second of imports that only this function needs

    judgements = list(judgements)
    judged = {judgement.query for judgement in judgements}
    asked = [query for query in queries if query in judged]
    if not asked:
        raise InvalidRequest("None of the queries has a judgement: do both files use the same query ids?", param="qrels")
    wanted = {judgement.document for judgement in judgements}
    stored = set(Document.objects.filter(collection=collection).values_list("external_id", flat=True))
    if not wanted & stored:
        raise InvalidRequest(f"None of the judged documents is in collection {collection.name!r}: judged are ids such as {min(wanted)!r}, "
                             f"stored {f'such as {min(stored)!r}' if stored else 'is nothing'}", param="qrels")
    found = search.ranked(collection, [queries[query] for query in asked], client=client, limit=depth)
    names = Document.objects.filter(collection=collection).only("external_id").in_bulk(
        list({scored.document for hits in found for scored in hits}))
    # scored by rank, so that ties stay in the order they are shown in
    run = [ir_measures.ScoredDoc(query, names[scored.document].external_id, -float(rank))
           for query, hits in zip(asked, found, strict=True) for rank, scored in enumerate(hits) if scored.document in names]
    measures = {name: ir_measures.parse_measure(name) for name in MEASURES}
    qrels = [ir_measures.Qrel(judgement.query, judgement.document, judgement.relevance) for judgement in judgements]
    figures = ir_measures.calc_aggregate(measures.values(), qrels, run)
    return Evaluation({name: float(figures[measure]) for name, measure in measures.items()}, len(asked), len(judged - set(asked)),
                      len(judgements), len(wanted), len(wanted - stored), depth)
