"""Jobs, results, errors and model descriptions as msgpack, the form in which they travel between processes.

Arrays are raw little-endian bytes behind their shape: 64 vectors of 384 floats are packed in microseconds, where a list of floats takes
milliseconds. A field that has its default value is left out, and a description's fields that are not known here are ignored, so that
web and workers need not be upgraded at the same moment.
"""
from __future__ import annotations

import math
import struct
from dataclasses import MISSING, fields
from typing import Any

import msgpack
import numpy as np

from . import errors
from .errors import InferenceFailed, InvalidRequest, ServiceError
from .wire import EmbedJob, EmbedResult, ModelSpec, RerankJob, RerankResult, Span, SplitJob

Job = EmbedJob | RerankJob | SplitJob
Result = EmbedResult | RerankResult | list[list[Span]]

JOBS: dict[str, type[Job]] = {"embed": EmbedJob, "rerank": RerankJob, "split": SplitJob}
RESULTS: dict[str, type[EmbedResult] | type[RerankResult]] = {"embed": EmbedResult, "rerank": RerankResult}
ARRAYS = {ord("f"): "<f4", ord("i"): "<i4"}         # msgpack extension types


def pack_job(job: Job) -> bytes:
    """Raises InvalidRequest where a token id is too large to be one."""
    (op,) = [name for name, kind in JOBS.items() if type(job) is kind]
    try:
        return pack({"op": op, **_set_fields(job)})
    except OverflowError:
        raise InvalidRequest("the input contains a token id of more than 64 bits", param="input") from None


def unpack_job(data: bytes) -> Job:
    """Raises InvalidRequest for a job of a newer version, whose fields this one would not honour."""
    values = unpack(data)
    try:
        return JOBS[values.pop("op")](**values)
    except (KeyError, TypeError) as error:
        raise InvalidRequest(f"this model worker does not understand the request ({error}); web and workers should be of one version") \
            from None


def pack_result(result: Result) -> bytes:
    if isinstance(result, list):
        return pack({"split": [[(span.start, span.end, span.tokens) for span in spans] for spans in result]})
    (op,) = [name for name, kind in RESULTS.items() if type(result) is kind]
    return pack({op: _set_fields(result)})


def pack_error(error: ServiceError) -> bytes:
    return pack({"error": (type(error).__name__, error.message, error.param, error.code)})


def unpack_reply(data: bytes) -> Result:
    """Raises the error, where the reply is one."""
    ((op, values),) = unpack(data).items()
    if op == "error":
        name, message, param, code = values
        kind = getattr(errors, name, None)
        raise (kind if isinstance(kind, type) and issubclass(kind, ServiceError) else InferenceFailed)(message, param=param, code=code)
    if op == "split":
        return [[Span(*span) for span in spans] for spans in values]
    return RESULTS[op](**values)


def pack_spec(spec: ModelSpec) -> bytes:
    return pack({name: dict(value) if name == "prompts" else value for name, value in _set_fields(spec).items()})


def unpack_spec(data: bytes) -> ModelSpec:
    known = {f.name for f in fields(ModelSpec)}
    return ModelSpec(**{name: value for name, value in unpack(data).items() if name in known})


def pack(values: Any) -> bytes:
    """msgpack with numpy arrays, and with texts that hold lone surrogates."""
    return bytes(msgpack.packb(values, default=_pack_array, unicode_errors="surrogatepass"))


def unpack(data: bytes) -> Any:
    """Sequences come back as tuples, arrays read-only."""
    return msgpack.unpackb(data, ext_hook=_unpack_array, use_list=False, unicode_errors="surrogatepass", strict_map_key=False)


def _set_fields(value: Any) -> dict[str, Any]:
    return {f.name: found for f in fields(value)
            if isinstance(found := getattr(value, f.name), np.ndarray) or f.default is MISSING or found != f.default}


def _pack_array(value: Any) -> msgpack.ExtType:
    if not isinstance(value, np.ndarray):
        raise OverflowError(value) if isinstance(value, int) else TypeError(f"cannot pack {value!r}")
    code = ord(value.dtype.kind)
    shape = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
    return msgpack.ExtType(code, shape + value.astype(ARRAYS[code], copy=False).tobytes())


def _unpack_array(code: int, data: bytes) -> np.ndarray:
    shape = struct.unpack_from(f"<{data[0]}I", data, 1)
    return np.frombuffer(data, ARRAYS[code], math.prod(shape), 1 + 4 * data[0]).reshape(shape)
