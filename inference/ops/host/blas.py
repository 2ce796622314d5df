"""Who multiplies matrices: the kernels of this package, MKL, a system OpenBLAS or numpy's own, one thread a product.

Parallelism is several Python threads that each take whole packs; all of these let go of the GIL. Libraries are called by pointer,
so that nothing they load replaces what other packages use. `choose` decides once, when the backend is opened.
"""
from __future__ import annotations

import ctypes
import ctypes.util
import logging
import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import ConfigError
from . import steady
from .reading import Weight, whole

log = logging.getLogger(__name__)

Precision = Literal["f32", "bf16x3", "bf16"]
Product = Callable[[np.ndarray], np.ndarray]
"""[T, K] f32 -> [T, N] f32: x @ weight.T + bias, a new array"""

F32 = np.float32
_ROW_MAJOR, _PLAIN, _TRANSPOSED, _PACKED, _B = 101, 111, 112, 151, 162        # enums of cblas.h and mkl_cblas.h


@dataclass(frozen=True)
class Provider:
    """`product(weight [N, K], bias [N] or None)`; `name` and `precision` are shown to people."""

    name: str
    precision: Precision
    product: Callable[[Weight, np.ndarray | None], Product]


def choose(name: str = "auto", precision: Precision = "f32") -> Provider:
    """The provider for MLXCEL_HOST_BLAS and MLXCEL_HOST_PRECISION; ConfigError where this machine does not have it.

    auto, f32: the kernels where numba is installed (measured: as fast as the best of the libraries on long packs, faster on short
    ones, and steady without padding), then MKL, a system OpenBLAS, numpy. auto, bf16: MKL where it uses AMX, then the kernels.
    """
    order: tuple[str, ...] = ("kernels", "mkl", "openblas", "numpy") if precision == "f32" else ("mkl", "kernels")
    if name != "auto":
        order = (name,)
    reasons = []
    for one in order:
        try:
            provider = _FIND[one](precision)
        except _Missing as missing:
            reasons.append(f"{one}: {missing}")
            continue
        _tell(provider.name, provider.precision)
        return provider
    raise ConfigError(
        f"MLXCEL_HOST_PRECISION={precision} with MLXCEL_HOST_BLAS={name} is not possible on this machine: {'; '.join(reasons)}")


@cache
def _tell(name: str, precision: Precision) -> None:
    """One line a process, however many models it opens."""
    log.info("matrix products by %s in %s", name, precision)


class _Missing(Exception):
    pass


def _only_f32(precision: Precision) -> None:
    if precision != "f32":
        raise _Missing("it multiplies in f32 only")


def _kernels(precision: Precision) -> Provider:
    try:
        from . import fast
    except ImportError as error:
        raise _Missing(str(error)) from None
    if precision == "f32":
        return Provider(f"kernels ({fast.VECTORS})", precision, fast.Product)
    if precision == "bf16x3":
        raise _Missing("three bf16 products gain nothing on f32 without AMX")
    if not fast.BF16_DOT:
        raise _Missing("this processor has no avx512_bf16")
    return Provider(f"kernels ({fast.VECTORS}, avx512_bf16)", precision, fast.HalfProduct)


def _steady(name: str, prepare: steady.Prepare) -> Callable[[Weight, np.ndarray | None], Product]:
    return lambda weight, bias: steady.Product(name, prepare, whole(weight), bias)


# ---- libraries by pointer

_INT, _FLOAT, _ADDRESS = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
_SGEMM: list[Any] = [*[_INT] * 6, _FLOAT, _ADDRESS, _INT, _ADDRESS, _INT, _FLOAT, _ADDRESS, _INT]


def _at(x: np.ndarray) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


