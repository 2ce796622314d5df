"""API keys: who may call. A set of keys; an empty set lets everyone in. The admin has its own login."""
from __future__ import annotations

import csv
import hmac
import io
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase

from inference.errors import ConfigError, Unauthorized

from .errors import respond

READY = {"/health/ready", "/v1/health/ready"}
PUBLIC = {*READY, "/", "/v1", "/docs", "/openapi.json", "/favicon.ico"}
HEALTH = {"/health", "/v1/health"}
PAGES = ("/admin", "/static/")
HEADERS = ("Authorization", "X-Api-Key", "Api-Key")


class ApiKeys:
    """A set of keys that does not show them."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = tuple({key.encode("utf-8", "surrogateescape") for key in keys})

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<{len(self)} API keys>"

    def admits(self, presented: bytes) -> bool:
        """Compares with every key in full, so that the time taken says nothing about any of them."""
        return sum([hmac.compare_digest(key, presented) for key in self._keys]) > 0


def load_keys(listed: str = "", file: str | Path = "") -> ApiKeys:
    """Keys of MLXCEL_API_KEYS (`listed`: one CSV row, `"` quotes a field that holds a comma) and of MLXCEL_API_KEY_FILE
    (`file`: one key a line; empty lines and lines that begin with # are skipped). Blanks and carriage returns at the end of a key are taken
    off with a warning: no header can carry them.

    Raises ConfigError where a source is given and holds no key: a server must not open up because of an empty file."""
    keys: list[str] = []
    if listed:
        try:
            found = [key for row in csv.reader(io.StringIO(listed, newline=""), strict=True) for key in row if key.strip()]
        except csv.Error as error:
            raise ConfigError(f"MLXCEL_API_KEYS is not a CSV row: {error}", param="MLXCEL_API_KEYS") from None
        if not found:
            raise ConfigError("MLXCEL_API_KEYS is set but holds no key; unset it to serve without keys", param="MLXCEL_API_KEYS")
        keys += _sendable(found, "MLXCEL_API_KEYS", "key")
    if file:
        try:
            lines = Path(file).read_bytes().decode("utf-8", "surrogateescape").split("\n")
        except OSError as error:
            raise ConfigError(f"MLXCEL_API_KEY_FILE={str(file)!r} cannot be read: {error.strerror}", param="MLXCEL_API_KEY_FILE") from None
        if not (found := _sendable(["" if line.startswith("#") else line for line in lines], str(file), "line")):
            raise ConfigError(f"MLXCEL_API_KEY_FILE={str(file)!r} holds no key", param="MLXCEL_API_KEY_FILE")
        keys += found
    return ApiKeys(keys)


def _sendable(found: list[str], where: str, unit: str) -> list[str]:
    """Keys as a header can carry them."""
    if numbers := [str(number) for number, key in enumerate(found, 1) if key.rstrip() and key != key.rstrip()]:
        shown = ", ".join(numbers[:10]) + (" ..." if len(numbers) > 10 else "")
        warnings.warn(f"{where}: blanks or carriage returns at the end of {unit} {shown} are not part of the key", stacklevel=3)
    return [key.rstrip() for key in found if key.strip()]


def presented(request: HttpRequest) -> bytes:
    """What the caller shows: `Authorization`, else `X-Api-Key`, else `Api-Key`; a leading `Bearer ` is not part of it."""
    shown = next((value for name in HEADERS if (value := request.headers.get(name))), "")
    return (shown[7:] if shown[:7].lower() == "bearer " else shown).encode("latin-1", "replace")


class ApiKeyMiddleware:
    """Everything needs a key except PUBLIC, the admin and static files, the preflight of browsers (OPTIONS), and HEALTH where it is not
    under an API prefix."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response
        self.keys = load_keys(settings.API_KEYS, settings.API_KEY_FILE)

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        path = request.path_info
        public = path in PUBLIC or path.startswith(PAGES) or (path in HEALTH and "mlxcel.prefix" not in request.META)
        admitted = not self.keys or self.keys.admits(presented(request))
        if admitted or public or request.method == "OPTIONS":
            request.META["mlxcel.admitted"] = admitted
            return self.get_response(request)
        return respond(Unauthorized("Invalid API Key"))
