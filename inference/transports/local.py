"""Models in this process: opened from their files when asked about, loaded at the first use."""
from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint import Checkpoint
from ..config import Settings
from ..embedder import Embedder
from ..errors import NotLoaded, ServiceError, no_model, wrong_model
from ..loader import open_checkpoint
from ..opened import Opened
from ..reranker import Reranker
from ..resolve import resolve
from ..wire import EmbedJob, EmbedResult, Kind, ModelSpec, RerankJob, RerankResult, Span


@dataclass
class _Served:
    """A configured model, as far as it has come: its name, its files, its engine, or what went wrong."""

    name: str
    kind: Kind
    opened: Opened | None = None
    running: Embedder | Reranker | None = None
    error: ServiceError | None = None


class LocalClient:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._served = [_Served(name, "embedding") for name in settings.embedding_models]
        self._served += [_Served(name, "reranker") for name in settings.reranker_models]

    def models(self) -> list[ModelSpec]:
        """Models that cannot be opened are left out; `health` and `describe` say why."""
        return [self._spec(served) for served in self._served if self._open(served)]

    def describe(self, kind: Kind, model: str | None = None) -> ModelSpec | None:
        """Raises NotLoaded where the model that would answer cannot be opened."""
        if refusal := self._settings.refusal(kind):
            raise NotLoaded(refusal)
        if not any(served.kind == kind for served in self._served):
            return None
        found = self._find(kind, model)
        return self._spec(found) if found else None

    def embed(self, job: EmbedJob) -> EmbedResult:
        return self._embedder(job.model).embed(job)

    def rerank(self, job: RerankJob) -> RerankResult:
        running = self._running("reranker", job.model)
        assert isinstance(running, Reranker)
        return running.rerank(job)

    def split(self, texts: Sequence[str], tokens: int, overlap: int = 0, *, prompt: str = "", model: str | None = None) -> list[list[Span]]:
        return self._embedder(model).split(texts, tokens, overlap, prompt)

    def load(self) -> None:
        for served in self._served:
            if not self._open(served):
                assert served.error is not None
                raise served.error
            self._start(served).engine.wait_until_open()

    def health(self) -> dict[str, Any]:
        models: dict[str, Any] = {}
        for served in self._served:
            if served.opened is None:
                models[served.name] = {"state": "failed", "error": served.error.message} if served.error else {"state": "cold"}
            else:
                spec = self._spec(served)
                models[spec.id] = {"state": spec.state, "kind": spec.kind} | (served.running.counters() if served.running else {})
        states = {entry["state"] for entry in models.values()}
        stalled = any(entry.get("stalled_seconds", 0) > self._settings.timeout for entry in models.values())
        return {"status": "failed" if "failed" in states else "stale" if stalled else "loading" if "loading" in states else "ok",
                "models": models}

    def close(self) -> None:
        for served in self._served:
            if served.running:
                served.running.engine.close()

    def _open(self, served: _Served) -> Opened | None:
        with self._lock:
            if served.opened is None and served.error is None:
                try:
                    served.opened = open_checkpoint(Checkpoint.read(resolve(served.name, self._settings)), self._settings, served.kind)
                except ServiceError as error:
                    served.error = error
            return served.opened

    def _spec(self, served: _Served) -> ModelSpec:
        assert served.opened is not None
        return served.running.spec if served.running else served.opened.spec

    def _find(self, kind: Kind, model: str | None) -> _Served | None:
        """The first configured model, or the one that answers to `model`. Raises NotLoaded where it, or every one, fails to open."""
        candidates = [served for served in self._served if served.kind == kind]
        candidates = candidates[:1] if model is None else candidates
        opened = [served for served in candidates if self._open(served)]
        if not opened:
            causes = [served.error for served in candidates if served.error]
            reasons = "; ".join(cause.message for cause in causes)
            raise no_model(kind, f"The configured model cannot be opened: {reasons}" if causes else "") from (causes[0] if causes else None)
        return next((served for served in opened if model is None or self._spec(served).answers_to(model)), None)

    def _embedder(self, model: str | None) -> Embedder:
        running = self._running("embedding", model)
        assert isinstance(running, Embedder)
        return running

    def _running(self, kind: Kind, model: str | None) -> Embedder | Reranker:
        if (found := self._find(kind, model)) is None:
            raise wrong_model(kind, model or "", [spec.id for spec in self.models() if spec.kind == kind])
        return self._start(found)

    def _start(self, served: _Served) -> Embedder | Reranker:
        with self._lock:
            if served.running is None:
                assert served.opened is not None
                served.running = (Embedder if served.kind == "embedding" else Reranker)(served.opened, self._settings)
            return served.running
