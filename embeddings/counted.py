"""Counts of things, as a person reads them."""
from __future__ import annotations


def counted(count: int, thing: str, things: str = "") -> str:
    """`1 document`, `2,000 documents`; `things` where the plural is not made with an s."""
    return f"{count:,} {thing if count == 1 else things or f'{thing}s'}"
