"""Items to vectors with one model: format, tokenise, run, normalise, shorten. Runs on the caller's thread but for the forward pass."""
from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from . import loader, normalize
from .config import Settings
from .engine import Engine
from .errors import InvalidRequest
from .layers.late_interaction import UNSCORED
from .opened import Opened
from .tokenizer import Encoded
from .wire import EmbedJob, EmbedResult, Item, ModelSpec, Span


class Embedder:
    """One opened checkpoint and the engine that runs it. Loading begins at once, on the engine's thread."""

    def __init__(self, opened: Opened, settings: Settings) -> None:
        self._opened, self._settings = opened, settings
        self._tokenizer = opened.tokenizer
        self._lock = threading.Lock()
        self._tokenize_seconds = self._encode_seconds = 0.0
        self.engine = Engine(lambda: loader.load(opened), name=f"engine-{opened.spec.id}", **loader.engine_options(opened, settings))

    @property
    def spec(self) -> ModelSpec:
        return replace(self._opened.spec, state=self.engine.state)

    def embed(self, job: EmbedJob) -> EmbedResult:
        """Raises InvalidRequest, Busy, TimedOut or InferenceFailed."""
        spec = self._opened.spec
        deadline = time.monotonic() + (self._settings.timeout if job.timeout is None else job.timeout)
        kind = spec.normalize if job.normalize is None else job.normalize
        normalize.check(kind)
        if job.dimensions is not None and not 1 <= job.dimensions <= spec.dims:
            raise InvalidRequest(f"`dimensions` must be between 1 and {spec.dims} for this model, got {job.dimensions}", param="dimensions")
        began = time.monotonic()
        encoded = self._prepare(job)
        prepared = time.monotonic()
        request = self.engine.submit([self._padded(e.ids) for e in encoded], lane=job.lane, deadline=deadline, partial=job.partial)
        outputs = request.wait()
        returned = time.monotonic()
        rows = np.array([0 if output is None else len(output) for output in outputs], np.int32)
        found = [output for output in outputs if output is not None]
        data = np.concatenate(found) if found else np.zeros((0, spec.dims), np.float32)
        data = normalize.shorten(data, job.dimensions, kind)
        ended = time.monotonic()
        with self._lock:
            self._tokenize_seconds += prepared - began
            self._encode_seconds += ended - returned
        return EmbedResult(
            model=spec.id, data=data, rows=rows, tokens=np.array([e.ids.shape[-1] for e in encoded], np.int32),
            multi_vector=spec.multi_vector, truncated=tuple(i for i, e in enumerate(encoded) if e.truncated),
            errors={i: error.message for i, error in sorted(request.errors.items())},
            timings={"tokenize": prepared - began, "queue": request.began - prepared, "forward": returned - request.began,
                     "encode": ended - returned})

    def split(self, texts: Sequence[str], tokens: int, overlap: int, prompt: str) -> list[list[Span]]:
        if tokens > self._opened.spec.max_length:
            raise InvalidRequest(f"passages of {tokens} tokens are longer than the model's limit of {self._opened.spec.max_length}")
        try:
            marker = late.document.prefix if (late := self._opened.late) else ""
            return [self._tokenizer.split(text, tokens, overlap, marker + prompt) for text in texts]
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def counters(self) -> dict[str, float]:
        with self._lock:
            return self.engine.counters() | {"tokenize_seconds": self._tokenize_seconds, "encode_seconds": self._encode_seconds}

    def _prepare(self, job: EmbedJob) -> list[Encoded]:
        side = self._opened.late.side(job.input_type) if self._opened.late else None
        limit = side.limit if side else self._opened.spec.max_length
        for i, item in enumerate(job.items):
            self._check(i, item)
        formatted = [self._format(item, job.instruction) for item in job.items if isinstance(item, str)]
        texts = iter(side.read(formatted, self._tokenizer) if side else self._tokenizer.encode(formatted, limit))
        encoded = [next(texts) if isinstance(item, str) else Encoded(np.array(item[:limit], np.int32), len(item)) for item in job.items]
        if side:
            encoded = [side.marked(e) if e.ids.ndim == 1 else e for e in encoded]
            if (bare := next((i for i, e in enumerate(encoded) if not e.ids[1].min() < UNSCORED), None)) is not None:
                raise InvalidRequest(f"input[{bare}] has only tokens that the model leaves out of documents", param="input")
        if not job.truncate and (long := next((i for i, e in enumerate(encoded) if e.truncated), None)) is not None:
            at_least = "" if encoded[long].exact else "at least "
            raise InvalidRequest(
                f"input[{long}] has {at_least}{encoded[long].length} tokens, more than the model's limit of {limit}; "
                "shorten it or allow truncation", param="input")
        return encoded

    def _check(self, i: int, item: Item) -> None:
        if isinstance(item, str):
            if not item:
                raise InvalidRequest(f"input[{i}] is an empty string", param="input")
            return
        if not item:
            raise InvalidRequest(f"input[{i}] is an empty token list", param="input")
        vocabulary = self._opened.spec.vocab_size
        wrong = next((token for token in item if not 0 <= token < vocabulary), None) if vocabulary else None
        if wrong is not None:
            raise InvalidRequest(f"input[{i}] contains token id {wrong}, which is >= vocab_size {vocabulary}", param="input")

    def _padded(self, ids: np.ndarray) -> np.ndarray:
        """What the model sees, where that is more than what is counted and billed."""
        if self._opened.pad_to is None:
            return ids
        tokens, pad = self._opened.pad_to
        return np.pad(ids, (0, tokens - len(ids)), constant_values=pad)

    def _format(self, text: str, instruction: str | None) -> str:
        form = getattr(self._opened.family, "format_text", None)
        return form(text, instruction, self._opened.spec.prompts) if form else text