def _sgemm(function: Callable[..., None], weight: np.ndarray) -> steady.Multiply:
    """By cblas_sgemm; a stack of blocks goes block by block."""
    weight = np.ascontiguousarray(weight)
    (outputs, inputs), there = weight.shape, _at(weight)

    def multiply(x: np.ndarray, weight: np.ndarray = weight) -> np.ndarray:       # keeps the weight alive
        y = np.empty((*x.shape[:-1], outputs), F32)
        for one, out in zip(x, y, strict=True) if x.ndim == 3 else ((x, y),):
            function(_ROW_MAJOR, _PLAIN, _TRANSPOSED, len(one), outputs, inputs, 1.0, _at(one), inputs, there, inputs, 0.0,
                     _at(out), outputs)
        return y
    return multiply


@cache
def _load_openblas() -> tuple[ctypes.CDLL, str] | None:
    found = ctypes.util.find_library("openblas") or ("libopenblas.so.0" if sys.platform == "linux" else None)
    if found is None:
        return None
    try:
        library = ctypes.CDLL(found)
        library.openblas_set_num_threads(_INT(1))
        library.cblas_sgemm.argtypes, library.cblas_sgemm.restype = _SGEMM, None
        library.openblas_get_config.restype = library.openblas_get_corename.restype = ctypes.c_char_p
        version = library.openblas_get_config().decode().split()
        return library, f"openblas {version[1] if len(version) > 1 else ''} {library.openblas_get_corename().decode()}".strip()
    except (OSError, AttributeError) as error:
        log.debug("%s cannot be used: %s", found, error)
        return None


def _openblas(precision: Precision) -> Provider:
    _only_f32(precision)
    loaded = _load_openblas()
    if loaded is None:
        raise _Missing("no libopenblas is installed")
    library, name = loaded
    return Provider(name, precision, _steady(name, lambda w: _sgemm(library.cblas_sgemm, w)))


def _numpy(precision: Precision) -> Provider:
    _only_f32(precision)
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, user_api="blas")

    def prepare(weight: np.ndarray) -> steady.Multiply:
        return lambda x: np.asarray(np.matmul(x, weight.T))
    return Provider(f"numpy {np.__version__}", precision, _steady("numpy", prepare))


# ---- MKL

@cache
def _load_mkl() -> ctypes.CDLL | None:
    """Sequential, 32-bit integers, and rows whose bits do not depend on M: MKL reads MKL_CBWR when it is loaded."""
    beside = (Path(entry).parents[2] for entry in sys.path if entry.endswith("site-packages"))      # the wheel puts it under <prefix>/lib
    for folder in (Path(sysconfig.get_path("data")) / "lib", *(prefix / "lib" for prefix in beside)):
        found = sorted(folder.glob("libmkl_rt.so.*"), reverse=True)
        if found:
            break
    else:
        return None
    os.environ.setdefault("MKL_CBWR", "AVX512,STRICT" if "avx512f" in cpu_flags() else "AVX2,STRICT")
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        log.debug("%s cannot be used: %s", found[0], error)
        return None
    library.MKL_Set_Threading_Layer(_INT(1))
    library.MKL_Set_Interface_Layer(_INT(0))
    size = ctypes.c_size_t
    signatures: tuple[tuple[str, list[Any], Any], ...] = (
        ("cblas_sgemm", _SGEMM, None),
        ("cblas_sgemm_pack_get_size", [_INT] * 4, size),
        ("cblas_sgemm_pack", [*[_INT] * 6, _FLOAT, _ADDRESS, _INT, _ADDRESS], None),
        ("cblas_sgemm_compute", [*[_INT] * 6, _ADDRESS, _INT, _ADDRESS, _INT, _FLOAT, _ADDRESS, _INT], None),
        ("cblas_gemm_bf16bf16f32_pack_get_size", [_INT] * 4, size),
        ("cblas_gemm_bf16bf16f32_pack", [*[_INT] * 6, _ADDRESS, _INT, _ADDRESS], None),
        ("cblas_gemm_bf16bf16f32_compute", _SGEMM, None))
    for name, arguments, result in signatures:
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "").split())


