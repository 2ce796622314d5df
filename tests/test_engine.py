"""The engine alone, over forward passes that are functions of a few lines."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.engine import Engine, Forward
from inference.errors import Busy, CheckpointError, InferenceFailed, InvalidNumericResult, TimedOut


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def sums(sequences: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """A model whose vector is (sum, length): whoever gets another one's answer notices."""
    return [np.array([[s.sum(), len(s)]], np.float32) for s in sequences]


class Model:
    """`sums` behind a gate: packs are recorded, and wait while the gate is shut."""

    def __init__(self) -> None:
        self.packs: list[list[list[int]]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self, sequences: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        self.packs.append([s.tolist() for s in sequences])
        self.entered.set()
        assert self.gate.wait(10)
        return sums(sequences)

    def shut(self) -> None:
        self.entered.clear()
        self.gate.clear()


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(forward: Forward = sums, **options: object) -> Engine:
        engines.append(Engine(lambda: forward, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_results_come_back_in_order(start):
    outputs = start().submit([ids(5, 6, 7), ids(1), ids(2, 3)]).wait()
    assert [o.tolist() for o in outputs] == [[[18, 3]], [[1, 1]], [[5, 2]]]


def test_nothing_to_do_is_done(start):
    assert start().submit([]).wait() == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=20), min_size=1, max_size=6),
       st.integers(1, 3), st.integers(1, 40), st.integers(1, 5))
def test_every_caller_gets_its_own_answers(requests, workers, pack_tokens, pack_rows):
    packs: list[list[int]] = []

    def forward(sequences):
        packs.append([len(s) for s in sequences])
        return sums(sequences)

    engine = Engine(lambda: forward, workers=workers, pack_tokens=pack_tokens, pack_rows=pack_rows, queue_depth=len(requests))
    waiting = [engine.submit([ids(*s) for s in sequences], lane="bulk" if i % 2 else "interactive") for i, sequences in enumerate(requests)]
    for sequences, request in zip(requests, waiting, strict=True):
        assert [o.tolist() for o in request.wait()] == [[[sum(s), len(s)]] for s in sequences]
    engine.close()
    assert all(len(p) <= pack_rows and (sum(p) <= pack_tokens or len(p) == 1) for p in packs)


def test_packs_keep_to_their_tokens_and_hold_neighbours_in_length(start):
    model = Model()
    engine = start(model, pack_tokens=20)
    model.shut()
    first = engine.submit([ids(0)])
    assert model.entered.wait(5)
    rest = engine.submit([ids(*[n] * n) for n in (2, 9, 3, 8, 1, 10)])
    model.gate.set()
    first.wait(), rest.wait()
    lengths = [sorted(len(s) for s in pack) for pack in model.packs[1:]]
    assert sum(map(len, lengths)) == 6 and all(sum(p) <= 20 for p in lengths)
    assert lengths == [[1, 2, 3, 8], [9, 10]]


def test_equal_sequences_in_flight_run_once(start):
    model = Model()
    engine = start(model)
    model.shut()
    blocker = engine.submit([ids(9, 9)])
    assert model.entered.wait(5)
    requests = [engine.submit([ids(1, 2), ids(9, 9), ids(1, 2)]) for _ in range(3)]
    model.gate.set()
    blocker.wait()
    for request in requests:
        assert [o.tolist() for o in request.wait()] == [[[3, 2]], [[18, 2]], [[3, 2]]]
    assert sum(pack.count([1, 2]) for pack in model.packs) == 1
    assert sum(pack.count([9, 9]) for pack in model.packs) == 1
    assert engine.counters()["shared"] == 8
    assert [o.tolist() for o in engine.submit([ids(1, 2)]).wait()] == [[[3, 2]]]      # and once more, later


def test_interactive_goes_before_bulk(start):
    model = Model()
    engine = start(model, pack_tokens=4)
    model.shut()
    bulk = engine.submit([ids(1, n, 0, 0) for n in range(20)], lane="bulk")
    assert model.entered.wait(5)
    online = engine.submit([ids(2, 2)])
    model.gate.set()
    online.wait(), bulk.wait()
    assert model.packs[1] == [[2, 2]]


