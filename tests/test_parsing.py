"""Bodies of /v1/embeddings: what is accepted, the wording of each error, and which of several errors is told."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.test import override_settings

from embeddings.parsing import EmbedRequest, parse_embed, parse_search
from inference.errors import InvalidRequest, NotLoaded, ServiceError, UnsupportedCapability
from tests.fakes import SPEC, FakeClient

MALFORMED = "invalid request body: "
ELEMENTS = MALFORMED + "the elements of `input` must be all strings, all token ids, all lists of token ids, or all parts; "


def parse(**body: Any) -> EmbedRequest:
    return parse_embed(body, FakeClient())


def message(body: Any, client: FakeClient | None = None) -> str:
    with pytest.raises(ServiceError) as caught:
        parse_embed(body, client or FakeClient())
    return str(caught.value)


@pytest.mark.parametrize(("given", "items"), [
    ("a", ("a",)),
    (" ", (" ",)),
    ("\0", ("\0",)),
    (["a", " ", "b"], ("a", " ", "b")),
    ([1, 2], ((1, 2),)),
    ([[1], [2, 3]], ((1,), (2, 3))),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": 1}], ("a", "b")),
    ([999], ((999,),)),
])
def test_forms_of_input(given: Any, items: tuple[Any, ...]) -> None:
    assert parse(input=given) == EmbedRequest(items=items, model="fake-8")


@pytest.mark.parametrize(("body", "expected"), [
    ({}, '"input" or "content" must be provided'),
    ({"model": "fake-8"}, '"input" or "content" must be provided'),
    ({"content": "a"}, MALFORMED + "missing field `input`"),
    ({"input": None}, MALFORMED + "`input` must not be null"),
    (["a"], MALFORMED + "expected an object, got a list"),
    ("a", MALFORMED + 'expected an object, got the string "a"'),
    (None, MALFORMED + "expected an object, got null"),
    ({"input": True}, MALFORMED + "`input` must be a string, a list of strings, a list of token ids, a list of lists of token ids, "
                                  "or a list of parts; got true"),
    ({"input": ["a", None]}, ELEMENTS + 'input[1] is null after the string "a"'),
    ({"input": [1, "a"]}, ELEMENTS + 'input[1] is the string "a" after the number 1'),
    ({"input": [1, True]}, ELEMENTS + "input[1] is true after the number 1"),
    ({"input": [True, False]}, ELEMENTS + "input[0] is true"),
    ({"input": [1.5]}, ELEMENTS + "input[0] is the number 1.5"), ({"input": [101.0]}, ELEMENTS + "input[0] is the number 101.0"),
    ({"input": "a", "embd_normalize": -0.0}, MALFORMED + "`embd_normalize` must be a whole number, got the number -0.0"),
    ({"input": [{"type": "text", "text": "a"}, "b"]}, ELEMENTS + 'input[1] is the string "b" after an object'),
    ({"input": [["a"]]}, MALFORMED + 'input[0][0] must be a token id, got the string "a"'),
    ({"input": [[1], [[2]]]}, MALFORMED + "input[1][0] must be a token id, got a list"),
    ({"input": [-1]}, MALFORMED + "input[0] must be a token id, a whole number from 0 to 4294967295, got -1"),
    ({"input": [1, 99999999999]}, MALFORMED + "input[1] must be a token id, a whole number from 0 to 4294967295, got 99999999999"),
    ({"input": [{"text": "a"}]},
     MALFORMED + 'input[0] must be {"type": "text", "text": "..."} or {"type": "image_url", "image_url": {"url": "..."}}'),
    ({"input": "a", "model": 1}, MALFORMED + "`model` must be a string, got the number 1"),
    ({"input": "a", "encoding_format": ["float"]}, MALFORMED + "`encoding_format` must be a string, got a list"),
    ({"input": "a", "dimensions": "64"}, MALFORMED + '`dimensions` must be a whole number of at least 0, got the string "64"'),
    ({"input": "a", "dimensions": -1}, MALFORMED + "`dimensions` must be a whole number of at least 0, got the number -1"),
    ({"input": "a", "dimensions": True}, MALFORMED + "`dimensions` must be a whole number of at least 0, got true"),
    ({"input": "a", "dimensions": 4.0}, MALFORMED + "`dimensions` must be a whole number of at least 0, got the number 4.0"),
    ({"input": "a", "instruction": 7}, MALFORMED + "`instruction` must be a string, got the number 7"),
    ({"input": "a", "embd_normalize": 2**31},
     MALFORMED + "`embd_normalize` must be a whole number from -2147483648 to 2147483647, got the number 2147483648"),
    ({"input": "a", "model": "m"}, "model `m` is not the served embedding model `fake-8`"),
    ({"input": "a", "model": "Fake-8"}, "model `Fake-8` is not the served embedding model `fake-8`"),
    ({"input": "a", "model": ""}, "model `` is not the served embedding model `fake-8`"),
    ({"input": "a", "encoding_format": "int8"}, "unsupported encoding_format `int8`; expected `float` or `base64`"),
    ({"input": "a", "encoding_type": "hex"}, "unsupported encoding_type `hex`; expected `float` or `base64`"),
    ({"input": "a", "output_dtype": "int8"}, "unsupported output_dtype `int8`; expected `float`"),
    ({"input": "a", "dimensions": 0}, "`dimensions` must be between 1 and 8 for this model, got 0"),
    ({"input": "a", "dimensions": 9}, "`dimensions` must be between 1 and 8 for this model, got 9"),
    ({"input": "a", "output_dimension": 9}, "`output_dimension` must be between 1 and 8 for this model, got 9"),
    ({"input": ""}, "input[0] is an empty string"),
    ({"input": ["a", ""]}, "input[1] is an empty string"),
    ({"input": [{"type": "text", "text": ""}]}, "input[0] is an empty string"),
    ({"input": []}, "input[0] is an empty token list"),
    ({"input": [[1], []]}, "input[1] is an empty token list"),
    ({"input": [[1], [5, 1000, 1001]]},
     "input[1] contains token id 1000, which is >= vocab_size 1000. If a LangChain OpenAIEmbeddings sent it, set "
     "check_embedding_ctx_length=False there: its ids are of another tokenizer"),
    ({"input": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]},
     "input[1] is an image, but the loaded embedding model does not accept images"),
    ({"input": "a", "embd_normalize": -2},
     "embd_normalize -2 is out of domain: pass -1 for no normalization, 0 for the max-absolute int16 rescale, 1 for taxicab, "
     "2 for euclidean, or a value above 2 for that p-norm"),
    ({"input": "a", "late_chunking": True}, "`late_chunking` is not supported: each input is embedded by itself"),
    ({"input": "a", "truncate": "MIDDLE"},
     MALFORMED + '`truncate` must be true, false, a number of tokens, or NONE, START or END, got the string "MIDDLE"'),
    ({"input": "a", "truncate_prompt_tokens": 16},
     "`truncate_prompt_tokens` 16 is below the model's limit of 32 tokens, which is where inputs are cut"),
    ({"input": "a", "truncation_direction": "up"}, MALFORMED + '`truncation_direction` must be left or right, got the string "up"'),
])
def test_messages(body: Any, expected: str) -> None:
    assert message(body) == expected


def test_errors_come_in_the_order_of_the_contract() -> None:
    """Each step repairs what the step before complained of; the request has all errors at once."""
    body: dict[str, Any] = {"model": "m", "encoding_format": "x", "dimensions": 0, "embd_normalize": -2, "late_chunking": True}
    repairs: list[tuple[str, dict[str, Any]]] = [
        ('"input" or "content"', {"input": [["a"]]}),
        ("invalid request body", {"input": ""}),
        ("model `m`", {"model": "fake-8"}),
        ("unsupported encoding_format", {"encoding_format": " base64 "}),
        ("`dimensions`", {"dimensions": 4}),
        ("input[0] is an empty string", {"input": "a"}),
        ("embd_normalize", {"embd_normalize": 1}),
        ("`late_chunking`", {"late_chunking": False}),
    ]
    for begins, repair in repairs:
        assert message(body).startswith(begins)
        body |= repair
    assert parse_embed(body, FakeClient()) == EmbedRequest(("a",), "fake-8", encoding_format="base64", dimensions=4, normalize=1.0)


def test_without_a_model_a_malformed_body_is_still_malformed() -> None:
    nothing = FakeClient().without_model()
    assert message({"input": True}, nothing).startswith(MALFORMED)
    with pytest.raises(NotLoaded, match=r"^This server does not support embeddings\.") as caught:
        parse_embed({"input": "a", "model": "m"}, nothing)
    assert str(caught.value).startswith("This server does not support embeddings. Start it with `manage.py serve --model MODEL`, or set ")


@pytest.mark.parametrize("field", ["model", "encoding_format", "dimensions", "instruction", "embd_normalize", "user", "input_type",
                                   "truncate",
                                   "late_chunking", "output_dtype", "output_dimension", "task", "prompt_name", "normalize"])
def test_null_is_absent(field: str) -> None:
    assert parse(**{"input": "a", field: None}) == parse(input="a")


@pytest.mark.parametrize("name", ["fake-8", "tests/fake-8"])
def test_names_of_the_model(name: str) -> None:
    assert parse(input="a", model=name).model == "fake-8"


@override_settings(ACCEPT_ANY_MODEL=True)
def test_any_name_where_the_operator_says_so() -> None:
    assert parse(input="a", model="text-embedding-3-small").model == "fake-8"


def test_unknown_fields() -> None:
    assert parse(input="a", colour="blue", user=3, priority=[], modality="text") == parse(input="a")
    with override_settings(STRICT_FIELDS=True):
        assert message({"input": "a", "colour": "blue"}).startswith(MALFORMED + "unknown field `colour`; this server takes model, input,")
        assert parse(input="a", user=3) == EmbedRequest(("a",), "fake-8")


@pytest.mark.parametrize(("fields", "encoding"), [
    ({"encoding_format": ""}, "float"), ({"encoding_format": " float\n"}, "float"), ({"encoding_format": "base64"}, "base64"),
    ({"encoding_type": "base64"}, "base64"), ({"embedding_type": "base64"}, "base64"),
    ({"encoding_format": None, "encoding_type": "base64"}, "base64"), ({"encoding_format": "float", "encoding_type": "base64"}, "float"),
    ({"output_dtype": "float"}, "float"),
])
def test_encoding(fields: dict[str, Any], encoding: str) -> None:
    assert parse(input="a", **fields).encoding_format == encoding


@pytest.mark.parametrize(("fields", "text"), [
    ({}, "a"), ({"input_type": "query"}, "query: a"), ({"input_type": "search_query"}, "query: a"), ({"task": "retrieval.query"},
                                                                                                     "query: a"),
    ({"input_type": "document"}, "passage: a"), ({"input_type": "search_document"}, "passage: a"), ({"task": "retrieval.passage"},
                                                                                                    "passage: a"),
    ({"prompt_name": "document", "task": "query"}, "passage: a"), ({"input_type": "classification"}, "a"),
])
def test_prompts_are_the_checkpoints_own(fields: dict[str, Any], text: str) -> None:
    assert parse(input=["a"], **fields).items == (text,)
    assert parse(input=[1], **fields).items == ((1,),)
    bare = FakeClient(spec=replace(SPEC, prompts={}))
    assert parse_embed({"input": "a", **fields}, bare).items == ("a",)


def test_a_prompt_does_not_fill_an_empty_text() -> None:
    assert message({"input": "", "input_type": "query"}) == "input[0] is an empty string"


@pytest.mark.parametrize(("fields", "normalize"), [
    ({}, None), ({"embd_normalize": -1}, -1.0), ({"embd_normalize": 0}, 0.0), ({"embd_normalize": 3}, 3.0), ({"normalize": True}, None),
    ({"normalize": False}, -1.0), ({"normalized": False}, -1.0), ({"normalize": False, "embd_normalize": 2}, 2.0),
])
def test_normalisation(fields: dict[str, Any], normalize: float | None) -> None:
    assert parse(input="a", **fields).normalize == normalize


def test_normalize_asks_for_it_where_the_checkpoint_does_not() -> None:
    assert parse_embed({"input": "a", "normalize": True}, FakeClient(spec=replace(SPEC, normalize=-1.0))).normalize == 2.0


@pytest.mark.parametrize(("fields", "truncate"), [
    ({}, True), ({"truncate": True}, True), ({"truncate": False}, False), ({"truncation": False}, False), ({"truncate": "NONE"}, False),
    ({"truncate": "end"}, True), ({"truncate": "START"}, False), ({"truncation_direction": "Right"}, True),
    ({"truncation_direction": "LEFT"}, False),
    ({"truncate": 32}, True), ({"truncate_prompt_tokens": -1}, True), ({"truncate": 100}, True),
])
def test_truncation(fields: dict[str, Any], truncate: bool) -> None:
    assert parse(input="a", **fields).truncate is truncate


@pytest.mark.parametrize("fields", [{"late_chunking": True}, {"output_dtype": "binary"}, {"truncate": 8}])
def test_what_would_give_other_vectors_is_refused_as_a_capability(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCapability) as caught:
        parse(input="a", **fields)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_capability", next(iter(fields)))


def test_unknown_vocabulary_checks_no_ids() -> None:
    spec = replace(SPEC, vocab_size=0)
    assert parse_embed({"input": [123456]}, FakeClient(spec=spec)).items == ((123456,),)


def test_many_inputs() -> None:
    assert len(parse(input=["a"] * 100_000).items) == 100_000


@pytest.mark.parametrize(("body", "expected"), [
    ({}, '"query" must be provided'), ({"query": None}, '"query" must be provided'),
    ({"query": 1}, MALFORMED + "`query` must be a string, got the number 1"), ([], MALFORMED + "expected an object, got a list"),
    ({"query": "a", "limit": "3"}, MALFORMED + '`limit` must be a whole number, got the string "3"'),
    ({"query": "a", "filter": []}, MALFORMED + "`filter` must be an object, got a list"),
    ({"query": "a", "include_text": 1}, MALFORMED + "`include_text` must be true or false, got the number 1"),
])
def test_search_messages(body: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_search(body)
    assert str(caught.value) == expected
