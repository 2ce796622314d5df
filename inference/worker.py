"""One model's worker: takes requests off its lanes, has its engine run them, answers. Knows nothing of Celery.

Work that waits stays in Redis, where it is bounded and its caller can take it back: of each lane the worker holds only as many requests as
make a good pack. Each lane is drained by a thread of its own, so bulk work never keeps interactive work from being taken; which of them
runs first is the engine's affair.
"""
from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from . import messages
from .client import InferenceClient, connect
from .config import LANE, LOCAL, Settings
from .errors import Busy, ConfigError, InferenceFailed, ServiceError
from .lane import BEAT_SECONDS, LISTS, STOPPING, Address, Beat, Broker, Clock, Ticket, Unreachable, identity, instance_name
from .wire import EmbedJob, EmbedResult, Kind, Lane, ModelSpec, RerankJob, RerankResult, State

log = logging.getLogger(__name__)

Timed = TypeVar("Timed", EmbedResult, RerankResult)

HELD: dict[Lane, int] = {"interactive": 16, "bulk": 4}      # requests in hand at most; the host backend: `held`
TAKE_SECONDS = 0.3
STOP_SECONDS = 10.0
ABANDON_SECONDS = 1.0      # for what is in hand and can still be answered


def pinned(settings: Settings) -> Settings:
    """`settings` with the one model this worker serves, in this process. Raises ConfigError unless that is clear."""
    if not settings.redis_url:
        raise ConfigError("MLXCEL_REDIS_URL is not set: a model worker gets its requests over Redis", param="MLXCEL_REDIS_URL")
    configured = {**dict.fromkeys(settings.embedding_models, "embedding"), **dict.fromkeys(settings.reranker_models, "reranker")}
    name = settings.worker_model or (next(iter(configured)) if len(configured) == 1 else None)
    if name is None:
        raise ConfigError("MLXCEL_WORKER_MODEL is not set, and a worker serves one model; configured are: "
                          + (", ".join(configured) or "none"), param="MLXCEL_WORKER_MODEL")
    name = next((other for other in configured if other == name or other.rpartition("/")[2] == name), name)
    embeds = configured.get(name) != "reranker"
    return replace(
        settings, embedding_models=(name,) if embeds else (), reranker_models=() if embeds else (name,),
        transport=LOCAL if settings.transport == LANE else settings.transport,
        # what was taken off the lane must find room in the engine
        queue_depth=max(settings.queue_depth, settings.threads + 1, *HELD.values()))


def held(lane: Lane, spec: ModelSpec, settings: Settings) -> int:
    """Requests in hand at most. A bulk request is several packs, so one more than packs run at once keeps them coming; whoever holds
    more of them leaves other workers of the model without."""
    return settings.threads + 1 if lane == "bulk" and spec.backend == "host" else HELD[lane]


