"""HTTP bodies into frozen requests. The order of the checks and the wording of the errors are a contract with clients.

A request for embeddings is checked in this order: the shape of the body and the type of every field, a served model, `encoding_format`,
`dimensions`, `input_type`, `multi_embedding`, `instruction`, the items, `embd_normalize`, and how long items are cut. `null` is the same as
absent. Other servers' names for a field are accepted; what would silently give other vectors than were asked for (`late_chunking`, int8
output) is refused.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from django.conf import settings

from inference.client import InferenceClient
from inference.errors import InvalidRequest, UnsupportedCapability
from inference.fields import Parser, anything, boolean, count, first, kind, malformed, mapping, read, served, short, signed, string
from inference.wire import EmbedJob, InputType, Item, ModelSpec

EncodingFormat = Literal["float", "base64"]

FOREIGN_IDS = "If a LangChain OpenAIEmbeddings sent it, set check_embedding_ctx_length=False there: its ids are of another tokenizer"
PART_FORMS = '{"type": "text", "text": "..."} or {"type": "image_url", "image_url": {"url": "..."}}'
U32 = 2**32
QUERY, DOCUMENT = ("query", "search_query", "retrieval.query"), ("document", "passage", "search_document", "retrieval.passage")


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    items: tuple[Item, ...]
    model: str                            # the served id
    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None
    instruction: str | None = None
    normalize: float | None = None
    truncate: bool = True
    input_type: InputType | None = None
    multi_embedding: bool = False         # the caller asked for rows by name, and is told so by the `object` of each item
    ignored: tuple[str, ...] = ()         # fields that have no effect on this model, and the caller is told so

    def job(self) -> EmbedJob:
        return EmbedJob(items=self.items, model=self.model, dimensions=self.dimensions, instruction=self.instruction,
                        input_type=self.input_type, normalize=self.normalize, truncate=self.truncate)


@dataclass(frozen=True, slots=True)
class SearchRequest:
    query: str
    limit: int = 10
    filter: dict[str, Any] | None = None
    include_text: bool = False
    rerank: str | bool = False            # a served reranker, True for the first
    candidates: int | None = None


class _Image:
    """An image part: no served family takes one."""


def _truncation(value: Any) -> bool | int | str:
    if isinstance(value, str) and value.upper() in ("NONE", "START", "END"):
        return value.upper()
    if type(value) in (bool, int):
        return value  # type: ignore[no-any-return]
    raise ValueError("true, false, a number of tokens, or NONE, START or END")


def _reranker(value: Any) -> str | bool:
    if not isinstance(value, str | bool):
        raise ValueError("the name of a reranker, true or false")
    return value


def _direction(value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in ("left", "right"):
        raise ValueError("left or right")
    return value.lower()


EMBED_FIELDS: Mapping[str, Parser] = {
    "model": string, "input": anything, "encoding_format": string, "dimensions": count, "instruction": string,
    "embd_normalize": signed, "user": anything,
    # what other servers call them, or have besides
    "encoding_type": string, "embedding_type": string, "output_dimension": count, "output_dtype": string,
    "prompt_name": string, "input_type": string, "task": string, "normalize": boolean, "normalized": boolean,
    "truncate": _truncation, "truncation": _truncation, "truncate_prompt_tokens": signed, "truncation_direction": _direction,
    "multi_embedding": boolean,
    "late_chunking": boolean, "modality": anything, "timeout": anything, "priority": anything, "request_id": anything,
}
SEARCH_FIELDS: Mapping[str, Parser] = {"query": string, "limit": signed, "filter": mapping, "include_text": boolean, "rerank": _reranker,
                                      "candidates": signed}


def parse_embed(body: object, client: InferenceClient) -> EmbedRequest:
    """A body of POST /v1/embeddings. Raises InvalidRequest (400), or NotLoaded (501) when no embedding model is served."""
    if isinstance(body, dict) and "input" not in body and "content" not in body:
        raise InvalidRequest('"input" or "content" must be provided', param="input")
    fields = read(body, EMBED_FIELDS, strict=settings.STRICT_FIELDS)
    if fields.get("input") is None:
        raise malformed("missing field `input`" if "input" not in fields else "`input` must not be null", "input")
    items = _items(fields["input"])
    model = served(client, "embedding", fields.get("model"), accept_any=settings.ACCEPT_ANY_MODEL)
    encoding = _encoding_format(fields)
    dimensions = _dimensions(fields, model)
    input_type, multi_embedding = _input_type(fields, model), _multi_embedding(fields, model)
    ignored = _ignored(fields, model)
    return EmbedRequest(
        items=_prompted(_checked(items, model), _prompt(fields, model)), model=model.id, encoding_format=encoding, dimensions=dimensions,
        instruction=fields.get("instruction"), normalize=_normalize(fields, model), truncate=_truncate(fields, model),
        input_type=input_type, multi_embedding=multi_embedding, ignored=ignored)


def parse_native(body: object, client: InferenceClient) -> EmbedRequest:
    """A body of POST /embedding, llama-server's own: `content` is another name of `input` there. Raises as parse_embed."""
    if isinstance(body, dict) and "input" not in body and "content" in body:
        body = {"input" if name == "content" else name: value for name, value in body.items()}
    return parse_embed(body, client)


