"""The web process of `manage.py serve`: loads the models, says where everything is, then answers."""
from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

from django.core.checks.urls import check_url_config

from inference.client import InferenceClient, get_client
from inference.config import LANE, Settings
from inference.errors import ConfigError, ServiceError
from inference.watchdog import watch
from inference.wire import EmbedJob, ModelSpec, RerankJob

STOP_SECONDS = 10      # for a web process that was told to stop
SAID = 3               # exit status of one that could not start, and said why
WAITING = {"loading": "its worker is loading it", "stale": "no worker answers at the moment"}


def create() -> Callable[..., Iterable[bytes]]:
    """The WSGI application, once every configured model is loaded. One that cannot be ends the process with a message."""
    # Ctrl-C goes to the terminal's whole process group, and the parent then stops this process with SIGTERM. Where both arrive granian
    # hangs until it is killed, and it handles SIGINT whatever is set here: so this process leaves the group.
    os.setpgrp()
    threading.Thread(target=_outlive_nobody, name="parent", daemon=True).start()
    from .wsgi import application, bodies

    try:
        load_models(get_client(), say := _speaker())
    except ServiceError as error:
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
        raise SystemExit(SAID) from None
    util.Finalize(None, get_client().close, exitpriority=0)
    _when_stopped(bodies.stop, get_client().close, bodies.hang_up)
    settings = Settings.from_env()
    if settings.transport != LANE:
        watch(get_client().health, settings.stall_seconds, lambda _: get_client().close())      # answers those who wait
    check_url_config(None)      # imports the views, which the first request would have to wait for
    origin = os.environ.get("MLXCEL_ORIGIN", "")
    say(f"\n  API    {origin}/v1\n  docs   {origin}/docs\n  admin  {origin}/admin/\n\nCtrl-C stops the server.")
    return application


def _when_stopped(*steps: Callable[[], None]) -> None:
    """At the signal to stop, ends the reading of bodies and closes the client: what runs is finished, what waits is refused. granian waits
    for both to be answered, but would let the waiting ones run. It also owns the signals' handlers, hence the file descriptor."""
    told, tell = socket.socketpair()
    tell.setblocking(False)
    signal.set_wakeup_fd(tell.detach(), warn_on_full_buffer=False)      # open for as long as the process lives

    def wait() -> None:
        while not {signal.SIGTERM, signal.SIGINT} & set(told.recv(64)):
            pass
        for step in steps:
            step()

    threading.Thread(target=wait, name="when-stopped", daemon=True).start()


def _outlive_nobody() -> None:
    """Stops this process when the one that started it is gone, however that ended: it would keep the port, and nobody could stop it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    print("the process that started this one is gone; stopping", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os._exit(1)


def _speaker() -> Callable[[str], None]:
    """Of several web processes the first one speaks for all."""
    with suppress(FileExistsError):
        Path(os.environ["MLXCEL_WEB_FOLDER"], "speaker").touch(exist_ok=False)
        return lambda line: print(line, flush=True)
    return lambda line: None


def load_models(client: InferenceClient, say: Callable[[str], None]) -> None:
    """Loads every configured model and has each work on a word: kernels get compiled, and a broken model shows now, not to a caller.
    Models that run elsewhere may come later."""
    started = time.perf_counter()
    say("Loading models ...")
    client.load()
    models = client.models()
    for model in models:
        if model.state != "ready":
            say(f"  {model.id}: {WAITING.get(model.state, model.state)}")
            continue
        if model.kind == "embedding":
            client.embed(EmbedJob(items=("ready",), model=model.id))
        else:
            client.rerank(RerankJob(query="ready", documents=("ready",), model=model.id))
        say(f"  {model.id}: {_summary(client.describe(model.kind, model.id) or model)}")
    settings = Settings.from_env()
    if settings.transport != LANE and (problem := settings.unanswered([name for model in models for name in (model.id, *model.aliases)])):
        raise ConfigError(problem, param="MLXCEL_MODEL_ALIASES")
    if not models:
        say("  none yet")
    say(f"Ready after {time.perf_counter() - started:.1f} s.")


def _summary(model: ModelSpec) -> str:
    gives = (f"{model.dims} dimensions", f"{model.pooling} pooling") if model.kind == "embedding" else ("reranker", model.scoring)
    return ", ".join(fact for fact in (gives[0], f"{model.max_length} tokens", gives[1], model.backend, model.precision) if fact)
