"""Every record comes with its position, every bad line is a problem with its position, and only a file that is none ends a run."""
from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embeddings import sources, storable
from embeddings.sources import Problem, Record
from inference.errors import InvalidRequest


def read(path: Path | str, *more: Path, id_field: str = "", text: tuple[str, ...] = ("text",)) -> list[Record | Problem]:
    return list(sources.documents(sources.read([str(path), *map(str, more)]), id_field, text))


def jsonl(tmp_path: Path, *lines: bytes | dict[str, Any]) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n")
    return path


def test_fields_become_id_text_and_metadata(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"_id": "a", "title": " T ", "text": "body ", "id": 7, "tags": ["x"]}, {"id": 12, "text": "b"})
    assert read(path, text=("title", "text")) == [
        Record(f"{path}:1", "a", "T  body", {"id": 7, "tags": ["x"]}), Record(f"{path}:2", "12", "b", {})]


def test_a_named_id_field_is_the_only_one_looked_at(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"_id": "a", "key": "k", "text": "t"}, {"_id": "b", "text": "t"})
    assert read(path, id_field="key") == [
        Record(f"{path}:1", "k", "t", {"_id": "a"}), Problem(f"{path}:2", "no field 'key'; found '_id', 'text'")]


def test_missing_and_null_text_fields_are_empty_as_long_as_one_is_there(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"_id": "a", "title": None, "text": "t"}, {"_id": "b", "text": 7}, {"_id": "c", "title": "only"})
    assert [record.text for record in read(path, text=("title", "text")) if isinstance(record, Record)] == ["t", "7", "only"]


@pytest.mark.parametrize(("line", "message"), [
    (b'{"_id": "a", "text": "x"', "not JSON: .* at character"), (b"nonsense", "not JSON"), (b"[1]", "expected a JSON object, found a list"),
    (b"null", "found null"), (b'"text"', "found a string"), (b'{"_id": "a", "text": NaN}', "NaN is not a JSON number"),
    (b'{"_id": "a", "text": "x", "n": Infinity}', "Infinity is not a JSON number"), (b'{"text": "x"}', "no field 'id'; found 'text'"),
    (b'{"_id": "", "text": "x"}', "id and is empty"), (b'{"_id": " ", "text": "x"}', "id and is empty"),
    (b'{"_id": null, "text": "x"}', "expected a string or a whole number, found null"), (b'{"_id": 1.5, "text": "x"}', "found a number"),
    (b'{"_id": true, "text": "x"}', "found a boolean"), (b'{"_id": ["a"], "text": "x"}', "found a list"),
    (b'{"_id": 123456789012345678901234567890, "text": "x"}', "found a number"),
    (b'{"_id": "' + b"i" * 513 + b'", "text": "x"}', "513 characters"),
    (b'{"_id": "a\\u0000", "text": "x"}', "NUL or a lone surrogate"), (b'{"_id": "\\ud800", "text": "x"}', "NUL or a lone surrogate"),
    (b'{"_id": "a", "body": "x"}', "no field 'text' to embed; found '_id', 'body' .choose with --text-field"),
    (b'{"_id": "a", "text": ["x"]}', "field 'text': expected a text, found a list"), (b'{"_id": "a", "text": false}', "found a boolean"),
    (b'{"_id": "a", "text": "caf\xe9"}', "not UTF-8: byte 0xe9 at byte 26 of the line"),
    (b'{"_id": "a", "text": "x", "m": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested|not JSON"),
    (b'{"_id": "a", "text": "x", "m": ' + b"[" * 300 + b"]" * 300 + b"}", "nested too deeply"),
])
def test_a_bad_line_is_a_problem_at_its_place_and_the_next_line_is_read(tmp_path: Path, line: bytes, message: str) -> None:
    path = jsonl(tmp_path, {"_id": "first", "text": "x"}, line, {"_id": "last", "text": "x"})
    first, bad, last = read(path)
    assert isinstance(bad, Problem) and bad.position == f"{path}:2"
    assert re.search(message, bad.message), bad.message
    assert isinstance(first, Record) and isinstance(last, Record) and last.id == "last"


def test_ids_seen_before_are_problems_across_files(tmp_path: Path) -> None:
    first = jsonl(tmp_path, {"_id": 1, "text": "x"}, {"_id": "1", "text": "y"})
    second = tmp_path / "second.csv"
    second.write_text("id,text\n1,z\n2,z\n")
    assert read(first, second)[1:] == [
        Problem(f"{first}:2", f"id '1' was already seen at {first}:1; the first one counts", "1"),
        Problem(f"{second}:2", f"id '1' was already seen at {first}:1; the first one counts", "1"), Record(f"{second}:3", "2", "z", {})]


def test_what_databases_refuse_becomes_a_replacement_character(tmp_path: Path) -> None:
    path = jsonl(tmp_path, b'{"_id": "a", "text": "x\\ud800y\\u0000z", "\\u0000k": ["\\udfff"], "pair": "\\ud83d\\ude00"}')
    assert read(path) == [Record(f"{path}:1", "a", "x�y�z", {"�k": ["�"], "pair": "\U0001f600"})]


def test_bom_blank_lines_carriage_returns_and_a_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "c.ndjson"
    path.write_bytes(b'\xef\xbb\xbf{"_id":"a","text":"x"}\r\n\r\n   \n{"_id":"b","text":"y"}')
    assert [(r.position, r.id) for r in read(path) if isinstance(r, Record)] == [(f"{path}:1", "a"), (f"{path}:4", "b")]


def test_a_line_over_the_limit_is_skipped_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LINE_BYTES", 64)
    path = jsonl(tmp_path, {"_id": "a", "text": "x"}, {"_id": "b", "text": "y" * 200}, {"_id": "c", "text": "z"})
    first, bad, last = read(path)
    assert isinstance(bad, Problem) and "longer than" in bad.message and bad.position == f"{path}:2"
    assert isinstance(last, Record) and last == Record(f"{path}:3", "c", "z", {}) and isinstance(first, Record)


def test_utf16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"_id":"a","text":"x"}\n', "utf-16")
    with pytest.raises(InvalidRequest, match="UTF-16; expected UTF-8"):
        read(path)