def _mkl(precision: Precision) -> Provider:
    library = _load_mkl()
    if library is None:
        raise _Missing("not installed: pip install 'mlxcel[cpu-intel]'")
    version = ctypes.create_string_buffer(200)
    library.MKL_Get_Version_String(version, _INT(200))
    name = "mkl " + next((word.removesuffix("-Product") for word in version.value.decode().split() if word[:2] == "20"), "")
    if precision == "f32":
        return Provider(name, precision, _steady(name, lambda w: _mkl_f32(library, w)))
    if "amx_bf16" not in cpu_flags():
        raise _Missing("this processor has no AMX (amx_bf16)")
    return Provider(f"{name} (AMX)", precision, lambda weight, bias: MklHalves(library, whole(weight), bias, split=precision == "bf16x3"))


def _bytes(count: int) -> np.ndarray:
    raw = np.empty(count + 64, np.uint8)
    skip = -_at(raw) % 64
    return raw[skip:skip + count]


def _mkl_f32(library: ctypes.CDLL, weight: np.ndarray) -> steady.Multiply:
    """With the weight packed once, for products of any height."""
    weight = np.ascontiguousarray(weight)
    outputs, inputs = weight.shape
    packed = _bytes(library.cblas_sgemm_pack_get_size(_B, 256, outputs, inputs))
    library.cblas_sgemm_pack(_ROW_MAJOR, _B, _TRANSPOSED, 256, outputs, inputs, 1.0, _at(weight), inputs, _at(packed))

    def multiply(x: np.ndarray) -> np.ndarray:
        y = np.empty((*x.shape[:-1], outputs), F32)
        for one, out in zip(x, y, strict=True) if x.ndim == 3 else ((x, y),):
            library.cblas_sgemm_compute(_ROW_MAJOR, _PLAIN, _PACKED, len(one), outputs, inputs, _at(one), inputs, _at(packed), inputs,
                                        0.0, _at(out), outputs)
        return y
    return multiply


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even: f32 -> uint16 of the same shape. NaN may become infinite, which no caller lets pass either."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << np.uint32(16)).view(F32)


def halves(x: np.ndarray, low_first: bool = False, twice: bool = True) -> np.ndarray:
    """[T, K] f32 -> [T, 3 K] bf16: high, low, high parts; or high, high, low, for the other factor of the product.

    Their product is x y without low x low: about 16 bits of each factor.
    """
    high = to_bf16(x)
    low = to_bf16(x - from_bf16(high))
    return np.concatenate([high, low, high] if not low_first else [high, high, low], 1) if twice else high


class MklHalves:
    """Products of bf16 numbers, summed in f32: of both factors rounded, or of both split in two (`split`), which keeps f32's results
    to about 1e-5. Rows are not the same to the bit in every company."""

    def __init__(self, library: ctypes.CDLL, weight: np.ndarray, bias: np.ndarray | None, split: bool) -> None:
        self.library, self.bias, self.split = library, bias, split
        factors = halves(weight, low_first=True, twice=split)
        self.outputs, self.inputs = factors.shape
        self.packed = _bytes(library.cblas_gemm_bf16bf16f32_pack_get_size(_B, 256, self.outputs, self.inputs))
        library.cblas_gemm_bf16bf16f32_pack(_ROW_MAJOR, _B, _TRANSPOSED, 256, self.outputs, self.inputs, _at(factors), self.inputs,
                                            _at(self.packed))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        factors, y = halves(x, twice=self.split), np.empty((len(x), self.outputs), F32)
        self.library.cblas_gemm_bf16bf16f32_compute(_ROW_MAJOR, _PLAIN, _PACKED, len(x), self.outputs, self.inputs, 1.0, _at(factors),
                                                    self.inputs, _at(self.packed), self.inputs, 0.0, _at(y), self.outputs)
        if self.bias is not None:
            y += self.bias
        return y


_FIND: dict[str, Callable[[Precision], Provider]] = {"kernels": _kernels, "mkl": _mkl, "openblas": _openblas, "numpy": _numpy}
