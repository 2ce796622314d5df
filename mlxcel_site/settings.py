"""The Django project's settings. Everything an operator may change comes from the environment; the defaults are fit for production on one
machine. What concerns models is read in `inference/config.py` instead."""
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import environ
from corsheaders.defaults import default_headers
from django.core.exceptions import ImproperlyConfigured

from inference import config
from inference.errors import ConfigError

from . import logs
from .var import key, prepare, private

BASE_DIR = Path(__file__).resolve().parent.parent
env = environ.Env()


def _number(name: str, default: float, least: float) -> float:
    text = env.str(name, default="").strip() or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise ImproperlyConfigured(f"{name}={text!r}: expected a number, {least:g} or more")
    return value


def _bool(name: str) -> bool:
    """Off where it is not set."""
    text = env.str(name, default="").strip() or "0"
    try:
        return config.parse_bool(text)
    except ValueError as error:
        raise ImproperlyConfigured(f"{name}={text!r}: {error}") from None


def _choice(name: str, *known: str) -> str:
    """One of `known`, written in capitals or not; the first is the default."""
    value = env.str(name, default="") or known[0]
    if (found := next((choice for choice in known if choice.lower() == value.lower()), None)) is None:
        raise ImproperlyConfigured(f"{name}={value!r}: expected one of {', '.join(known)}")
    return found


def _database(url: str) -> dict[str, Any]:
    """What Django is to be told of the database. Of an address only the scheme is ever shown, since a password may follow it."""
    scheme, separator, rest = url.partition("://")
    expected = "expected postgres://user:password@host/name, postgresql:// likewise, or sqlite:///path"
    if not (rest.startswith("/") or rest == ":memory:" if scheme == "sqlite" else rest and scheme in ("postgres", "postgresql")):
        shown = f"{scheme}://..." if separator else repr(url) if "@" not in url else "(not shown)"
        raise ImproperlyConfigured(f"DATABASE_URL={shown}: {expected}")
    try:
        return dict(env.db_url_config(url))
    except ValueError:
        raise ImproperlyConfigured(f"DATABASE_URL={scheme}://...: its host or port cannot be read; {expected}") from None


# Everything this server writes: database, secrets, search files.
VAR_DIR = Path(env.str("MLXCEL_VAR_DIR", default=str(BASE_DIR / "var")))
prepare(VAR_DIR)

