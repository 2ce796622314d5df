"""Models in model workers, reached over Redis. Imports nothing that computes: what the web knows of a model it reads from the registry."""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

from ..config import Settings, unserved
from ..errors import Away, Busy, ConfigError, InferenceFailed, Loading, NotLoaded, TimedOut, wrong_model
from ..lane import SLICE_SECONDS, STOPPING, Address, Broker, Interrupted, Registered, Ticket, Unreachable
from ..messages import Job, Result, pack_job, unpack_reply
from ..wire import EmbedJob, EmbedResult, Kind, Lane, ModelSpec, RerankJob, RerankResult, Span, SplitJob, State

SNAPSHOT_SECONDS = 0.5
LOST_SECONDS = 2.5         # how long a request may be in no list and in no heartbeat: whoever took it says so in the next one
AWAY_SECONDS = 10.0        # how long a request waits for a Redis that went away while it was in it
ROOM_SECONDS = 0.05        # between two tries of bulk work to get into a full list

WHAT: dict[Kind, str] = {"embedding": "Embedding", "reranker": "Rerank"}


class LaneClient:
    def __init__(self, settings: Settings) -> None:
        if not settings.redis_url:
            raise ConfigError("MLXCEL_REDIS_URL is not set: the lane transport reaches models over Redis", param="MLXCEL_REDIS_URL")
        self._settings = settings
        self._broker = Broker(settings.redis_url)
        self._lock = threading.Lock()
        self._known: list[Registered] = []
        self._away: str | None = None                        # why Redis did not answer
        self._read_at = float("-inf")
        self._closing, self._asking = False, 0               # requests on their way

    def models(self) -> list[ModelSpec]:
        """In the order of the configured lists, others after them, those that registered first before later ones."""
        return [replace(known.spec, state=self._state(known)) for known in self._registry()]

    def describe(self, kind: Kind, model: str | None = None) -> ModelSpec | None:
        """Raises NotLoaded where the mode rules out this kind."""
        if refusal := self._settings.refusal(kind):
            raise NotLoaded(refusal)
        known = self._find(kind, model)
        return replace(known.spec, state=self._state(known)) if known else None

    def embed(self, job: EmbedJob) -> EmbedResult:
        return cast(EmbedResult, self._ask("embedding", job))

    def rerank(self, job: RerankJob) -> RerankResult:
        return cast(RerankResult, self._ask("reranker", job))

    def split(self, texts: Sequence[str], tokens: int, overlap: int = 0, *, prompt: str = "", model: str | None = None) -> list[list[Span]]:
        return cast(list[list[Span]], self._ask("embedding", SplitJob(tuple(texts), tokens, overlap, prompt, model)))

    def load(self) -> None:
        """Loading is the workers' affair. Raises where Redis cannot be used."""
        self._broker.check()

    def health(self) -> dict[str, Any]:
        """Never raises for a Redis that is away: that is a status as well."""
        try:
            registry = self._registry()
        except Busy as error:
            return {"status": "failed", "error": error.message, "models": {}}
        models = {known.spec.id: {
            "state": self._state(known), "kind": known.spec.kind,
            **{f"queued_{lane}": length for lane, length in known.waiting.items()},
            "instances": {beat.instance: {**beat.counters, "state": beat.state, "stalled_seconds": beat.stalled} for beat in known.beats}}
            for known in registry}
        states = {entry["state"] for entry in models.values()}
        return {"status": next((state for state in ("failed", "stale", "loading") if state in states), "ok" if models else "unserved"),
                "models": models}

    def close(self) -> None:
        """What runs is finished, what waits in Redis is taken back and refused."""
        with self._lock:
            self._closing = True
            idle = not self._asking
        if idle:
            self._broker.close()

    # ---- the registry

    def _registry(self) -> list[Registered]:
        """A failure is kept as long as an answer: callers must not queue up behind each other's time-outs."""
        with self._lock:
            if time.monotonic() - self._read_at > SNAPSHOT_SECONDS:
                try:
                    self._known, self._away = sorted(self._broker.snapshot(), key=self._position), None
                except Busy as error:
                    self._away = error.message
                self._read_at = time.monotonic()
            if self._away:
                raise Away(self._away)
            return self._known

    def _position(self, known: Registered) -> int:
        configured = [*self._settings.embedding_models, *self._settings.reranker_models]
        return next((i for i, name in enumerate(configured) if known.spec.answers_to(_basename(name))), len(configured))

    def _find(self, kind: Kind, model: str | None) -> Registered | None:
        return next((known for known in self._registry()
                     if known.spec.kind == kind and (model is None or known.spec.answers_to(model))), None)

    def _state(self, known: Registered) -> State:
        """The best of its instances; one that is stopping or stuck serves nobody."""
        states = {beat.state for beat in known.beats if beat.stalled <= self._settings.timeout}
        return next((state for state in cast(tuple[State, ...], ("ready", "loading", "failed")) if state in states), "stale")

    def _serving(self, kind: Kind, model: str | None) -> Registered:
        """Raises NotLoaded, InvalidRequest, Loading or Busy, without asking any worker."""
        known = self._find(kind, model)
        if known is None:
            served = [other.spec.id for other in self._registry() if other.spec.kind == kind]
            raise wrong_model(kind, model or "", served) if served else unserved(kind, self._settings)
        state = self._state(known)
        if state == "loading":
            raise Loading(f"The model {known.spec.id} is still loading. Please try again later.")
        if state != "ready":
            raise Busy(f"No worker of the model {known.spec.id} answers at the moment. Please try again later.")
        return known

    # ---- requests

    def _ask(self, kind: Kind, job: Job) -> Result:
        known = self._serving(kind, job.model)
        seconds = self._settings.timeout if job.timeout is None else job.timeout
        until = time.monotonic() + seconds
        packed = pack_job(replace(job, model=known.spec.id, timeout=None))
        with self._on_its_way():
            interrupted = False
            try:
                ticket, reply = self._admit(known.address, job.lane, packed, until)
            except Interrupted as error:
                ticket, reply, interrupted = error.ticket, None, True
            try:
                reply = reply or self._wait(known.address, job.lane, ticket, until, interrupted)
            except BaseException:
                self._give_up(known.address, job.lane, ticket)
                raise
        return unpack_reply(reply)

    @contextmanager
    def _on_its_way(self) -> Iterator[None]:
        with self._lock:
            if self._closing:
                raise Busy(STOPPING)
            self._asking += 1
        try:
            yield
        finally:
            with self._lock:
                self._asking -= 1
                last = self._closing and not self._asking
            if last:
                self._broker.close()

    def _admit(self, address: Address, lane: Lane, job: bytes, until: float) -> tuple[Ticket, bytes | None]:
        """Interactive work is refused when the list is full; bulk work waits for room."""
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise TimedOut(f"{WHAT[address.kind]} request timed out. Please try again later.")
            if admitted := self._broker.admit(address, lane, job, left, self._settings.queue_depth):
                return admitted
            if lane == "interactive":
                raise Busy("All slots are busy. Please try again later.")
            if self._closing:
                raise Busy(STOPPING)
            while not self._closing and time.monotonic() < until and self._broker.full(address, lane, self._settings.queue_depth):
                time.sleep(ROOM_SECONDS)
                self._serving(address.kind, address.model)

    def _wait(self, address: Address, lane: Lane, ticket: Ticket, until: float, interrupted: bool) -> bytes:
        """The reply, which did not come within the first slice. Else what became of the request, by the list and the heartbeats."""
        held, seen = False, time.monotonic() - (0 if interrupted else SLICE_SECONDS)
        heard = time.monotonic()
        while (left := until - time.monotonic()) > 0:
            try:
                holder, alive, waits = self._broker.look(address, lane, ticket)
                heard = time.monotonic()
                if waits and self._closing and self._broker.withdraw(address, lane, ticket):
                    raise Busy(STOPPING)
                if holder or (waits and alive):
                    held, seen = bool(holder), time.monotonic()
                elif time.monotonic() - seen > (LOST_SECONDS if interrupted or (alive and not held) else 0):
                    if not waits:
                        if reply := self._broker.reply(ticket, SLICE_SECONDS):       # written between the two questions
                            return reply
                        if interrupted:
                            raise Busy("Redis was restarted while this request was in it. Please try again later.")
                        raise InferenceFailed(f"The worker of {address.model} died or could not answer while it had this request")
                    if self._broker.withdraw(address, lane, ticket):
                        raise Busy(f"The worker of {address.model} went away before it began this request. Please try again later.")
                if reply := self._broker.reply(ticket, left):
                    return reply
            except Unreachable:
                held, interrupted, seen = False, True, time.monotonic()              # a Redis that comes back knows of no heartbeat yet
                if seen - heard > AWAY_SECONDS:
                    raise
                time.sleep(min(SLICE_SECONDS, max(until - time.monotonic(), 0)))
        raise TimedOut(f"{WHAT[address.kind]} request timed out. Please try again later.")

    def _give_up(self, address: Address, lane: Lane, ticket: Ticket) -> None:
        """A request nobody waits for any more must not run. Where Redis is away there is nothing to take back."""
        with suppress(Busy):
            self._broker.withdraw(address, lane, ticket)


def _basename(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]
