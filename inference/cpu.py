"""Which of its kernels OpenBLAS takes, settled before numpy loads it. Nothing here imports anything but the standard library."""
from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

_NEEDED = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def choose_kernels() -> None:
    """For the first lines of an entry point. numpy's OpenBLAS knows no AMD processor with AVX-512 and takes its Haswell kernels
    there; its SkylakeX kernels run at 1.8 times their rate (measured on an EPYC of family 26: 237 against 129 GFLOP/s on one
    thread) and give a row the same bits wherever it stands, which spares the host backend its block-wise detour.

    Does nothing where numpy is loaded already, where OPENBLAS_CORETYPE is set, and on any other processor.
    """
    if "numpy" in sys.modules or "OPENBLAS_CORETYPE" in os.environ or sys.platform != "linux" or platform.machine() != "x86_64":
        return
    info = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    flags = next((line for line in info.splitlines() if line.startswith("flags")), "")
    if "AuthenticAMD" in info and set(flags.split()) >= _NEEDED:
        os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"
