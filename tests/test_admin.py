"""The admin's pages: what they show, to whom, with how many queries, and that neither a hostile text nor an absent model breaks them."""
from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.sites import site
from django.contrib.auth.models import Permission, User
from django.core.cache import cache
from django.db import connection
from django.db.models import JSONField, Value
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from embeddings import charts, corpus, spaces
from embeddings.admin import base, documents, texts
from embeddings.admin.documents import _successor
from embeddings.corpus import NewDocument, NewPassage
from embeddings.index import ExactIndex
from embeddings.models import Collection, Document, Passage, VectorSpace
from inference.errors import Busy, ServiceError
from inference.wire import EmbedJob
from tests.fakes import SPEC, FakeClient

pytestmark = pytest.mark.django_db

EVIL = """<script>alert("x")</script>'"&"""
ODD_IDS = ["a/b/c", "ü ü?x=1&y#z", "\"quoted\" 'id'", "100%_off", "..", "文書 7", EVIL, "_42_2F", "tab\tand\nline"]


class Page(HTMLParser):
    """What a browser would find: tags with their attributes, and the ids in use."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def ids(self) -> list[str]:
        return [attrs["id"] or "" for _, attrs in self.tags if "id" in attrs]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    cache.clear()
    client = FakeClient()
    for module in ("collections", "documents"):
        monkeypatch.setattr(f"embeddings.admin.{module}.get_client", lambda: client)
    return client


@pytest.fixture
def collection() -> Collection:
    return make("papers")


def make(name: str, **options: Any) -> Collection:
    space = spaces.space_for(SPEC)
    space, _ = VectorSpace.objects.get_or_create(
        fingerprint=space.fingerprint, defaults={f: getattr(space, f) for f in spaces.FIELDS})
    return Collection.objects.create(name=name, space=space, text_fields=["text"], **options)


def put(collection: Collection, id: str, text: str, *, split: int = 0, metadata: dict[str, Any] | None = None,
        truncated: bool = False) -> Document:
    client = FakeClient()
    spans = client.split([text], split)[0] if split else []
    edges = [(s.start, s.end) for s in spans] or [(0, len(text))]
    result = client.embed(EmbedJob(tuple(text[a:b] for a, b in edges)))
    passages = [NewPassage(a, b, int(t), v) for (a, b), t, v in zip(edges, result.tokens, result.data, strict=True)]
    corpus.upsert(collection, [NewDocument(id, text, passages, metadata or {}, truncated)])
    return Document.objects.get(collection=collection, external_id=id)


def url(name: str, *args: Any) -> str:
    return reverse(f"admin:embeddings_{name}", args=args)


def get(client: Client, path: str, data: dict[str, str] | None = None) -> str:
    response = client.get(path, data)
    assert response.status_code == 200, path
    return str(response.content.decode())


def plain(source: str) -> str:
    """The text of a page, tags removed and blanks collapsed."""
    source = re.sub(r"<(script|style).*?</\1>", "", source, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", source)).split())


def pages(collection: Collection, document: Document) -> list[str]:
    documents, search, page = url("document_changelist"), url("collection_search", collection.pk), url("document_change", document.pk)
    return [
        url("collection_changelist"), url("collection_change", collection.pk), search, f"{search}?q=flow",
        url("collection_history", collection.pk), url("collection_delete", collection.pk),
        documents, f"{documents}?q=a", f"{documents}?collection__id__exact={collection.pk}", f"{documents}?truncated__exact=1",
        page, f"{page}?q=flow", url("document_history", document.pk), url("document_delete", document.pk),
        url("vectorspace_changelist"), url("vectorspace_change", collection.space_id)]


# Every page


def test_every_page_answers(admin_client: Client, collection: Collection) -> None:
    document = put(collection, "a", "One two three. Four five.", metadata={"year": 1960})
    for path in pages(collection, document):
        get(admin_client, path)


def test_every_page_answers_for_a_collection_without_documents(admin_client: Client, collection: Collection) -> None:
    for path in [url("collection_changelist"), url("collection_change", collection.pk), url("document_changelist"),
                 url("collection_search", collection.pk) + "?q=flow", url("collection_delete", collection.pk)]:
        get(admin_client, path)


def test_no_page_uses_an_id_twice_and_every_reference_has_its_target(admin_client: Client, collection: Collection) -> None:
    put(collection, "b", "Another one.")
    document = put(collection, "a", "One two three. Four five. " * 20, split=8, truncated=True)
    for path in pages(collection, document):
        page = Page(get(admin_client, path))
        assert len(page.ids) == len(set(page.ids)), path
        for _, attrs in page.tags:
            for name in ("aria-labelledby", "aria-describedby", "for"):
                for target in (attrs.get(name) or "").split():
                    assert target in page.ids, (path, name, target)


def test_our_tables_head_their_columns_and_rows(admin_client: Client, collection: Collection) -> None:
    put(collection, "b", "Another one.")
    document = put(collection, "a", "One two three. Four five. " * 20, split=8)
    for path in [url("document_change", document.pk), url("collection_change", collection.pk)]:
        headers = Page(get(admin_client, path)).all("th")
        assert headers and all(attrs.get("scope") in ("col", "row") for attrs in headers), path


# Contents


def test_the_list_counts_documents_passages_and_bytes(admin_client: Client, collection: Collection) -> None:
    put(collection, "a", "one two three four five six seven eight", split=4)
    put(collection, "b", "one")
    other = make("empty")
    source = get(admin_client, url("collection_changelist"))
    rows = {m.group(1): plain(m.group(0)) for m in re.finditer(r"<tr>.*?/collection/(\d+)/change/.*?</tr>", source, re.DOTALL)}
    count = Passage.objects.count()
    assert f"papers fake-8 2 {count} 8 {count * 32} bytes" in rows[str(collection.pk)]
    assert "empty fake-8 0 0 8" in rows[str(other.pk)]


def test_counts_follow_writes_and_deletions(admin_client: Client, collection: Collection) -> None:
    def shown() -> str:
        return plain(get(admin_client, url("collection_change", collection.pk)))
    put(collection, "a", "one")
    assert "documents 1 passages 1" in shown()
    put(collection, "b", "two")
    assert "documents 2 passages 2" in shown()
    corpus.delete(collection, ["a", "b"])
    assert "documents 0 passages 0" in shown()


def test_a_collection_shows_what_its_fingerprint_consists_of(admin_client: Client, collection: Collection) -> None:
    text = plain(get(admin_client, url("collection_change", collection.pk)))
    space = collection.space
    assert space.fingerprint in text
    for name in spaces.FIELDS:
        value = getattr(space, name)
        if isinstance(value, str) and value:
            assert value in text, name
    assert "dims 8" in text and "max length 32" in text and "pooling mean" in text and "euclidean length 1" in text


def test_a_document_shows_text_metadata_vector_and_neighbours(admin_client: Client, collection: Collection) -> None:
    document = put(collection, "doc-1", "Lift of a wing in a slipstream.", metadata={"title": "Wings", "authors": ["A", "B"], "year": 1958})
    twin = put(collection, "twin", "Lift of a wing in a slipstream.")
    put(collection, "other", "Heat transfer.")
    source = get(admin_client, url("document_change", document.pk))
    text = plain(source)
    vector = np.frombuffer(document.passages.get().vector, "<f4")
    assert "Lift of a wing in a slipstream." in text
    assert "title Wings" in text and 'authors ["A", "B"]' in text and "year 1958" in text
    assert "norm 1.000000" in text and "1 row × 8" in text and charts.number(float(vector[0])) in text
    neighbours = text[text.index("Nearest documents"):]
    assert "1.0000 twin Lift of a wing" in neighbours
    assert neighbours.index("twin") < neighbours.index("other") and "doc-1 Lift" not in neighbours
    assert url("document_change", twin.pk) in source
    assert len(Page(source).all("svg")) >= 2


def test_passages_of_a_long_document_are_marked_where_they_stand(admin_client: Client, collection: Collection) -> None:
    words = " ".join(f"word{i}" for i in range(40))
    document = put(collection, "long", words, split=12)
    parts = list(document.passages.order_by("part"))
    assert len(parts) == 4
    source = get(admin_client, url("document_change", document.pk), {"part": "2"})
    chosen = parts[2]
    assert html.unescape("".join(re.findall(r"<mark>(.*?)</mark>", source, re.DOTALL))) == words[chosen.start:chosen.end]
    for p in parts:
        assert f'id="part-{p.part}"' in source and f"part {p.part} {p.start}–{p.end}" in plain(source)
    assert "Vector of part 2" in plain(source) and "All passages" in plain(source)


@pytest.mark.parametrize("part", ["99", "-1", "x", "", "²", "9" * 400])
def test_an_unknown_part_falls_back_to_the_first(admin_client: Client, collection: Collection, part: str) -> None:
    document = put(collection, "long", "a b c d e f g h i j k l m n", split=6)
    assert "Vector of part 0" in plain(get(admin_client, url("document_change", document.pk), {"part": part}))


def test_a_very_long_document_is_folded_and_its_table_bounded(admin_client: Client, collection: Collection) -> None:
    text = " ".join(f"w{i}" for i in range(3000))
    document = put(collection, "huge", text, split=12)
    assert document.passages.count() > 2 * documents.PARTS
    source = get(admin_client, url("document_change", document.pk), {"part": "150"})
    assert source.count('<tr') < documents.PARTS + 40
    assert "The beginning of the text" in source and "The rest of the text" in source
    assert "more passages are not listed" in source and 'class="chosen"' in source


def test_a_document_without_passages_or_text_or_metadata(admin_client: Client, collection: Collection) -> None:
    document = Document.objects.create(collection=collection, external_id="bare", content_hash="0" * 64, split="none")
    text = plain(get(admin_client, url("document_change", document.pk), {"q": "x"}))
    assert "The text is empty." in text and "No passage is stored." in text


@pytest.mark.parametrize("metadata", [[1, 2], "text", 7, None, {"": {"deep": [None, {"x": "y" * 200}]}}, {"k" * 300: True}])
def test_any_json_is_readable_metadata(admin_client: Client, collection: Collection, metadata: Any) -> None:
    document = put(collection, "a", "one two")
    Document.objects.filter(pk=document.pk).update(metadata=Value(metadata, JSONField()))
    get(admin_client, url("document_change", document.pk))
    get(admin_client, url("collection_search", collection.pk), {"q": "one"})


def test_truncation_is_told(admin_client: Client, collection: Collection) -> None:
    document = put(collection, "cut", "word " * 50, truncated=True)
    assert "of part 0 the model read only the first 32 tokens" in plain(get(admin_client, url("document_change", document.pk)))
    assert "1 document had a passage longer than the 32 tokens" in plain(get(admin_client, url("collection_change", collection.pk)))


@pytest.mark.parametrize(("values", "told"), [
    ([np.nan, 1, 0, 0, 0, 0, 0, 0], "1 NaN among 8 components"),
    ([np.inf, -np.inf, 0, 0, 0, 0, 0, 0], "2 infinite among 8 components"),
    ([0] * 8, "a row of zeros"),
    ([3, 0, 0, 0, 0, 0, 0, 0], "normalised to length 1, this vector is not"),
])
def test_a_vector_that_looks_wrong_is_flagged(admin_client: Client, collection: Collection, values: list[float], told: str) -> None:
    document = put(collection, "a", "one")
    put(collection, "b", "two")
    Passage.objects.filter(document=document).update(vector=np.array(values, "<f4").tobytes())
    source = get(admin_client, url("document_change", document.pk), {"q": "one"})
    assert told in plain(source) and 'role="alert"' in source


@pytest.mark.parametrize("change", [{"vector": b"123"}, {"dtype": "nonsense"}, {"rows": 0}, {"vector": b""}])
def test_bytes_that_are_no_vector_are_told_and_break_nothing(admin_client: Client, collection: Collection, change: dict[str, Any]) -> None:
    document = put(collection, "a", "one")
    Passage.objects.filter(document=document).update(**change)
    assert "The vector looks wrong" in plain(get(admin_client, url("document_change", document.pk)))


def test_multi_vectors_are_summarised_row_by_row(admin_client: Client) -> None:
    space = spaces.space_for(SPEC)
    space.multi_vector, space.fingerprint = True, "m" * 64
    space.save()
    collection = Collection.objects.create(name="multi", space=space)
    rng = np.random.default_rng(3)
    for id, rows in (("a", 5), ("b", 9)):
        vectors = rng.standard_normal((rows, 8))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        corpus.upsert(collection, [NewDocument(id, "some words", [NewPassage(0, 10, rows, vectors)])])
    text = plain(get(admin_client, url("document_change", Document.objects.get(external_id="a").pk)))
    assert "5 rows × 8" in text and "Norm of each row" in text and "<f2" in text and "mean 1" in text and "MaxSim" in text
    assert "b some words" in text[text.index("Nearest documents"):]


# Search


def test_search_ranks_documents_and_marks_the_best_passage(admin_client: Client, fake: FakeClient) -> None:
    collection = make("split", query_prompt="")
    target = "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11"
    put(collection, "target", target, split=6)
    put(collection, "other", "something else entirely")
    passage = Passage.objects.get(document__external_id="target", part=1)
    query = target[passage.start:passage.end]
    source = get(admin_client, url("collection_search", collection.pk), {"q": query})
    text = plain(source)
    assert "The 2 best documents" in text and text.index("target score 1.0000") < text.index("other score")
    assert f"<mark>{query}</mark>" in source and f"part 1, characters {passage.start}–{passage.end}" in text
    assert f"part={passage.part}" in source
    assert fake.jobs[-1].items == (query,)


def test_search_takes_a_metadata_filter_and_a_limit(admin_client: Client, collection: Collection) -> None:
    for i in range(15):
        put(collection, f"d{i:02d}", f"text {i}", metadata={"even": i % 2 == 0})
    path = url("collection_search", collection.pk)
    assert get(admin_client, path, {"q": "x"}).count("<article>") == 10
    assert get(admin_client, path, {"q": "x", "limit": "25"}).count("<article>") == 15
    found = plain(get(admin_client, path, {"q": "x", "limit": "25", "filter": '{"even": true}'}))
    assert "The 8 best documents" in found and "d01" not in found
    assert "No document matches the metadata filter" in plain(get(admin_client, path, {"q": "x", "filter": '{"even": 7}'}))


@pytest.mark.parametrize("data", [{"q": ""}, {"q": "  "}, {"q": "x", "limit": "7"}, {"q": "x", "filter": "{"}, {"q": "x", "filter": "[1]"},
                                  {"q": "a\0b"}, {"q": "x" * 20_000}])
def test_wrong_input_is_told_beside_its_field(admin_client: Client, collection: Collection, fake: FakeClient, data: dict[str, str]) -> None:
    source = get(admin_client, url("collection_search", collection.pk), data)
    page = Page(source)
    assert "errorlist" in source and not fake.jobs
    wrong = [attrs for tag in ("input", "select") for attrs in page.all(tag) if attrs.get("aria-invalid") == "true"]
    assert len(wrong) == 1 and set((wrong[0]["aria-describedby"] or "").split()) <= set(page.ids)


def test_a_filter_that_search_refuses_is_told(admin_client: Client, collection: Collection) -> None:
    text = plain(get(admin_client, url("collection_search", collection.pk), {"q": "x", "filter": '{"year": {"above": 3}}'}))
    assert "above" in text and "expected" in text


def test_why_a_document_is_found(admin_client: Client, collection: Collection, fake: FakeClient) -> None:
    document = put(collection, "a", "First sentence here. The second one! And a third?")
    text = plain(get(admin_client, url("document_change", document.pk), {"q": "The second one!"}))
    assert "1.0000 The second one! (best)" in text
    vectors = fake.embed(EmbedJob(("The second one!", document.text))).data
    assert f"The query scores {float(vectors[0] @ vectors[1]):.4f}" in text


def test_what_the_model_did_not_read_does_not_explain(admin_client: Client, collection: Collection, fake: FakeClient) -> None:
    """FakeClient reads 32 tokens, two of them special: ten sentences of three words."""
    assert fake.spec is not None and fake.spec.max_length == 32
    document = put(collection, "a", " ".join(f"Sentence number {i}." for i in range(40)), truncated=True)
    text = plain(get(admin_client, url("document_change", document.pk), {"q": "Sentence number 30."}))
    why = text[text.index("Why is it found?"):text.index("Each passage" if "Each passage" in text else " Text ")]
    assert "Its sentences that the model read (the text was cut after them)" in why
    assert "Sentence number 9." in why and "Sentence number 10." not in why and "1.0000" not in why


def test_only_the_best_sentences_are_listed(admin_client: Client, collection: Collection) -> None:
    document = put(collection, "a", " ".join(f"{i}." for i in range(20)))
    text = plain(get(admin_client, url("document_change", document.pk), {"q": "7."}))
    assert "The best 12 of 20 sentences, each embedded alone" in text and "1.0000 7. (best)" in text


@pytest.mark.parametrize(("tokens", "limit", "read"), [
    ([5, 5, 5, 5, 8], 8, 2), ([5, 5, 5, 5, 8], 9, 3), ([5, 5, 5, 5, 8], 100, 4), ([8, 8, 8, 8], 8, 1), ([5, 9, 9, 9], 9, 2)])
def test_how_many_sentences_were_read(tokens: list[int], limit: int, read: int) -> None:
    assert documents._read(tokens, limit) == read


def test_the_part_that_answers_best_is_opened(admin_client: Client, collection: Collection) -> None:
    words = " ".join(f"word{i}" for i in range(40))
    document = put(collection, "long", words, split=12)
    last = document.passages.latest("part")
    assert f"Vector of part {last.part}" in plain(get(admin_client, url("document_change", document.pk), {"q": words[last.start:last.end]}))


# Models that are away


@pytest.mark.parametrize("error", [None, Busy("the queue is full"), ServiceError("something else")])
def test_without_the_model_pages_answer_and_say_how_to_serve_it(
        admin_client: Client, collection: Collection, fake: FakeClient, error: ServiceError | None) -> None:
    document = put(collection, "a", "One. Two.")
    put(collection, "b", "Three.")
    fake.fail = error
    if error is None:
        fake.spec = None
    for path in pages(collection, document):
        get(admin_client, path)
    found = get(admin_client, url("collection_search", collection.pk), {"q": "x"})
    assert (str(error) if error else "manage.py serve --model fake-8") in found and "neighbours need no model" in found
    why = plain(get(admin_client, url("document_change", document.pk), {"q": "x"}))
    assert (str(error) if error else "not served") in why
    assert "b Three." in why[why.index("Nearest documents"):]


def test_a_transport_that_cannot_be_loaded_breaks_no_page(
        admin_client: Client, collection: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> FakeClient:
        raise ServiceError("MLXCEL_TRANSPORT cannot be loaded")
    for module in ("collections", "documents"):
        monkeypatch.setattr(f"embeddings.admin.{module}.get_client", broken)
    document = put(collection, "a", "One. Two.")
    for path in pages(collection, document):
        get(admin_client, path)
    assert "cannot be loaded" in get(admin_client, url("collection_change", collection.pk))


def test_a_model_with_other_weights_is_refused(admin_client: Client, collection: Collection, fake: FakeClient) -> None:
    put(collection, "a", "One.")
    fake.spec = replace(SPEC, weights_hash="1" * 64)
    text = plain(get(admin_client, url("collection_search", collection.pk), {"q": "x"}))
    assert "weights_hash" in text and not fake.jobs


# Hostile contents


def test_nothing_a_user_wrote_becomes_markup(admin_client: Client) -> None:
    collection = make("evil", query_prompt=EVIL, id_field=EVIL, model_source=EVIL)
    Collection.objects.filter(pk=collection.pk).update(text_fields=[EVIL], name=EVIL)      # past the validator, as a restored dump would be
    VectorSpace.objects.filter(pk=collection.space_id).update(document_prompt=EVIL, revision=EVIL[:64])
    document = put(collection, EVIL, f"{EVIL}. {EVIL}! Some words more to be cut. " * 3, split=8, metadata={EVIL: EVIL, "l": [EVIL]})
    put(collection, EVIL + "2", EVIL)
    for path in [*pages(collection, document), url("document_change", document.pk) + "?part=1"]:
        assert "<script>alert" not in get(admin_client, path), path
    for path in (url("collection_search", collection.pk), url("document_change", document.pk)):
        assert "<script>alert" not in get(admin_client, path, {"q": EVIL, "filter": EVIL})
    for path in (url("document_changelist"), url("collection_changelist"), url("vectorspace_changelist")):
        assert "<script>alert" not in get(admin_client, path, {"q": EVIL})


@pytest.mark.parametrize("id", ODD_IDS)
def test_odd_ids_are_found_shown_and_deleted(admin_client: Client, collection: Collection, id: str) -> None:
    document = put(collection, id, "One.")
    put(collection, "zzz", "Two.")
    listed = get(admin_client, url("document_changelist"), {"q": id[:4]})
    assert url("document_change", document.pk) in listed and "zzz" not in listed
    assert html.escape(id) in get(admin_client, url("document_change", document.pk)) or "\n" in id
    assert url("document_change", document.pk) in get(admin_client, url("collection_search", collection.pk), {"q": "One."})
    assert admin_client.post(url("document_delete", document.pk), {"post": "yes"}).status_code == 302
    assert not Document.objects.filter(pk=document.pk).exists()


@pytest.mark.parametrize("path", ["collection/1/x/search/", "collection/%3Cscript%3E/search/", "collection/99999999999999999999/search/",
                                  "document/1%2F2/change/", "document/abc/change/"])
def test_urls_that_name_nothing_are_no_server_error(admin_client: Client, path: str) -> None:
    assert admin_client.get(f"/admin/embeddings/{path}").status_code in (302, 404)


# The list of documents


def test_search_by_the_beginning_of_an_id_is_case_sensitive_and_literal(admin_client: Client, collection: Collection) -> None:
    ids = ["report/1", "report/10", "Report/1", "repor", "r%port", "report/2", "report/\U0010ffff"]
    for id in ids:
        put(collection, id, "One.")

    def listed(term: str) -> set[str]:
        source = get(admin_client, url("document_changelist"), {"q": term})
        return {html.unescape(m) for m in re.findall(r'/document/\d+/change/[^>]*>([^<]*)</a>', source)}
    assert listed("report/") == {"report/1", "report/10", "report/2", "report/\U0010ffff"}
    assert listed("report/1") == {"report/1", "report/10"} and listed("r%") == {"r%port"} and listed("R") == {"Report/1"}
    assert listed("eport") == set()


def test_the_id_search_uses_the_index(collection: Collection, rf: Any, admin_user: User) -> None:
    request = rf.get("/")
    request.user = admin_user
    found, _ = site.get_model_admin(Document).get_search_results(request, Document.objects.all(), "abc")
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off")      # a table of no rows is read whole
        assert "one_document_per_external_id" in (plan := found.explain()) and ">= 'abc'" in plan, plan
    else:
        plan = found.explain()
        assert "one_document_per_external_id" in plan or "external_id>?" in plan, plan
        assert "SCAN" not in plan


@pytest.mark.parametrize("prefix", ["a", "report/", "z\uffff", "\ud7ff", "a\U0010ffff", "文"])
def test_successor_is_above_everything_with_the_prefix_and_nothing_else(prefix: str) -> None:
    above = _successor(prefix)
    assert above is not None and above > prefix + "\U0010ffff" * 4 and not above.startswith(prefix)
    assert above.encode()                                            # no lone surrogate
    assert _successor("\U0010ffff") is None


def test_the_list_counts_no_further_than_it_shows(admin_client: Client, collection: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "COUNTED", 60)
    Document.objects.bulk_create(Document(collection=collection, external_id=f"d{i}", content_hash="", split="none") for i in range(70))
    with CaptureQueriesContext(connection) as seen:
        text = plain(get(admin_client, url("document_changelist")))
    assert "the first 60 of more documents" in text
    counts = [q["sql"] for q in seen if "COUNT(" in q["sql"] and '"embeddings_document"' in q["sql"] and "LIMIT 61" in q["sql"]]
    assert len(counts) == 1
    assert not [q for q in seen if q["sql"].startswith('SELECT COUNT(*) AS "__count" FROM "embeddings_document"')]


def test_rows_of_the_list_carry_no_whole_text(admin_client: Client, collection: Collection) -> None:
    put(collection, "a", "head " + "x" * 5000 + " omega")
    with CaptureQueriesContext(connection) as seen:
        assert "omega" not in get(admin_client, url("document_changelist"))
    rows = [q["sql"] for q in seen if "_beginning" in q["sql"] and "LIMIT" in q["sql"]]
    beginnings = re.compile(r'SUBSTR(ING)?\("embeddings_document"."text",')
    assert rows and all('"embeddings_document"."text",' not in beginnings.sub("", sql) for sql in rows)


# Queries


def counted(client: Client, path: str) -> int:
    cache.clear()
    with CaptureQueriesContext(connection) as seen:
        get(client, path)
    return len(seen)


def test_queries_do_not_grow_with_rows(admin_client: Client) -> None:
    first = make("c0")
    document = put(first, "a", "One two three four five six. Seven.", split=4)
    put(first, "b", "Two.")
    put(first, "b", "Three.")                  # replaced: search looks for removed passages from now on
    paths = pages(first, document)
    before = {path: counted(admin_client, path) for path in paths}
    for i in range(1, 6):
        other = make(f"c{i}")
        for j in range(5):
            put(other if j % 2 else first, f"{i}-{j}", f"Some text {i} {j}. And more.", split=4)
    put(first, "a", "One two three four five six. Seven. " * 10, split=4)
    after = {path: counted(admin_client, path) for path in paths}
    assert after == before
    assert max(before.values()) <= 16, before


def test_sizes_are_counted_once_a_generation(admin_client: Client, collection: Collection) -> None:
    put(collection, "a", "One.")
    path = url("collection_changelist")
    first = counted(admin_client, path)
    with CaptureQueriesContext(connection) as seen:
        get(admin_client, path)
    assert len(seen) == first - 2


# Who may do what


def staff(client: Client, *permissions: str) -> Client:
    user = User.objects.create_user("staff", password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client.force_login(user)
    return client


def test_strangers_are_sent_to_the_login(client: Client, collection: Collection) -> None:
    document = put(collection, "a", "One.")
    for path in pages(collection, document):
        assert client.get(path).status_code == 302


def test_without_permission_there_is_no_page(client: Client, collection: Collection) -> None:
    document = put(collection, "a", "One.")
    staff(client)
    for path in pages(collection, document):
        assert client.get(path).status_code == 403, path


def test_whoever_may_view_collections_only_sees_no_text_of_documents(client: Client, collection: Collection) -> None:
    document = put(collection, "doc-1", "A secret text.", metadata={"key": "hidden value"})
    staff(client, "view_collection")
    source = get(client, url("collection_search", collection.pk), {"q": "x"})
    assert "doc-1" in source and "secret" not in source and "hidden value" not in source and "/document/" not in source
    assert "/document/" not in get(client, url("collection_change", collection.pk))
    assert client.get(url("document_change", document.pk)).status_code == 403
    assert client.get(url("collection_delete", collection.pk)).status_code == 403


def test_whoever_may_view_documents_only_gets_no_search(client: Client, collection: Collection) -> None:
    document = put(collection, "a", "One.")
    staff(client, "view_document")
    assert "/collection/" not in get(client, url("document_change", document.pk))
    assert client.get(url("collection_search", collection.pk), {"q": "x"}).status_code == 403
    assert "deletelink" not in get(client, url("document_change", document.pk))


def test_nobody_adds_or_changes_anything(admin_client: Client, collection: Collection) -> None:
    document = put(collection, "a", "One.")
    def everything() -> list[Any]:
        return [list(model.objects.values()) for model in (VectorSpace, Collection, Document, Passage)]
    before = everything()
    for model, pk in (("collection", collection.pk), ("document", document.pk), ("vectorspace", collection.space_id)):
        assert admin_client.get(url(f"{model}_add")).status_code == 403
        assert admin_client.post(url(f"{model}_add"), {"name": "x", "text": "x"}).status_code == 403
        assert admin_client.post(url(f"{model}_change", pk), {"name": "x", "text": "x", "external_id": "x"}).status_code == 403
    assert admin_client.post(url("vectorspace_delete", collection.space_id), {"post": "yes"}).status_code == 403
    assert everything() == before


def test_deleting_a_document_is_real_and_moves_the_counters(admin_client: Client, collection: Collection) -> None:
    document = put(collection, "a", "One two three four five six.", split=4)
    put(collection, "b", "Two.")
    parts = document.passages.count()
    before = Collection.objects.get(pk=collection.pk)
    assert f"Passages: {parts}" in plain(get(admin_client, url("document_delete", document.pk)))
    assert admin_client.post(url("document_delete", document.pk), {"post": "yes"}).status_code == 302
    after = Collection.objects.get(pk=collection.pk)
    assert list(Document.objects.values_list("external_id", flat=True)) == ["b"] and Passage.objects.count() == 1
    assert after.generation > before.generation and after.deletions == before.deletions + parts
    assert LogEntry.objects.get().object_repr == "a"
    assert "a score" not in plain(get(admin_client, url("collection_search", collection.pk), {"q": "One"}))


def test_deleting_chosen_documents_of_several_collections(admin_client: Client, collection: Collection) -> None:
    other = make("other")
    chosen = [put(collection, "a", "One."), put(collection, "b", "Two."), put(other, "a", "Three.")]
    put(other, "stays", "Four.")
    data = {"action": "delete_selected", "_selected_action": [d.pk for d in chosen]}
    assert "Documents: 3" in plain(admin_client.post(url("document_changelist"), data).content.decode())
    admin_client.post(url("document_changelist"), {**data, "post": "yes"})
    assert list(Document.objects.values_list("external_id", flat=True)) == ["stays"]
    assert [c.deletions for c in Collection.objects.order_by("pk")] == [2, 1]


def test_deleting_a_collection_takes_its_documents_and_search_files_along(
        admin_client: Client, collection: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make("other")
    put(collection, "a", "One.")
    put(other, "b", "Two.")
    monkeypatch.setattr("embeddings.index.TAIL_BYTES", 0)      # the smallest collection is worth a file
    index = ExactIndex(tmp_path)
    monkeypatch.setattr("embeddings.admin.collections.get_index", lambda: index)
    index.rebuild(collection)
    index.rebuild(other)
    assert index.folder(collection).is_dir() and index.folder(other).is_dir()
    assert "1 document, 1 passage" in plain(get(admin_client, url("collection_delete", collection.pk)))
    assert admin_client.post(url("collection_delete", collection.pk), {"post": "yes"}).status_code == 302
    assert not index.folder(collection).exists() and index.folder(other).is_dir()
    assert [c.name for c in Collection.objects.all()] == ["other"] and Document.objects.get().external_id == "b"
    assert Passage.objects.count() == 1


def test_deleting_a_collection_needs_the_right_to_delete_documents(client: Client, collection: Collection) -> None:
    put(collection, "a", "One.")
    staff(client, "view_collection", "delete_collection")
    assert "Cannot delete" in get(client, url("collection_delete", collection.pk))
    assert client.post(url("collection_delete", collection.pk), {"post": "yes"}).status_code == 403
    assert Collection.objects.count() == 1


# Charts and texts


@pytest.mark.parametrize("values", [
    [0.0], [1.0], [-1.0, 2.0], [np.nan], [np.inf, 1.0], [], [0.0] * 50, [1e-45, -1e-45], [3e38, -3e38], list(np.linspace(-1, 1, 5000)),
])
@pytest.mark.parametrize("draw", [charts.histogram, charts.sparkline])
@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_charts_draw_anything(values: list[float], draw: Callable[..., str], dtype: str) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values, dtype)
    source = str(draw(array, id="x", name="<b>&"))
    page = Page(source)
    assert page.all("svg")[0]["role"] == "img" and {"x-title", "x-desc"} <= set(page.ids)
    assert "<b>" not in source and "nan" not in re.sub(r"<(title|desc|text).*?</\1>", "", source)


def test_a_histogram_counts_every_finite_component_once() -> None:
    values = np.random.default_rng(1).standard_normal(999).astype("<f4")
    source = str(charts.histogram(np.append(values, np.float32(np.nan)), id="x", name="n", bins=21))
    heights = [108 - float(h) for h in re.findall(r"V([\d.]+)h", source)]
    top = int(re.search(r"bins holds (\d+)", source).group(1))       # type: ignore[union-attr]
    assert round(sum(h * top / 96 for h in heights)) == pytest.approx(999, abs=3)
    assert "1 NaN not drawn" in source


@pytest.mark.parametrize("chosen", [None, 0, 3, 9])
@pytest.mark.parametrize("length", [10, 2400, 2999, 3001, 20_000, 250_000])
def test_marked_segments_are_the_text(chosen: int | None, length: int) -> None:
    text = ("lorem ipsum " * (length // 12 + 1))[:length]
    step = max(length // 10, 1)
    parts = [Passage(pk=i + 1, part=i, start=min(i * step, length - 1), end=min(i * step + step + 7, length)) for i in range(10)]
    picked = None if chosen is None else parts[chosen]
    marked = texts.mark(text, parts, picked)
    segments = [*marked.before, *marked.open, *marked.after]
    assert "".join(s.text for s in segments) == text[:len(text) - marked.dropped]
    assert sum(len(s.begins) for s in segments) == len([p for p in parts if p.start < texts.MOST])
    if picked and picked.end <= texts.MOST:
        assert "".join(s.text for s in segments if s.chosen) == text[picked.start:picked.end]
        assert any(s.chosen for s in marked.open)


@pytest.mark.parametrize(("text", "expected"), [
    ("One. Two! Three?", ["One.", "Two!", "Three?"]), ("v1.2 is out. Yes", ["v1.2 is out.", "Yes"]), ("", []), ("   ", []),
    ("no end", ["no end"]), ("a\n\nb", ["a", "b"]), ("これは文です。次の文。", ["これは文です。", "次の文。"]),
    ('He said "no." Then left.', ['He said "no."', "Then left."]),
])
def test_sentences(text: str, expected: list[str]) -> None:
    assert [text[s:e].strip() for s, e in texts.sentences(text, 0, len(text))] == expected


def test_many_sentences_are_joined_and_cover_the_passage() -> None:
    text = "Word one. " * 500
    spans = texts.sentences(text, 0, len(text), most=48)
    assert len(spans) <= 48 and spans[0][0] == 0 and spans[-1][1] == len(text.rstrip())
    assert all(a < b for a, b in spans) and all(not text[b:c].strip() for (_, b), (c, _) in pairwise(spans))