class Worker:
    """`stop` waits for what runs. `failed` is called, once and from another thread, when the model cannot be served after all."""

    def __init__(self, settings: Settings, failed: Callable[[ServiceError], None]) -> None:
        self._settings, self._failed = settings, failed
        own = pinned(settings)
        assert settings.redis_url is not None
        self.broker = Broker(settings.redis_url)
        self.client: InferenceClient = connect(own)
        self.instance = instance_name()
        self.state: State = "loading"
        self.counters: defaultdict[str, float] = defaultdict(float)
        self._clock = Clock()
        self._lock, self._beating = threading.Lock(), threading.Lock()
        self._holds: dict[str, float] = {}                  # request id -> time.monotonic() when it was taken
        self._stopping, self._stopped = threading.Event(), threading.Event()
        self._kind: Kind = "embedding" if own.embedding_models else "reranker"
        self._drains: list[threading.Thread] = []

    def start(self) -> ModelSpec:
        """Registers and begins to load; requests are taken when that is done. Raises what can be known before."""
        self.broker.check()
        self.spec = self._describe()
        self.address = Address(self.spec.kind, self.spec.id)
        self.counters["restarts"] = self.broker.starting(self.address)
        self._beat()
        for run in (self._beat_forever, self._open):
            threading.Thread(target=run, name=run.__name__, daemon=True).start()
        return self.spec

    def stop(self) -> None:
        """Finishes what runs, refuses what waits."""
        self._stopping.set()
        self.state = "stale"                                 # for callers and other instances
        self._beat_quietly()
        until = time.monotonic() + STOP_SECONDS
        self._refuse()
        for drain in self._drains:
            drain.join(max(until - time.monotonic(), 0))
        while self._holds and time.monotonic() < until:
            time.sleep(0.02)
        self.client.close()                                  # what is left gets its refusal from the engine
        while self._holds and time.monotonic() < until + 1:
            time.sleep(0.02)
        with self._beating:                                  # none is on its way any more when the connections are closed
            self._stopped.set()
        self._refuse()
        try:
            self.broker.retire(self.address, self.instance)
        except Busy as error:
            log.warning("left without saying so: %s", error)
        self.broker.close()

    def abandon(self, why: str) -> None:
        """Farewell of a process that ends with a batch that hangs: what had begun is answered with an error, what waits is refused."""
        self._stopping.set()
        self.state = "stale"
        self._beat_quietly()
        threading.Thread(target=self.client.close, name="abandon", daemon=True).start()      # does not return before the batch does
        until = time.monotonic() + ABANDON_SECONDS
        while self._holds and time.monotonic() < until:
            time.sleep(0.02)
        for request in list(self._holds):
            failed = messages.pack_error(InferenceFailed(f"The worker ended with this request in its hands: {why}"))
            self.broker.answer(Ticket(0, 0, request), failed)
        self._refuse()

    # ---- the registry

    def _describe(self) -> ModelSpec:
        spec = self.client.describe(self._kind)
        if spec is None:
            raise ConfigError("the configured model cannot be described", param="MLXCEL_WORKER_MODEL")
        return spec

    def _beat(self) -> None:
        with self._beating:                                  # an older one must not overwrite a newer one
            if not self._stopped.is_set():
                self._say()

    def _say(self) -> None:
        with self._lock:
            holds, own = dict(self._holds), dict(self.counters)
        counted: dict[str, Any] = next(iter(self.client.health().get("models", {}).values()), {})
        numbers = {name: value for name, value in counted.items() if isinstance(value, int | float)}
        for name, value in own.items():
            numbers[name] = numbers.get(name, 0) + value
        oldest = min(holds.values(), default=None)
        stalled = 0.0 if oldest is None else numbers.get("stalled_seconds", time.monotonic() - oldest)
        asked = time.monotonic()
        self._clock.set(self.broker.beat(
            self.address, identity(self.spec), messages.pack_spec(self.spec),
            Beat(self.instance, self.state, stalled, numbers, tuple(holds))), asked)

    def _beat_quietly(self) -> None:
        """Out of turn. What goes wrong is told by the next regular one."""
        with suppress(ServiceError):
            self._beat()

    def _beat_forever(self) -> None:
        quiet = False
        while not self._stopped.wait(BEAT_SECONDS):
            try:
                self._beat()
                if quiet:
                    log.info("heard by Redis again")
                quiet = False
            except Busy as error:
                if not quiet:
                    log.warning("no heartbeat: %s", error)
                quiet = True
            except ServiceError as error:
                self._failed(error)
                return

    # ---- the model

    def _open(self) -> None:
        started = time.perf_counter()
        try:
            self.client.load()
            if self.spec.kind == "embedding":               # kernels get compiled now, not for the first caller
                self.client.embed(EmbedJob(("ready",)))
            else:
                self.client.rerank(RerankJob("ready", ("ready",)))
        except ServiceError as error:
            self.state = "failed"
            self._failed(error)
            return
        if self._stopping.is_set():
            return
        self.state = "ready"
        log.info("%s is ready after %.1f s: %s, %s, as %s", self.spec.id, time.perf_counter() - started, self.spec.backend,
                 self.spec.precision, self.instance)
        for lane in LISTS:
            thread = threading.Thread(target=self._drain, args=(lane,), name=f"lane-{lane}", daemon=True)
            self._drains.append(thread)
            thread.start()
        self._beat_quietly()

    # ---- requests

    def _drain(self, lane: Lane) -> None:
        size = min(held(lane, self.spec, self._settings), self._settings.queue_depth)
        free = threading.Semaphore(size)
        away = False
        with ThreadPoolExecutor(size, f"request-{lane}") as pool:
            while not self._stopping.is_set():
                if not free.acquire(timeout=TAKE_SECONDS):
                    continue
                room = 1
                while room < size and free.acquire(blocking=False):
                    room += 1
                taken: list[tuple[Ticket, bytes]] = []
                try:
                    taken = self.broker.take(self.address, lane, room, TAKE_SECONDS)
                    away = False
                except Busy as error:
                    if not away:
                        log.warning("no requests: %s", error)
                    away = True
                    self._stopping.wait(0.2)
                with self._lock:
                    self._holds.update((ticket.id, time.monotonic()) for ticket, _ in taken)
                for ticket, job in taken:
                    pool.submit(self._run, lane, ticket, job, free)
                if room > len(taken):
                    free.release(room - len(taken))

    def _run(self, lane: Lane, ticket: Ticket, job: bytes, free: threading.Semaphore) -> None:
        """One request from its being taken to its answer. Whatever happens, its place is free again after it."""
        try:
            now = self._clock.now()
            waited, left = max(now - ticket.admitted, 0) / 1000, (ticket.deadline - now) / 1000 if job else 0.0
            with self._lock:
                self.counters[f"brokered_{lane}"] += 1
                self.counters[f"broker_seconds_{lane}"] += waited
                self.counters[f"dropped_{lane}"] += left <= 0
            if left <= 0:
                return
            reply = self._reply(ticket, job, waited, left)
            if (left := (ticket.deadline - self._clock.now()) / 1000) > 0:       # else its caller has gone
                self._answer(ticket, reply, left + 1)
        except Exception:
            log.exception("request %s got no answer", ticket.id)
        finally:
            with self._lock:
                del self._holds[ticket.id]
            free.release()

    def _reply(self, ticket: Ticket, packed: bytes, waited: float, left: float) -> bytes:
        try:
            job = replace(messages.unpack_job(packed), timeout=left)
            match job:
                case EmbedJob():
                    return messages.pack_result(_timed(self.client.embed(job), waited))
                case RerankJob():
                    return messages.pack_result(_timed(self.client.rerank(job), waited))
                case _:
                    return messages.pack_result(self.client.split(
                        job.texts, job.tokens, job.overlap, prompt=job.prompt, model=job.model))
        except ServiceError as error:
            return messages.pack_error(error)
        except Exception as error:
            log.exception("request %s failed", ticket.id)
            return messages.pack_error(InferenceFailed(f"inference failed: {error!r}"))

    def _answer(self, ticket: Ticket, reply: bytes, seconds: float) -> None:
        """Tries again while Redis is away, for as long as somebody may wait."""
        while True:
            try:
                self.broker.answer(ticket, reply, seconds)
                return
            except Unreachable:
                if self._clock.now() > ticket.deadline or self._stopped.wait(0.2):
                    raise

    def _refuse(self) -> None:
        try:
            refused = self.broker.refuse(self.address, self.instance)
            for ticket in refused:
                self.broker.answer(ticket, messages.pack_error(Busy(STOPPING)))
        except Busy as error:
            log.warning("could not refuse what waits: %s", error)


def _timed(result: Timed, waited: float) -> Timed:
    """Waiting in Redis is waiting in the queue."""
    return replace(result, timings={**result.timings, "queue": result.timings.get("queue", 0.0) + waited})