SECRET_KEY = env.str("DJANGO_SECRET_KEY", default="") or key(VAR_DIR)
DEBUG = _bool("DJANGO_DEBUG")
ALLOWED_HOSTS = env.list("DJANGO_ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])
CSRF_TRUSTED_ORIGINS = env.list("DJANGO_CSRF_TRUSTED_ORIGINS", default=[])

# DJANGO_HTTPS=1: people reach this server through a proxy that speaks TLS and sets X-Forwarded-Proto.
HTTPS = _bool("DJANGO_HTTPS")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = HTTPS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
SECURE_HSTS_SECONDS = 365 * 24 * 3600 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = HTTPS
SECURE_REDIRECT_EXEMPT = [r"^(v1/)?health(/ready)?/?$"]
X_FRAME_OPTIONS = "DENY"

# Everything lies under this path, for a proxy that passes paths on as they are.
API_PREFIX = f"/{env.str('MLXCEL_API_PREFIX', default='').strip().strip('/')}".rstrip("/")
FORCE_SCRIPT_NAME = API_PREFIX or None

# Pages of these origins may call the API from a browser. It is never sent cookies, so `*` gives nobody more than they have a key for.
_ORIGINS = env.list("MLXCEL_CORS_ORIGINS", default=[])
CORS_ALLOW_ALL_ORIGINS = _ORIGINS == ["*"]
CORS_ALLOWED_ORIGINS = [] if CORS_ALLOW_ALL_ORIGINS else _ORIGINS
CORS_URLS_REGEX = r"^(?!/admin)"
CORS_ALLOW_METHODS = ["GET", "HEAD", "POST", "OPTIONS"]
CORS_ALLOW_HEADERS = [*default_headers, "x-api-key", "api-key", "x-request-id", *(     # and what the OpenAI SDK sends from browsers
    f"x-stainless-{name}" for name in ("arch", "lang", "os", "package-version", "runtime", "runtime-version", "retry-count", "timeout"))]
CORS_EXPOSE_HEADERS = ["x-request-id", "x-truncated-inputs", "x-ignored-fields", "x-should-retry", "Retry-After", "Server-Timing"]

# Who may call the API (mlxcel_site/auth.py), what it accepts and how it answers (embeddings/ and rerank/: parsing.py, rendering.py).
API_KEYS = env.str("MLXCEL_API_KEYS", default="")
API_KEY_FILE = env.str("MLXCEL_API_KEY_FILE", default="")
STRICT_FIELDS = _bool("MLXCEL_STRICT_FIELDS")
RERANK_DOCUMENT_SHAPE = env.str("MLXCEL_RERANK_DOCUMENT_SHAPE", default="verbatim")     # or "object": {"text": ...} for every document
PROPS = _bool("MLXCEL_PROPS")
ACCEPT_ANY_MODEL = _bool("MLXCEL_ACCEPT_ANY_MODEL")
DATA_UPLOAD_MAX_MEMORY_SIZE = 64 * 1024 * 1024

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "corsheaders",
    "mlxcel_site",
    "embeddings",
    "rerank",
]
MIDDLEWARE = [
    "mlxcel_site.middleware.Hostless",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "mlxcel_site.logs.Logged",
    "mlxcel_site.metrics.Measured",
    "corsheaders.middleware.CorsMiddleware",     # before keys: a browser asks first without one
    "mlxcel_site.errors.Envelope",
    "mlxcel_site.middleware.TrailingSlash",
    "mlxcel_site.auth.ApiKeyMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "mlxcel_site.urls"
WSGI_APPLICATION = "mlxcel_site.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {"default": _database(env.str("DATABASE_URL", default="").strip() or f"sqlite:///{VAR_DIR / 'mlxcel.sqlite3'}")}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    if ":" not in str(DATABASES["default"]["NAME"]):      # :memory:, file:...
        private(Path(DATABASES["default"]["NAME"]))
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
else:
    DATABASES["default"] |= {"CONN_MAX_AGE": 60, "CONN_HEALTH_CHECKS": True}      # a server that was restarted costs no request
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator", "NumericPasswordValidator")]

# Bulk workers (mlxcel_site/celery.py). The function that tells them of chunks is loaded by name, so that apps need not know Celery.
try:
    BULK_BROKER = config.Settings.from_env({"MLXCEL_REDIS_URL": env.str("MLXCEL_REDIS_URL", default="")}).redis_url or ""
except ConfigError as error:
    raise ImproperlyConfigured(str(error)) from None
BULK_SENDER = "mlxcel_site.celery.send" if BULK_BROKER else ""
BULK_LEASE_SECONDS = _number("MLXCEL_BULK_LEASE_SECS", 30, 1)

# How single vectors are searched on PostgreSQL: auto builds pgvector's graph for collections of INDEX_FROM passages, exact never.
INDEX = env.str("MLXCEL_INDEX", default="auto")
INDEX_FROM = int(_number("MLXCEL_INDEX_FROM", 200_000, 0))

# Static files are served from the installed packages, so nothing has to be collected; set DJANGO_STATIC_ROOT to collect them for a proxy.
STATIC_URL = f"{API_PREFIX}/static/"
STATIC_ROOT = env.str("DJANGO_STATIC_ROOT", default="") or None
WHITENOISE_USE_FINDERS = True

REST_FRAMEWORK = {
    "DEFAULT_PARSER_CLASSES": ["mlxcel_site.codec.JSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["mlxcel_site.codec.JSONRenderer"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "mlxcel_site.codec.Negotiation",
    "DEFAULT_AUTHENTICATION_CLASSES": [],       # mlxcel_site.auth.ApiKeyMiddleware guards all routes
    "DEFAULT_PERMISSION_CLASSES": [],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "mlxcel_site.errors.exception_handler",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "mlxcel",
    "DESCRIPTION": "Embeddings, reranking and retrieval on your own machine. `/v1/embeddings` speaks OpenAI's language: "
                   "point any OpenAI client at `/v1`. `/v1/rerank` speaks Jina's and Cohere's, and text-embeddings-inference's.",
    "VERSION": "0.1.0",
    "TAGS": [
        {"name": "Embeddings", "description": "Texts into vectors."},
        {"name": "Reranking", "description": "Documents in the order of their relevance to a query."},
        {"name": "Collections", "description": "Stored documents, and search over them."},
        {"name": "Models", "description": "What is served."},
        {"name": "Health", "description": "For load balancers and supervisors."},
    ],
    "OAS_VERSION": "3.1.0",
    "SERVERS": [{"url": API_PREFIX}] if API_PREFIX else [],
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PUBLIC": True,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "SWAGGER_UI_SETTINGS": {
        "deepLinking": True, "persistAuthorization": True, "displayRequestDuration": True, "tryItOutEnabled": True,
        "defaultModelsExpandDepth": -1, "docExpansion": "list"},
    "APPEND_COMPONENTS": {"securitySchemes": {"key": {
        "type": "http", "scheme": "bearer", "description": "An API key, where the server has any. `X-Api-Key` and `Api-Key` do as well."}}},
    "SECURITY": [{"key": []}],
    "POSTPROCESSING_HOOKS": ["mlxcel_site.schema.complete"],
}

LOGGING = logs.configure(
    level=_choice("MLXCEL_LOG_LEVEL", "INFO", "DEBUG", "WARNING", "ERROR", "CRITICAL"),
    json=_choice("MLXCEL_LOG_FORMAT", "console", "json") == "json")
LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
