"""The fields of a request body: their types, what is wrong with them in words, and the model they name. Pure Python.

Every kind of request reads its body with these. A parser takes a JSON value and returns the one to use, or raises ValueError with what was
expected; `null` is the same as absent.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .client import InferenceClient
from .config import unserved
from .errors import InvalidRequest, wrong_model
from .wire import Kind, ModelSpec

Parser = Callable[[Any], Any]


def string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def whole(least: int, below: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if type(value) is not int or not least <= value < below:
            outside = f" from {least} to {below - 1}" if type(value) is int else ""
            raise ValueError("a whole number of at least 0" if least == 0 else f"a whole number{outside}")
        return value
    return parse


count, signed = whole(0, 2**64), whole(-2**31, 2**31)


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an object")
    return value


def anything(value: Any) -> Any:
    return value


def read(body: object, known: Mapping[str, Parser], *, strict: bool) -> dict[str, Any]:
    """Known fields of the right type, in the table's order; null stays None. Unknown ones are dropped, or refused where `strict`."""
    if not isinstance(body, dict):
        raise malformed(f"expected an object, got {kind(body)}")
    if strict and (unknown := [name for name in body if name not in known]):
        raise malformed(f"unknown field `{short(unknown[0])}`; this server takes {', '.join(known)}", unknown[0])
    fields = {}
    for name, parse in known.items():
        if name in body:
            try:
                fields[name] = None if body[name] is None else parse(body[name])
            except ValueError as error:
                raise malformed(f"`{name}` must be {error}, got {kind(body[name])}", name) from None
    return fields


def first(fields: Mapping[str, Any], *names: str) -> tuple[str, Any]:
    """The first of these fields that is there, and its value; (names[0], None) when none is."""
    return next(((name, fields[name]) for name in names if fields.get(name) is not None), (names[0], None))


def malformed(detail: str, param: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"invalid request body: {detail}", param=param)


def kind(value: object) -> str:
    """A JSON value as messages name it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {value!r}"
        case str():
            return f'the string "{short(value)}"'
        case list():
            return "a list"
    return "an object"


def short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def served(client: InferenceClient, kind: Kind, name: str | None, *, accept_any: bool, param: str = "model") -> ModelSpec:
    """The model that answers to `name`, the first of its kind where there is no name or `accept_any`.

    Raises NotLoaded (501) where none of this kind is served, and InvalidRequest for a name that none answers to; it stands in `param`.
    """
    if (model := client.describe(kind, name)) is not None:
        return model
    if (default := client.describe(kind)) is None:
        raise unserved(kind)
    if accept_any:
        return default
    error = wrong_model(kind, name or "", [model.id for model in client.models() if model.kind == kind] or [default.id])
    error.param = param
    raise error
