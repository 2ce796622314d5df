"""Metadata filters: which documents a search may find. The same answer on every database, since Python compares, not SQL.

    {"lang": "en"}                        equal; a list in the metadata matches if one of its elements does
    {"lang": ["en", "de"]}                any of
    {"year": {"gte": 1960, "lt": 1970}}   gt, gte, lt, lte between numbers or between strings; ne; in
    {"lang": "en", "year": {"ne": 1958}}  all of

Keys are keys of the metadata, taken literally. A number never equals a string or a boolean. A missing key is null: it
matches null and "ne".
"""
from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import numpy as np
import orjson
from django.db.models import TextField
from django.db.models.functions import Cast
from numpy.typing import NDArray

from inference.errors import InvalidRequest

from .models import Collection, Document

Metadata = Mapping[str, Any]
Predicate = Callable[[Metadata], bool]

ORDERS: dict[str, Callable[[Any, Any], bool]] = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}
OPERATORS = ("gte", "gt", "lte", "lt", "ne", "in")
REMEMBERED = 64      # filters whose answer is kept until the collection changes

_lock = Lock()
_answers: OrderedDict[tuple[str, int, bytes], NDArray[np.int64]] = OrderedDict()


def parse(filter: object) -> Predicate:
    """The filter as a function of a document's metadata. Raises InvalidRequest naming the key, what was found and what is accepted."""
    if not isinstance(filter, Mapping):
        raise InvalidRequest(f"filter: expected an object of metadata keys, found {_shown(filter)}", param="filter")
    tests = [(key, _condition(key, condition)) for key, condition in filter.items()]
    return lambda metadata: all(test(metadata.get(key)) for key, test in tests)


def matching(collection: Collection, generation: int, filter: Mapping[str, Any]) -> NDArray[np.int64]:
    """Ids of the collection's documents that pass, ascending. `generation` is the collection's: an answer is kept until it grows."""
    predicate = parse(filter)
    key = (str(collection.token), generation, orjson.dumps(filter, option=orjson.OPT_SORT_KEYS))
    with _lock:
        if key in _answers:
            _answers.move_to_end(key)
            return _answers[key]
    rows = Document.objects.filter(collection=collection).order_by("pk").values_list("pk", Cast("metadata", TextField()))
    found = np.fromiter((pk for pk, text in rows.iterator(chunk_size=2000) if predicate(orjson.loads(text))), np.int64)
    with _lock:
        _answers[key] = found
        while len(_answers) > REMEMBERED:
            _answers.popitem(last=False)
    return found


def _condition(key: str, condition: object) -> Callable[[Any], bool]:
    if isinstance(condition, Mapping):
        unknown = [name for name in condition if name not in OPERATORS]
        if unknown or not condition:
            raise InvalidRequest(f"filter: {key!r} has {_shown(unknown[0]) if unknown else 'no operator'}; expected {', '.join(OPERATORS)}",
                                 param="filter")
        tests = [_operator(key, name, value) for name, value in condition.items()]
        return lambda value: all(test(value) for test in tests)
    return _any_of(key, condition if isinstance(condition, list | tuple) else [condition])


def _operator(key: str, name: str, operand: object) -> Callable[[Any], bool]:
    if name == "in":
        if not isinstance(operand, list | tuple):
            raise InvalidRequest(f"filter: {key!r}: \"in\" takes a list, found {_shown(operand)}", param="filter")
        return _any_of(key, operand)
    if name == "ne":
        equal = _any_of(key, [operand])
        return lambda value: not equal(value)
    kind = _order_kind(operand)
    if kind is None:
        raise InvalidRequest(f"filter: {key!r}: {name!r} compares with a number or a string, found {_shown(operand)}", param="filter")
    order = ORDERS[name]
    return lambda value: any(_order_kind(item) == kind and order(item, operand) for item in _items(value))


def _any_of(key: str, operands: list[Any] | tuple[Any, ...]) -> Callable[[Any], bool]:
    for operand in operands:
        if operand is not None and not isinstance(operand, str | int | float):
            raise InvalidRequest(
                f"filter: {key!r} is compared with a string, number, boolean or null, found {_shown(operand)}", param="filter")
    wanted = {(_equality_kind(operand), operand) for operand in operands}
    return lambda value: any((_equality_kind(item), item) in wanted for item in _items(value))


def _items(value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if item is None or isinstance(item, str | int | float)]


def _equality_kind(value: Any) -> str:
    return "boolean" if isinstance(value, bool) else "number" if isinstance(value, int | float) else type(value).__name__


def _order_kind(value: Any) -> str | None:
    kind = _equality_kind(value)
    return kind if kind in ("number", "str") else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
