"""What a pack is: token ids laid end to end and the segments they fall into. Plain numpy; backends keep what they derive beside it.

T counts all real tokens of a pack, B its segments. Nothing here pads, and nothing here knows a backend.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .errors import CheckpointError

Ids = Sequence[int] | np.ndarray


class Memo:
    """Things derived once per pack (index arrays, masks, device copies of a table), kept on what they derive from.

    Not locked: a pack belongs to the one thread that runs it.
    """

    def memo(self, key: Hashable, build: Callable[[], Any]) -> Any:
        kept: dict[Hashable, Any] = self.__dict__.setdefault("_memo", {})
        if key not in kept:
            kept[key] = build()
        return kept[key]


@dataclass(eq=False)
class Segments(Memo):
    """Which rows belong together for attention and pooling: sequences of a batch, windows of an image, frames.

    lengths [B]: rows of each segment, all at least 1.
    parent  [B]: the segment whose rows stand before this one's keys (a shared prefix), -1 for none. One level deep, and
                 exact for causal models only: a prefix does not see what follows it.
    hidden  [T] bool: rows that are computed but that nobody attends to.
    """

    lengths: np.ndarray
    parent: np.ndarray | None = None
    hidden: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.lengths = np.asarray(self.lengths, np.int32)
        if self.lengths.ndim != 1 or not len(self.lengths) or self.lengths.min() < 1:
            raise ValueError(f"segment lengths must be a list of numbers that are at least 1, not {self.lengths.tolist()}")
        if self.parent is not None:
            self.parent = np.asarray(self.parent, np.int32)
            if self.parent.shape != self.lengths.shape:
                raise ValueError(f"{len(self.lengths)} segments have {self.parent.size} parents")
            named = self.parent[self.parent >= 0]
            if self.parent.max() >= len(self.lengths) or (self.parent[named] >= 0).any():
                raise ValueError(f"parents {self.parent.tolist()} must name segments that have no parent themselves, or be -1")
        if self.hidden is not None:
            self.hidden = np.asarray(self.hidden, bool)
            if self.hidden.shape != (self.total,):
                raise ValueError(f"{self.hidden.size} hidden flags for {self.total} rows")

    @property
    def count(self) -> int:
        """B"""
        return len(self.lengths)

    @property
    def total(self) -> int:
        """T"""
        return int(self.starts[-1])

    @cached_property
    def unseen(self) -> np.ndarray | None:
        """The indices of hidden rows, ascending; None where there are none."""
        return None if self.hidden is None or not self.hidden.any() else np.flatnonzero(self.hidden)

    @cached_property
    def starts(self) -> np.ndarray:
        """[B + 1] int32: segment b is rows starts[b] to starts[b + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def first(self) -> np.ndarray:
        """[B] the first row of each segment."""
        return self.starts[:-1]

    @property
    def last(self) -> np.ndarray:
        """[B] the last row of each segment."""
        return self.starts[1:] - 1

    @cached_property
    def offsets(self) -> np.ndarray:
        """[B] int32: the position of each segment's first row, which is the length of its parent."""
        if self.parent is None:
            return np.zeros(self.count, np.int32)
        return np.where(self.parent >= 0, self.lengths[self.parent], 0).astype(np.int32)

    @cached_property
    def positions(self) -> np.ndarray:
        """[T] int32: place within the segment, counted on from the parent's end."""
        return np.arange(self.total, dtype=np.int32) - np.repeat(self.first - self.offsets, self.lengths)

    def rows(self, b: int) -> slice:
        """The rows of segment b."""
        return slice(int(self.starts[b]), int(self.starts[b + 1]))

    def keys(self, b: int) -> slice | np.ndarray:
        """The rows whose keys and values segment b may see, in order of position: its parent's, then its own."""
        if self.parent is None or self.parent[b] < 0:
            return self.rows(b)
        prefix = self.rows(int(self.parent[b]))
        return np.concatenate([np.arange(prefix.start, prefix.stop), np.arange(self.starts[b], self.starts[b + 1])])


@dataclass(frozen=True)
class RopeSpec:
    """A kind of rotation. Equal specs share one table per pack.

    dim:   how many of a head's components rotate; fewer than the head's width leaves the rest as they are.
    theta: base of the geometric series of frequencies.
    """

    dim: int
    theta: float

    @classmethod
    def of(cls, dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> RopeSpec:
        """For heads of width `dim`, from config.json. `scaling` is its `rope_scaling` or `rope_parameters`, whose type must be known."""
        scaling = scaling or {}
        kind = scaling.get("rope_type", scaling.get("type")) or "default"
        if kind not in ROPE_TYPES:
            raise CheckpointError(f"rope_type {kind!r} is not implemented; known: {', '.join(ROPE_TYPES)}")
        rotated = int(dim * _number(scaling, "partial_rotary_factor", 1.0))
        return ROPE_TYPES[kind](rotated, _number(scaling, "rope_theta", theta), scaling)

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2 or not self.theta > 0:
            raise CheckpointError(f"a rotation of {self.dim} components with theta {self.theta}: expected an even number and theta > 0")

    def frequencies(self) -> np.ndarray:
        """[dim / 2] float64, radians per position."""
        return self.theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)

    def table(self, segments: Segments) -> Rope:
        """The rotation of every row of a pack."""
        angles = segments.positions[:, None] * self.frequencies()
        return Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


@dataclass(frozen=True)
class DynamicRope(RopeSpec):
    """NTK scaling by length: in a text of n > trained tokens, theta grows by (factor n / trained - factor + 1) ** (dim / (dim - 2)).

    The length is that of each text alone. (transformers keeps the longest seen so far, so that there a text's result depends on
    what ran before it; ours is what a fresh model gives.)
    """

    factor: float
    trained: float

    @classmethod
    def read(cls, dim: int, theta: float, scaling: Mapping[str, Any]) -> DynamicRope:
        """The length it was trained to is the model's, which stands beside the scaling in config.json: the family puts it in."""
        factor, trained = _number(scaling, "factor"), _number(scaling, "max_position_embeddings")
        if factor < 1 or trained < 1 or dim < 4:
            raise CheckpointError(
                f"rope_type 'dynamic' with factor {factor}, max_position_embeddings {trained} and {dim} components: "
                "expected at least 1, 1 and 4")
        return cls(dim, theta, factor, trained)

    def table(self, segments: Segments) -> Rope:
        growth = self.factor * np.maximum(segments.lengths, self.trained) / self.trained - (self.factor - 1)
        theta = self.theta * growth ** (self.dim / (self.dim - 2))                                 # [B]
        frequencies = theta[:, None] ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        angles = segments.positions[:, None] * np.repeat(frequencies, segments.lengths, 0)
        return Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


@dataclass(frozen=True)
class Llama3Rope(RopeSpec):
    """Llama 3.1's: waves longer than `original / low` slow down by `factor`, those shorter than `original / high` stay, a blend between."""

    factor: float
    low: float
    high: float
    original: float

    @classmethod
    def read(cls, dim: int, theta: float, scaling: Mapping[str, Any]) -> Llama3Rope:
        return cls(dim, theta, *(_number(scaling, name) for name in (
            "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")))

    def frequencies(self) -> np.ndarray:
        plain = super().frequencies()
        turns = self.original * plain / (2 * np.pi)                       # full turns within the original length
        kept = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return np.asarray(plain * (kept + (1 - kept) / self.factor))


@dataclass(frozen=True)
class YarnRope(RopeSpec):
    """YaRN: components of more than `fast` turns within the original length stay, those of under `slow` slow down by `factor`, a ramp
    over the component's number between. `attention` multiplies queries and keys alike."""

    factor: float
    original: float
    fast: float
    slow: float
    truncate: bool
    attention: float

    @classmethod
    def read(cls, dim: int, theta: float, scaling: Mapping[str, Any]) -> YarnRope:
        factor = _number(scaling, "factor")

        def gain(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        whole, all_dim = _number(scaling, "mscale", 0.0), _number(scaling, "mscale_all_dim", 0.0)
        attention = gain(whole) / gain(all_dim) if whole and all_dim else gain(1.0)
        return cls(dim, theta, factor, _number(scaling, "original_max_position_embeddings"), _number(scaling, "beta_fast", 32.0),
                   _number(scaling, "beta_slow", 1.0), bool(scaling.get("truncate", True)), _number(scaling, "attention_factor", attention))

    def frequencies(self) -> np.ndarray:
        plain = super().frequencies()
        low, high = (self.dim * math.log(self.original / (turns * 2 * math.pi), self.theta) / 2 for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        slowed = np.clip((np.arange(self.dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
        return np.asarray(plain * (1 - slowed + slowed / self.factor))

    def table(self, segments: Segments) -> Rope:
        rope = super().table(segments)
        return Rope(rope.cos * np.float32(self.attention), rope.sin * np.float32(self.attention))


@dataclass(frozen=True)
class GrowingRope:
    """Another rotation, and a factor 1 + beta ln(1 + floor(position / span)) on it: queries of Llama 4 and Ministral 3."""

    spec: RopeSpec
    beta: float
    span: float

    def table(self, segments: Segments) -> Rope:
        rope = self.spec.table(segments)
        growth = (1 + self.beta * np.log1p(segments.positions // self.span)).astype(np.float32)[:, None]
        return Rope(rope.cos * growth, rope.sin * growth)


ROPE_TYPES: dict[str, Callable[[int, float, Mapping[str, Any]], RopeSpec]] = {
    "default": lambda dim, theta, scaling: RopeSpec(dim, theta),
    "dynamic": DynamicRope.read,
    "llama3": Llama3Rope.read,
    "yarn": YarnRope.read,
}
"""`rope_type` of config.json -> spec. Another kind is a subclass of RopeSpec with its own `frequencies` or `table`, and a line here."""


def rope_parameters(raw: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """One table out of a config's older spellings: `rope_scaling` (or `rope_parameters`), a `rope_theta` and a `partial_rotary_factor`
    beside it, `theta` where none is named. Scaled kinds take the model's length for their original one where they name none."""
    beside = {"rope_theta": raw.get("rope_theta") or theta, "partial_rotary_factor": raw.get("partial_rotary_factor"),
              "max_position_embeddings": raw.get("max_position_embeddings"),
              "original_max_position_embeddings": raw.get("original_max_position_embeddings") or raw.get("max_position_embeddings")}
    table = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    return beside | {name: value for name, value in table.items() if value is not None}


def _number(scaling: Mapping[str, Any], name: str, missing: float | None = None) -> float:
    value = scaling.get(name)
    value = missing if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} of the rope parameters is {value!r}; expected a number")
    return float(value)


@dataclass(eq=False)
class Rope(Memo):
    """cos, sin: [T, dim / 2] f32."""

    cos: np.ndarray
    sin: np.ndarray


def common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """How many ids all of these begin with, and have others after; 0 for a single one."""
    if len(sequences) < 2:
        return 0
    length = min(map(len, sequences)) - 1
    first = sequences[0][:length]
    for sequence in sequences[1:]:
        different = np.flatnonzero(first != sequence[:len(first)])
        first = first[:different[0]] if len(different) else first
    return len(first)


@dataclass(eq=False)
class Batch(Memo):
    """ids: [T] int32. type_ids: [T] int32, zeros where the tokenizer sends none."""

    ids: np.ndarray
    segments: Segments
    type_ids: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[Ids], type_ids: Sequence[Ids] | None = None, *, hidden: np.ndarray | None = None) -> Batch:
        """One segment a sequence; none may be empty. `hidden` as in Segments."""
        segments = Segments(np.array([len(s) for s in sequences], np.int32), hidden=hidden)
        ids = np.concatenate(sequences).astype(np.int32)
        if type_ids is None:
            return cls(ids, segments, np.zeros_like(ids))
        if [len(t) for t in type_ids] != segments.lengths.tolist():
            raise ValueError(f"type ids of lengths {[len(t) for t in type_ids]} for sequences of lengths {segments.lengths.tolist()}")
        return cls(ids, segments, np.concatenate(type_ids).astype(np.int32))

    @classmethod
    def continuing(cls, sequences: Sequence[np.ndarray], shared: int) -> Batch:
        """The first `shared` ids, which all sequences have in common and none ends with, as segment 0, and the rest of each as a segment
        that continues it."""
        parts = [sequences[0][:shared], *(sequence[shared:] for sequence in sequences)]
        segments = Segments(np.array([len(part) for part in parts], np.int32), parent=np.array([-1] + [0] * len(sequences), np.int32))
        ids = np.concatenate(parts).astype(np.int32)
        return cls(ids, segments, np.zeros_like(ids))

    @property
    def positions(self) -> np.ndarray:
        """[T] int32"""
        return self.segments.positions

    def rope(self, spec: RopeSpec | GrowingRope) -> Rope:
        table: Rope = self.memo(spec, lambda: spec.table(self.segments))
        return table
