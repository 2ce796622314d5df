"""Model settings, read once from the environment. The only place that reads them; everyone else is handed a `Settings`.

Every name, default and meaning stands in `Settings` below; `describe()` prints them for the docs and `manage.py serve --help`.
"""
from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from .errors import ConfigError, NotLoaded, no_model
from .wire import Kind

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
LOCAL, LANE = "inference.transports.local.LocalClient", "inference.transports.lane.LaneClient"

Backend = Literal["auto", "mlx", "host"]
Blas = Literal["auto", "kernels", "mkl", "openblas", "numpy"]
Precision = Literal["f32", "bf16x3", "bf16"]
Mode = Literal["", "embeddings", "reranking"]
MODE_KIND: Mapping[str, Kind] = {"embeddings": "embedding", "reranking": "reranker"}
STALL_MARGIN = 30.0        # a pass that nobody waits for any more is given so many seconds to end by itself
TRUE, FALSE = ("1", "true", "yes", "on", "enabled"), ("0", "false", "no", "off", "disabled")
POOLING = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "lasttoken", "last_token": "lasttoken", "last": "lasttoken"}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))


def _aliases(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in _names(text)]
    if any(not alias.strip() or not target.strip() for alias, _, target in pairs):
        raise ValueError("expected alias=model[,alias=model...]")
    return {alias.strip(): target.strip() for alias, _, target in pairs}


def parse_bool(text: str) -> bool:
    if text.strip().lower() not in TRUE + FALSE:
        raise ValueError(f"expected one of {', '.join(TRUE + FALSE)}")
    return text.strip().lower() in TRUE


def _number(kind: type[int] | type[float], least: float) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"expected {'a whole number' if kind is int else 'a number'}") from None
        if not value >= least:
            raise ValueError(f"expected at least {least}")
        return value
    return parse


def _choice(*known: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return text.strip().lower()
    return parse


def parse_pooling(text: str) -> str:
    """The one spelling of a pooling mode: cls, mean, max or lasttoken."""
    name = text.strip().lower()
    if name == "none":
        raise ValueError("`none` (one vector per token) is what multi-vector models do by themselves; choose cls, mean, max or last")
    if name not in POOLING:
        raise ValueError(f"expected one of {', '.join(POOLING)}")
    return POOLING[name]


def parse_normalize(text: str) -> float:
    """-1 none, 0 max-absolute int16, 1 taxicab, 2 euclidean, above 2 that p-norm."""
    value = float(_number(float, -1)(text))
    if value == float("inf") or -1 < value < 0 or 0 < value < 1:
        raise ValueError("expected -1 (none), 0 (max-absolute int16), 1 (taxicab), 2 (euclidean) or another p-norm above 1")
    return value


def parse_redis_url(text: str) -> str:
    """As it is, where it can be one. Messages never quote it, since a password may stand in any part."""
    url = text.strip()
    expected = "expected redis://[:password@]host[:port][/db], rediss:// likewise, or unix://path"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"the port is not a number up to 65535; {expected}") from None
    if not url.startswith(("redis://", "rediss://", "unix://")) or port == 0 or (parts.scheme == "unix" and not parts.path):
        raise ValueError(expected)
    if parts.scheme != "unix" and not re.fullmatch(r"(/\d*)?", parts.path, re.ASCII):
        raise ValueError(f"the database is not a number; {expected}")
    return url


def _shown(text: str, secret: bool) -> str:
    """A value for a message: an address only where nothing in it can be a password."""
    return "(not shown)" if secret and any(mark in text for mark in ("@", "?", "//:")) else repr(text)


def _setting(name: str, default: Any, parse: Callable[[str], Any], help: str, *, secret: bool = False) -> Any:
    """`secret`: the value may hold a password."""
    meta = {"name": name, "parse": parse, "help": help, "secret": secret}
    if callable(default):
        return field(default_factory=default, metadata=meta, repr=not secret)
    return field(default=default, metadata=meta, repr=not secret)


