"""Documents from files: JSONL, CSV, Parquet, directories of text and Markdown, standard input. Knows nothing of Django or models.

Every reader yields raw records with their position, `file:line`, and a `Problem` where a line cannot be read; only a file that cannot be
read at all raises. `documents()` turns raw records into `Record`s by a field mapping.
"""
from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import orjson

from inference.errors import InvalidRequest

from . import storable

LINE_BYTES = 64 * 1024 * 1024      # a longer line or file is reported, not read
ID_CHARACTERS = 512                # as the column is wide
TEXT_FILES = (".txt", ".md", ".markdown")
RECORD_FILES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
RECORDS, STDIN = ".jsonl, .ndjson, .csv, .tsv (each also .gz), .parquet", "or - for JSONL on standard input"
UNSEEN = ("Zs", "Zl", "Zp", "Cc", "Cf")
FILLERS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"        # by their category letters, marks or symbols
COUNT_BYTES = 256 * 1024 * 1024    # larger files are not counted but judged by their first mebibyte


@dataclass(frozen=True, slots=True)
class Record:
    position: str
    id: str
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def blank(self) -> bool:
        """Whether no character of the text can be seen: white space, control and format characters (zero-width spaces, byte order marks,
        soft hyphens, ...) and Unicode's fillers."""
        return all(unicodedata.category(character) in UNSEEN or character in FILLERS for character in self.text)


@dataclass(frozen=True, slots=True)
class Problem:
    """`known` is the document's id where the line told it."""

    position: str
    message: str
    known: str | None = None


@dataclass(frozen=True, slots=True)
class Raw:
    position: str
    fields: Mapping[str, Any]


def documents(raws: Iterable[Raw | Problem], id_field: str = "", text_fields: Iterable[str] = ("text",)) -> Iterator[Record | Problem]:
    """Ids from `id_field` (empty: `_id`, else `id`); texts from the text fields, joined by a space and stripped; the rest is metadata.

    A text field that no document has, beside others that they have, is a problem at the end: a misspelt name would lose text quietly.
    """
    text_fields = tuple(text_fields)
    seen: dict[str, str] = {}
    absent = set(text_fields)
    for raw in raws:
        if isinstance(raw, Problem):
            yield raw
            continue
        known: str | None = None
        try:
            key = id_field or ("_id" if "_id" in raw.fields else "id")
            known = _id(raw.fields, key)
            if known in seen:
                raise ValueError(f"id {known!r} was already seen at {seen[known]}; the first one counts")
            seen[known] = raw.position
            rest = {name: value for name, value in raw.fields.items() if name != key and name not in text_fields}
            text = _text(raw.fields, text_fields)
            absent.difference_update(raw.fields)
            yield Record(raw.position, known, text, storable.metadata(rest))
        except ValueError as error:
            yield Problem(raw.position, str(error), known)
    if len(absent) < len(text_fields):
        for name in text_fields:
            if name in absent:
                yield Problem("all sources", f"no document has the field {name!r}, which belongs to the text (choose with --text-field)")


def read(sources: Iterable[str]) -> Iterator[Raw | Problem]:
    """All records of all sources, in order."""
    for source in sources:
        yield from _reader(source)(source)


def total(sources: Iterable[str]) -> int | None:
    """About how many documents the sources hold; None where that cannot be told. Raises InvalidRequest for what cannot be read."""
    counts = []
    for source in sources:
        try:
            counts.append(_count(source))
        except OSError as error:
            _unreadable(source, error)
    return None if None in counts else sum(count for count in counts if count is not None)


def _reader(source: str) -> Any:
    path = Path(source)
    if source == "-":
        return _jsonl
    if path.is_dir():
        return _directory
    if not path.exists():
        raise InvalidRequest(f"{source} does not exist", param="source")
    kind = kind_of(path)
    readers = {".jsonl": _jsonl, ".ndjson": _jsonl, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet} | dict.fromkeys(TEXT_FILES, _file)
    if kind not in readers:
        raise InvalidRequest(
            f"{source} is not of a kind that can be read; expected {RECORDS}, .txt, .md, a directory of .txt and .md files, {STDIN}",
            param="source")
    return readers[kind]


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


