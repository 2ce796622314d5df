"""Documents to passages with vectors, through the door to the models. Touches no database, so it runs beside the one who writes."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference.client import InferenceClient
from inference.errors import Busy, InferenceFailed, InvalidRequest, ServiceError, TimedOut, TooLarge
from inference.wire import EmbedJob, ModelSpec, Span

from .corpus import NewDocument, NewPassage
from .models import Collection
from .sources import Record
from .vectors import stored_as

T = TypeVar("T")

JOB_SECONDS = 600.0        # a bulk job waits behind interactive ones
BUSY_SECONDS = 300.0       # how long a full queue or a loading model is waited for


@dataclass(frozen=True, slots=True)
class Failure:
    record: Record
    message: str


@dataclass(frozen=True, slots=True)
class Encoder:
    """How the documents of a collection become vectors."""

    client: InferenceClient
    model: str
    prompt: str
    dimensions: int | None
    split_tokens: int
    split_overlap: int
    dtype: str                        # what rows are stored as
    stop: Event                       # set: an encoder that waits for a busy model gives up

    @classmethod
    def of(cls, collection: Collection, client: InferenceClient, spec: ModelSpec, stop: Event) -> Encoder:
        dims = collection.space.dims
        return cls(client, spec.id, collection.space.document_prompt, None if dims == spec.dims else dims,
                   collection.split_tokens, collection.split_overlap, stored_as(collection.space.multi_vector), stop)

    def encode(self, records: Sequence[Record]) -> list[NewDocument | Failure]:
        """In order. A document of which one passage fails, fails. What fails as a whole is halved until the culprit stands alone."""
        try:
            return self._encode(records)
        except (InferenceFailed, InvalidRequest, TooLarge, TimedOut) as error:
            if isinstance(error, InvalidRequest) and error.param == "model":      # nobody serves it any more: no document's fault
                raise
            if len(records) == 1:
                return self._alone(records[0], error)
            half = len(records) // 2
            return self.encode(records[:half]) + self.encode(records[half:])

    def _alone(self, record: Record, error: ServiceError) -> list[NewDocument | Failure]:
        """Once more where the model's process died under the document: it may have been another one's, or a restart."""
        if isinstance(error, InferenceFailed):
            try:
                return self._encode([record])
            except (InferenceFailed, TimedOut) as again:
                error = again
        return [Failure(record, str(error))]

    def _encode(self, records: Sequence[Record]) -> list[NewDocument | Failure]:
        spans = self._spans([record.text for record in records])
        # Models refuse an empty text; a space is the special tokens alone, as an empty text would be.
        items = tuple(self.prompt + record.text[span.start:span.end] or " "
                      for record, parts in zip(records, spans, strict=True) for span in parts)
        result = self._patiently(lambda: self.client.embed(EmbedJob(
            items, model=self.model, dimensions=self.dimensions, input_type="document", lane="bulk", partial=True, timeout=JOB_SECONDS)))
        vectors, truncated = result.vectors(), set(result.truncated)
        encoded: list[NewDocument | Failure] = []
        first = 0
        for record, parts in zip(records, spans, strict=True):
            indices = range(first, first + len(parts))
            first += len(parts)
            wrong = [result.errors[i] for i in indices if i in result.errors] or _unstorable([vectors[i] for i in indices], self.dtype)
            if wrong:
                encoded.append(Failure(record, wrong[0]))
                continue
            passages = [NewPassage(span.start, span.end, int(result.tokens[i]), vectors[i]) for span, i in zip(parts, indices, strict=True)]
            encoded.append(NewDocument(record.id, record.text, passages, record.metadata, any(i in truncated for i in indices)))
        return encoded

    def _spans(self, texts: list[str]) -> list[list[Span]]:
        if not self.split_tokens:
            return [[Span(0, len(text), 0)] for text in texts]
        spans = self._patiently(lambda: self.client.split(
            texts, self.split_tokens, self.split_overlap, prompt=self.prompt, model=self.model))
        return [parts or [Span(0, len(text), 0)] for text, parts in zip(texts, spans, strict=True)]

    def _patiently(self, call: Callable[[], T]) -> T:
        """Bulk work waits for its turn instead of failing."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return call()
            except Busy as error:
                if self.stop.wait(error.retry_after or 1) or time.monotonic() > deadline:
                    raise


def _unstorable(found: Sequence[NDArray[Any]], dtype: str) -> list[str]:
    """Rows that are not normalised can hold numbers that their type in the database cannot."""
    most = float(np.finfo(dtype).max)
    largest = max((float(np.abs(vector).max()) for vector in found if vector.size), default=0.0)
    if largest <= most:
        return []
    return [f"a vector holds {largest:g}; the numbers of this collection are stored as {np.dtype(dtype)}, up to {most:g}"]
