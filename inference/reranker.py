"""Documents to scores with one model: pair with the query, run, squash. Runs on the caller's thread but for the forward pass."""
from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np

from . import loader, rerankers
from .config import Settings
from .engine import Engine
from .errors import InvalidNumericResult, InvalidRequest
from .opened import Opened
from .wire import ModelSpec, RerankJob, RerankResult


class Reranker:
    """One opened checkpoint and the engine that runs it. Loading begins at once, on the engine's thread."""

    def __init__(self, opened: Opened, settings: Settings) -> None:
        self._opened, self._settings = opened, settings
        self._way = rerankers.find(opened.checkpoint)
        self._pairs = self._way.Pairs(opened)
        self._lock = threading.Lock()
        self._tokenize_seconds = 0.0
        self.engine = Engine(lambda: self._way.load(opened), name=f"engine-{opened.spec.id}", what="rerank",
                             **loader.engine_options(opened, settings))

    @property
    def spec(self) -> ModelSpec:
        return replace(self._opened.spec, state=self.engine.state)

    def rerank(self, job: RerankJob) -> RerankResult:
        """Raises InvalidRequest, Busy, TimedOut or InferenceFailed."""
        deadline = time.monotonic() + (self._settings.timeout if job.timeout is None else job.timeout)
        instruction = (job.instruction or "").strip() or None
        if instruction and not self._way.INSTRUCTIONS:
            raise InvalidRequest(
                "`instruction` is only supported by the generative rerankers; the loaded sequence-classifier reranker scores the "
                "query/document pair directly", param="instruction")
        began = time.monotonic()
        pairs = self._pairs(job.query, job.documents, instruction)
        prepared = time.monotonic()
        request = self.engine.submit([pair.ids for pair in pairs], lane=job.lane, deadline=deadline)
        outputs = request.wait()
        returned = time.monotonic()
        with self._lock:
            self._tokenize_seconds += prepared - began
        logits = np.array([output.item() for output in outputs if output is not None], np.float32)
        scores = logits if job.raw_scores else _sigmoid(logits)
        if not np.isfinite(scores).all():
            raise InvalidNumericResult("rerank inference returned an invalid numeric result")
        return RerankResult(
            model=self._opened.spec.id, scores=scores, tokens=np.array([pair.ids.shape[-1] for pair in pairs], np.int32),
            truncated=tuple(i for i, pair in enumerate(pairs) if pair.truncated),
            timings={"tokenize": prepared - began, "queue": request.began - prepared, "forward": returned - request.began})

    def counters(self) -> dict[str, float]:
        with self._lock:
            return self.engine.counters() | {"tokenize_seconds": self._tokenize_seconds}


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """[N] f32 -> [N] f32, without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