def test_bulk_packs_are_small_while_interactive_traffic_is_recent(start):
    model = Model()
    engine = start(model, pack_tokens=400)
    engine.submit([ids(1)]).wait()
    engine.submit([ids(*[n] * 30) for n in range(20)], lane="bulk").wait()
    assert max(sum(map(len, pack)) for pack in model.packs) <= 64


def test_a_waiting_bulk_sequence_is_promoted_by_an_interactive_caller(start):
    model = Model()
    engine = start(model, pack_tokens=4)
    model.shut()
    bulk = engine.submit([ids(1, 1, 1, n) for n in range(10)], lane="bulk")
    assert model.entered.wait(5)
    online = engine.submit([ids(1, 1, 1, 9)])
    model.gate.set()
    assert online.wait()[0].tolist() == [[12, 4]]
    bulk.wait()
    assert model.packs[1] == [[1, 1, 1, 9]] and len(model.packs) == 10


def test_callers_take_turns(start):
    model = Model()
    engine = start(model, pack_tokens=4)
    model.shut()
    large = engine.submit([ids(7, 7, 7, n) for n in range(50)])
    assert model.entered.wait(5)
    small = engine.submit([ids(8, 8, 8, 8)])
    model.gate.set()
    small.wait()
    large.wait()
    assert [[8, 8, 8, 8]] in model.packs[1:4]


def test_an_interactive_caller_is_refused_when_the_queue_is_full(start):
    model = Model()
    engine = start(model, queue_depth=2)
    model.shut()
    running = engine.submit([ids(1)])
    assert model.entered.wait(5)
    waiting = [engine.submit([ids(2)]), engine.submit([ids(3)])]
    with pytest.raises(Busy):
        engine.submit([ids(4)])
    model.gate.set()
    for request in (running, *waiting):
        request.wait()
    engine.submit([ids(4)]).wait()
    assert engine.counters()["rejected"] == 1


def test_a_bulk_caller_waits_for_room_instead(start):
    model = Model()
    engine = start(model, queue_depth=1, pack_tokens=1)
    model.shut()
    engine.submit([ids(1)], lane="bulk")
    assert model.entered.wait(5)
    engine.submit([ids(2)], lane="bulk")
    done = threading.Event()

    def third():
        engine.submit([ids(3)], lane="bulk").wait()
        done.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert not done.wait(0.1)
    model.gate.set()
    assert done.wait(5)
    thread.join()


def test_what_nobody_waits_for_is_dropped(start):
    model = Model()
    engine = start(model)
    model.shut()
    running = engine.submit([ids(1)])
    assert model.entered.wait(5)
    late = engine.submit([ids(2)], deadline=time.monotonic() + 0.05)
    left = engine.submit([ids(3)])
    left.cancel()
    with pytest.raises(TimedOut):
        late.wait()
    kept = engine.submit([ids(4)])
    model.gate.set()
    running.wait(), kept.wait()
    assert [[2]] not in model.packs and [[3]] not in model.packs and all([2] not in p and [3] not in p for p in model.packs)
    assert engine.counters()["dropped"] == 2
    assert engine.counters()["waiting_interactive"] == 0


def test_a_sequence_that_one_caller_left_still_runs_for_another(start):
    model = Model()
    engine = start(model)
    model.shut()
    running = engine.submit([ids(1)])
    assert model.entered.wait(5)
    left, stays = engine.submit([ids(2)]), engine.submit([ids(2)])
    left.cancel()
    model.gate.set()
    running.wait()
    assert stays.wait()[0].tolist() == [[2, 1]]


