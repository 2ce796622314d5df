"""The settings of the web application, as the documentation shows them: (name, default, meaning). `settings.py` reads them; those about
models are in `inference/config.py`."""
from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

from inference import config

WEB: tuple[tuple[str, str, str], ...] = (
    ("MLXCEL_VAR_DIR", "var", "where the database, search files, secrets and the admin's password are kept"),
    ("DATABASE_URL", "SQLite in MLXCEL_VAR_DIR", "the database; postgres://user:password@host/name for PostgreSQL (docs/production.md)"),
    ("MLXCEL_INDEX", "auto", "search of single vectors on PostgreSQL: auto uses pgvector's graph where one was built, exact never"),
    ("MLXCEL_INDEX_FROM", "200000", "passages from which on embed_corpus builds that graph"),
    ("MLXCEL_BULK_LEASE_SECS", "30",
     "seconds (1 or more) until a bulk worker that froze, or died on another machine, loses its chunk to another"),
    ("MLXCEL_API_KEYS", "", "keys callers have to send, comma separated; none: everyone who reaches the server may use it"),
    ("MLXCEL_API_KEY_FILE", "", "a file with one key a line"),
    ("MLXCEL_API_PREFIX", "", "path that everything lies under, such as /ai"),
    ("MLXCEL_CORS_ORIGINS", "", "origins whose pages may call the API from a browser, comma separated: https://app.example; * is any"),
    ("MLXCEL_STRICT_FIELDS", "0", "refuse request fields that are not known instead of ignoring them"),
    ("MLXCEL_ACCEPT_ANY_MODEL", "0", "answer with the default model whatever model a request names"),
    ("MLXCEL_RERANK_DOCUMENT_SHAPE", "verbatim", "how rerankers return documents: verbatim, or object for {\"text\": ...} always"),
    ("MLXCEL_PROPS", "0", "answer GET /props: which models are served, and how"),
    ("MLXCEL_LOG_LEVEL", "INFO", "how much is logged: DEBUG, INFO, WARNING, ERROR or CRITICAL"),
    ("MLXCEL_LOG_FORMAT", "console", "console, or json for one object a line"),
    ("PROMETHEUS_MULTIPROC_DIR", "", "an empty directory, where several web processes add up their /metrics"),
    ("DJANGO_SECRET_KEY", "made on first start", "signs sessions"),
    ("DJANGO_ALLOWED_HOSTS", "this machine", "names the server answers to, comma separated; unset, and with `serve` listening elsewhere "
                                            "than on this machine: *, any"),
    ("DJANGO_CSRF_TRUSTED_ORIGINS", "", "origins the admin's forms may come from"),
    ("DJANGO_HTTPS", "0", "a proxy in front speaks TLS and sets X-Forwarded-Proto"),
    ("DJANGO_STATIC_ROOT", "", "where collectstatic puts files for a proxy; not needed otherwise"),
    ("DJANGO_DEBUG", "0", "Django's debug pages in the admin; never where others can reach them"),
)
INTERNAL = {"MLXCEL_ORIGIN", "MLXCEL_PORT", "MLXCEL_WEB_THREADS",      # set by `serve` for its process
            "MLXCEL_TEST_DATA", "MLXCEL_TEST_DATABASE_URL", "MLXCEL_TEST_POSTGRES"}


def misspelt(env: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Names that begin like one of ours and are none, each with the likeliest one that was meant."""
    known = {name for name, *_ in (*WEB, *config.describe())}
    unknown = [name for name in (os.environ if env is None else env) if name.startswith("MLXCEL_") and name not in known | INTERNAL]
    return [(name, next(iter(difflib.get_close_matches(name, known, 1, 0)), "")) for name in sorted(unknown)]
