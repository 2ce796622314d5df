"""Late interaction (ColBERT) on any text family: the trunk's rows, projected one by one; queries and documents are read differently.

Three layouts, told apart by the checkpoint's files: sentence-transformers' own (a MultiVectorMask module), PyLate's (settings in
config_sentence_transformers.json) and colbert-ir's (artifact.metadata, projection in the trunk's file). Reference:
sentence-transformers `MultiVectorEncoder`, defaults included.
"""
from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .. import ops
from ..batching import Batch
from ..checkpoint import LENGTH_CAP, Checkpoint, read_json
from ..errors import CheckpointError
from ..ops import Tensor
from ..ops.safetensors import read_header
from ..tokenizer import Encoded, Tokenizer
from ..wire import InputType
from . import dense

PLAIN, UNSEEN, UNSCORED = 0, 1, 2
"""Marks of a row: as any other; attended to by nobody; computed and attended to, but no part of the result."""
PROJECTION = "linear.weight"                       # colbert-ir's, in the trunk's file
PROMPTS = ("query", "document", "passage", "corpus")
"""Names of prompts that belong to a side."""
EXPANSION = 32                                     # tokens of an expanded query where the files name no number
T = TypeVar("T")


@dataclass(frozen=True)
class Expansion:
    """Queries shorter than `length` tokens are filled with `token` up to it; the filled rows are part of the result."""

    length: int
    token: int
    seen: bool                                     # whether the text's own rows attend to the filled ones
    exact: bool                                    # longer queries are cut to `length`


@dataclass(frozen=True)
class Side:
    """How queries, or documents, are read. `prefix` stands before every text: a marker, which is one token, or a prompt."""

    prefix: str
    limit: int
    skipped: frozenset[int]
    expansion: Expansion | None = None

    def read(self, texts: Sequence[str], tokenizer: Tokenizer) -> list[Encoded]:
        """ids and marks of each text, [2, L] int32, special and filled tokens included."""
        return [self.marked(encoded, expand=True) for encoded in tokenizer.encode([self.prefix + text for text in texts], self.limit)]

    def marked(self, encoded: Encoded, expand: bool = False) -> Encoded:
        ids = encoded.ids
        marks = np.where(np.isin(ids, list(self.skipped)), UNSCORED, PLAIN).astype(np.int32)
        if expand and self.expansion and (missing := self.expansion.length - len(ids)) > 0:
            ids = np.pad(ids, (0, missing), constant_values=self.expansion.token)
            marks = np.pad(marks, (0, missing), constant_values=PLAIN if self.expansion.seen else UNSEEN)
        return Encoded(np.stack([ids, marks]), encoded.length, encoded.exact)


@dataclass(frozen=True)
class LateInteraction:
    query: Side
    document: Side
    modules: tuple[dense.Module, ...]
    normalize: bool

    def side(self, input_type: InputType | None) -> Side:
        return self.query if input_type == "query" else self.document

    @property
    def signature(self) -> str:
        """What makes the vectors of documents beside the weights, canonically."""
        return json.dumps([self.document.prefix, sorted(self.document.skipped), [m.config.out_features for m in self.modules]])


@dataclass(frozen=True)
class _Settings:
    """The three layouts' settings in one form. `markers`: prefixes that are one token, where the tokenizer knows them."""

    query: str = ""
    document: str = ""
    markers: tuple[str, ...] = ()
    query_length: int | None = None
    document_length: int | None = None
    expansion: Mapping[str, Any] | None = None
    skiplist: tuple[str, ...] = ()
    skiplist_tasks: tuple[str, ...] = ("document",)
    normalize: bool = True