def test_poison_fails_alone(start):
    def forward(sequences):
        if any(13 in s for s in sequences):
            raise RuntimeError("thirteen")
        return sums(sequences)

    engine = start(forward)
    request = engine.submit([ids(1), ids(13), ids(2)], partial=True)
    outputs = request.wait()
    assert outputs[0].tolist() == [[1, 1]] and outputs[1] is None and outputs[2].tolist() == [[2, 1]]
    assert list(request.errors) == [1] and "thirteen" in request.errors[1].message
    with pytest.raises(InferenceFailed, match="thirteen"):
        engine.submit([ids(1), ids(13)]).wait()
    assert engine.submit([ids(3)]).wait()[0].tolist() == [[3, 1]]


def test_memory_errors_are_contained_too(start):
    def forward(sequences):
        if len(sequences) > 1:
            raise MemoryError
        return sums(sequences)

    engine = start(forward)
    assert len(engine.submit([ids(1), ids(2), ids(3)]).wait()) == 3
    assert engine.counters()["failed"] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_output_is_an_error_of_that_item(start, value):
    def forward(sequences):
        return [np.full((1, 2), value if 13 in s else 0, np.float32) for s in sequences]

    request = start(forward).submit([ids(1), ids(13)], partial=True)
    outputs = request.wait()
    assert outputs[0] is not None and outputs[1] is None
    assert isinstance(request.errors[1], InvalidNumericResult)


def test_a_forward_that_loses_a_row_is_an_error(start):
    engine = start(lambda sequences: sums(sequences)[:-1])
    with pytest.raises(InferenceFailed, match="0 results for 1"):
        engine.submit([ids(1)]).wait()


@pytest.mark.parametrize("cause, seen", [(CheckpointError("no weights"), CheckpointError), (ValueError("odd"), InferenceFailed)])
def test_a_model_that_cannot_be_opened_says_so_to_everyone(cause, seen):
    entered = threading.Event()

    def open_model():
        assert entered.wait(5)
        raise cause

    engine = Engine(open_model, workers=2)
    early = engine.submit([ids(1)])
    entered.set()
    with pytest.raises(seen):
        early.wait()
    with pytest.raises(seen):
        engine.submit([ids(1)])
    with pytest.raises(seen):
        engine.wait_until_open()
    assert engine.state == "failed"
    engine.close()


def test_closing_finishes_what_runs_and_refuses_what_waits():
    model = Model()
    engine = Engine(lambda: model)
    model.shut()
    running = engine.submit([ids(1)])
    assert model.entered.wait(5)
    waiting = engine.submit([ids(2)])
    closer = threading.Thread(target=engine.close)
    closer.start()
    with pytest.raises(Busy):
        waiting.wait()
    model.gate.set()
    assert running.wait()[0].tolist() == [[1, 1]]
    closer.join()
    with pytest.raises(Busy):
        engine.submit([ids(3)])


def test_closing_finishes_an_interactive_request_that_has_begun_but_not_a_bulk_one():
    model = Model()
    engine = Engine(lambda: model, pack_rows=1)
    model.shut()
    begun = engine.submit([ids(1), ids(2), ids(3)])
    assert model.entered.wait(5)
    bulk = engine.submit([ids(4), ids(5)], lane="bulk")
    closer = threading.Thread(target=engine.close)
    closer.start()
    with pytest.raises(Busy):
        bulk.wait()
    model.gate.set()
    assert [output.tolist() for output in begun.wait()] == [[[1, 1]], [[2, 1]], [[3, 1]]]
    closer.join()


def test_closing_does_not_wait_for_long(monkeypatch):
    monkeypatch.setattr("inference.engine.FINISH_SECONDS", 0.05)
    model = Model()
    engine = Engine(lambda: model, pack_rows=1)
    model.shut()
    begun = engine.submit([ids(1), ids(2)])
    assert model.entered.wait(5)
    closer = threading.Thread(target=engine.close)
    closer.start()
    time.sleep(0.2)
    model.gate.set()
    with pytest.raises(Busy):
        begun.wait()
    closer.join()
    assert model.packs == [[[1]]]


