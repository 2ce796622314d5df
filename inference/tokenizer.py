"""Text to token ids, as the checkpoint's tokenizer.json says, minus the padding and truncation baked into it.

The limit of a checkpoint stands in other files (all-MiniLM-L6-v2: 256, while its tokenizer.json truncates at 128 and pads to 128).
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers

from .checkpoint import read_json
from .errors import CheckpointError
from .wire import Span

# Tokenizers read all of a text before anything is cut, and 1 MB without spaces takes 14 s. Texts are therefore cut in characters
# first: at LEAST or LIKELY per token, and where that turned out to be too few tokens, once more at MOST.
LEAST, LIKELY, MOST = 2_000, 16, 64
BLOCK = 20_000                                     # characters tokenised at a time when a text is split into passages


@dataclass(frozen=True, slots=True)
class Encoded:
    """ids [L] int32, special tokens included, or [2, L] with type ids. `length`: of the uncut text; if not `exact`, at least that."""

    ids: np.ndarray
    length: int
    exact: bool = True

    @property
    def truncated(self) -> bool:
        return self.length > self.ids.shape[-1]


def clean(text: str) -> str:
    """Lone surrogates, which are no characters, become U+FFFD; paired ones the character they stand for."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _encoded(ids: np.ndarray | list[int] | list[list[int]], length: int, limit: int, exact: bool) -> Encoded:
    """A text cut in characters is longer than what was tokenised, even where those tokens fit."""
    return Encoded(np.array(ids, np.int32), length if exact else max(length, limit + 1), exact)