def read(checkpoint: Checkpoint, tokenizer: Tokenizer, width: int, limits: Sequence[int]) -> LateInteraction:
    """`width`: of the trunk's rows. `limits`: tokens that no side may exceed. Registers the checkpoint's markers with the tokenizer.

    CheckpointError names what cannot be served as the checkpoint says.
    """
    modules = _projection(checkpoint, width) if checkpoint.colbert_ir else dense.read(checkpoint, width)
    s = _colbert_ir(checkpoint) if checkpoint.colbert_ir else _sentence_transformers(checkpoint)
    for marker in s.markers:
        tokenizer.register(next((m for m in (marker, marker.split(None, 1)[0]) if tokenizer.token_id(m) is not None), None))
    expansion = _expansion(checkpoint, tokenizer, s.expansion)
    skipped = frozenset(token for word in s.skiplist if (token := tokenizer.token_id(word)) is not None)
    longest = min(LENGTH_CAP, *limits)
    usual = min(longest, checkpoint.length_limit)
    query = min(longest, s.query_length) if s.query_length else usual
    if expansion:
        query = expansion.length if expansion.exact else max(query, expansion.length)
        if query > longest:
            raise CheckpointError(f"{checkpoint.root}: queries are expanded to {expansion.length} tokens, over the limit of {longest}")

    def side(task: InputType, limit: int, **more: Any) -> Side:
        return Side(getattr(s, task), limit, skipped if task in s.skiplist_tasks else frozenset(), **more)

    return LateInteraction(side("query", query, expansion=expansion), side("document", min(longest, s.document_length or usual)),
                           modules, s.normalize)