def parse_search(body: object) -> SearchRequest:
    """A body of POST /collections/{name}/search; the values are judged where the search is."""
    if isinstance(body, dict) and body.get("query") is None:
        raise InvalidRequest('"query" must be provided', param="query")
    fields = {name: value for name, value in read(body, SEARCH_FIELDS, strict=settings.STRICT_FIELDS).items() if value is not None}
    return SearchRequest(**fields)


def _items(value: Any) -> list[str | tuple[int, ...] | _Image]:
    """A string, a list of strings, of token ids, of lists of token ids, or of parts. An empty list is a list of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise malformed("`input` must be a string, a list of strings, a list of token ids, a list of lists of token ids, "
                         f"or a list of parts; got {kind(value)}", "input")
    kinds = set(map(type, value))
    if kinds <= {int}:
        return [_token_ids(value, "input")]
    if kinds == {str}:
        return value
    if kinds == {list}:
        return [_token_ids(ids, f"input[{i}]") for i, ids in enumerate(value)]
    if kinds == {dict}:
        return [_part(part, f"input[{i}]") for i, part in enumerate(value)]
    first = type(value[0])
    odd = next((i for i, element in enumerate(value) if type(element) is not first), 0)
    against = f" after {kind(value[0])}" if odd else ""
    raise malformed("the elements of `input` must be all strings, all token ids, all lists of token ids, or all parts; "
                     f"input[{odd}] is {kind(value[odd])}{against}", "input")


def _token_ids(ids: list[Any], where: str) -> tuple[int, ...]:
    if not set(map(type, ids)) <= {int}:
        odd = next(i for i, element in enumerate(ids) if type(element) is not int)
        raise malformed(f"{where}[{odd}] must be a token id, got {kind(ids[odd])}", "input")
    if ids and (min(ids) < 0 or max(ids) >= U32):
        odd = next(i for i, element in enumerate(ids) if not 0 <= element < U32)
        raise malformed(f"{where}[{odd}] must be a token id, a whole number from 0 to {U32 - 1}, got {ids[odd]}", "input")
    return tuple(ids)


def _part(part: dict[str, Any], where: str) -> str | _Image:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image_url", "image_url": {"url": str()}}:
            return _Image()
    raise malformed(f"{where} must be {PART_FORMS}", "input")


def _encoding_format(fields: dict[str, Any]) -> EncodingFormat:
    name, value = first(fields, "encoding_format", "encoding_type", "embedding_type")
    dtype = fields.get("output_dtype")
    if dtype is not None and dtype != "float":
        raise UnsupportedCapability(f"unsupported output_dtype `{short(dtype)}`; expected `float`", param="output_dtype")
    match (value or "").strip():
        case "" | "float":
            return "float"
        case "base64":
            return "base64"
    raise InvalidRequest(f"unsupported {name} `{short(value.strip())}`; expected `float` or `base64`", param=name)


def _dimensions(fields: dict[str, Any], model: ModelSpec) -> int | None:
    name, value = first(fields, "dimensions", "output_dimension")
    if value is not None and not 1 <= value <= model.dims:
        raise InvalidRequest(f"`{name}` must be between 1 and {model.dims} for this model, got {value}", param=name)
    return value  # type: ignore[no-any-return]


def _checked(items: list[str | tuple[int, ...] | _Image], model: ModelSpec) -> list[Item]:
    checked: list[Item] = []
    for i, item in enumerate(items):
        if isinstance(item, _Image):
            raise UnsupportedCapability(f"input[{i}] is an image, but the loaded embedding model does not accept images", param="input")
        if not item:
            raise InvalidRequest(f"input[{i}] is an empty {'string' if isinstance(item, str) else 'token list'}", param="input")
        if isinstance(item, tuple) and 0 < model.vocab_size <= max(item):
            worst = next(token for token in item if token >= model.vocab_size)
            raise InvalidRequest(
                f"input[{i}] contains token id {worst}, which is >= vocab_size {model.vocab_size}. {FOREIGN_IDS}", param="input")
        checked.append(item)
    return checked


def _input_type(fields: dict[str, Any], model: ModelSpec) -> InputType | None:
    """Which side a multi-vector model reads the texts as; other models have prompts for that."""
    name, value = first(fields, "prompt_name", "input_type", "task")
    if value is None or not model.multi_vector or value in model.prompts:
        return None
    if value.lower() in QUERY:
        return "query"
    if value.lower() in DOCUMENT:
        return "document"
    raise InvalidRequest(f"unsupported {name} `{short(value)}`; this model reads texts as `query` or `document`", param=name)


def _multi_embedding(fields: dict[str, Any], model: ModelSpec) -> bool:
    wanted = bool(fields.get("multi_embedding"))
    if wanted and not model.multi_vector:
        raise UnsupportedCapability(f"`multi_embedding` is not supported: {model.id} gives one vector an input", param="multi_embedding")
    return wanted


def _ignored(fields: dict[str, Any], model: ModelSpec) -> tuple[str, ...]:
    """`instruction`, of a model that has no format for one."""
    if model.instructions or not (fields.get("instruction") or "").strip():
        return ()
    if settings.STRICT_FIELDS:
        raise UnsupportedCapability(f"`instruction` has no effect: {model.id} takes none", param="instruction")
    return ("instruction",)


def _prompt(fields: dict[str, Any], model: ModelSpec) -> str:
    """The checkpoint's prompt for what the caller says the texts are; none where the checkpoint has none for it."""
    _, value = first(fields, "prompt_name", "input_type", "task")
    if value is None:
        return ""
    alike = next((names for names in (QUERY, DOCUMENT) if value.lower() in names), ())
    return next((model.prompts[name] for name in (value, *alike) if name in model.prompts), "")


