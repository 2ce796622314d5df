"""Texts for people: passages marked in the text they were cut from, excerpts around a passage, and sentences."""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..models import Passage

OPEN = 2_400
"""Characters of a long text that stand open; the rest is folded away."""

MOST = 200_000
"""Characters of a text that are sent to the browser at all."""


@dataclass(slots=True)
class Segment:
    """A stretch of text that lies in the same passages from end to end."""

    text: str
    begins: list[Passage] = field(default_factory=list)   # passages whose first character is this segment's
    parts: list[int] = field(default_factory=list)        # of all passages it lies in
    chosen: bool = False

    @property
    def shared(self) -> bool:
        return len(self.parts) > 1


@dataclass(frozen=True, slots=True)
class Marked:
    """A text cut at the edges of its passages: what stands open, and what is folded away before and after."""

    before: list[Segment]
    open: list[Segment]
    after: list[Segment]
    dropped: int         # characters beyond `MOST`

    @property
    def before_length(self) -> int:
        return sum(len(s.text) for s in self.before)

    @property
    def after_length(self) -> int:
        return sum(len(s.text) for s in self.after)


def mark(text: str, passages: Sequence[Passage], chosen: Passage | None) -> Marked:
    """`text` in segments, a stretch around the chosen passage open. With a single passage nothing is marked: all of it is the passage."""
    several = list(passages) if len(passages) > 1 else []
    shown = min(len(text), MOST)
    first, last = 0, shown
    if shown > OPEN * 1.25:
        start, end = (chosen.start, chosen.end) if chosen in several and chosen else (0, 0)
        first = word_start(text, start - 300) if end > OPEN and start < shown else 0
        last = min(word_end(text, max(first + OPEN, end if first else 0)), shown)
    edges = sorted({0, first, last, shown, *(min(edge, shown) for p in several for edge in (p.start, p.end))})
    by_start: dict[int, list[Passage]] = {}
    for passage in several:
        by_start.setdefault(passage.start, []).append(passage)
    marked = Marked([], [], [], len(text) - shown)
    inside: list[Passage] = []
    for start, end in pairwise(edges):
        begins = by_start.get(start, [])
        inside = [p for p in inside if p.end > start] + begins
        segment = Segment(text[start:end], begins, [p.part for p in inside], chosen in inside)
        (marked.before if end <= first else marked.open if end <= last else marked.after).append(segment)
    return marked


def word_end(text: str, at: int, near: int = 60) -> int:
    """The end of the word around `at`; `at` itself where no blank is near."""
    found = _BLANK.search(text, at, at + near)
    return found.start() if found else min(at, len(text)) if at + near < len(text) else len(text)


def word_start(text: str, at: int, near: int = 60) -> int:
    """The beginning of the first word at or after `at`; `at` itself where no blank is near."""
    if at <= 0:
        return 0
    found = _BLANK.search(text, at - 1, at + near)
    return found.end() if found else at


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A passage with a little of what stands around it. `more` is the part of a long passage that is folded away."""

    before: str
    passage: str
    more: str
    after: str
    whole: bool          # the passage is the whole text: marking it would say nothing
    starts_late: bool
    ends_early: bool


def excerpt(text: str, start: int, end: int, *, around: int = 160, most: int = 700) -> Excerpt:
    passage = text[start:end]
    cut = word_end(passage, most) if len(passage) > most * 1.2 else len(passage)
    left, right = min(word_start(text, start - around), start), max(word_end(text, end + around), end)
    return Excerpt(text[left:start], passage[:cut], passage[cut:], text[end:right], not (text[:start].strip() or text[end:].strip()),
                   left > 0, right < len(text))


_BLANK = re.compile(r"\s")
_SENTENCE = re.compile(r"[^\s](?:.*?(?:[.!?][\"'”’)\]]*(?=\s|$)|[。！？…]+|\n\s*\n)|.*)", re.DOTALL)


def sentences(text: str, start: int, end: int, *, most: int = 48) -> list[tuple[int, int]]:
    """Character spans of the sentences in text[start:end]; where there are more than `most`, neighbours are joined."""
    spans = [(m.start(), m.end()) for m in _SENTENCE.finditer(text, start, end)]
    size = -(-len(spans) // most)
    return [(group[0][0], group[-1][1]) for group in (spans[i:i + size] for i in range(0, len(spans), max(size, 1)))]