def _longest_first(left: int, right: int, budget: int) -> tuple[int, int]:
    """How much of two sides stays within `budget`: the shorter one whole if it fits beside as much of the other, else half each."""
    if left + right <= budget:
        return left, right
    short = min(left, right, budget // 2)
    return (short, budget - short) if left <= right else (budget - short, short)


class Tokenizer:
    """Thread-safe. Text that spells a special token is that token, as in the reference tokenizers."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; save one with transformers' `AutoTokenizer.from_pretrained(...).save_pretrained(...)`")
        read_json(path)                            # names git-lfs pointers and broken files as every other side file does
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")      # callers are threads already
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:                 # the Rust side raises bare Exception
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.specials: int = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        self.pair_specials: int = self._tokenizer.num_special_tokens_to_add(is_pair=True)

    def token_id(self, token: str) -> int | None:
        """None for what is no single token of the vocabulary."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def register(self, token: str | None) -> None:
        """From now on a text that spells this token of the vocabulary is that token; before any text is read. None: nothing."""
        if token is not None and self._tokenizer.encode(token, add_special_tokens=False).tokens != [token]:
            self._tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])

    def encode(self, texts: Sequence[str], limit: int) -> list[Encoded]:
        """At most `limit` tokens each: cut on the right, keeping the special tokens that the tokenizer appends."""
        likely = max(LEAST, LIKELY * limit)
        texts = [clean(text) for text in texts]
        encodings = iter(self._tokenizer.encode_batch_fast([text for text in texts if len(text) <= likely]))
        return [self._shorten(next(encodings), limit) if len(text) <= likely else self._encode_long(text, limit, likely) for text in texts]

    def _encode_long(self, text: str, limit: int, likely: int) -> Encoded:
        for characters in (likely, max(LEAST, MOST * limit)):
            encoding = self._tokenizer.encode(text[:characters])
            words = [word for word in encoding.word_ids if word is not None]
            # The last word may have lost its tail; it must lie beyond the limit, or the cut changed what the model sees.
            if len(text) <= characters or sum(word != words[-1] for word in words) >= limit:
                break
        return self._shorten(encoding, limit, exact=len(text) <= characters)

    def pairs(self, first: str, seconds: Sequence[str], limit: int) -> list[Encoded]:
        """`first` with each of `seconds` in the tokenizer's pair template: ids and type ids, [2, L] int32.

        Over `limit`, tokens go from the end of whichever side is longer, as transformers' `longest_first`; special tokens stay, and
        `limit` has to leave room beside them.
        """
        most = max(LEAST, MOST * limit)
        budget = limit - self.pair_specials
        encodings = self._tokenizer.encode_batch([clean(text)[:most] for text in (first, *seconds)], add_special_tokens=False)
        cut = [len(text) > most for text in (first, *seconds)]
        pairs = []
        for second, second_cut in zip(encodings[1:], cut[1:], strict=True):
            left, right = _longest_first(len(encodings[0]), len(second), budget)
            short = tokenizers.Encoding.merge([encodings[0]], growing_offsets=False)              # a copy: truncate works in place
            short.truncate(left)
            length = len(encodings[0]) + len(second) + limit - budget
            second.truncate(right)
            pair = self._tokenizer.post_process(short, second)
            pairs.append(_encoded([pair.ids, pair.type_ids], length, limit, exact=not (cut[0] or second_cut)))
        return pairs

    def pieces(self, texts: Sequence[str], limit: int) -> list[Encoded]:
        """Texts without special tokens, the first `limit` tokens of each."""
        most = max(LEAST, MOST * limit)
        encodings = self._tokenizer.encode_batch_fast([clean(text)[:most] for text in texts], add_special_tokens=False)
        return [_encoded(encoding.ids[:limit], len(encoding), limit, exact=len(text) <= most)
                for encoding, text in zip(encodings, texts, strict=True)]

    @staticmethod
    def _shorten(encoding: tokenizers.Encoding, limit: int, exact: bool = True) -> Encoded:
        ids = np.array(encoding.ids, np.int32)
        length = len(ids)
        if length > limit:
            mask = np.array(encoding.special_tokens_mask)
            tail = min(int(np.argmin(mask[::-1])) if not mask.all() else length, limit)
            ids = np.concatenate([ids[:limit - tail], ids[length - tail:]])
        return _encoded(ids, length, limit, exact)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of whole texts, special ones included."""
        return [len(encoding) for encoding in self._tokenizer.encode_batch_fast([clean(text) for text in texts])]

    def split(self, text: str, tokens: int, overlap: int, prompt: str = "") -> list[Span]:
        """Passages that cover `text`, each of at most `tokens` tokens with `prompt` and special tokens, cut between words where
        words are shorter than a passage; neighbours share about `overlap` tokens."""
        room = tokens - self.count([prompt])[0]
        if room < 1:
            raise ValueError(f"passages of {tokens} tokens leave no room beside the prompt and special tokens ({tokens - room})")
        if not 0 <= overlap < room:
            raise ValueError(f"an overlap of {overlap} tokens does not fit passages with room for {room}")
        text = clean(text)
        edges, starts = self._words(text)
        spans: list[Span] = []
        first = 0
        while first < len(edges):
            last = self._cut(starts, first, min(first + room, len(edges)))
            span, last = self._fit(text, edges, starts, first, last, tokens, prompt)
            spans.append(span)
            if last == len(edges):
                break
            back = last - overlap
            while back > first and not starts[back]:
                back -= 1
            first = back if back > first else last
        return spans

    def _words(self, text: str) -> tuple[list[tuple[int, int]], list[bool]]:
        """Character edges of every token of `text`, and whether the token begins a word."""
        cuts = [0]
        while cuts[-1] < len(text):
            end = cuts[-1] + BLOCK
            space = max(text.rfind(" ", cuts[-1] + 1, end), text.rfind("\n", cuts[-1] + 1, end)) if end < len(text) else -1
            cuts.append(min(space if space > 0 else end, len(text)))
        edges: list[tuple[int, int]] = []
        starts: list[bool] = []
        blocks = [text[a:b] for a, b in pairwise(cuts)]
        for offset, encoding in zip(cuts, self._tokenizer.encode_batch(blocks, add_special_tokens=False), strict=False):
            previous = None
            for (start, end), word in zip(encoding.offsets, encoding.word_ids, strict=True):
                edges.append((offset + start, offset + end))
                starts.append(word is None or word != previous)
                previous = word
        return edges, starts

    @staticmethod
    def _cut(starts: list[bool], first: int, last: int) -> int:
        """The last word boundary in (first, last], or `last` where a single word fills the passage."""
        cut = last
        while first < cut < len(starts) and not starts[cut]:
            cut -= 1
        return cut if cut > first else last

    def _fit(self, text: str, edges: list[tuple[int, int]], starts: list[bool], first: int, last: int, tokens: int,
             prompt: str) -> tuple[Span, int]:
        """A piece on its own can tokenise into a few more tokens than it was within the text; it is then made shorter."""
        while True:
            start, end = edges[first][0], edges[last - 1][1]
            count = self.count([prompt + text[start:end]])[0]
            if count <= tokens or last - first <= 1:
                return Span(start, end, min(count, tokens)), last
            last = self._cut(starts, first, max(last - (count - tokens), first + 1))