@dataclass(frozen=True)
class Settings:
    embedding_models: tuple[str, ...] = _setting(
        "MLXCEL_EMBEDDING_MODEL", (DEFAULT_MODEL,), _names,
        "embedding models to serve, comma separated: a directory, a name under MLXCEL_MODELS_DIR, or a Hugging Face id; "
        "the first is used where a request names none; empty serves none")
    reranker_models: tuple[str, ...] = _setting("MLXCEL_RERANKER_MODEL", (), _names, "rerankers to serve, likewise")
    mode: Mode = _setting(
        "MLXCEL_MODE", "", _choice(*MODE_KIND),
        "embeddings or reranking: serve models of that kind only, and answer 501 on the other kind's routes; unset: both")
    aliases: Mapping[str, str] = _setting(
        "MLXCEL_MODEL_ALIASES", dict, _aliases, "other names models answer to: alias=model, comma separated")
    models_dir: Path | None = _setting("MLXCEL_MODELS_DIR", None, Path, "a directory of model directories, by name or by org/name")
    allow_download: bool = _setting(
        "MLXCEL_ALLOW_DOWNLOAD", False, parse_bool, "fetch models that are not on this machine from the Hugging Face hub")
    backend: Backend = _setting(
        "MLXCEL_BACKEND", "auto", _choice(*get_args(Backend)),
        "mlx (Metal, CUDA), host (CPU), or auto: mlx where it has a GPU, else host")
    threads: int = _setting("MLXCEL_THREADS", lambda: os.cpu_count() or 1, _number(int, 1), "worker threads of the host backend")
    host_blas: Blas = _setting(
        "MLXCEL_HOST_BLAS", "auto", _choice(*get_args(Blas)),
        "who multiplies matrices on the host backend: kernels (compiled here, needs numba), mkl, openblas (the system's), numpy, or auto: "
        "the first of these that is there")
    host_precision: Precision = _setting(
        "MLXCEL_HOST_PRECISION", "f32", _choice(*get_args(Precision)),
        "f32; bf16: linear layers in bfloat16 (needs avx512_bf16, or AMX with MKL); bf16x3: three bf16 products that nearly give f32's "
        "results (needs AMX with MKL)")
    pooling: str | None = _setting(
        "MLXCEL_EMBEDDING_POOLING", None, parse_pooling, "overrides the checkpoint's pooling: cls, mean, max, last")
    normalize: float | None = _setting(
        "MLXCEL_EMBEDDING_NORMALIZE", None, parse_normalize,
        "overrides the checkpoint's normalisation: -1 none, 0 int16, 1, 2 or another p")
    max_length: int | None = _setting("MLXCEL_EMBEDDING_MAX_LENGTH", None, _number(int, 1), "lowers the model's limit of tokens an item")
    batch_tokens: int | None = _setting(
        "MLXCEL_BATCH_TOKENS", None, _number(int, 1),
        "tokens a forward pass takes at most (one longer item goes alone); unset: 512 on host, 8192 on mlx")
    batch_size: int | None = _setting("MLXCEL_EMBEDDING_BATCH_SIZE", None, _number(int, 1), "items a forward pass takes at most")
    rerank_max_length: int | None = _setting(
        "MLXCEL_RERANK_MAX_LENGTH", None, _number(int, 1), "lowers a reranker's limit of tokens a pair")
    rerank_batch_size: int | None = _setting(
        "MLXCEL_RERANK_BATCH_SIZE", None, _number(int, 0), "pairs a forward pass takes at most; 0 is no limit but the tokens'")
    queue_depth: int = _setting(
        "MLXCEL_EMBEDDING_QUEUE_DEPTH", 64, _number(int, 1), "requests that may wait for a model; one more is answered 503")
    timeout: float = _setting(
        "MLXCEL_EMBEDDING_REQUEST_TIMEOUT_SECS", 120.0, _number(float, 0),
        "seconds a request may take before it is answered 504; 0 is the default. /health/ready is 503 when a model has made no progress "
        "for that long")
    stall_limit: float | None = _setting(
        "MLXCEL_STALL_LIMIT_SECS", None, _number(float, 0),
        "seconds that one forward pass may take before its process ends itself, to be started again by its supervisor; unset: "
        f"{STALL_MARGIN:.0f} more than a request may take; 0 never")
    cache_dir: Path = _setting(
        "MLXCEL_CACHE_DIR", lambda: Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxcel", Path,
        "where hashes of weight files and compiled kernels are kept")
    redis_url: str | None = _setting(
        "MLXCEL_REDIS_URL", None, parse_redis_url,
        "redis://[:password@]host[:port][/db], rediss:// or unix://path: models run in model workers, reached over this Redis (7 or newer)",
        secret=True)
    worker_model: str | None = _setting(
        "MLXCEL_WORKER_MODEL", None, str.strip, "the one model a model worker serves; not needed where only one is configured")
    transport: str = _setting(
        "MLXCEL_TRANSPORT", LOCAL, str,
        "class that reaches the models, by its dotted name; with MLXCEL_REDIS_URL set it is " + LANE)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Reads `env` (os.environ by default). A blank value is the default, except for the two model lists, where it means none."""
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        for f in fields(cls):
            text = env.get(f.metadata["name"])
            if text is None or (not text.strip() and not f.name.endswith("_models")):
                continue
            try:
                values[f.name] = f.metadata["parse"](text)
            except ValueError as error:
                raise ConfigError(f"{f.metadata['name']}={_shown(text, f.metadata['secret'])}: {error}", param=f.metadata["name"]) from None
        if values.get("timeout") == 0:
            del values["timeout"]
        if mode := values.get("mode"):
            values["reranker_models" if mode == "embeddings" else "embedding_models"] = ()
        if "redis_url" in values:
            values.setdefault("transport", LANE)
        return cls(**values)

    @property
    def stall_seconds(self) -> float:
        """0: never."""
        return self.timeout + STALL_MARGIN if self.stall_limit is None else self.stall_limit

    def models(self, kind: Kind) -> tuple[str, ...]:
        return self.embedding_models if kind == "embedding" else self.reranker_models

    def unanswered(self, names: Collection[str]) -> str | None:
        """What is wrong with the aliases, where one is for none of these served names. A mode leaves some out on purpose."""
        wrong = [(alias, target) for alias, target in self.aliases.items() if target not in names]
        if not wrong or self.mode:
            return None
        (alias, target), served = wrong[0], ", ".join(f"`{name}`" for name in names) or "none"
        return f"alias `{alias}` is for model `{target}`, which is not served; served: {served} (--alias, MLXCEL_MODEL_ALIASES)"

    def refusal(self, kind: Kind) -> str | None:
        """Why models of this kind are not served, where that is because the mode is another one."""
        if not self.mode or MODE_KIND[self.mode] == kind:
            return None
        refused = next(mode for mode, served in MODE_KIND.items() if served == kind)
        return (f"This server does not support {refused}: it was started with --{self.mode} (MLXCEL_MODE={self.mode}), which serves "
                f"{self.mode} only.")


def describe() -> list[tuple[str, str, str]]:
    """(name, default, meaning) of every setting, in order."""
    defaults = Settings()
    rows = []
    for f in fields(Settings):
        value = getattr(defaults, f.name)
        shown = ",".join(cast(tuple[str, ...], value)) if isinstance(value, tuple) else "" if value is None or value == {} else str(value)
        rows.append((f.metadata["name"], "number of CPUs" if f.name == "threads" else "~/.cache/mlxcel" if f.name == "cache_dir" else shown,
                     f.metadata["help"]))
    return rows


def serving_command(model: str, kind: Kind = "embedding", settings: Settings | None = None) -> str:
    """The shell command that makes this installation serve `model`."""
    if (settings or Settings.from_env()).transport == LANE:
        also = "" if kind == "embedding" else f"MLXCEL_RERANKER_MODEL={model} "
        return f"{also}MLXCEL_WORKER_MODEL={model} celery -A inference.app worker -P threads"
    return f"manage.py serve {'--model' if kind == 'embedding' else '--reranker-model'} {model}"


def how_to_serve(model: str, kind: Kind = "embedding", settings: Settings | None = None) -> str:
    """The same in a sentence, for errors."""
    settings = settings or Settings.from_env()
    command = serving_command(model, kind, settings)
    if settings.transport == LANE:
        return f"Start a worker for it, with the same MLXCEL_REDIS_URL: {command}"
    return f"Serve it with `{command}` or {'MLXCEL_EMBEDDING_MODEL' if kind == 'embedding' else 'MLXCEL_RERANKER_MODEL'}={model}."


def unserved(kind: Kind, settings: Settings | None = None) -> NotLoaded:
    """No model of this kind is served, and how this installation would come to serve one."""
    settings = settings or Settings.from_env()
    return no_model(kind, how=how_to_serve("MODEL", kind, settings) if settings.transport == LANE else "")