def forward(model: Callable[[Batch], Tensor], chain: dense.Chain, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """ids and marks, [2, L] int32 each -> the rows of each that count, [rows, D] f32, not normalised."""
    marks = np.concatenate([sequence[1] for sequence in sequences])
    hidden = marks == UNSEEN
    batch = Batch.of([sequence[0] for sequence in sequences], hidden=hidden if hidden.any() else None)
    counted = marks != UNSCORED
    x = model(batch)
    rows = ops.numpy(chain(x if counted.all() else ops.rows(x, np.flatnonzero(counted))))
    return np.split(rows, np.cumsum([int((sequence[1] != UNSCORED).sum()) for sequence in sequences])[:-1])


def rename(name: str) -> str:
    """colbert-ir's projection as the first Dense module."""
    return "dense.0.weight" if name == PROJECTION else name


# ---- the layouts

def _projection(checkpoint: Checkpoint, width: int) -> tuple[dense.Module, ...]:
    entries = {name: entry for file in checkpoint.weight_files for name, entry in read_header(file).items()}
    if PROJECTION not in entries:
        raise CheckpointError(f"{checkpoint.root} is a {checkpoint.architecture} without {PROJECTION}, the projection of its rows")
    rows, columns = entries[PROJECTION].shape
    if columns != width:
        raise CheckpointError(f"{PROJECTION} of {checkpoint.root} is [{rows}, {columns}]; the trunk's rows have {width} components")
    return (dense.Module("", dense.Config(columns, rows, False, "Identity")),)


def _colbert_ir(checkpoint: Checkpoint) -> _Settings:
    path = checkpoint.root / "artifact.metadata"
    raw = read_json(path, {})
    if (kind := raw.get("similarity") or "cosine") != "cosine":
        raise CheckpointError(f"{path}: similarity is {kind!r}; expected 'cosine'")
    markers = tuple((_typed(path, raw, name, str) or usual) + " " for name, usual in (
        ("query_token_id", "[unused0]"), ("doc_token_id", "[unused1]")))
    return _Settings(
        query=markers[0], document=markers[1], markers=markers, document_length=_count(path, raw, "doc_maxlen"),
        expansion={"strategy": "fixed", "length": _count(path, raw, "query_maxlen") or EXPANSION,
                   "attend": bool(_typed(path, raw, "attend_to_mask_tokens", bool))},
        skiplist=() if _typed(path, raw, "mask_punctuation", bool) is False else tuple(string.punctuation))


def _sentence_transformers(checkpoint: Checkpoint) -> _Settings:
    """PyLate's flat settings, or a MultiVectorMask module and settings of the Transformer."""
    path = checkpoint.root / "config_sentence_transformers.json"
    raw = read_json(path, {})
    prompts = {k: v for k, v in (raw.get("prompts") or {}).items() if isinstance(v, str)}
    own: dict[str, Any] = {}
    for file in sorted({*checkpoint.root.glob("sentence_*_config.json"), *checkpoint.trunk.glob("sentence_*_config.json")}):
        own |= read_json(file)
    flat = {name: raw[name] for name in ("query_length", "document_length") if raw.get(name) is not None}
    knobs = flat | {name: own[name] for name in ("query_length", "document_length") if own.get(name) is not None}
    expansion, fixed = _typed(path, raw, "query_expansion", dict), "query_expansion" in raw
    if "query_expansion" in own:
        expansion, fixed = _typed(path, own, "query_expansion", dict), True
    if not fixed and any(name in raw for name in (
            "query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens",
            "query_prefix", "document_prefix", "skiplist_words")) and _typed(path, raw, "do_query_expansion", bool) is not False:
        attend = raw.get("attend_to_expansion_tokens", raw.get("attend_to_mask_tokens"))
        expansion = {"strategy": "fixed", "length": _count(path, knobs, "query_length") or EXPANSION, "attend": bool(attend)}
    prefixes = {name: _typed(path, raw, f"{name}_prefix", str) or "" for name in ("query", "document")}
    usual = {"query": prompts.get("query", ""),
             "document": next((prompts[name] for name in PROMPTS[1:] if name in prompts), "")}
    words, tasks, normalize = _list(path, raw, "skiplist_words"), ["document"], True
    if "MultiVectorMask" in checkpoint.modules:
        file = checkpoint.root / checkpoint.module_folders[checkpoint.modules.index("MultiVectorMask")] / "config.json"
        mask = read_json(file, {})
        if mask.get("keep_only_token_ids"):
            raise CheckpointError(f"{file}: keep_only_token_ids is not supported; it is for image tokens")
        words, tasks = _list(file, mask, "skiplist_words") or [], _list(file, mask, "skiplist_tasks") or tasks
        normalize = "Normalize" in checkpoint.modules
    elif words is None:
        words = list(string.punctuation)
    return _Settings(
        **{name: prefix + usual[name].removeprefix(prefix) for name, prefix in prefixes.items()},
        markers=tuple(prefix for prefix in prefixes.values() if prefix.strip()),
        query_length=_count(path, knobs, "query_length"), document_length=_count(path, knobs, "document_length"), expansion=expansion,
        skiplist=tuple(words), skiplist_tasks=tuple(tasks), normalize=normalize)


def _expansion(checkpoint: Checkpoint, tokenizer: Tokenizer, raw: Mapping[str, Any] | None) -> Expansion | None:
    if raw is None:
        return None
    if raw.get("strategy") not in ("fixed", "min"):
        raise CheckpointError(f"{checkpoint.root}: the strategy of query_expansion is {raw.get('strategy')!r}; expected 'fixed' or 'min'")
    length = _count(checkpoint.root, raw, "length")
    if length is None:
        raise CheckpointError(f"{checkpoint.root}: query_expansion names no length; expected a number of tokens")
    name = raw.get("token") or _special(checkpoint, "mask_token") or _special(checkpoint, "eos_token")
    token = tokenizer.token_id(name) if name else None
    if token is None:
        wanted = repr(name) if name else "the mask_token, or else the eos_token, of tokenizer_config.json"
        raise CheckpointError(f"{checkpoint.root}: queries are filled with {wanted}, which the tokenizer does not have; "
                              "name one that it has, or set do_query_expansion to false")
    return Expansion(length, token, bool(raw.get("attend")), raw["strategy"] == "fixed")


def _special(checkpoint: Checkpoint, name: str) -> str | None:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        value = read_json(checkpoint.tokenizer_folder / file, {}).get(name)
        if value := value.get("content") if isinstance(value, dict) else value:
            return str(value)
    return None


def _typed(path: Any, raw: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = raw.get(name)
    if value is not None and not isinstance(value, kind):
        raise CheckpointError(f"{path}: {name} is {value!r}; expected a {kind.__name__}")
    return value


def _count(path: Any, raw: Mapping[str, Any], name: str) -> int | None:
    value = _typed(path, raw, name, int)
    if value is not None and (value is True or value < 1):
        raise CheckpointError(f"{path}: {name} is {value!r}; expected a number of tokens of at least 1")
    return value


def _list(path: Any, raw: Mapping[str, Any], name: str) -> list[str] | None:
    value = raw.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
        raise CheckpointError(f"{path}: {name} is {value!r}; expected a list of strings")
    return value
