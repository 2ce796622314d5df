"""A model at the door that costs nothing: vectors derive from the text, so equal texts have equal vectors and nothing else does."""
from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from inference.config import Settings
from inference.engine import Engine
from inference.errors import InvalidRequest, ServiceError
from inference.wire import EmbedJob, EmbedResult, Kind, ModelSpec, RerankJob, RerankResult, Span

SPEC = ModelSpec(
    id="fake-8", aliases=("tests/fake-8",), kind="embedding", family="fake", revision="", weights_hash="0" * 64, dims=8, max_length=32,
    vocab_size=1000, pooling="mean", normalize=2.0, prompts={"query": "query: ", "document": "passage: "}, backend="fake",
    precision="f32", state="ready", parameters=8, bytes=32)
RERANKER = replace(SPEC, id="fake-reranker", aliases=("tests/fake-reranker",), kind="reranker", dims=1, pooling="", normalize=-1.0,
                   prompts={}, scoring="sequence_classifier")


@dataclass
class FakeClient:
    """One token a word plus special ones. Set `fail` to have every `embed` and `rerank` raise it; `jobs` and `reranked` record what
    was asked. There is no reranker unless `reranker` is set."""

    settings: Settings = field(default_factory=Settings)
    spec: ModelSpec | None = SPEC
    fail: ServiceError | None = None
    jobs: list[EmbedJob] = field(default_factory=list)
    reranker: ModelSpec | None = None
    reranked: list[RerankJob] = field(default_factory=list)

    def models(self) -> list[ModelSpec]:
        return [spec for spec in (self.spec, self.reranker) if spec]

    def describe(self, kind: Kind, model: str | None = None) -> ModelSpec | None:
        return next((spec for spec in self.models() if spec.kind == kind and (model is None or spec.answers_to(model))), None)

    def embed(self, job: EmbedJob) -> EmbedResult:
        self.jobs.append(job)
        if self.fail:
            raise self.fail
        assert self.spec is not None
        if (empty := next((i for i, item in enumerate(job.items) if not item), None)) is not None:
            raise InvalidRequest(f"input[{empty}] is an empty string", param="input")
        lengths = np.array([len(i) if isinstance(i, tuple) else len(i.split()) + 2 for i in job.items], np.int32)
        tokens = np.minimum(lengths, self.spec.max_length).astype(np.int32)
        data = np.stack([self._vector(item) for item in job.items]) if job.items else np.zeros((0, self.spec.dims), np.float32)
        if job.dimensions:
            data = data[:, :job.dimensions] / np.linalg.norm(data[:, :job.dimensions], axis=1, keepdims=True)
        return EmbedResult(
            model=self.spec.id, data=data.astype(np.float32), rows=np.ones(len(job.items), np.int32), tokens=tokens,
            truncated=tuple(np.flatnonzero(lengths > tokens).tolist()))

    def rerank(self, job: RerankJob) -> RerankResult:
        """The share of the query's words that a document has; ten times that as a logit."""
        self.reranked.append(job)
        if self.fail:
            raise self.fail
        assert self.reranker is not None
        words = set(job.query.lower().split())
        scores = [len(words & set(d.lower().split())) / max(len(words), 1) for d in job.documents]
        lengths = np.array([len(job.query.split()) + len(d.split()) + 3 for d in job.documents], np.int32)
        tokens = np.minimum(lengths, self.reranker.max_length).astype(np.int32)
        return RerankResult(self.reranker.id, np.array(scores, np.float32) * (10 if job.raw_scores else 1), tokens,
                            tuple(np.flatnonzero(lengths > tokens).tolist()))

    def split(self, texts: Sequence[str], tokens: int, overlap: int = 0, *, prompt: str = "", model: str | None = None) -> list[list[Span]]:
        return [self._split(text, max(tokens - 2, 1), overlap) for text in texts]

    def load(self) -> None:
        pass

    def health(self) -> dict[str, Any]:
        return {"status": "ok", "models": {model.id: {"state": model.state, "kind": model.kind} for model in self.models()}}

    def close(self) -> None:
        pass

    def without_model(self) -> FakeClient:
        return replace(self, spec=None)

    def _vector(self, item: object) -> np.ndarray:
        assert self.spec is not None
        seed = int.from_bytes(hashlib.sha256(repr(item).encode("utf-8", "replace")).digest()[:8], "little")
        vector = np.random.default_rng(seed).standard_normal(self.spec.dims).astype(np.float32)
        return vector / np.linalg.norm(vector)

    @staticmethod
    def _split(text: str, words: int, overlap: int) -> list[Span]:
        edges, at = [], 0
        for word in text.split():
            start = text.index(word, at)
            at = start + len(word)
            edges.append((start, at))
        step = max(words - overlap, 1)
        cuts = range(0, max(len(edges) - overlap, 1), step) if edges else ()
        return [Span(edges[i][0], edges[min(i + words, len(edges)) - 1][1], min(words, len(edges) - i) + 2) for i in cuts]


class SlowClient(FakeClient):
    """Takes a second for each request."""

    def embed(self, job: EmbedJob) -> EmbedResult:
        time.sleep(1)
        return super().embed(job)


class CrowdedClient(FakeClient):
    """An engine with one slot: what runs takes a second and a half, as does each job that waits for it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)

        def forward(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
            time.sleep(0 if bytes(sequences[0].astype(np.uint8)) == b"ready" else 1.5)       # which is what a server embeds at its start
            return [np.ones((1, 8), np.float32) for _ in sequences]

        self._engine = Engine(lambda: forward, pack_rows=1, queue_depth=settings.queue_depth)

    def embed(self, job: EmbedJob) -> EmbedResult:
        self._engine.submit([np.frombuffer(str(item).encode(), np.uint8).astype(np.int32) for item in job.items],
                            deadline=time.monotonic() + self.settings.timeout).wait()
        return super().embed(job)

    def close(self) -> None:
        self._engine.close()
