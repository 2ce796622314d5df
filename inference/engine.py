"""One queue per model: all callers' sequences meet here, are packed by tokens, run, and go back to whoever asked.

Two lanes. Interactive work goes first between packs; bulk work fills the rest, in small packs while interactive traffic is recent,
so that it delays nobody by more than one pack. Equal sequences in flight are computed once. What nobody waits for any more is
dropped before it runs. A pack that fails is run again item by item, so that one bad input fails alone.
"""
from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import cast, get_args

import numpy as np

from .errors import Busy, InferenceFailed, InvalidNumericResult, ServiceError, TimedOut
from .wire import Lane, State

log = logging.getLogger(__name__)

Forward = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""[L_i] int32 token ids, or [2, L_i] ids and type ids (late interaction: marks), each -> [rows_i, D] f32 each."""

RECENT = 1.0                                       # seconds after interactive work in which bulk packs stay small
SMALL_PACK = 64                                    # tokens of such a pack

FINISH_SECONDS = 5.0                               # for interactive requests that have begun when the engine is closed

LANES: tuple[Lane, ...] = get_args(Lane)


@dataclass
class Stats:
    """Counters since the start; seconds are summed over items (queue) or packs (forward)."""

    requests: int = 0
    rejected: int = 0
    sequences: int = 0
    shared: int = 0                                # sequences answered by one already in flight
    packs: int = 0
    tokens: int = 0
    dropped: int = 0
    failed: int = 0
    retried: int = 0
    queue_seconds: float = 0.0
    forward_seconds: float = 0.0


@dataclass
class LaneStats:
    """One lane's share of them; `taken` is sequences that left the queue to be run, which `queue_seconds` is summed over."""

    requests: int = 0
    rejected: int = 0
    taken: int = 0
    dropped: int = 0
    queue_seconds: float = 0.0


class Request:
    """The caller's side of one `submit`: wait for it, or cancel it."""

    def __init__(self, engine: Engine, count: int, lane: Lane, deadline: float | None, partial: bool) -> None:
        self.outputs: list[np.ndarray | None] = [None] * count
        self.errors: dict[int, ServiceError] = {}
        self.lane, self.deadline, self.partial = lane, deadline, partial
        self.cancelled = False
        self.started = False                       # some of it has left the queue
        self.submitted = self.began = time.monotonic()
        self._engine, self._left, self._done = engine, count, threading.Event()

    def start(self, now: float) -> None:
        if not self.started:
            self.started, self.began = True, now

    def alive(self, now: float) -> bool:
        return not self.cancelled and (self.deadline is None or now < self.deadline)

    def cancel(self) -> None:
        self._engine._cancel(self)

    def wait(self) -> list[np.ndarray | None]:
        """[rows, D] f32 each, in order; None beside an entry of `errors` where the request is partial. Else raises the first error,
        or TimedOut."""
        remaining = None if self.deadline is None else max(self.deadline - time.monotonic(), 0)
        if not self._done.wait(remaining):
            self.cancel()
            raise TimedOut(self._engine.late)
        if self.errors and not self.partial:
            raise self.errors[min(self.errors)]
        return self.outputs


@dataclass(eq=False)
class _Task:
    """One distinct sequence in flight and everyone who waits for it."""

    key: bytes
    ids: np.ndarray
    order: int
    lane: Lane
    since: float
    waiters: list[tuple[Request, int]] = field(default_factory=list)
    running: bool = False

    @property
    def length(self) -> int:
        return self.ids.shape[-1]


