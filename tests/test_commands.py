"""The commands as a person types them: what they print, what they remember, how they end."""
from __future__ import annotations

import gzip
import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import OperationalError, ProgrammingError

from embeddings import corpus
from embeddings.bulk import Bulk, Report
from embeddings.models import Collection, Document, Passage
from embeddings.progress import Display, Interruptible, duration
from embeddings.sources import Problem
from inference.config import Settings
from inference.errors import Busy
from inference.wire import ModelSpec
from tests.fakes import SPEC, FakeClient

pytestmark = pytest.mark.django_db


@dataclass
class Fake(FakeClient):
    """Named as the settings name it; `connected` remembers them."""

    def __post_init__(self) -> None:
        connected.append(self.settings)
        name = self.settings.embedding_models[0] if self.settings.embedding_models else ""
        self.spec = specs.get(name, SPEC)


connected: list[Settings] = []
specs: dict[str, ModelSpec] = {"other": replace(SPEC, id="other", weights_hash="1" * 64), "wide": replace(SPEC, prompts={})}


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path) -> Iterator[None]:
    settings.VAR_DIR = tmp_path / "var"
    monkeypatch.setenv("MLXCEL_TRANSPORT", f"{__name__}.Fake")
    monkeypatch.setenv("MLXCEL_EMBEDDING_MODEL", "tests/fake-8")
    connected.clear()
    yield


@dataclass
class Ended:
    code: int = 0
    out: str = ""
    err: str = ""
    message: str = ""
    json: dict[str, Any] = field(default_factory=dict)


def manage(*args: Any) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    ended = Ended()
    try:
        call_command(*map(str, args), stdout=out, stderr=err)
    except SystemExit as stop:
        ended.code = int(stop.code or 0)
    except CommandError as error:
        ended.code, ended.message = error.returncode, str(error)
    ended.out, ended.err = out.getvalue(), err.getvalue()
    if "--json" in args and ended.out:
        ended.json = json.loads(ended.out)
    return ended


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", {"_id": "a", "title": "Ships", "text": "sail the sea", "year": 1960},
                 {"_id": "b", "title": "Trains", "text": "ride on rails", "year": 1971}, {"_id": "c", "title": "", "text": " "})


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def texts() -> dict[str, str]:
    return dict(Document.objects.order_by("pk").values_list("external_id", "text"))


def test_a_first_run_makes_the_collection_and_tells_what_happened(source: Path) -> None:
    ended = manage("embed_corpus", "books", source, "--text-field", "title,text")
    assert ended.code == 0 and texts() == {"a": "Ships sail the sea", "b": "Trains ride on rails"}
    for part in ("read", "3", "embedded", "2", "blank, skipped", "1", "documents/s", "tokens/s"):
        assert part in ended.out
    assert "fake-8 · 8 dimensions · fingerprint" in ended.err and "document prompt 'passage: '" in ended.err
    collection = corpus.get("books")
    assert (collection.space.document_prompt, collection.query_prompt, collection.model_source) == ("passage: ", "query: ", "tests/fake-8")


def test_options_are_remembered_and_a_changed_one_embeds_what_it_changes(source: Path) -> None:
    manage("embed_corpus", "books", source, "--text-field", "title,text", "--split", "4:1", "--dimensions", "4", "--prompt", "p: ")
    again = manage("embed_corpus", "books", source, "--json").json
    assert (again["embedded"], again["unchanged"], again["blank"], again["exit_code"]) == (0, 2, 1, 0)
    assert manage("embed_corpus", "books", source, "--text-field", "text", "--json").json["embedded"] == 2
    assert texts()["a"] == "sail the sea"
    assert manage("embed_corpus", "books", source, "--split", "none", "--json").json["embedded"] == 2
    assert manage("embed_corpus", "books", source, "--json").json["unchanged"] == 2
    collection = corpus.get("books")
    assert (collection.space.dims, collection.space.document_prompt) == (4, "p: ")
    assert (collection.text_fields, collection.split_tokens) == (["text"], 0)