@contextmanager
def _open(source: str) -> Iterator[IO[bytes]]:
    if source == "-":
        yield sys.stdin.buffer
        return
    opener: Any = gzip.open if source.lower().endswith(".gz") else open
    try:
        with opener(source, "rb") as stream:
            yield stream
    except EOFError as error:
        raise InvalidRequest(f"{source} ends early: its compressed data breaks off. Fetch or copy it once more", param="source") from error
    except (OSError, zlib.error) as error:
        _unreadable(source, error)


def _unreadable(source: str, error: Exception) -> NoReturn:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    raise InvalidRequest(f"{source} cannot be read: {said}", param="source") from error


# --- JSON lines -----------------------------------------------------------------------------------------------------------------------

def _jsonl(source: str) -> Iterator[Raw | Problem]:
    name = "stdin" if source == "-" else source
    with _open(source) as stream:
        number = 0
        while line := stream.readline(LINE_BYTES + 1):
            number += 1
            position = f"{name}:{number}"
            if len(line) > LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(LINE_BYTES)
                yield Problem(position, f"the line is longer than {LINE_BYTES >> 20} MiB")
                continue
            if number == 1:
                if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise InvalidRequest(f"{name} is UTF-16; expected UTF-8", param="source")
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _object(position, line)


def _object(position: str, line: bytes) -> Raw | Problem:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        try:    # orjson refuses escaped lone surrogates, which are harmless here; every other error is one for both
            value = json.loads(line.decode(), parse_constant=_no_constant)
        except UnicodeDecodeError as wrong:
            return Problem(position, f"not UTF-8: byte 0x{wrong.object[wrong.start]:02x} at byte {wrong.start + 1} of the line")
        except RecursionError:
            return Problem(position, "JSON is nested too deeply")
        except json.JSONDecodeError as wrong:
            return Problem(position, f"not JSON: {wrong.msg} at character {wrong.pos + 1}")
        except ValueError as wrong:
            return Problem(position, f"not JSON: {wrong or error}")
    if not isinstance(value, dict):
        return Problem(position, f"expected a JSON object, found {_json_type(value)}")
    return Raw(position, value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


# --- CSV ------------------------------------------------------------------------------------------------------------------------------

def _csv(source: str) -> Iterator[Raw | Problem]:
    csv.field_size_limit(LINE_BYTES)
    delimiter = "\t" if kind_of(Path(source)) == ".tsv" else ","
    with _open(source) as stream:
        # surrogateescape keeps the row count right where a byte is not UTF-8; the row is reported below. Strict: a quote that is not
        # closed would make one long cell of the rows after it, and one within a cell would be guessed at.
        rows = csv.reader(
            io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline=""), delimiter=delimiter, strict=True)
        try:
            header = next(rows, [])
        except csv.Error as error:
            _unreadable(source, error)
        if len(set(header)) != len(header) or not any(header):
            raise InvalidRequest(f"{source}: the first line must name the columns, each once; found {header}", param="source")
        while True:
            first = rows.line_num + 1
            position = f"{source}:{first}"
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Problem(position, _not_csv(error, first, rows.line_num))
                continue
            if not row:
                continue
            if len(row) != len(header):
                yield Problem(position, f"expected {len(header)} columns, found {len(row)}")
            elif any(storable.UNSTORABLE.search(cell.replace("\x00", "")) for cell in row):
                yield Problem(position, "not UTF-8")
            else:
                yield Raw(position, dict(zip(header, row, strict=True)))


def _not_csv(error: csv.Error, first: int, last: int) -> str:
    said = "a quote is opened and never closed" if "unexpected end of data" in str(error) else str(error)
    return f"not CSV: {said}" + (f"; lines {first} to {last} are taken for one row and left out" if last > first else "")


# --- Parquet --------------------------------------------------------------------------------------------------------------------------

def _parquet(source: str) -> Iterator[Raw | Problem]:
    number = 0
    file = _parquet_file(source)
    try:
        for batch in file.iter_batches(batch_size=1000):
            for fields in batch.to_pylist():
                number += 1
                yield Raw(f"{source}:{number}", fields)
    except OSError as error:
        _unreadable(source, error)
    finally:
        file.close()


