"""The web process of `manage.py serve`: loads the models, says where everything is, then answers."""
from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import util
from typing import Any

from inference.client import InferenceClient, get_client
from inference.errors import ServiceError
from inference.wire import EmbedJob


def create() -> Callable[..., Iterable[bytes]]:
    """The WSGI application, once every configured model has answered. A model that cannot be loaded ends the process with a message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)      # Ctrl-C reaches the parent too, which stops this process
    from .wsgi import application

    try:
        client = get_client()
        load_models(client)
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    util.Finalize(None, client.close, exitpriority=0)
    origin = os.environ.get("MLXCEL_ORIGIN", "")
    print(f"\n  API    {origin}/v1\n  docs   {origin}/docs\n  admin  {origin}/admin/\n\nCtrl-C stops the server.", flush=True)
    return application


def load_models(client: InferenceClient) -> None:
    """Has each embedding model embed one word, so that it is loaded, its kernels are compiled, and what is wrong with it shows now."""
    for model in (model for model in client.models() if model.kind == "embedding"):
        print(f"Loading {model.id} ...", end=" ", flush=True)
        started = time.perf_counter()
        client.embed(EmbedJob(items=("ready",), model=model.id))
        ready = client.describe("embedding", model.id) or model
        print(_summary(ready, time.perf_counter() - started), flush=True)


def _summary(model: Any, seconds: float) -> str:
    how = ", ".join(word for word in (model.backend, model.precision) if word)
    return f"ready in {seconds:.1f} s: {model.dims} dimensions, {model.max_length} tokens, {model.pooling} pooling" + (f", {how}" if how else "")
