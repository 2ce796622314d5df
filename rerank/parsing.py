"""HTTP bodies into frozen requests. The order of the checks and the wording of the errors are a contract with clients.

A body is checked in this order: that `query` and a list of documents are there, the type of every field and item, a served model, `top_n`,
`instruction`, the items. Which of two forms the answer takes is decided by the body alone: `texts` without `documents` is
text-embeddings-inference's, everything else Jina's and Cohere's. `null` is the same as absent.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings

from inference.client import InferenceClient
from inference.errors import InvalidRequest, UnsupportedCapability
from inference.fields import Parser, anything, boolean, count, first, kind, malformed, read, served, string
from inference.wire import ModelSpec, RerankJob

MISSING = '"documents" must be a non-empty string array'
ITEM = 'a string or an object with `text`, `image` or `image_url`'
INSTRUCTED = ("`instruction` is only supported by the generative rerankers; the loaded sequence-classifier reranker scores the "
              "query/document pair directly")
KEYS = ("text", "image", "image_url")

FIELDS: Mapping[str, Parser] = {
    "model": string, "query": anything, "documents": anything, "texts": anything, "top_n": count, "return_documents": boolean,
    "return_text": boolean, "instruction": string, "raw_scores": boolean, "user": anything,
    # what other servers call them, or have besides
    "top_k": count, "max_tokens_per_doc": anything, "max_chunks_per_doc": anything, "rank_fields": anything, "overlap_tokens": anything,
    "truncate": anything, "truncation": anything, "truncation_direction": anything, "priority": anything, "timeout": anything,
    "request_id": anything,
}


@dataclass(frozen=True, slots=True)
class RerankRequest:
    query: str
    documents: tuple[str, ...]
    model: str                            # the served id
    items: tuple[Any, ...] = ()           # the documents as they were sent
    top_n: int | None = None
    return_documents: bool = False
    instruction: str | None = None
    raw_scores: bool = False
    texts: bool = False                   # text-embeddings-inference's form
    top_k: bool = False                   # Voyage's name was used

    def job(self) -> RerankJob:
        return RerankJob(query=self.query, documents=self.documents, model=self.model, instruction=self.instruction,
                         raw_scores=self.raw_scores)


@dataclass(frozen=True, slots=True)
class _Item:
    text: str
    image: bool
    sent: Any


def parse_rerank(body: object, client: InferenceClient) -> RerankRequest:
    """A body of POST /v1/rerank. Raises InvalidRequest (400), or NotLoaded (501) when no reranker is served."""
    if isinstance(body, dict):
        _check_shape(body)
    fields = read(body, FIELDS, strict=settings.STRICT_FIELDS)
    texts = fields.get("documents") is None
    listed = "texts" if texts else "documents"
    query = _item(fields["query"], "`query`", "query")
    documents = [_item(value, f"documents[{i}]", listed) for i, value in enumerate(fields[listed])]
    model = served(client, "reranker", fields.get("model"), accept_any=settings.ACCEPT_ANY_MODEL)
    name, top_n = first(fields, "top_n", "top_k")
    if top_n == 0:
        raise InvalidRequest(f"`{name}` must be at least 1", param=name)
    instruction = (fields.get("instruction") or "").strip() or None
    if instruction and not model.instructions:
        raise InvalidRequest(INSTRUCTED, param="instruction")
    _check(query, "`query`", model, "query")
    for i, document in enumerate(documents):
        _check(document, f"documents[{i}]", model, listed)
    return RerankRequest(
        query=query.text, documents=tuple(document.text for document in documents), model=model.id,
        items=tuple(document.sent for document in documents), top_n=top_n,
        return_documents=bool(fields.get("return_documents") or fields.get("return_text")), instruction=instruction,
        raw_scores=bool(fields.get("raw_scores")), texts=texts, top_k=name == "top_k")


def _check_shape(body: dict[str, Any]) -> None:
    query = body.get("query")
    if query is None:
        raise InvalidRequest('"query" must be provided', param="query")
    if not isinstance(query, str | dict):
        raise InvalidRequest('"query" must be a string', param="query")
    name, documents = first(body, "documents", "texts")
    if not isinstance(documents, list) or not documents:
        raise InvalidRequest(MISSING, param=name)


def _item(value: Any, where: str, param: str) -> _Item:
    """An item carries a text, an image, or both. What else an object holds is nothing that can be scored."""
    if isinstance(value, str):
        return _Item(value, False, value)
    if not isinstance(value, dict):
        raise malformed(f"{where} must be {ITEM}, got {kind(value)}", param)
    sent = {key: value[key] for key in KEYS if value.get(key) is not None}
    if not isinstance(sent.get("text", ""), str):
        raise malformed(f"the text of {where} must be a string, got {kind(sent['text'])}", param)
    for key in KEYS[1:]:
        match sent.get(key, ""):
            case str() | {"url": str()}:
                pass
            case wrong:
                raise malformed(f'the {key} of {where} must be a URL or {{"url": "..."}}, got {kind(wrong)}', param)
    return _Item(sent.get("text", ""), len(sent) > ("text" in sent), sent)


def _check(item: _Item, label: str, model: ModelSpec, param: str) -> None:
    if not item.image and not item.text.strip():
        raise InvalidRequest(f"{label} carries neither text nor an image", param=param)
    if item.image and not model.images:
        raise UnsupportedCapability(f"{label} is an image, but the loaded reranker does not accept images", param=param)
