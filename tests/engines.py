"""Models for model workers that cost what a test wants them to, behind the real engine. What they do besides is told in the environment:

    TEST_FORWARD_SECONDS   a pack takes so long (0.003)
    TEST_LOAD_SECONDS      loading takes so long (0)
    TEST_DEADLY            a text with this word ends the process
    TEST_HANGING           a pass over a text with this word never returns
    TEST_DEAF              likewise, and lets no other thread of the process run
    TEST_CLOCK_SKEW        seconds that this process's wall clock is wrong
"""
from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from inference.config import Settings
from inference.engine import Engine, Forward
from inference.errors import InferenceFailed
from inference.wire import EmbedJob, EmbedResult, Kind, ModelSpec
from tests.fakes import RERANKER, SPEC, FakeClient

ROWS = 16

if skew := float(os.environ.get("TEST_CLOCK_SKEW", "0")):
    _time = time.time
    time.time = lambda: _time() + skew


class EngineClient(FakeClient):
    """The vectors of FakeClient; a text that says `raise` fails."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.reranker_models:
            self.spec, self.reranker = None, RERANKER
        self.forward_seconds = float(os.environ.get("TEST_FORWARD_SECONDS", "0.003"))
        self.engine = Engine(self._load, pack_rows=ROWS, pack_tokens=1 << 30, queue_depth=settings.queue_depth)

    def describe(self, kind: Kind, model: str | None = None) -> ModelSpec | None:
        spec = super().describe(kind, model)
        return spec and replace(spec, state=self.engine.state)

    def embed(self, job: EmbedJob) -> EmbedResult:
        deadline = time.monotonic() + (self.settings.timeout if job.timeout is None else job.timeout)
        texts = [_ids(item) for item in job.items]
        outputs = self.engine.submit(texts, lane=job.lane, deadline=deadline, partial=job.partial).wait()
        result = super().embed(job)
        assert all(output is not None for output in outputs)
        return result

    def load(self) -> None:
        self.engine.wait_until_open()

    def health(self) -> dict[str, Any]:
        (spec,) = self.models()
        counters = self.engine.counters()
        return {"status": "stale" if counters["stalled_seconds"] > self.settings.timeout else "ok",
                "models": {spec.id: {"state": self.engine.state, "kind": spec.kind, **counters}}}

    def close(self) -> None:
        self.engine.close()

    def _load(self) -> Forward:
        time.sleep(float(os.environ.get("TEST_LOAD_SECONDS", "0")))
        return self._forward

    def _forward(self, sequences: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        texts = [ids.tobytes() for ids in sequences]
        if _said("TEST_DEADLY", texts):
            os._exit(139)
        if _said("TEST_HANGING", texts):
            threading.Event().wait()
        if _said("TEST_DEAF", texts):
            ctypes.PyDLL(None).sleep(600)              # PyDLL keeps the interpreter's lock during the call
        time.sleep(self.forward_seconds)
        if any(b"raise" in text for text in texts):
            raise InferenceFailed("this text fails")
        return [np.zeros((1, 8), np.float32)] * len(texts)


class BrokenClient(EngineClient):
    """Its weights cannot be loaded."""

    def _load(self) -> Forward:
        raise InferenceFailed("no such weights")


class OtherClient(EngineClient):
    """Other weights under the same name."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.spec = replace(SPEC, weights_hash="1" * 64)


def _said(setting: str, texts: Sequence[bytes]) -> bool:
    word = os.environ.get(setting, "").encode()
    return bool(word) and any(word in text for text in texts)


def _ids(item: object) -> np.ndarray:
    data = repr(item).encode("utf-8", "replace")
    return np.frombuffer(data.ljust(len(data) // 4 * 4 + 4), np.int32)