@pytest.mark.parametrize(("options", "prompts"), [
    ([], ("passage: ", "query: ")), (["--prompt", ""], ("", "query: ")),
    (["--prompt", "query", "--query-prompt", "ask: "], ("query: ", "ask: ")),
    (["--model", "wide"], ("", "")), (["--query-prompt", ""], ("passage: ", ""))])
def test_prompts_come_by_name_literally_or_from_the_checkpoint(source: Path, options: list[str], prompts: tuple[str, str]) -> None:
    manage("embed_corpus", "books", source, *options)
    collection = corpus.get("books")
    assert (collection.space.document_prompt, collection.query_prompt) == prompts


@pytest.mark.parametrize("rows", [[], [{"id": 1, "name": "x"}], [{"id": 1, "text": " "}]])
def test_a_run_in_which_nothing_goes_in_leaves_nothing_behind(tmp_path: Path, rows: list[Any]) -> None:
    assert manage("embed_corpus", "c", write(tmp_path / "c.jsonl", *rows)).code == 3 and not Collection.objects.exists()


@pytest.mark.parametrize("wrong", [["--text-field", "nope"], ["--id-field", "nope"]])
def test_an_option_with_which_nothing_goes_in_is_not_remembered(source: Path, wrong: list[str]) -> None:
    assert manage("embed_corpus", "new", source, *wrong).code == 3
    assert manage("embed_corpus", "new", source).code == 0
    assert manage("embed_corpus", "new", source, *wrong).code == 3
    assert manage("embed_corpus", "new", source, "--json").json["unchanged"] == 2


def test_an_option_is_remembered_though_no_document_changes(source: Path) -> None:
    manage("embed_corpus", "books", source)
    assert manage("embed_corpus", "books", source, "--query-prompt", "ask: ", "--json").json["unchanged"] == 2
    assert corpus.get("books").query_prompt == "ask: "


def test_blank_documents_are_embedded_where_they_are_asked_for(tmp_path: Path) -> None:
    source = write(tmp_path / "c.jsonl", {"id": 1, "text": ""}, {"id": 2, "text": " \n"}, {"id": 3, "text": "x"})
    ended = manage("embed_corpus", "c", source, "--blank", "embed", "--prompt", "", "--json").json
    assert (ended["embedded"], ended["failed"], texts()) == (3, 0, {"1": "", "2": "", "3": "x"})
    assert manage("embed_corpus", "split", source, "--blank", "embed", "--prompt", "", "--split", "8", "--json").json["embedded"] == 3