def _parquet_file(source: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidRequest(f"{source}: Parquet needs pyarrow; install it with: pip install 'mlxcel[parquet]' "
                             "(in a clone: .venv/bin/pip install -e '.[parquet]')", param="source") from None
    try:
        return pyarrow.parquet.ParquetFile(source)
    except (OSError, pyarrow.ArrowException) as error:
        _unreadable(source, error)


# --- directories and single text files ------------------------------------------------------------------------------------------------

def _directory(source: str) -> Iterator[Raw | Problem]:
    closed: list[OSError] = []
    for path in _text_files(Path(source), closed.append):
        yield _document(path, path.relative_to(source).as_posix())
    for error in closed:
        yield Problem(storable.text(str(error.filename)), f"cannot be read: {error.strerror}")


def _file(source: str) -> Iterator[Raw | Problem]:
    yield _document(Path(source), Path(source).name)


def _text_files(folder: Path, failed: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    for here, folders, names in os.walk(folder, onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(TEXT_FILES) and not name.startswith("."):
                yield Path(here, name)


def _document(path: Path, id: str) -> Raw | Problem:
    position = storable.text(str(path))
    try:
        with path.open("rb") as stream:
            data = stream.read(LINE_BYTES + 1)
        if len(data) > LINE_BYTES:
            return Problem(position, f"the file is larger than {LINE_BYTES >> 20} MiB")
        return Raw(position, {"_id": id, "text": data.decode("utf-8-sig")})
    except UnicodeDecodeError as error:
        return Problem(position, f"not UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start + 1}", _storable_id(id))
    except OSError as error:
        return Problem(position, f"cannot be read: {error.strerror}", _storable_id(id))


# --- fields ---------------------------------------------------------------------------------------------------------------------------

def _id(fields: Mapping[str, Any], key: str) -> str:
    if key not in fields:
        raise ValueError(f"no field {key!r}; found {_names(fields)}")
    value = fields[key]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"field {key!r} is the document's id: expected a string or a whole number, found {_json_type(value)}")
    id = str(value)
    if not id.strip():
        raise ValueError(f"field {key!r} is the document's id and is empty")
    if len(id) > ID_CHARACTERS:
        raise ValueError(f"the id has {len(id)} characters; at most {ID_CHARACTERS} can be stored")
    if _storable_id(id) is None:
        raise ValueError(f"the id {id!r} holds a NUL or a lone surrogate, which cannot be stored")
    return id


def _storable_id(id: str) -> str | None:
    return None if storable.UNSTORABLE.search(id) else id


def _text(fields: Mapping[str, Any], names: tuple[str, ...]) -> str:
    if not any(name in fields for name in names):
        raise ValueError(f"no field {' or '.join(map(repr, names))} to embed; found {_names(fields)} (choose with --text-field)")
    parts = []
    for name in names:
        value = fields.get(name)
        if value is None:
            value = ""
        elif isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        elif not isinstance(value, str):
            raise ValueError(f"field {name!r}: expected a text, found {_json_type(value)}")
        parts.append(value)
    return storable.text(" ".join(parts).strip())


def _names(fields: Mapping[str, Any]) -> str:
    names = [repr(name) for name in fields]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "no fields"


def _json_type(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


# --- counting -------------------------------------------------------------------------------------------------------------------------

def _count(source: str) -> int | None:
    reader = _reader(source)
    if source == "-" or source.lower().endswith(".gz"):
        return None
    if reader is _file:
        return 1
    if reader is _directory:
        return sum(1 for _ in _text_files(Path(source)))
    if reader is _parquet:
        with _parquet_file(source) as file:
            return int(file.metadata.num_rows)
    return max(_lines(Path(source)) - (reader is _csv), 0)


def _lines(path: Path) -> int:
    size = path.stat().st_size
    with path.open("rb") as stream:
        if size > COUNT_BYTES:
            sample = stream.read(1 << 20)
            return size * (sample.count(b"\n") or 1) // len(sample)
        lines, last = 0, b"\n"
        while block := stream.read(1 << 20):
            lines, last = lines + block.count(b"\n"), block[-1:]
        return lines + (last != b"\n")
