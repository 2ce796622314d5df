"""The web's only door to models. A transport is named in the settings and loaded by its dotted name, like a Django cache backend."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol, cast

from .config import LOCAL, Settings
from .errors import ConfigError
from .wire import EmbedJob, EmbedResult, Kind, ModelSpec, RerankJob, RerankResult, Span


class InferenceClient(Protocol):
    """Every method may be called from any thread.

    embed      raises InvalidRequest, NotLoaded, Busy, TimedOut or InferenceFailed; blocks until all items are done
    rerank     likewise
    describe   None: no model of this kind, or none that answers to `model`. Needs no loaded model
    split      passages of at most `tokens` tokens, special ones included, neighbours sharing about `overlap`: [[Span, ...], ...] by text
    load       opens every configured model now instead of at its first use; raises what keeps one from opening
    health     {"status": "ok" | "loading" | "failed" | "stale", "models": {id: {"state", "kind", counters ...}}}; stale: a model has
               made no progress for a request's time-out while work waits. Where several processes run a model, its entry has
               "instances": {instance: counters} instead of counters of its own
    """

    def models(self) -> list[ModelSpec]: ...
    def describe(self, kind: Kind, model: str | None = None) -> ModelSpec | None: ...
    def embed(self, job: EmbedJob) -> EmbedResult: ...
    def rerank(self, job: RerankJob) -> RerankResult: ...
    def split(self, texts: Sequence[str], tokens: int, overlap: int = 0, *, prompt: str = "",
              model: str | None = None) -> list[list[Span]]: ...
    def load(self) -> None: ...
    def health(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


def transport(settings: Settings) -> Callable[[Settings], InferenceClient]:
    """The class that `settings.transport` names. Raises ConfigError where there is none."""
    module, _, name = settings.transport.rpartition(".")
    try:
        found = getattr(import_module(module), name)
        if not callable(found):
            raise TypeError(f"{name} is no class")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"MLXCEL_TRANSPORT={settings.transport!r} cannot be loaded: {error}; expected the dotted name of a class, "
                          f"such as {LOCAL}", param="MLXCEL_TRANSPORT") from error
    return cast("Callable[[Settings], InferenceClient]", found)


def connect(settings: Settings) -> InferenceClient:
    """A new client on `settings.transport`."""
    return transport(settings)(settings)


@lru_cache(maxsize=1)
def get_client() -> InferenceClient:
    """The process's own client, on the settings of the environment."""
    return connect(Settings.from_env())