def test_csv_with_quotes_newlines_bom_and_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes('\ufeffid,text,lang\n1,"two\nlines, ""quoted""",en\n2,short\n3,a,b,c\n\n4,"caf'.encode() + b'\xe9",fr\n5,last,de\n')
    assert read(path) == [
        Record(f"{path}:2", "1", 'two\nlines, "quoted"', {"lang": "en"}), Problem(f"{path}:4", "expected 3 columns, found 2"),
        Problem(f"{path}:5", "expected 3 columns, found 4"), Problem(f"{path}:7", "not UTF-8"),
        Record(f"{path}:8", "5", "last", {"lang": "de"})]


def test_a_quote_that_is_not_closed_loses_nothing_quietly(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text('id,text\n1,fine\n2,"never closed\n3,lost\n4,lost\n')
    assert read(path) == [Record(f"{path}:2", "1", "fine"), Problem(
        f"{path}:3", "not CSV: a quote is opened and never closed; lines 3 to 5 are taken for one row and left out")]
    path.write_text('id,text\n1,"never closed\n2,"closes it"\n3,fine\n')
    first, second = read(path)
    assert isinstance(first, Problem) and "lines 2 to 3" in first.message and second == Record(f"{path}:4", "3", "fine")


def test_tsv_and_gzip(tmp_path: Path) -> None:
    path = tmp_path / "c.tsv.gz"
    with gzip.open(path, "wt") as stream:
        stream.write("id\ttext\na\tx, y\n")
    assert read(path) == [Record(f"{path}:2", "a", "x, y", {})]


@pytest.mark.parametrize("header", ["", "a,a\n1,2\n", ",\n"])
def test_a_csv_without_a_header_is_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "c.csv").write_text(header)
    with pytest.raises(InvalidRequest, match="must name the columns"):
        read(tmp_path / "c.csv")


def test_parquet(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    import datetime
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"id": [1, 2, None], "text": ["x", None, "z"], "score": [0.5, float("nan"), 1.0],
                             "day": [datetime.date(2020, 1, 2)] * 3}), path)
    assert read(path) == [
        Record(f"{path}:1", "1", "x", {"score": 0.5, "day": "2020-01-02"}),
        Record(f"{path}:2", "2", "", {"score": None, "day": "2020-01-02"}),
        Problem(f"{path}:3", "field 'id' is the document's id: expected a string or a whole number, found null")]
    assert sources.total([str(path)]) == 3
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "c.parquet").touch()
    with pytest.raises(InvalidRequest, match=r"pip install 'mlxcel\[parquet\]'"):
        read(tmp_path / "c.parquet")


