"""HTTP bodies into frozen requests. The order of the checks and the wording of the errors are a contract with clients.

A request of /v1/embeddings is checked in this order: the shape of the body and the type of every field, a served model, `encoding_format`,
`dimensions`, `input_type`, `multi_embedding`, the items, `embd_normalize`, and how long items are cut. `null` is the same as absent.
Other servers' names for a field are accepted; what would silently give other vectors than were asked for (`late_chunking`, int8 output)
is refused.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from django.conf import settings

from inference.client import InferenceClient
from inference.errors import InvalidRequest, NotLoaded, UnsupportedCapability
from inference.wire import EmbedJob, InputType, Item, ModelSpec

EncodingFormat = Literal["float", "base64"]

NOT_LOADED = ("This server does not support embeddings. Start it with `manage.py serve --model MODEL`, "
              "or set MLXCEL_EMBEDDING_MODEL to a directory or a Hugging Face id.")
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

    def job(self) -> EmbedJob:
        return EmbedJob(items=self.items, model=self.model, dimensions=self.dimensions, instruction=self.instruction,
                        input_type=self.input_type, normalize=self.normalize, truncate=self.truncate)


@dataclass(frozen=True, slots=True)
class SearchRequest:
    query: str
    limit: int = 10
    filter: dict[str, Any] | None = None
    include_text: bool = False


class _Image:
    """An image part: no served family takes one."""


# Types of fields. A parser returns the value or raises ValueError with what was expected.

def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _integer(least: int, below: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if type(value) is not int or not least <= value < below:
            raise ValueError("a whole number of at least 0" if least == 0 else "a whole number")
        return value
    return parse


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an object")
    return value


def _anything(value: Any) -> Any:
    return value


_count, _signed = _integer(0, 2**64), _integer(-2**31, 2**31)


def _truncation(value: Any) -> bool | int | str:
    if isinstance(value, str) and value.upper() in ("NONE", "START", "END"):
        return value.upper()
    if type(value) in (bool, int):
        return value  # type: ignore[no-any-return]
    raise ValueError("true, false, a number of tokens, or NONE, START or END")


def _direction(value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in ("left", "right"):
        raise ValueError("left or right")
    return value.lower()


EMBED_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "model": _string, "input": _anything, "encoding_format": _string, "dimensions": _count, "instruction": _string,
    "embd_normalize": _signed, "user": _anything,
    # what other servers call them, or have besides
    "encoding_type": _string, "embedding_type": _string, "output_dimension": _count, "output_dtype": _string,
    "prompt_name": _string, "input_type": _string, "task": _string, "normalize": _boolean, "normalized": _boolean,
    "truncate": _truncation, "truncation": _truncation, "truncate_prompt_tokens": _signed, "truncation_direction": _direction,
    "multi_embedding": _boolean,
    "late_chunking": _boolean, "modality": _anything, "timeout": _anything, "priority": _anything, "request_id": _anything,
}
SEARCH_FIELDS: Mapping[str, Callable[[Any], Any]] = {"query": _string, "limit": _signed, "filter": _object, "include_text": _boolean}


def parse_embed(body: object, client: InferenceClient) -> EmbedRequest:
    """A body of POST /v1/embeddings. Raises InvalidRequest (400), or NotLoaded (501) when no embedding model is served."""
    if isinstance(body, dict) and "input" not in body and "content" not in body:
        raise InvalidRequest('"input" or "content" must be provided', param="input")
    fields = _fields(body, EMBED_FIELDS)
    if fields.get("input") is None:
        raise _malformed("missing field `input`" if "input" not in fields else "`input` must not be null", "input")
    items = _items(fields["input"])
    model = _model(fields.get("model"), client)
    encoding = _encoding_format(fields)
    dimensions = _dimensions(fields, model)
    input_type, multi_embedding = _input_type(fields, model), _multi_embedding(fields, model)
    return EmbedRequest(
        items=_prompted(_checked(items, model), _prompt(fields, model)), model=model.id, encoding_format=encoding, dimensions=dimensions,
        instruction=fields.get("instruction"), normalize=_normalize(fields, model), truncate=_truncate(fields, model),
        input_type=input_type, multi_embedding=multi_embedding)


def parse_search(body: object) -> SearchRequest:
    """A body of POST /collections/{name}/search; the values are judged where the search is."""
    if isinstance(body, dict) and body.get("query") is None:
        raise InvalidRequest('"query" must be provided', param="query")
    fields = {name: value for name, value in _fields(body, SEARCH_FIELDS).items() if value is not None}
    return SearchRequest(**fields)


def _malformed(detail: str, param: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"invalid request body: {detail}", param=param)


def _fields(body: object, known: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Known fields of the right type, in the table's order; null stays None. Unknown ones are dropped, or refused by a strict server."""
    if not isinstance(body, dict):
        raise _malformed(f"expected an object, got {_kind(body)}")
    if settings.STRICT_FIELDS and (unknown := [name for name in body if name not in known]):
        raise _malformed(f"unknown field `{_short(unknown[0])}`; this server takes {', '.join(known)}", unknown[0])
    fields = {}
    for name, parse in known.items():
        if name in body:
            try:
                fields[name] = None if body[name] is None else parse(body[name])
            except ValueError as error:
                raise _malformed(f"`{name}` must be {error}, got {_kind(body[name])}", name) from None
    return fields


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {value:.40g}" if isinstance(value, float) else f"the number {value}"
        case str():
            return f'the string "{_short(value)}"'
        case list():
            return "a list"
    return "an object"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def _items(value: Any) -> list[str | tuple[int, ...] | _Image]:
    """A string, a list of strings, of token ids, of lists of token ids, or of parts. An empty list is a list of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _malformed("`input` must be a string, a list of strings, a list of token ids, a list of lists of token ids, "
                         f"or a list of parts; got {_kind(value)}", "input")
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
    against = f" after {_kind(value[0])}" if odd else ""
    raise _malformed("the elements of `input` must be all strings, all token ids, all lists of token ids, or all parts; "
                     f"input[{odd}] is {_kind(value[odd])}{against}", "input")


def _token_ids(ids: list[Any], where: str) -> tuple[int, ...]:
    if not set(map(type, ids)) <= {int}:
        odd = next(i for i, element in enumerate(ids) if type(element) is not int)
        raise _malformed(f"{where}[{odd}] must be a token id, got {_kind(ids[odd])}", "input")
    if ids and (min(ids) < 0 or max(ids) >= U32):
        odd = next(i for i, element in enumerate(ids) if not 0 <= element < U32)
        raise _malformed(f"{where}[{odd}] must be a token id, a whole number from 0 to {U32 - 1}, got {ids[odd]}", "input")
    return tuple(ids)


def _part(part: dict[str, Any], where: str) -> str | _Image:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image_url", "image_url": {"url": str()}}:
            return _Image()
    raise _malformed(f"{where} must be {PART_FORMS}", "input")


def _model(name: str | None, client: InferenceClient) -> ModelSpec:
    model = client.describe("embedding", name)
    if model is not None:
        return model
    default = client.describe("embedding")
    if default is None:
        raise NotLoaded(NOT_LOADED)
    if settings.ACCEPT_ANY_MODEL:
        return default
    served = [model.id for model in client.models() if model.kind == "embedding"]
    which = f"the served embedding model `{default.id}`"
    if len(served) > 1:
        which = f"a served embedding model: `{'`, `'.join(served)}`"
    raise InvalidRequest(f"model `{_short(name or '')}` is not {which}", param="model", code="model_not_found")


def _first(fields: dict[str, Any], *names: str) -> tuple[str, Any]:
    """The first of these fields that is there, and its value; (names[0], None) when none is."""
    return next(((name, fields[name]) for name in names if fields.get(name) is not None), (names[0], None))


def _encoding_format(fields: dict[str, Any]) -> EncodingFormat:
    name, value = _first(fields, "encoding_format", "encoding_type", "embedding_type")
    dtype = fields.get("output_dtype")
    if dtype is not None and dtype != "float":
        raise UnsupportedCapability(f"unsupported output_dtype `{_short(dtype)}`; expected `float`", param="output_dtype")
    match (value or "").strip():
        case "" | "float":
            return "float"
        case "base64":
            return "base64"
    raise InvalidRequest(f"unsupported {name} `{_short(value.strip())}`; expected `float` or `base64`", param=name)


def _dimensions(fields: dict[str, Any], model: ModelSpec) -> int | None:
    name, value = _first(fields, "dimensions", "output_dimension")
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
    name, value = _first(fields, "prompt_name", "input_type", "task")
    if value is None or not model.multi_vector or value in model.prompts:
        return None
    if value.lower() in QUERY:
        return "query"
    if value.lower() in DOCUMENT:
        return "document"
    raise InvalidRequest(f"unsupported {name} `{_short(value)}`; this model reads texts as `query` or `document`", param=name)


def _multi_embedding(fields: dict[str, Any], model: ModelSpec) -> bool:
    wanted = bool(fields.get("multi_embedding"))
    if wanted and not model.multi_vector:
        raise UnsupportedCapability(f"`multi_embedding` is not supported: {model.id} gives one vector an input", param="multi_embedding")
    return wanted


def _prompt(fields: dict[str, Any], model: ModelSpec) -> str:
    """The checkpoint's prompt for what the caller says the texts are; none where the checkpoint has none for it."""
    _, value = _first(fields, "prompt_name", "input_type", "task")
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
    _, wanted = _first(fields, "normalize", "normalized")
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
    _, value = _first(fields, "truncate", "truncation")
    refused = value is False or value in ("NONE", "START")
    return not refused and fields.get("truncation_direction") != "left"