def test_a_collection_that_someone_else_made_meanwhile_is_gone_on_with_if_it_is_the_same(
        source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manage("embed_corpus", "books", source, "--limit", "1")
    find = corpus.find
    answers = iter([None])      # the first look, before the other one made it
    monkeypatch.setattr(corpus, "find", lambda name: next(answers, find(name)))
    assert manage("embed_corpus", "books", source).code == 0 and list(texts()) == ["a", "b"]
    answers = iter([None])
    ended = manage("embed_corpus", "books", source, "--split", "8")
    assert ended.code in (2, 3) and "There already is a collection 'books'." in ended.message and corpus.get("books").split_tokens == 0


@pytest.mark.parametrize("command", [["embed_corpus", "c", "{source}"], ["delete_corpus", "books"]])
def test_files_that_cannot_be_read_and_questions_nobody_answers_are_told(
        source: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    manage("embed_corpus", "books", source)

    def refuse(self: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    def nobody(_: str) -> str:
        raise EOFError
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr("builtins.input", nobody)
    ended = manage(*(part.format(source=source) for part in command))
    assert (ended.code, ended.message) in [(2, f"{source} cannot be read: Permission denied"),
                                           (1, "Nothing was removed: nobody answered. --yes does not ask.")]


@pytest.mark.parametrize(("options", "said"), [
    (["--dimensions", "4"], "dims 8 is not 4"), (["--model", "other"], "model_id 'fake-8' is not 'other'"),
    (["--prompt", ""], "document_prompt 'passage: ' is not ''")])
def test_another_space_is_refused_with_what_to_do(source: Path, options: list[str], said: str) -> None:
    manage("embed_corpus", "books", source)
    before = list(Passage.objects.values_list("pk", flat=True))
    ended = manage("embed_corpus", "books", source, *options)
    assert ended.code == 2 and said in ended.message and "another name" in ended.message and "delete_corpus books" in ended.message
    assert list(Passage.objects.values_list("pk", flat=True)) == before


def test_the_collections_own_model_is_loaded_wherever_it_came_from(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manage("embed_corpus", "books", source, "--model", "other", "--backend", "host", "--batch-tokens", "99")
    assert (connected[-1].embedding_models, connected[-1].backend, connected[-1].batch_tokens) == (("other",), "host", 99)
    manage("search_corpus", "books", "x")
    assert connected[-1].embedding_models == ("other",)
    monkeypatch.setenv("MLXCEL_EMBEDDING_MODEL", "first,/elsewhere/other")
    manage("search_corpus", "books", "x")
    assert connected[-1].embedding_models == ("/elsewhere/other",)


def test_with_a_broker_the_service_is_asked(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXCEL_REDIS_URL", "redis://localhost")
    ended = manage("embed_corpus", "books", source, "--model", "absent")
    assert ended.code == 2 and "The model absent is not served" in ended.message
    assert manage("embed_corpus", "books", source, "--model", "fake-8").code == 0


def test_bad_lines_are_told_with_their_position_and_the_exit_code(tmp_path: Path) -> None:
    source = write(tmp_path / "c.jsonl", {"id": 1, "text": "x"}, "nonsense", {"id": 1, "text": "y"}, {"id": 2, "text": "z"})
    ended = manage("embed_corpus", "c", source, "--json")
    assert ended.code == 1 and f"{source}:2: not JSON" in ended.err and f"{source}:3: id '1' was already seen" in ended.err
    assert [p["position"] for p in ended.json["problems"]] == [f"{source}:2", f"{source}:3"] and texts() == {"1": "x", "2": "z"}


@pytest.mark.parametrize("rows", [[], ["nonsense"], [{"id": 1, "text": " "}]])
def test_nothing_that_went_in_is_exit_code_three(tmp_path: Path, rows: list[Any]) -> None:
    assert manage("embed_corpus", "c", write(tmp_path / "c.jsonl", *rows)).code == 3


@pytest.mark.parametrize(("args", "said"), [
    (["embed_corpus", "a b", "{source}"], "use letters, digits"), (["embed_corpus", "x", "/absent.jsonl"], "/absent.jsonl does not exist"),
    (["embed_corpus", "x", "{source}", "--dimensions", "9"], "8 dimensions; expected 1 to 8, found 9"),
    (["embed_corpus", "x", "{source}", "--split", "33"], "at most 32 tokens"),
    (["embed_corpus", "x", "{source}", "--split", "4:4"], "OVERLAP smaller"),
    (["embed_corpus", "x", "{source}", "--split", "many"], "none, TOKENS or TOKENS:OVERLAP"),
    (["embed_corpus", "x", "{source}", "--limit", "0"], "at least 1"),
    (["embed_corpus", "x", "{source}", "--text-field", ","], "field names"),
    (["embed_corpus", "x", "{source}", "--prune", "--limit", "1"], "--prune needs the whole"),
    (["search_corpus", "x", "q"], "no collection 'x'"),
    (["evaluate_corpus", "x", "--queries", "q", "--qrels", "r"], "no collection 'x'"),
    (["export_corpus", "x", "o.npy"], "no collection 'x'"),
    (["delete_corpus", "x", "--yes"], "no collection 'x'")])
def test_wrong_usage_is_exit_code_two_or_one_of_argparse_and_makes_nothing(source: Path, args: list[str], said: str) -> None:
    ended = manage(*(arg.format(source=source) for arg in args))
    assert ended.code in (1, 2) and said in ended.message and not Collection.objects.exists()


@pytest.mark.parametrize(("args", "said"), [
    (["search_corpus", "books", "q", "--filter", "{"], "--filter is not JSON"),
    (["search_corpus", "books", "q", "--filter", "[]"], "an object"),
    (["search_corpus", "books", "q", "--limit", "0"], "1 to 1000"), (["search_corpus", "books", ""], "not empty"),
    (["export_corpus", "books", "out.txt"], ".npy or .parquet"), (["export_corpus", "books", "/absent/o.npy"], "cannot be written")])
def test_wrong_usage_of_a_collection_is_exit_code_two(source: Path, args: list[str], said: str) -> None:
    manage("embed_corpus", "books", source)
    ended = manage(*args)
    assert ended.code == 2 and said in ended.message


def test_limit_dry_run_and_prune(source: Path, tmp_path: Path) -> None:
    dry = manage("embed_corpus", "books", source, "--dry-run")
    assert dry.code == 0 and "would be embedded" in dry.out and not Collection.objects.exists()
    assert manage("embed_corpus", "books", source, "--limit", "1", "--json").json["read"] == 1 and list(texts()) == ["a"]
    manage("embed_corpus", "books", source)
    less = write(tmp_path / "less.jsonl", {"_id": "b", "title": "Trains", "text": "ride on rails", "year": 1971})
    assert manage("embed_corpus", "books", less, "--prune", "--dry-run", "--json").json["pruned"] == 1 and len(texts()) == 2
    ended = manage("embed_corpus", "books", less, "--prune")
    assert "removed" in ended.out and list(texts()) == ["b"]


def test_nothing_is_pruned_while_a_line_cannot_be_read(source: Path, tmp_path: Path) -> None:
    manage("embed_corpus", "books", source)
    ended = manage("embed_corpus", "books", write(tmp_path / "less.jsonl", "nonsense", {"_id": "b", "text": "x"}), "--prune")
    assert ended.code == 1 and "Nothing was removed: 1 line could not" in ended.err and list(texts()) == ["a", "b"]


@pytest.mark.parametrize(("rows", "said"), [([], "The sources hold no documents, and"), ([{"_id": "a", "text": " "}], "but blank ones")])
@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--workers", "celery"]])
def test_sources_without_documents_do_not_empty_a_collection(
        source: Path, tmp_path: Path, settings: Any, rows: list[Any], said: str, options: list[str]) -> None:
    manage("embed_corpus", "books", source)
    settings.BULK_SENDER = "builtins.list"
    ended = manage("embed_corpus", "books", write(tmp_path / "empty.jsonl", *rows), "--prune", *options)
    assert ended.code == 2 and said in ended.message and "nothing was removed" in ended.message
    assert "manage.py delete_corpus books" in ended.message and list(texts()) == ["a", "b"]


def test_truncated_documents_are_counted_with_a_hint(tmp_path: Path) -> None:
    ended = manage("embed_corpus", "c", write(tmp_path / "c.jsonl", {"id": 1, "text": "word " * 40}))
    assert ended.code == 0 and "truncated" in ended.out and "--split" in ended.out


@pytest.mark.parametrize(("stored_before", "code"), [(True, 1), (False, 3)])
def test_a_database_that_refuses_ends_the_run_clearly(
        source: Path, monkeypatch: pytest.MonkeyPatch, stored_before: bool, code: int, tmp_path: Path) -> None:
    if stored_before:
        manage("embed_corpus", "books", source, "--limit", "1")

    def locked(*_: Any) -> None:
        raise OperationalError("database is locked")
    monkeypatch.setattr(corpus, "upsert", locked)
    ended = manage("embed_corpus", "books", source)
    assert ended.code == code and "database is locked (another process has been writing" in ended.message
    assert "What this run stored stays: 0 documents. Run the same command again" in ended.message and "read" in ended.out


def test_what_is_only_told_is_not_in_the_colour_of_errors(source: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True
    err = Terminal()
    call_command("embed_corpus", "books", str(source), stdout=io.StringIO(), stderr=err, force_color=True)
    assert err.getvalue().startswith("Collection books")


def test_a_source_that_is_no_gzip_is_told_in_sentences(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl.gz").write_bytes(b"FM")
    said = "Not a gzipped file (b'FM'). What this run stored stays: 0 documents. Once that is mended, run the same command"
    assert said in manage("embed_corpus", "c", tmp_path / "c.jsonl.gz").message


def test_a_source_that_breaks_off_ends_the_run_with_its_summary(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"id": i, "text": f"{i} {os.urandom(40).hex()}"}) + "\n" for i in range(3000))
    source = tmp_path / "c.jsonl.gz"
    source.write_bytes(gzip.compress(lines.encode())[:-2000])
    ended = manage("embed_corpus", "c", source)
    assert ended.code == 1 and f"{source} ends early" in ended.message and "Once that is mended, run the same command" in ended.message
    assert f"{Document.objects.count():,}" in ended.message and "embedded" in ended.out and Document.objects.count() > 0


def test_a_model_that_stays_busy_ends_the_run_with_its_summary(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any) -> None:
        raise Busy("the queue is full")
    monkeypatch.setattr(Fake, "embed", busy)
    monkeypatch.setattr(Busy, "retry_after", 0.01)
    monkeypatch.setattr("embeddings.encoding.BUSY_SECONDS", 0.02)
    ended = manage("embed_corpus", "books", source)
    assert ended.code == 3 and "the queue is full" in ended.message and "read" in ended.out


def test_missing_tables_are_told_with_the_command_that_makes_them(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise OperationalError("no such table: embeddings_collection")
    monkeypatch.setattr(corpus, "find", absent)
    ended = manage("search_corpus", "books", "query")
    assert ended.code == 2 and "holds nothing yet: `manage.py embed_corpus" in ended.message


def test_tables_that_postgresql_lacks_are_told_with_the_command_that_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ProgrammingError('relation "embeddings_job" does not exist\nLINE 1: SELECT "embeddings_job"."id"')
    monkeypatch.setattr("embeddings.jobs.settle", absent)
    ended = manage("list_jobs")
    assert ended.code == 2 and ended.message.endswith("lacks tables of this version: run `manage.py migrate` first")


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bulk, "_tick", lambda self: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    ended = manage("embed_corpus", "books", source)
    assert ended.code == 130 and "Stopped. What this run stored stays: 0 documents. Run the same command again to go on." in ended.err
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_within_a_transaction_waits_for_its_end_and_a_second_one_does_not() -> None:
    with Interruptible(io.StringIO(), None) as display:
        display.writing(True)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            display.writing(False)
    with Interruptible(io.StringIO(), None) as display:
        display.writing(True)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_search_prints_ranks_scores_ids_and_passages(source: Path) -> None:
    manage("embed_corpus", "books", source, "--text-field", "title,text", "--prompt", "", "--query-prompt", "")
    ended = manage("search_corpus", "books", "Trains ride on rails", "--limit", "1")
    assert ended.out.splitlines() == ["  1. 1.0000  b", "     Trains ride on rails"]
    found = manage("search_corpus", "books", "sea", "--json", "--text", "--filter", '{"year": {"lt": 1970}}').json
    assert [(hit["external_id"], hit["text"], hit["metadata"]) for hit in found["hits"]] == [("a", "Ships sail the sea", {"year": 1960})]
    assert found["exact"] is True and "text" not in manage("search_corpus", "books", "sea", "--json").json["hits"][0]
    assert manage("search_corpus", "books", "sea", "--filter", '{"year": 1}').out == "Nothing found.\n"


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_exports_hold_what_is_stored(source: Path, tmp_path: Path, suffix: str) -> None:
    manage("embed_corpus", "books", source, "--text-field", "title,text", "--split", "4")
    out = tmp_path / f"out.{suffix}"
    assert manage("export_corpus", "books", out).code == 0
    passages = list(Passage.objects.select_related("document").order_by("document_id", "part"))
    expected = np.stack([np.frombuffer(bytes(p.vector), p.dtype) for p in passages])
    if suffix == "npy":
        assert np.array_equal(np.load(out), expected)
        rows = [json.loads(line) for line in out.with_suffix(".ids.jsonl").read_text().splitlines()]
    else:
        rows = pytest.importorskip("pyarrow.parquet").read_table(out).to_pylist()
        assert np.array_equal(np.array([row["vector"] for row in rows], np.float32), expected)
        assert rows[0]["text"] == "Ships sail" and json.loads(rows[0]["metadata"]) == {"year": 1960}
    assert [(row["id"], row["part"], row["start"], row["end"]) for row in rows] == [
        (p.document.external_id, p.part, p.start, p.end) for p in passages]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_empty_collection_can_be_exported(tmp_path: Path) -> None:
    manage("embed_corpus", "none", write(tmp_path / "c.jsonl", {"id": 1, "text": "x"}))
    manage("delete_corpus", "none", "--id", "1")
    manage("export_corpus", "none", tmp_path / "o.npy")
    assert np.load(tmp_path / "o.npy").shape == (0, 8)


def test_an_export_that_cannot_be_written_names_what_was_typed(source: Path, tmp_path: Path) -> None:
    manage("embed_corpus", "books", source)
    (tmp_path / "folder.npy").mkdir()
    for out, said in ((tmp_path / "no" / "o.npy", "No such file or directory"), (tmp_path / "folder.npy", "Is a directory")):
        ended = manage("export_corpus", "books", out)
        assert (ended.code, ended.message) == (2, f"{out} cannot be written: {said}")


def test_one_is_not_told_as_many(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manage("embed_corpus", "books", source, "--limit", "1")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    assert "1 of them was not there" in manage("delete_corpus", "books", "--id", "zz").message
    assert manage("delete_corpus", "books").out == "Collection books removed, 1 document\n"
    assert asked == ["Remove collection books with 1 document? [y/N] "]


def test_deleting(source: Path, monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    manage("embed_corpus", "books", source)
    manage("search_corpus", "books", "x")
    ended = manage("delete_corpus", "books", "--id", "a", "zz")
    assert ended.code == 1 and "1 of 2 documents removed" in ended.out and list(texts()) == ["b"]
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert manage("delete_corpus", "books").code == 1 and Collection.objects.exists()
    assert manage("delete_corpus", "books", "--yes").code == 0 and not Collection.objects.exists() and not Passage.objects.exists()
    assert not list(Path(settings.VAR_DIR).glob("index/*"))


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("embeddings.progress.PLAIN_SECONDS", 0)
    monkeypatch.setattr("embeddings.progress.SHOWN_PROBLEMS", 1)
    with Display(stream, 1000) as display:
        display.progress(Report(embedded=200, tokens=4000, seconds=2))
        for i in range(3):
            display.problem(Problem(f"f:{i}", "[bad] :smile:"))
    assert stream.getvalue().splitlines() == [
        "200 of 1,000 documents · 100 documents/s · 2,000 tokens/s · 8.0 s left", "f:0: [bad] :smile:", "... and 2 more problems"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with Display(stream, 1000) as display:
        display.progress(Report(embedded=200, tokens=4000, seconds=2))
        display.problem(Problem("f:1", "[bad] :smile:"))
    assert "f:1: [bad] :smile:" in stream.getvalue() and "200 of 1,000" in stream.getvalue() and "100 documents/s" in stream.getvalue()


def test_problems_that_are_alike_are_counted_after_twenty() -> None:
    stream = io.StringIO()
    with Display(stream, None) as display:
        for i in range(100):
            display.problem(Problem(f"f:{i}", "no field 'nope' to embed", str(i)))
            display.problem(Problem(f"g:{i}", f"document {str(i)!r}: not finite", str(i)))
        display.problem(Problem("h:1", "not JSON"))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 43 and "h:1: not JSON" in lines
    assert lines[-2:] == ["... and 80 more like: no field 'nope' to embed", "... and 80 more like: document ... not finite"]


@pytest.mark.parametrize(("seconds", "said"), [(0.04, "0.0 s"), (59.6, "60 s"), (61, "1 min 01 s"),
    (3599.9, "1 h 00 min"), (7322, "2 h 02 min")])
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