def test_a_directory_of_texts(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.txt").write_text("no")
    (folder / "b" / "two.md").write_text("# Two\n", "utf-8-sig")
    (folder / "one.txt").write_text("one")
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    (folder / "picture.png").write_bytes(b"no")
    assert read(folder) == [
        Problem(str(folder / "bad.txt"), "not UTF-8: byte 0xe9 at byte 4", "bad.txt"),
        Record(str(folder / "one.txt"), "one.txt", "one", {}),
        Record(str(folder / "b/two.md"), "b/two.md", "# Two", {})]
    assert sources.total([str(folder), str(folder / "one.txt")]) == 4
    assert read(folder / "b" / "two.md")[0] == Record(str(folder / "b/two.md"), "two.md", "# Two", {})


def test_a_file_name_that_is_not_unicode_is_a_problem(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.txt")).write_text("x")
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    (problem,) = read(tmp_path)
    assert isinstance(problem, Problem) and "lone surrogate" in problem.message
    problem.position.encode()


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"id": 1, "text": "x"}\nbad\n')))
    assert read("-")[0] == Record("stdin:1", "1", "x", {}) and sources.total(["-"]) is None


@pytest.mark.parametrize("name", ["absent.jsonl", "picture.png", "corpus.json"])
def test_what_cannot_be_read_at_all_is_told_before_anything_runs(tmp_path: Path, name: str) -> None:
    if not name.startswith("absent"):
        (tmp_path / name).touch()
    with pytest.raises(InvalidRequest, match=name):
        sources.total([str(tmp_path / name)])


def test_a_broken_gzip_is_told_and_not_traced(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": 1, "text": "x"}\n' * 9999)[:-20])
    with pytest.raises(InvalidRequest, match=r"c\.jsonl\.gz ends early"):
        read(path)
    whole = bytearray(gzip.compress(os.urandom(9999)))
    whole[100:200] = bytes(100)
    path.write_bytes(whole)
    with pytest.raises(InvalidRequest, match=r"c\.jsonl\.gz cannot be read"):
        read(path)


def test_a_folder_that_may_not_be_read_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)
    monkeypatch.setattr(os, "scandir", refuse)
    assert read(tmp_path)[1:] == [Problem(f"{tmp_path / 'closed'}", "cannot be read: Permission denied")]


def test_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path, *({"_id": i, "text": "x" * 50} for i in range(40_000)))
    assert sources.total([str(path)]) == 40_000
    monkeypatch.setattr(sources, "COUNT_BYTES", 1000)
    assert sources.total([str(path)]) == pytest.approx(40_000, rel=0.02)


@given(st.text(st.characters(), max_size=20))
def test_storable_text_is_storable_and_keeps_its_length(text: str) -> None:
    kept = storable.text(text)
    assert len(kept) == len(text) and "\0" not in kept and kept.encode().decode() == kept and storable.text(kept) == kept


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5)


@settings(suppress_health_check=[HealthCheck.too_slow])      # drawing Unicode is slow at first
@given(st.dictionaries(st.text(st.characters(), max_size=5), SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(
    st.text(st.characters(), max_size=5), SCALARS, max_size=3), max_size=4))
def test_any_metadata_becomes_json_that_stays_as_it_is(value: dict[str, Any]) -> None:
    cleaned = storable.metadata(value)
    assert "\\u0000" not in json.dumps(cleaned, allow_nan=False) and storable.metadata(cleaned) == cleaned


def test_a_text_field_that_no_document_has_is_told_at_the_end() -> None:
    raws = [sources.Raw(f"f:{i}", {"_id": str(i), "title": "a", **({"note": "b"} if i == 2 else {})}) for i in range(3)]
    *records, problem = sources.documents(raws, text_fields=("title", "txet"))
    assert len(records) == 3 and isinstance(problem, Problem) and "'txet'" in problem.message
    assert all(isinstance(record, Record) for record in sources.documents(raws, text_fields=("title", "note")))
    assert list(sources.documents([], text_fields=("title", "txet"))) == []