class _Queue:
    """One lane. Requests take turns in naming the head of a pack; its neighbours in length fill it, whoever they belong to."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.by_length: list[tuple[int, int, _Task]] = []
        self.turns: OrderedDict[Request, deque[_Task]] = OrderedDict()

    def add(self, request: Request, tasks: list[_Task]) -> None:
        if tasks:
            self.turns.setdefault(request, deque()).extend(tasks)
        if len(tasks) > 8:
            self.by_length = sorted(self.by_length + [(t.length, t.order, t) for t in tasks], key=lambda entry: entry[:2])
        else:
            for t in tasks:
                insort(self.by_length, (t.length, t.order, t), key=lambda entry: entry[:2])

    def discard(self, task: _Task) -> None:
        at = self._at(task)
        if at < len(self.by_length) and self.by_length[at][2] is task:
            del self.by_length[at]

    def _at(self, task: _Task) -> int:
        return bisect_left(self.by_length, (task.length, task.order), key=lambda entry: entry[:2])

    def take(self, budget: int, rows: int) -> list[_Task]:
        head = self._head()
        if head is None:
            return []
        low = self._at(head)
        high, tokens = low + 1, head.length
        while high - low < rows:
            below = self.by_length[low - 1][0] if low else None
            above = self.by_length[high][0] if high < len(self.by_length) else None
            if above is not None and tokens + above <= budget and (below is None or above - head.length <= head.length - below):
                tokens, high = tokens + above, high + 1
            elif below is not None and tokens + below <= budget:
                tokens, low = tokens + below, low - 1
            else:
                break
        pack = [task for _, _, task in self.by_length[low:high]]
        del self.by_length[low:high]
        return pack

    def _head(self) -> _Task | None:
        while self.turns:
            request, tasks = next(iter(self.turns.items()))
            while tasks and (tasks[0].running or not tasks[0].waiters or tasks[0].lane != self.lane):
                tasks.popleft()
            if not tasks:
                del self.turns[request]
                continue
            self.turns.move_to_end(request)
            return tasks[0]
        return None


class Engine:
    """`open_model` runs on the first worker thread, which for MLX is the only one: its arrays belong to the thread that made them.

    `submit` does not wait in the interactive lane (Busy instead); in the bulk lane it waits for room.

    around: entered around every forward pass. anywhere: the forward pass may run on any thread. Then an interactive request that finds
    nothing in flight runs its first pack on its own caller's thread, within `submit`: no other thread has to wake up for it.
    """

    def __init__(self, open_model: Callable[[], Forward], *, name: str = "engine", what: str = "embedding", workers: int = 1,
                 pack_tokens: int = 512, pack_rows: int | None = None, queue_depth: int = 64, anywhere: bool = False,
                 around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.stats = Stats()
        self.lane_stats = {lane: LaneStats() for lane in LANES}
        self.late = f"{what.capitalize()} request timed out. Please try again later."
        self._what = what                          # embedding | rerank: what messages call it
        self.state: State = "loading"
        self.last_progress = time.monotonic()
        self._failure: ServiceError | None = None
        self._open, self._forward = open_model, cast(Forward, None)
        self._pack_tokens, self._pack_rows, self._depth = pack_tokens, pack_rows or 1 << 30, queue_depth
        self._workers = workers                    # packs at once, at most
        self._running: dict[int, tuple[float, list[_Task]]] = {}              # those of now, and since when
        self._anywhere, self._around = anywhere, around
        self._lock = threading.Lock()
        self._work, self._room = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queues = {lane: _Queue(lane) for lane in LANES}
        self._waiting: dict[Lane, set[Request]] = {lane: set() for lane in LANES}
        self._in_flight: dict[bytes, _Task] = {}
        self._order = 0
        self._last_interactive = float("-inf")
        self._closed = False
        self._opened = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), name=f"{name}-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    # ---- callers

    def submit(self, sequences: Sequence[np.ndarray], *, lane: Lane = "interactive", deadline: float | None = None,
               partial: bool = False) -> Request:
        """`sequences`: [L] or [2, L] int32 each, none empty. `deadline` is on time.monotonic()'s clock.

        Raises Busy, or what kept the model from loading."""
        request = Request(self, len(sequences), lane, deadline, partial)
        if not sequences:
            request._done.set()
            return request
        with self._lock:
            self._check_open()
            self.stats.requests += 1
            self.lane_stats[lane].requests += 1
            while len(self._waiting[lane]) >= self._depth:
                if lane == "interactive":
                    self.stats.rejected += 1
                    self.lane_stats[lane].rejected += 1
                    raise Busy("All slots are busy. Please try again later.")
                if not self._room.wait(None if deadline is None else deadline - time.monotonic()):
                    raise TimedOut(self.late)
                self._check_open()
            here = self._anywhere and lane == "interactive" and not self._in_flight and self.state == "ready"
            self._admit(request, sequences)
            pack = self._take() if here else []
            if len(pack) < len(self._in_flight):
                self._work.notify_all()
        if pack:
            self._run_pack(pack)
        return request

    def wait_until_open(self, timeout: float | None = None) -> None:
        """Raises what kept the model from loading, or TimedOut."""
        if not self._opened.wait(timeout):
            raise TimedOut("the model is still loading")
        with self._lock:
            self._check_open()

    def close(self) -> None:
        """Finishes the packs that run and, within FINISH_SECONDS, interactive requests of which some has run; the rest fails with Busy."""
        with self._lock:
            self._closed = True
            self._refuse(lambda task: not any(request.started and request.lane == "interactive" for request, _ in task.waiters))
            self._work.notify_all()
            self._room.notify_all()
        finished = time.monotonic() + FINISH_SECONDS
        for thread in self._threads:
            thread.join(max(finished - time.monotonic(), 0))
        with self._lock:
            self._refuse(lambda task: True)
        for thread in self._threads:
            thread.join()
        with self._lock:
            if not self._running:                  # a pack may still run on a caller's thread
                self._forward = cast(Forward, None)                       # the weights, which need not live as long as this object

    def counters(self) -> dict[str, float]:
        """`stalled_seconds`: since work was there to do and none of it got done. `pack_seconds`: how long the oldest pack has been running,
        which has `pack_sequences` and `pack_tokens`; others may be done meanwhile."""
        with self._lock:
            now = time.monotonic()
            oldest = next(iter(self._in_flight.values()), None)
            stalled = 0.0 if oldest is None else now - max(self.last_progress, oldest.since)
            began, pack = min(self._running.values(), key=lambda running: running[0], default=(now, []))
            lanes = {f"{name}_{lane}": value for lane in LANES for name, value in asdict(self.lane_stats[lane]).items()}
            waiting = {f"waiting_{lane}": len(self._waiting[lane]) for lane in LANES}
            return asdict(self.stats) | lanes | waiting | {
                "stalled_seconds": stalled, "pack_seconds": now - began, "pack_sequences": len(pack),
                "pack_tokens": sum(task.length for task in pack)}

    # ---- admission and settlement, under the lock

    def _check_open(self) -> None:
        if self._failure:
            raise self._failure
        if self._closed:
            raise Busy("The server is shutting down. Please try again later.")

    def _refuse(self, chosen: Callable[[_Task], bool]) -> None:
        for task in [task for task in self._in_flight.values() if not task.running and chosen(task)]:
            self._finish(task, Busy("The server is shutting down. Please try again later."))

    def _admit(self, request: Request, sequences: Sequence[np.ndarray]) -> None:
        now = time.monotonic()
        fresh: list[_Task] = []
        for position, ids in enumerate(sequences):
            self.stats.sequences += 1
            key = ids.tobytes()
            task = self._in_flight.get(key)
            if task is None:
                self._order += 1
                task = self._in_flight[key] = _Task(key, ids, self._order, request.lane, now)
                fresh.append(task)
            else:
                self.stats.shared += 1
                if task.running:
                    request.start(now)
                elif task.lane == "bulk" and request.lane == "interactive":
                    self._queues["bulk"].discard(task)
                    task.lane = "interactive"
                    fresh.append(task)
            task.waiters.append((request, position))
        self._queues[request.lane].add(request, fresh)
        if not request.started:
            self._waiting[request.lane].add(request)
        if request.lane == "interactive":
            self._last_interactive = now

    def _cancel(self, request: Request) -> None:
        with self._lock:
            request.cancelled = True
            self._leave(request)

    def _leave(self, request: Request) -> None:
        if request in self._waiting[request.lane]:
            self._waiting[request.lane].discard(request)
            self._room.notify()

    def _take(self) -> list[_Task]:
        """The next pack; tasks that nobody waits for any more are dropped on the way."""
        now = time.monotonic()
        for lane in LANES:
            small = lane == "bulk" and now - self._last_interactive < RECENT
            while pack := self._queues[lane].take(min(SMALL_PACK, self._pack_tokens) if small else self._pack_tokens, self._pack_rows):
                wanted = []
                for task in pack:
                    if any(request.alive(now) for request, _ in task.waiters):
                        wanted.append(task)
                        task.running = True
                        self.stats.queue_seconds += now - task.since
                        self.lane_stats[lane].queue_seconds += now - task.since
                        self.lane_stats[lane].taken += 1
                        for request, _ in task.waiters:
                            request.start(now)
                            self._leave(request)
                    else:
                        self.stats.dropped += 1
                        self.lane_stats[lane].dropped += 1
                        self._finish(task, TimedOut(self.late))
                if wanted:
                    if lane == "interactive":
                        self._last_interactive = now
                    self._running[id(wanted)] = now, wanted
                    return wanted
        return []

    def _finish(self, task: _Task, outcome: np.ndarray | ServiceError) -> None:
        if self._in_flight.get(task.key) is task:
            del self._in_flight[task.key]
        if not task.running:
            self._queues[task.lane].discard(task)
        for request, position in task.waiters:
            if isinstance(outcome, ServiceError):
                request.errors[position] = outcome
            else:
                request.outputs[position] = outcome
            request._left -= 1
            if request._left == 0:
                self._leave(request)
                request._done.set()
        task.waiters = []

    # ---- workers

    def _run(self, number: int) -> None:
        if number == 0:
            self._open_model()
        self._opened.wait()
        while True:
            with self._lock:
                while not (pack := [] if self._failure or len(self._running) >= self._workers else self._take()):
                    if self._closed or self._failure:
                        return
                    self._work.wait()
            self._run_pack(pack)

    def _open_model(self) -> None:
        try:
            self._forward = self._open()
            self.last_progress = time.monotonic()
            self.state = "ready"
        except Exception as error:
            failure = error if isinstance(error, ServiceError) else InferenceFailed(f"the model could not be loaded: {error!r}")
            log.exception("the model could not be loaded") if not isinstance(error, ServiceError) else log.error("%s", error)
            with self._lock:
                self._failure, self.state = failure, "failed"
                for task in list(self._in_flight.values()):
                    self._finish(task, failure)
                self._room.notify_all()
        self._opened.set()

    def _run_pack(self, pack: list[_Task]) -> None:
        began = time.monotonic()
        with self._around():
            outcomes = self._outcomes(pack)
        with self._lock:
            del self._running[id(pack)]
            self._work.notify()
            self.stats.packs += 1
            self.stats.tokens += sum(task.length for task in pack)
            self.stats.forward_seconds += time.monotonic() - began
            self.last_progress = time.monotonic()
            for task, outcome in zip(pack, outcomes, strict=True):
                self.stats.failed += isinstance(outcome, ServiceError)
                self._finish(task, outcome)

    def _outcomes(self, pack: list[_Task]) -> list[np.ndarray | ServiceError]:
        try:
            outputs = self._forward([task.ids for task in pack])
            if len(outputs) != len(pack):
                raise InferenceFailed(f"{self._what} inference failed: the model returned {len(outputs)} results for {len(pack)} inputs")
        except Exception as error:
            if len(pack) == 1:
                log.exception("a forward pass over %d tokens failed", pack[0].length)
                return [error if isinstance(error, ServiceError) else InferenceFailed(f"{self._what} inference failed: {error}")]
            log.warning("a pack of %d sequences failed (%r); running them one by one", len(pack), error)
            with self._lock:
                self.stats.retried += len(pack)
            return [outcome for task in pack for outcome in self._outcomes([task])]
        return [
            output if np.isfinite(output).all() else InvalidNumericResult(f"{self._what} inference returned an invalid numeric result")
            for output in outputs]
