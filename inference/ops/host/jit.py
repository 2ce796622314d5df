"""How kernels are compiled: for this very processor, without the GIL, and kept on disk. Importing this imports numba.

numba chooses 256-bit vectors on processors with AVX-512; 512-bit ones are taken instead, which the kernels here are written for.
"""
from __future__ import annotations

import atexit
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numba
from llvmlite import binding
from numba import types

log = logging.getLogger(__name__)
config = cast(Any, numba.config)

FEATURES: dict[str, bool] = dict(binding.get_host_cpu_features())
if FEATURES.get("avx512f"):
    config.CPU_NAME = binding.get_host_cpu_name()
    config.CPU_FEATURES = binding.get_host_cpu_features().flatten() + ",-prefer-256-bit"


def _cache_dir() -> str:
    """A directory for compiled kernels that can be written: the configured one, else a copy of it that ends with the process.

    Its name follows the sources: numba itself notices a change of the file a kernel stands in, but not of one it takes code from.
    """
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()[:12]
    folder = Path(config.CACHE_DIR or Path(__file__).parent / "__pycache__") / f"host-{sources}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError as error:
        copy = Path(tempfile.mkdtemp(prefix="mlxcel-kernels-"))
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        if folder.is_dir():
            shutil.copytree(folder, copy, dirs_exist_ok=True)
        log.warning("compiled kernels cannot be kept in %s (%s); %s in this process only. Set MLXCEL_CACHE_DIR or NUMBA_CACHE_DIR to a "
                    "directory that can be written", folder, error.strerror or error,
                    "what is there is used" if any(copy.iterdir()) else "they are compiled again")
        return str(copy)


config.CACHE_DIR = _cache_dir()


def kernel(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles at once, or reads what was compiled before; so importing a module of kernels warms it up.

    f32 sums keep the order they are written in: only what a kernel does itself, with vectors, decides its bits.
    """
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(
        signature, nogil=True, cache=True, error_model="numpy", boundscheck=False)
    return compiled


address = types.intp
