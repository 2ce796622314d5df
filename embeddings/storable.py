"""What every database takes. PostgreSQL refuses NUL, UTF-8 has no lone surrogates, JSON no NaN: texts and metadata get U+FFFD or null."""
from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, cast

import orjson

UNSTORABLE = re.compile("[\ud800-\udfff\x00]")
REPLACEMENT = "�"


def text(value: str) -> str:
    """Lone surrogates and NUL become U+FFFD; the length in characters stays."""
    return UNSTORABLE.sub(REPLACEMENT, value)


def metadata(value: dict[str, Any]) -> dict[str, Any]:
    """Plain JSON: strings and keys as `text`, NaN and infinities null, dates and other objects strings. ValueError if nested too deeply."""
    try:
        encoded = orjson.dumps(value, default=str)
        if b"\\u0000" not in encoded:
            return cast(dict[str, Any], orjson.loads(encoded))
    except (orjson.JSONEncodeError, orjson.JSONDecodeError):
        pass
    try:
        return cast(dict[str, Any], _clean(value))
    except RecursionError:
        raise ValueError("metadata is nested too deeply") from None


def same(stored: Any, given: Any) -> bool:
    """Whether metadata that comes from a database is what was given. PostgreSQL keeps the decimal digits of a number: those of
    5.085048049152998e16 come back as a whole number, which is another one than the float."""
    if stored == given:
        return True
    if isinstance(stored, dict) and isinstance(given, dict):
        return stored.keys() == given.keys() and all(same(stored[key], value) for key, value in given.items())
    if isinstance(stored, list) and isinstance(given, list):
        return len(stored) == len(given) and all(map(same, stored, given))
    return isinstance(stored, int) and isinstance(given, float) and stored == Decimal(repr(given))


def _clean(value: Any, depth: int = 0) -> Any:
    if depth > 200:
        raise RecursionError
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {text(str(key)): _clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, depth + 1) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else text(str(value))
