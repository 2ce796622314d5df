"""API keys: where they come from, how they are sent, and what is open without one."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.test import Client, override_settings

from inference.errors import ConfigError
from mlxcel_site.auth import ApiKeys, load_keys
from mlxcel_site.checks import check_api_keys
from tests.fakes import FakeClient

KEY = "s3cret, \"quoted\""
CSV = 'other,"s3cret, ""quoted""", spaced,,é'


@pytest.fixture
def http(served: FakeClient) -> Iterator[Client]:
    with override_settings(API_KEYS=CSV):
        yield Client()


@pytest.mark.parametrize(("listed", "keys"), [
    ("a", ["a"]), ("a,b", ["a", "b"]), (" a, b", [" a", " b"]), ('"a,b",c', ["a,b", "c"]), ('"a""b"', ['a"b']), ("a,,b,", ["a", "b"]),
    ("a,a", ["a"])])
def test_listed_keys(listed: str, keys: list[str]) -> None:
    found = load_keys(listed)
    assert len(found) == len(keys) and all(found.admits(key.encode()) for key in keys)


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nalice\n\n bob\n#eve\n")
    found = load_keys("root", file)
    assert len(found) == 3 and all(found.admits(key) for key in (b"root", b"alice", b" bob")) and not found.admits(b"bob")


@pytest.mark.parametrize("content", [b"# \r\nalice\r\n\r\n", b"\nalice \n", b"\nalice\t\r\n  \n"])
def test_what_no_header_can_carry_is_no_part_of_a_key(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="at the end of line 2 are not part of the key"):
        found = load_keys("", file)
    assert len(found) == 1 and found.admits(b"alice")
    with pytest.warns(UserWarning, match="MLXCEL_API_KEYS: .* at the end of key 2, 3 are"):
        assert all(load_keys("a,b ,c\t").admits(key) for key in (b"a", b"b", b"c"))


@pytest.mark.parametrize("listed", [",", '""', '"a'])
def test_a_source_without_keys_does_not_open_the_server(listed: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_keys(listed)
    (tmp_path / "empty").write_text("# none\n")
    for file in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(ConfigError, match="MLXCEL_API_KEY_FILE"):
            load_keys("", file)
    with override_settings(API_KEYS=listed):
        assert [error.id for error in check_api_keys(None)] == ["mlxcel.E002"]


def test_keys_do_not_show() -> None:
    assert repr(ApiKeys(["a", "b"])) == str(ApiKeys(["a", "b"])) == "<2 API keys>"


@pytest.mark.parametrize("headers", [
    {"Authorization": f"Bearer {KEY}"}, {"Authorization": KEY}, {"Authorization": f"bearer {KEY}"}, {"X-Api-Key": KEY}, {"Api-Key": KEY},
    {"X-Api-Key": f"Bearer {KEY}"}, {"Authorization": "", "X-Api-Key": KEY}, {"Authorization": "Bearer other"},
    {"Authorization": "Bearer  spaced"},
    {"Authorization": "Bearer é".encode().decode("latin-1")}])
def test_who_is_let_in(http: Client, headers: dict[str, str]) -> None:
    assert http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [
    {}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Authorization": "wrong", "X-Api-Key": KEY},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": "Bearer spaced"}, {"X-Api-Key": "OTHER"}, {"Authorization": "Bearer \xff"}])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/embeddings", "/collections", "/nothing", "/v1/../health"])
def test_who_is_not(http: Client, headers: dict[str, str], path: str) -> None:
    response = http.get(path, headers=headers)
    assert (response.status_code, response["Content-Type"]) == (401, "application/json; charset=utf-8")
    assert response.json() == {"error": {"message": "Invalid API Key", "type": "authentication_error", "param": None, "code": 401},
                               "detail": "Invalid API Key"}
    assert response["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/health/", "/health/ready", "/v1/health/ready", "/v1",
                                  "/docs", "/openapi.json"])
def test_what_is_open(http: Client, path: str) -> None:
    assert http.get(path).status_code == 200


def test_preflights_are_answered_before_keys(http: Client) -> None:
    assert http.options("/v1/embeddings").status_code == 200


@pytest.mark.django_db
def test_pages_for_people(http: Client) -> None:
    assert b"Collections</h2>" not in http.get("/").content and b"YOUR_KEY" in http.get("/").content
    assert http.get("/admin/").status_code == 302


def test_without_keys_everyone_is_let_in(served: FakeClient) -> None:
    assert Client().get("/v1/models").status_code == 200