def test_stalled_is_the_time_since_work_was_there_and_none_got_done(start):
    model = Model()
    engine = start(model)
    assert engine.counters()["stalled_seconds"] == 0
    engine.submit([ids(1)]).wait()
    time.sleep(0.1)
    assert engine.counters()["stalled_seconds"] == 0
    model.shut()
    request = engine.submit([ids(2)])
    assert model.entered.wait(5)
    time.sleep(0.1)
    assert 0.1 <= engine.counters()["stalled_seconds"] < 1
    model.gate.set()
    request.wait()
    assert engine.counters()["stalled_seconds"] == 0


def test_a_pack_that_hangs_is_seen_beside_others_that_end(start):
    hangs = threading.Event()

    def forward(sequences):
        if sequences[0][0] == 7:
            hangs.wait(10)
        return [np.ones((1, 1), np.float32) for _ in sequences]

    engine = start(forward, workers=2)
    assert engine.counters()["pack_seconds"] == engine.counters()["pack_tokens"] == 0
    stuck = engine.submit([ids(7, 8, 9)])
    for i in range(5):
        time.sleep(0.05)
        engine.submit([ids(i)]).wait()
    counters = engine.counters()
    assert counters["stalled_seconds"] < 0.2 < counters["pack_seconds"] < 5
    assert (counters["pack_sequences"], counters["pack_tokens"]) == (1, 3)
    hangs.set()
    stuck.wait()
    assert engine.counters()["pack_seconds"] == 0


def test_lanes_are_counted_apart(start):
    engine = start()
    engine.submit([ids(1), ids(2)]).wait()
    engine.submit([ids(3)], lane="bulk").wait()
    counters = engine.counters()
    assert [counters[f"{name}_{lane}"] for name in ("requests", "taken") for lane in ("interactive", "bulk")] == [1, 1, 2, 1]
    assert counters["queue_seconds"] == pytest.approx(counters["queue_seconds_interactive"] + counters["queue_seconds_bulk"])


def test_the_model_is_opened_and_run_on_the_engines_own_thread(start):
    seen = set()

    def forward(sequences):
        seen.add(threading.get_ident())
        return sums(sequences)

    def open_model():
        seen.add(threading.get_ident())
        return forward

    engine = Engine(open_model)
    for n in range(5):
        engine.submit([ids(n)]).wait()
    engine.close()
    assert len(seen) == 1 and threading.get_ident() not in seen


def test_an_idle_engine_runs_an_interactive_request_on_its_callers_thread(start):
    seen: list[int] = []

    def forward(sequences):
        seen.append(threading.get_ident())
        return sums(sequences)

    engine = start(forward, anywhere=True, workers=2)
    engine.wait_until_open()
    assert [o.tolist() for o in engine.submit([ids(1, 2), ids(3)]).wait()] == [[[3, 2]], [[3, 1]]]
    assert seen == [threading.get_ident()]
    engine.submit([ids(1, 2)], lane="bulk").wait()
    assert seen[1] != threading.get_ident()


def test_while_something_runs_a_caller_leaves_its_request_to_the_workers(start):
    model = Model()
    inside: list[str] = []

    @contextmanager
    def around():
        inside.append("in")
        yield
        inside.append("out")

    engine = start(model, anywhere=True, workers=1, around=around)
    engine.wait_until_open()
    model.shut()
    first = threading.Thread(target=lambda: engine.submit([ids(1)]).wait())
    first.start()
    assert model.entered.wait(5)
    second = engine.submit([ids(2)])
    time.sleep(0.05)
    assert len(model.packs) == 1                             # the caller's pack takes the worker's place
    model.gate.set()
    assert second.wait()[0].tolist() == [[2, 1]]
    first.join()
    assert inside == ["in", "out"] * 2


def test_a_callers_own_pack_fails_like_any_other(start):
    def forward(sequences):
        raise RuntimeError("odd")

    engine = start(forward, anywhere=True)
    engine.wait_until_open()
    for _ in range(3):
        with pytest.raises(InferenceFailed, match="odd"):
            engine.submit([ids(1)]).wait()
    assert not engine._running and not engine._in_flight
