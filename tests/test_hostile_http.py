"""Hostile bodies gathered elsewhere: each is answered as its index says, and never by a 500."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from mlxcel_site.codec import loads
from tests.fakes import FakeClient
from tests.test_rest import envelope, post


@pytest.fixture
def http(served: FakeClient) -> Client:
    return Client(raise_request_exception=False)


def accepted(expect: Any) -> set[int]:
    return {int(part) for part in str(expect).split(" or ")}


def test_bodies(http: Client, data: Path) -> None:
    folder = data / "hostile/text/http"
    cases = [case for case in json.loads((folder / "index.json").read_text()) if not case["file"].startswith("rerank")]
    assert len(cases) == 26
    wrong = {}
    for case in cases:
        body = (folder / case["file"]).read_bytes().replace(b'"model":"m"', b'"model":"fake-8"')
        response = post(http, body)
        if response.status_code not in accepted(case["expect"]):
            wrong[case["file"]] = (response.status_code, case["expect"])
        elif response.status_code != 200:
            envelope(response, response.status_code)
    assert not wrong


def test_of_equal_keys_the_last_wins(http: Client, data: Path, served: FakeClient) -> None:
    post(http, (data / "hostile/text/http/dup-keys.json").read_bytes().replace(b'"m"', b'"fake-8"'))
    assert served.jobs[-1].items == ("second",)


def test_half_a_surrogate_becomes_the_replacement_character(http: Client, data: Path, served: FakeClient) -> None:
    post(http, (data / "hostile/text/http/surrogate-lone-escaped.json").read_bytes().replace(b'"m"', b'"fake-8"'))
    assert served.jobs[-1].items == ("bad \ufffd",)


def test_raw_bytes_are_refused_or_read_as_what_they_say(http: Client, data: Path, served: FakeClient) -> None:
    """As a whole body, and as a text inside one: 400, or, where the bytes are UTF-8, that text."""
    files = sorted((data / "hostile/text/bytes").iterdir())
    assert files
    for file in files:
        raw = file.read_bytes()
        envelope(post(http, raw), 400)
        response = post(http, b'{"input": "' + raw + b'"}')
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            assert "not UTF-8" in envelope(response, 400)["message"], file.name
        else:
            assert response.status_code == 200 and served.jobs[-1].items == (text,), file.name


def test_every_text_arrives_as_it_was_sent(http: Client, data: Path, served: FakeClient) -> None:
    sent = 0
    for case in json.loads((data / "hostile/text/cases.json").read_text()):
        text = case.get("text")
        if isinstance(text, str):
            response = post(http, {"input": text})
            if text:
                assert response.status_code == 200 and served.jobs[-1].items == (loads(json.dumps(text).encode()),), case["id"]
                sent += 1
            else:
                assert envelope(response, 400)["message"] == "input[0] is an empty string"
    assert sent > 20
