"""Exact scores over blocks of passages: cosine of single vectors, MaxSim of multi-vectors. Numpy only; knows nothing of files or rows.

Letters: N passages, R rows of all passages laid end to end (R = N for single vectors), D dims, Q rows of the query.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_ROWS = 16_384        # rows cast to float32 at a time; about what stays in the second-level cache pays most
RESCORED = 4_096           # candidates scored in float64 at a time
ROUNDING = 2.0 ** -23      # of a float32 sum, per term

Floats = NDArray[Any]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Block:
    """Passages in the order they were written.

    vectors   [R, D] f32 or f16
    offsets   [N + 1] int64     passage i owns rows offsets[i]:offsets[i + 1], at least one
    ids       [N] int64         of passages, ascending
    documents [N] int64
    norms     [R] f32           euclidean length of every row
    """

    vectors: Floats
    offsets: Ints
    ids: Ints
    documents: Ints
    norms: Floats

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Metric:
    """cosine: rows of unit length already. divide: by both norms. maxsim: sum over query rows of the best row's dot product."""

    multi_vector: bool = False
    divide: bool = False

    def scores(self, block: Block, query: Floats, mask: Mask | None) -> Floats:
        """[N] f32, -inf where masked. query [Q, D] f32, prepared by `query`."""
        if mask is not None and (chosen := int(mask.sum())) * 4 < len(block):
            scores = np.full(len(block), -np.inf, np.float32)
            if chosen:
                scores[mask] = self.scores(take(block, np.flatnonzero(mask)), query, None)
            return scores
        scores = self._maxsim(block, query) if self.multi_vector else self._cosine(block, query)
        if mask is not None:
            scores[~mask] = -np.inf
        return scores

    def exact(self, block: Block, query: Floats) -> Floats:
        """[N] f64: a passage's score depends on its own numbers only, not on where it lies, so equal vectors tie."""
        scores = np.empty(len(block))
        wide = query.astype(np.float64)
        if self.multi_vector:
            for i in range(len(block)):
                rows = block.vectors[block.offsets[i]:block.offsets[i + 1]].astype(np.float64)
                scores[i] = (rows @ wide.T).max(axis=0).sum()
            return scores
        for at in range(0, len(block), RESCORED):
            rows = block.vectors[at:at + RESCORED].astype(np.float64)
            scores[at:at + RESCORED] = (rows * wide[0]).sum(axis=1)
            if self.divide:
                scores[at:at + RESCORED] /= np.maximum(np.sqrt((rows * rows).sum(axis=1)), np.finfo(np.float64).tiny)
        return scores

    def query(self, query: Floats) -> Floats:
        """The query as [Q, D] f32, of unit length where the metric is a cosine of vectors that are not."""
        rows = np.atleast_2d(np.asarray(query, np.float32))
        return rows / np.maximum(np.linalg.norm(rows), np.finfo(np.float32).tiny) if self.divide else rows

    def _cosine(self, block: Block, query: Floats) -> Floats:
        scores = np.concatenate([block.vectors[at:at + BLOCK_ROWS].astype(np.float32, copy=False) @ query[0]
                                 for at in range(0, len(block), BLOCK_ROWS)] or [np.empty(0, np.float32)])
        return scores / np.maximum(block.norms, np.finfo(np.float32).tiny) if self.divide else scores

    @staticmethod
    def _maxsim(block: Block, query: Floats) -> Floats:
        """Never padded: a zero row would beat every negative similarity."""
        scores = np.empty(len(block), np.float32)
        first = 0
        while first < len(block):
            last = max(int(np.searchsorted(block.offsets, block.offsets[first] + BLOCK_ROWS, "right")) - 1, first + 1)
            start, end = block.offsets[first], block.offsets[last]
            similarity = block.vectors[start:end].astype(np.float32, copy=False) @ query.T          # [rows, Q]
            scores[first:last] = np.maximum.reduceat(similarity, block.offsets[first:last] - start, axis=0).sum(axis=1)
            first = last
        return scores


def take(block: Block, index: Ints) -> Block:
    """The passages at `index`, in that order."""
    lengths = block.offsets[index + 1] - block.offsets[index]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = np.repeat(block.offsets[index] - offsets[:-1], lengths) + np.arange(offsets[-1])
    return Block(block.vectors[rows], offsets, block.ids[index], block.documents[index], block.norms[rows])


@dataclass(frozen=True, slots=True)
class Scored:
    passage: int
    document: int
    score: float


@dataclass(frozen=True, eq=False)
class View:
    """All passages of a collection at one moment. `masks` tell the living ones of a block; None: all live."""

    blocks: Sequence[Block]
    masks: Sequence[Mask | None]

    @cached_property
    def ids(self) -> Ints:
        return np.concatenate([block.ids for block in self.blocks] or [np.empty(0, np.int64)])

    @cached_property
    def documents(self) -> Ints:
        return np.concatenate([block.documents for block in self.blocks] or [np.empty(0, np.int64)])

    def masks_for(self, documents: Ints | None = None, without: int | None = None) -> list[Mask | None]:
        """The living passages, of these documents only (ids, ascending) and without that passage."""
        masks = list(self.masks)
        for i, block in enumerate(self.blocks):
            for chosen in (documents is not None and np.isin(block.documents, documents), without is not None and block.ids != without):
                if chosen is not False:
                    mask = masks[i]
                    masks[i] = chosen if mask is None else chosen & mask
        return masks


def best(view: View, masks: Sequence[Mask | None], metric: Metric, query: Floats, limit: int) -> list[Scored]:
    """The `limit` best documents, each with its best passage; ties by document id, then passage id. Exact: float32 only preselects."""
    if not view.blocks:
        return []
    query = metric.query(query)
    scores = np.concatenate([metric.scores(block, query, mask) for block, mask in zip(view.blocks, masks, strict=True)])
    alive = int(np.isfinite(scores).sum())
    slack = 2 * _error(view.blocks, metric, query)
    wanted = limit
    while alive:
        threshold = np.partition(scores, len(scores) - wanted)[len(scores) - wanted] if wanted < alive else np.finfo(np.float32).min
        if wanted >= alive or len(np.unique(view.documents[scores >= threshold])) >= limit:
            candidates = np.flatnonzero((scores >= threshold - slack) & np.isfinite(scores))
            exact = _exact(view.blocks, metric, query, candidates)
            ids, documents = view.ids[candidates], view.documents[candidates]
            order = np.lexsort((ids, documents, -exact))
            _, first = np.unique(documents[order], return_index=True)
            chosen = order[np.sort(first)[:limit]]
            return [Scored(int(ids[i]), int(documents[i]), float(exact[i])) for i in chosen]
        wanted *= 4
    return []


def _error(blocks: Sequence[Block], metric: Metric, query: Floats) -> float:
    """A bound on how far a float32 score lies from the exact one."""
    longest = 1.0 if metric.divide else max((float(block.norms.max()) for block in blocks if len(block)), default=0.0)
    return float(query.shape[1] * ROUNDING * longest * np.linalg.norm(query, axis=1).sum())


def _exact(blocks: Sequence[Block], metric: Metric, query: Floats, candidates: Ints) -> Floats:
    parts, first = [], 0
    for block in blocks:
        inside = candidates[(candidates >= first) & (candidates < first + len(block))] - first
        parts.append(metric.exact(take(block, inside), query))
        first += len(block)
    return np.concatenate(parts)
