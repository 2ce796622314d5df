"""Models in this process: opened from their files when asked about, loaded at the first use."""
from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint import Checkpoint
from ..config import Settings
from ..embedder import Embedder
from ..errors import InvalidRequest, NotLoaded, ServiceError
from ..loader import Opened, open_checkpoint
from ..resolve import resolve
from ..wire import EmbedJob, EmbedResult, Kind, ModelSpec, Span

log = logging.getLogger(__name__)

UNSUPPORTED = ("This server does not support embeddings. Start it with an embedding model: `manage.py serve --model NAME`, "
               "or set MLXCEL_EMBEDDING_MODEL.")


@dataclass
class _Served:
    """A configured model, as far as it has come: its name, its files, its engine, or what went wrong."""

    name: str
    opened: Opened | None = None
    embedder: Embedder | None = None
    error: ServiceError | None = None


class LocalClient:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._served = [_Served(name) for name in settings.embedding_models]

    def models(self) -> list[ModelSpec]:
        """Models that cannot be opened are left out; `health` and `describe` say why."""
        return [self._spec(served) for served in self._served if self._open(served)]

    def describe(self, kind: Kind, model: str | None = None) -> ModelSpec | None:
        """Raises NotLoaded where the model that would answer cannot be opened."""
        if kind != "embedding" or not self._served:
            return None
        found = self._find(model)
        return self._spec(found) if found else None

    def embed(self, job: EmbedJob) -> EmbedResult:
        return self._embedder(job.model).embed(job)

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
                models[spec.id] = {"state": spec.state, "kind": spec.kind} | (served.embedder.counters() if served.embedder else {})
        states = {entry["state"] for entry in models.values()}
        return {"status": "failed" if "failed" in states else "loading" if "loading" in states else "ok", "models": models}

    def close(self) -> None:
        for served in self._served:
            if served.embedder:
                served.embedder.engine.close()

    def _open(self, served: _Served) -> Opened | None:
        with self._lock:
            if served.opened is None and served.error is None:
                try:
                    served.opened = open_checkpoint(Checkpoint.read(resolve(served.name, self._settings)), self._settings)
                except ServiceError as error:
                    log.error("the model %s cannot be served: %s", served.name, error.message)
                    served.error = error
            return served.opened

    def _spec(self, served: _Served) -> ModelSpec:
        assert served.opened is not None
        return served.embedder.spec if served.embedder else served.opened.spec

    def _find(self, model: str | None) -> _Served | None:
        """The first configured model, or the one that answers to `model`. Raises NotLoaded where it, or every one, fails to open."""
        candidates = self._served[:1] if model is None else self._served
        opened = [served for served in candidates if self._open(served)]
        if not opened:
            reasons = "; ".join(served.error.message for served in candidates if served.error)
            raise NotLoaded(UNSUPPORTED + (f" The configured model cannot be opened: {reasons}" if reasons else ""))
        return next((served for served in opened if model is None or self._spec(served).answers_to(model)), None)

    def _embedder(self, model: str | None) -> Embedder:
        if (found := self._find(model)) is None:
            names = "`, `".join(spec.id for spec in self.models())
            raise InvalidRequest(f"model `{model}` is not the served embedding model `{names}`", param="model")
        return self._start(found)

    def _start(self, served: _Served) -> Embedder:
        with self._lock:
            if served.embedder is None:
                assert served.opened is not None
                served.embedder = Embedder(served.opened, self._settings)
            return served.embedder
