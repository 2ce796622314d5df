"""What can go wrong, as one tree. The web turns a `ServiceError` into a body in one place; commands print its message.

    ServiceError                      500  server_error
    ├── InvalidRequest                400  invalid_request_error
    │   └── UnsupportedCapability     400  invalid_request_error, code unsupported_capability
    ├── Unauthorized                  401  authentication_error
    ├── NotFound                      404  not_found_error
    ├── Conflict                      409  conflict_error
    ├── TooLarge                      413  invalid_request_error
    ├── NotLoaded                     501  not_implemented
    ├── Busy                          503  server_busy
    │   ├── Loading                   503  server_busy
    │   └── Away                      503  server_busy       Redis cannot be reached or refuses
    ├── TimedOut                      504  server_timeout
    ├── InferenceFailed               500  server_error
    │   └── InvalidNumericResult      500  server_error
    ├── ConfigError                   500  server_error      a setting that cannot be used
    └── CheckpointError               500  server_error      a model directory that cannot be loaded
        └── ModelNotFound             500  server_error      a model name that resolves to nothing
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class ServiceError(Exception):
    """`str(error)` is the message a user reads. `param` names the offending request field, `code` a machine-readable cause."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    retry_after: ClassVar[int | None] = None       # seconds, sent as `Retry-After`
    should_retry: ClassVar[bool | None] = None     # sent as `x-should-retry`; None leaves the client's own rule
    told: ClassVar[str | None] = None              # what callers over HTTP get in place of a message that is for operators

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(ServiceError):
    status = 400
    type = "invalid_request_error"


class UnsupportedCapability(InvalidRequest):
    code = "unsupported_capability"


class Unauthorized(ServiceError):
    status = 401
    type = "authentication_error"


class NotFound(ServiceError):
    status = 404
    type = "not_found_error"


class Conflict(ServiceError):
    status = 409
    type = "conflict_error"


class TooLarge(ServiceError):
    status = 413
    type = "invalid_request_error"


class NotLoaded(ServiceError):
    status = 501
    type = "not_implemented"
    should_retry = False


class Busy(ServiceError):
    status = 503
    type = "server_busy"
    retry_after = 1


class Loading(Busy):
    pass


class Away(Busy):
    told = "The models cannot be reached at the moment. Please try again later."


class TimedOut(ServiceError):
    status = 504
    type = "server_timeout"
    should_retry = False


class InferenceFailed(ServiceError):
    pass


class InvalidNumericResult(InferenceFailed):
    pass


class ConfigError(ServiceError):
    pass


class CheckpointError(ServiceError):
    pass


class ModelNotFound(CheckpointError):
    pass


def told(error: ServiceError) -> str:
    """What a command says of an error: where a model in its own process could not be opened, the cause, without advice on serving."""
    return error.__cause__.message if isinstance(error, NotLoaded) and isinstance(error.__cause__, ServiceError) else error.message


_VERBS = {"embedding": "embeddings", "reranker": "reranking"}
_HOW = {
    "embedding": "Start it with `manage.py serve --model MODEL`, or set MLXCEL_EMBEDDING_MODEL to a directory or a Hugging Face id.",
    "reranker": "Start it with `manage.py serve --reranker-model MODEL`, or set MLXCEL_RERANKER_MODEL to a directory or a Hugging Face id.",
}
_NAMES = {"embedding": "embedding model", "reranker": "reranker"}


def no_model(kind: str, why: str = "", how: str = "") -> NotLoaded:
    """No model of this kind is served. `how`: what would change that, where it is not the usual."""
    return NotLoaded(" ".join(filter(None, (f"This server does not support {_VERBS[kind]}.", how or _HOW[kind], why))))


def wrong_model(kind: str, name: str, served: Sequence[str]) -> InvalidRequest:
    """None of the models served, of which there is at least one, answers to `name`."""
    name = name if len(name) <= 80 else f"{name[:79]}…"
    which = f"the served {_NAMES[kind]} `{served[0]}`" if len(served) == 1 else f"a served {_NAMES[kind]}: `{'`, `'.join(served)}`"
    return InvalidRequest(f"model `{name}` is not {which}", param="model", code="model_not_found")