def _prompted(items: list[Item], prompt: str) -> tuple[Item, ...]:
    return tuple(prompt + item if isinstance(item, str) else item for item in items) if prompt else tuple(items)


def _normalize(fields: dict[str, Any], model: ModelSpec) -> float | None:
    value = fields.get("embd_normalize")
    if value is not None and value < -1:
        raise InvalidRequest(
            f"embd_normalize {value} is out of domain: pass -1 for no normalization, 0 for the max-absolute int16 rescale, 1 for taxicab, "
            "2 for euclidean, or a value above 2 for that p-norm", param="embd_normalize")
    _, wanted = first(fields, "normalize", "normalized")
    if value is not None or wanted is None:
        return None if value is None else float(value)
    return -1.0 if not wanted else None if model.normalize != -1 else 2.0


def _truncate(fields: dict[str, Any], model: ModelSpec) -> bool:
    """False: an item over the limit is refused. So it is when the caller wants it cut at its start, which no model here does."""
    if fields.get("late_chunking"):
        raise UnsupportedCapability("`late_chunking` is not supported: each input is embedded by itself", param="late_chunking")
    for name in ("truncate", "truncation", "truncate_prompt_tokens"):
        value = fields.get(name)
        if type(value) is int and value != -1 and value < model.max_length:
            raise UnsupportedCapability(
                f"`{name}` {value} is below the model's limit of {model.max_length} tokens, which is where inputs are cut", param=name)
    _, value = first(fields, "truncate", "truncation")
    refused = value is False or value in ("NONE", "START")
    return not refused and fields.get("truncation_direction") != "left"
