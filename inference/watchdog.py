"""Ends a process whose model hangs, so that its supervisor starts it again: no thread can end a forward pass that never returns."""
from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

HUNG = os.EX_SOFTWARE      # exit status
LOOK_SECONDS = 1.0
FAREWELL_SECONDS = 5.0
SILENCE_SECONDS = 10.0     # beyond the limit, until a process in which no Python runs any more is ended
LONGEST = 1e6
STDERR = 2                 # itself: Celery puts an object without a descriptor in the place of sys.stderr


def watch(health: Callable[[], Mapping[str, Any]], limit: float, farewell: Callable[[str], None]) -> None:
    """Starts a thread that ends this process with status HUNG as soon as one of its models has made no progress for `limit` seconds, or one
    forward pass has run that long beside others that end; 0 starts none.

    health: InferenceClient's. farewell: told what hangs, it answers those who wait, for FAREWELL_SECONDS at most.

    A call that hangs and lets no other thread run is ended too, without a farewell: faulthandler's timer needs no Python.
    """
    if limit:
        threading.Thread(target=_look, args=(health, min(limit, LONGEST), farewell), name="watchdog", daemon=True).start()


def _look(health: Callable[[], Mapping[str, Any]], limit: float, farewell: Callable[[str], None]) -> None:
    while True:
        for model, entry in health()["models"].items():
            if entry["state"] == "ready" and max(entry.get("stalled_seconds", 0), entry.get("pack_seconds", 0)) > limit:
                _end(_what(model, entry, limit), farewell)
        faulthandler.dump_traceback_later(limit + SILENCE_SECONDS, exit=True, file=STDERR)
        time.sleep(LOOK_SECONDS)


def _what(model: str, entry: Mapping[str, Any], limit: float) -> str:
    if not entry.get("pack_sequences"):
        return f"{model} has had work and run none of it for {entry['stalled_seconds']:.0f} s (the limit is {limit:g})"
    return (f"a forward pass of {model} over {entry['pack_sequences']:.0f} sequences with {entry['pack_tokens']:.0f} tokens has not ended "
            f"after {entry['pack_seconds']:.0f} s (the limit is {limit:g})")


def _end(what: str, farewell: Callable[[str], None]) -> None:
    log.critical("%s; this process ends, to be started again (MLXCEL_STALL_LIMIT_SECS). Its threads:", what)
    faulthandler.dump_traceback(STDERR, all_threads=True)
    saying = threading.Thread(target=farewell, args=(what,), name="farewell", daemon=True)
    saying.start()
    saying.join(FAREWELL_SECONDS)
    os._exit(HUNG)
