"""The lane's mechanics over a real Redis, with the worker in this process: admission, deadlines, places, registry, refusals."""
from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference import lane
from inference.config import LANE, LOCAL, Settings, how_to_serve
from inference.errors import Busy, ConfigError, InferenceFailed, InvalidRequest, Loading, NotLoaded, ServiceError, TimedOut
from inference.lane import Address, Beat, Broker, Ticket
from inference.messages import pack_job, pack_spec
from inference.transports.lane import LaneClient
from inference.wire import EmbedJob, RerankJob
from inference.worker import HELD, Worker, pinned
from tests.engines import EngineClient
from tests.fakes import RERANKER, SPEC, FakeClient
from tests.lanes import RedisServer, client_of, redis_server, wait_until

ADDRESS = Address("embedding", "fake-8")
JOB = pack_job(EmbedJob(("a",)))


def settings(broker: RedisServer, **changes: Any) -> Settings:
    return Settings(**{"embedding_models": ("fake-8",), "redis_url": broker.url, "transport": "tests.engines.EngineClient", **changes})


@contextmanager
def working(broker: RedisServer, *, forward: float = 0.003, load: bool = True, failed: Callable[[ServiceError], None] = pytest.fail,
            **changes: Any) -> Iterator[Worker]:
    worker = Worker(settings(broker, **changes), failed)
    if isinstance(worker.client, EngineClient):
        worker.client.forward_seconds = forward
    worker.start()
    if load:
        wait_until(lambda: any(beat.instance == worker.instance and beat.state != "loading"
                               for known in worker.broker.snapshot() for beat in known.beats), 10)
    try:
        yield worker
    finally:
        worker.stop()


@pytest.fixture
def client(broker: RedisServer) -> Iterator[LaneClient]:
    client = client_of(broker.url)
    yield client
    client.close()


def embed(client: LaneClient, *texts: str, **options: Any) -> np.ndarray:
    return client.embed(EmbedJob(texts or ("a",), **options)).data


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except ServiceError as error:
        return type(error).__name__
    return "ok"


def together(count: int, call: Callable[[int], object]) -> Counter[str]:
    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(lambda i: outcome(lambda: call(i)), range(count)))


def queue(broker: RedisServer, lane: str = "online") -> int:
    return broker.redis.llen(f"{ADDRESS.base}:{lane}")


# ---- requests

def test_everyone_gets_their_own_vectors(broker: RedisServer, client: LaneClient) -> None:
    def check(i: int) -> None:
        texts = tuple(f"caller {i} text {j}" for j in range(i % 5 + 1))
        assert np.array_equal(embed(client, *texts, lane="bulk" if i % 3 == 0 else "interactive"), FakeClient().embed(EmbedJob(texts)).data)

    with working(broker) as worker:
        assert together(32, check) == {"ok": 32}
        assert together(32, check) == {"ok": 32}
        assert worker.counters["brokered_interactive"] + worker.counters["brokered_bulk"] == 64
    assert broker.remains() == []


def test_a_reranker_has_a_lane_of_its_own(broker: RedisServer, client: LaneClient) -> None:
    job = RerankJob("blue boat", ("a blue boat", "a red boat", "nothing"))
    with working(broker, embedding_models=(), reranker_models=("fake-reranker",)), working(broker):
        assert client.rerank(job).scores.tolist() == FakeClient(reranker=RERANKER).rerank(job).scores.tolist()
        assert embed(client).shape == (1, 8)
        assert {spec.kind for spec in client.models()} == {"embedding", "reranker"}


def test_errors_of_the_model_arrive_as_they_are(broker: RedisServer, client: LaneClient) -> None:
    with working(broker):
        with pytest.raises(InferenceFailed, match="this text fails"):
            embed(client, "raise")
        assert outcome(lambda: embed(client)) == "ok"


def test_a_failing_text_fails_alone(broker: RedisServer, client: LaneClient) -> None:
    with working(broker, forward=0.02):
        assert together(12, lambda i: embed(client, "raise" if i == 5 else f"good {i}")) == {"ok": 11, "InferenceFailed": 1}


def test_an_unforeseen_error_of_the_model_is_one_of_inference(broker: RedisServer, client: LaneClient) -> None:
    with working(broker) as worker:
        worker.client.embed = lambda job: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(InferenceFailed, match="ZeroDivisionError"):
            embed(client)


# ---- the bounded queue

def test_a_full_lane_refuses_at_once(broker: RedisServer) -> None:
    client = client_of(broker.url, queue_depth=8)
    times: list[float] = []

    def call(i: int) -> None:
        started = time.monotonic()
        try:
            embed(client, str(i))
        except Busy as error:
            times.append(time.monotonic() - started)
            assert error.message == "All slots are busy. Please try again later."
            raise

    with working(broker, forward=1.0, queue_depth=8):
        embed(client)
        counts = together(60, call)
    assert counts.keys() == {"ok", "Busy"} and 9 <= counts["ok"] <= 17, counts      # 8 wait, and up to 8 are in the worker's hands
    assert sorted(times)[len(times) // 2] < 0.1
    assert broker.remains() == []


def test_what_a_full_lane_refused_leaves_nothing(broker: RedisServer) -> None:
    door = Broker(broker.url)
    assert door.admit(ADDRESS, "interactive", JOB, 60, 1, wait=0)
    started = time.monotonic()
    assert door.admit(ADDRESS, "interactive", JOB, 60, 1) is None and time.monotonic() - started < lane.SLICE_SECONDS
    assert len(broker.redis.keys("j:*")) == 1 and broker.redis.keys("r:*") == []
    door.close()


@pytest.mark.parametrize("kind", ("interactive", "bulk"))
def test_a_job_is_sent_once_however_long_it_waits(broker: RedisServer, client: LaneClient, kind: Any) -> None:
    """Megabytes of texts, or a picture: not with every look whether it still waits, nor with every look for room."""
    client = client_of(broker.url, queue_depth=1)
    register(broker)
    size = 1 << 20
    before = broker.redis.info("stats")["total_net_input_bytes"]
    assert together(2, lambda i: embed(client, "a" * size, lane=kind, timeout=2.2)).total() == 2
    assert size < broker.redis.info("stats")["total_net_input_bytes"] - before < 3.5 * size
    assert broker.remains() == []
    client.close()


def test_bulk_work_waits_for_room(broker: RedisServer) -> None:
    client = client_of(broker.url, queue_depth=2)
    with working(broker, forward=0.01, queue_depth=2):
        assert together(12, lambda i: embed(client, str(i), lane="bulk")) == {"ok": 12}


def test_bulk_work_does_not_keep_interactive_work_from_being_taken(broker: RedisServer, client: LaneClient) -> None:
    with working(broker, forward=0.1), ThreadPoolExecutor(20) as pool:
        bulk = [pool.submit(embed, client, *(f"{i} {j}" for j in range(64)), lane="bulk") for i in range(12)]     # 5 s of work
        wait_until(lambda: queue(broker, "bulk") > 0, 5)
        started = time.monotonic()
        embed(client, "interactive")
        assert time.monotonic() - started < 1
        assert not all(job.done() for job in bulk)


def test_a_caller_whose_time_is_up_takes_its_request_back(broker: RedisServer, client: LaneClient) -> None:
    with working(broker, forward=0.5, queue_depth=1) as worker:
        with ThreadPoolExecutor(4) as pool:
            first = [pool.submit(embed, client, *(f"{i} {j}" for j in range(16))) for i in range(2)]
            wait_until(lambda: queue(broker) == 1, 5)
            with pytest.raises(TimedOut):
                client_of(broker.url, queue_depth=9).embed(EmbedJob(("late",), timeout=0.2))
            assert queue(broker) <= 1
            for job in first:
                job.result()
        assert worker.counters["dropped_interactive"] == 0
        assert worker.counters["brokered_interactive"] == 2


def test_an_interrupted_caller_takes_its_request_back(broker: RedisServer, client: LaneClient, monkeypatch: pytest.MonkeyPatch) -> None:
    register(broker)

    def interrupt(*_: Any) -> bytes:
        assert queue(broker) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(client._broker, "reply", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embed(client)
    assert broker.remains() == []


def test_requests_past_their_deadline_are_dropped_and_free_their_places(broker: RedisServer, client: LaneClient) -> None:
    """More of them than the worker has places: a place that leaks would leave it deaf."""
    door = Broker(broker.url)
    register(broker)
    for _ in range(3 * HELD["interactive"]):
        assert door.admit(ADDRESS, "interactive", JOB, 60, 99, wait=0)
    late = [b"%013d" % (int(time.time() * 1000) - 1) + ticket[13:] for ticket in broker.redis.lrange(f"{ADDRESS.base}:online", 0, -1)]
    broker.redis.delete(f"{ADDRESS.base}:online")
    broker.redis.rpush(f"{ADDRESS.base}:online", *late)
    with working(broker) as worker:
        assert outcome(lambda: embed(client)) == "ok"
        wait_until(lambda: worker.counters["dropped_interactive"] == len(late), 5)
        assert worker.client.engine.stats.sequences == 2          # type: ignore[attr-defined]  the worker's own word, and the caller's
    assert broker.remains() == []
    door.close()


def test_nonsense_in_the_list_frees_its_place_too(broker: RedisServer, client: LaneClient) -> None:
    later = b"%013d" % (int(time.time() * 1000) + 60_000)
    with working(broker):
        for i in range(2 * HELD["interactive"]):
            broker.redis.set(f"j:{i:032d}", b"\xc1 not msgpack")
            broker.redis.rpush(f"{ADDRESS.base}:online", later * 2 + b"%032d" % i)
        assert outcome(lambda: embed(client)) == "ok"
    broker.redis.delete(*[f"r:{i:032d}" for i in range(2 * HELD["interactive"])])
    assert broker.remains() == []


def test_what_a_dead_caller_left_in_a_full_list_makes_room(broker: RedisServer) -> None:
    door = Broker(broker.url)
    for _ in range(8):
        assert door.admit(ADDRESS, "interactive", JOB, 1.5, 8, wait=0)
    assert door.admit(ADDRESS, "interactive", JOB, 60, 8, wait=0) is None
    time.sleep(1.6)
    assert door.admit(ADDRESS, "interactive", JOB, 60, 8, wait=0)
    assert queue(broker) == 1
    door.close()


def test_a_list_without_traffic_expires_with_its_last_deadline(broker: RedisServer) -> None:
    door = Broker(broker.url)
    for seconds in (1.0, 2.0, 0.5):
        assert door.admit(ADDRESS, "interactive", JOB, seconds, 8, wait=0)
    assert 1000 < broker.redis.pttl(f"{ADDRESS.base}:online") <= 2000
    time.sleep(2.1)
    assert broker.remains() == []
    door.close()


def test_a_reply_that_nobody_fetches_expires(broker: RedisServer) -> None:
    door = Broker(broker.url)
    door.answer(Ticket(0, 0, "f" * 32), b"x")
    assert 29_000 < broker.redis.pttl("r:" + "f" * 32) <= 30_000
    door.close()


# ---- the registry

def register(broker: RedisServer, state: str = "ready", instance: str = "elsewhere:1", stalled: float = 0.0,
             holds: tuple[str, ...] = ()) -> None:
    """A heartbeat of a worker that is not there."""
    door = Broker(broker.url)
    door.beat(ADDRESS, lane.identity(SPEC), pack_spec(SPEC), Beat(instance, state, stalled, {}, holds))  # type: ignore[arg-type]
    door.close()


def test_no_worker_ever(broker: RedisServer, client: LaneClient) -> None:
    started = time.monotonic()
    with pytest.raises(NotLoaded, match=r"support embeddings.*MLXCEL_WORKER_MODEL=MODEL celery -A inference.app worker -P threads"):
        embed(client)
    with pytest.raises(NotLoaded, match=r"does not support reranking.*MLXCEL_RERANKER_MODEL"):
        client.rerank(RerankJob("q", ("d",)))
    assert time.monotonic() - started < 0.1
    assert client.models() == [] and client.describe("embedding") is None and client.health() == {"status": "unserved", "models": {}}


def test_loading(broker: RedisServer, client: LaneClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_LOAD_SECONDS", "1")
    with working(broker, load=False):
        with pytest.raises(Loading, match="fake-8 is still loading"):
            embed(client)
        assert client.health()["status"] == "loading" and client.models()[0].state == "loading"
        wait_until(lambda: client.health()["status"] == "ok", 5)
        assert outcome(lambda: embed(client)) == "ok"


def test_names(broker: RedisServer, client: LaneClient) -> None:
    with working(broker):
        assert client.describe("embedding", "tests/fake-8") == client.describe("embedding") == replace(SPEC, state="ready")
        assert client.describe("embedding", "other") is None and client.describe("reranker") is None
        assert embed(client, model="tests/fake-8").shape == (1, 8)
        with pytest.raises(InvalidRequest, match="model `other` is not the served embedding model `fake-8`"):
            embed(client, model="other")


def test_the_first_configured_model_is_the_default(broker: RedisServer) -> None:
    door = Broker(broker.url)
    for name in ("a", "b", "c"):
        spec = replace(SPEC, id=name, aliases=())
        door.beat(Address("embedding", name), lane.identity(spec), pack_spec(spec), Beat(f"i:{name}", "ready"))
    assert [spec.id for spec in client_of(broker.url, embedding_models=("org/b", "/models/a/")).models()] == ["b", "a", "c"]
    door.close()


@pytest.mark.parametrize(("state", "stalled"), [("stale", 0.0), ("ready", 121.0)])
def test_workers_that_stop_or_are_stuck_serve_nobody(broker: RedisServer, client: LaneClient, state: str, stalled: float) -> None:
    register(broker, state, stalled=stalled)
    with pytest.raises(Busy, match="No worker of the model fake-8 answers"):
        embed(client)
    assert client.health()["status"] == "stale"


def test_one_good_instance_is_enough(broker: RedisServer, client: LaneClient) -> None:
    register(broker, stalled=200.0)
    with working(broker) as worker:
        assert outcome(lambda: embed(client)) == "ok" and client.health()["status"] == "ok"
        instances = client.health()["models"]["fake-8"]["instances"]
        assert instances.keys() == {"elsewhere:1", worker.instance} and instances[worker.instance]["requests_interactive"] >= 1


def test_counters_stand_by_instance(broker: RedisServer, client: LaneClient) -> None:
    with working(broker) as first, working(broker) as second:
        together(10, lambda i: embed(client, str(i)))

        def counted(name: str) -> float:
            return sum(counters.get(name, 0) for counters in client.health()["models"]["fake-8"]["instances"].values())

        wait_until(lambda: counted("requests_interactive") == 12, 5)
        entry = client.health()["models"]["fake-8"]
        assert entry["instances"].keys() == {first.instance, second.instance} and counted("brokered_interactive") == 10
        assert (entry["instances"][first.instance]["restarts"], entry["instances"][second.instance]["restarts"]) == (0, 1)
        assert entry["queued_interactive"] == 0


def test_a_mode_rules_out_the_other_kind(broker: RedisServer) -> None:
    with pytest.raises(NotLoaded, match="MLXCEL_MODE=reranking"):
        client_of(broker.url, mode="reranking").describe("embedding")


def test_a_client_that_closes_finishes_what_runs_and_takes_back_what_waits(broker: RedisServer) -> None:
    client = client_of(broker.url)
    with working(broker, forward=1.0, queue_depth=2), ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(outcome, lambda i=i: embed(client, str(i))) for i in range(6)]
        wait_until(lambda: queue(broker) == 4, 5)
        client.close()
        assert Counter(call.result() for call in calls) == {"ok": 2, "Busy": 4}
        assert outcome(lambda: embed(client)) == "Busy"
    assert broker.remains() == []


def test_after_ten_minutes_without_a_worker_a_model_is_unknown(broker: RedisServer, client: LaneClient) -> None:
    register(broker)
    assert 590 < broker.redis.ttl(f"{ADDRESS.base}:seen") <= 600
    broker.redis.delete(f"{ADDRESS.base}:alive:elsewhere:1")
    assert outcome(lambda: embed(client)) == "Busy"
    broker.redis.delete(f"{ADDRESS.base}:seen")
    client._read_at = 0
    assert outcome(lambda: embed(client)) == "NotLoaded"


def test_other_weights_under_the_same_name_are_refused(broker: RedisServer) -> None:
    with working(broker):
        other = Worker(settings(broker, transport="tests.engines.OtherClient"), pytest.fail)
        with pytest.raises(ConfigError, match="another model is served as fake-8 already"):
            other.start()
        other.client.close()
    with working(broker, transport="tests.engines.OtherClient"):     # nobody left who could disagree
        pass


def test_a_model_that_cannot_be_loaded_is_told(broker: RedisServer) -> None:
    told: list[ServiceError] = []
    with working(broker, transport="tests.engines.BrokenClient", failed=told.append):
        wait_until(lambda: len(told) == 1, 5)
    assert "no such weights" in told[0].message


def test_a_stopping_worker_finishes_what_runs_and_refuses_what_waits(broker: RedisServer) -> None:
    client = client_of(broker.url)
    outcomes: list[str] = []
    with working(broker, forward=0.5, queue_depth=2) as worker:
        callers = [threading.Thread(target=lambda i=i: outcomes.append(outcome(lambda: embed(client, str(i))))) for i in range(6)]
        for caller in callers:
            caller.start()
        wait_until(lambda: queue(broker) == 4, 5)
        started = time.monotonic()
        worker.stop()
        for caller in callers:
            caller.join()
    assert sorted(outcomes) == ["Busy"] * 4 + ["ok"] * 2 and time.monotonic() - started < 4
    assert broker.remains() == []
    client._read_at = 0
    assert outcome(lambda: embed(client)) == "NotLoaded"
    assert broker.redis.keys("m:*") == []


def test_one_of_two_workers_leaves_its_waiting_work_to_the_other(broker: RedisServer, client: LaneClient) -> None:
    with working(broker, forward=0.2, queue_depth=1) as staying:
        with working(broker, forward=0.2, queue_depth=1) as leaving, ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(embed, client, str(i)) for i in range(8)]
            wait_until(lambda: bool(leaving._holds) and bool(staying._holds), 5)
            leaving.stop()
            for call in calls:
                call.result()
        assert outcome(lambda: embed(client)) == "ok"


# ---- callers notice

def test_an_answer_arrives_though_the_connection_broke(broker: RedisServer, client: LaneClient) -> None:
    with working(broker, forward=0.4):
        told: list[str] = []
        caller = threading.Thread(target=lambda: told.append(outcome(lambda: embed(client))))
        caller.start()
        time.sleep(0.15)
        for connection in broker.redis.client_list():
            if connection["cmd"] == "blpop":
                broker.redis.client_kill_filter(_id=connection["id"])
        caller.join(5)
        assert told == ["ok"]
    assert broker.remains() == []


def test_a_request_waits_only_so_long_for_a_redis_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.transports.lane.AWAY_SECONDS", 1.0)
    with redis_server(tmp_path) as broker, working(broker, forward=3.0):
        client = client_of(broker.url)
        told: list[str] = []
        caller = threading.Thread(target=lambda: told.append(outcome(lambda: embed(client))))
        caller.start()
        time.sleep(0.8)
        broker.stop()
        caller.join(4)
        assert told == ["Unreachable"]
        broker.start()
        client.close()


def test_a_redis_that_has_forgotten_the_scripts_is_told_them_again(broker: RedisServer, client: LaneClient) -> None:
    with working(broker):
        broker.redis.script_flush()
        assert outcome(lambda: embed(client)) == "ok"


def test_a_request_whose_holder_is_gone_is_lost_at_once(broker: RedisServer, client: LaneClient) -> None:
    register(broker)
    told: list[str] = []
    caller = threading.Thread(target=lambda: told.append(outcome(lambda: embed(client))))
    caller.start()
    wait_until(lambda: queue(broker) == 1, 5)
    ticket = Ticket.unpack(broker.redis.lpop(f"{ADDRESS.base}:online"))
    register(broker, instance="elsewhere:1", holds=(ticket.id,))
    register(broker, instance="elsewhere:2")
    time.sleep(0.7)
    assert told == []
    broker.redis.delete(f"{ADDRESS.base}:alive:elsewhere:1")
    caller.join(1.5)
    assert told == ["InferenceFailed"]


def test_a_request_that_nobody_owns_up_to_is_lost(broker: RedisServer, client: LaneClient) -> None:
    with working(broker) as worker:
        worker.broker.take = lambda *_: time.sleep(0.2) or []  # type: ignore[method-assign]
        time.sleep(1.1)
        told: list[str] = []
        caller = threading.Thread(target=lambda: told.append(outcome(lambda: embed(client))))
        caller.start()
        wait_until(lambda: queue(broker) == 1, 5)
        broker.redis.lpop(f"{ADDRESS.base}:online")
        assert wait_until(lambda: told == ["InferenceFailed"], 5) < 4


def test_requests_that_no_worker_is_left_for_are_taken_back(broker: RedisServer, client: LaneClient) -> None:
    register(broker)
    started = time.monotonic()
    with pytest.raises(Busy, match="went away before it began"):
        embed(client)
    assert time.monotonic() - started < 4 and broker.remains() == []


def test_a_redis_that_is_away_is_busy_not_broken() -> None:
    client = client_of("redis://:secret@127.0.0.1:1/0")
    for call in (client.models, lambda: embed(client), client.load):
        with pytest.raises(Busy, match=r"Redis at 127\.0\.0\.1:1/0 cannot be reached") as error:
            call()
        assert "secret" not in str(error.value)
    health = client.health()
    assert health["status"] == "failed" and "cannot be reached" in health["error"]


def test_callers_do_not_queue_behind_a_redis_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of("redis://127.0.0.1:1/0")

    def hang() -> list[Any]:
        time.sleep(0.4)
        raise Busy("no answer")

    monkeypatch.setattr(client._broker, "snapshot", hang)
    started = time.monotonic()
    assert together(20, lambda i: embed(client, str(i))) == {"Away": 20}
    assert time.monotonic() - started < 2


# ---- settings

def test_settings_choose_the_lane() -> None:
    url = "redis://:secret@somewhere/1"
    assert Settings.from_env({"MLXCEL_REDIS_URL": url}).transport == LANE
    assert Settings.from_env({"MLXCEL_REDIS_URL": url, "MLXCEL_TRANSPORT": LOCAL}).transport == LOCAL
    assert "secret" not in repr(Settings.from_env({"MLXCEL_REDIS_URL": url}))
    with pytest.raises(ConfigError, match="MLXCEL_REDIS_URL") as error:
        Settings.from_env({"MLXCEL_REDIS_URL": "http://:secret@somewhere"})
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="MLXCEL_REDIS_URL is not set"):
        LaneClient(Settings())


def test_a_worker_serves_one_model() -> None:
    both = Settings(embedding_models=("org/a", "b"), reranker_models=("org/r",), redis_url="redis://x", transport=LANE)
    for name, embeds, ranks in (("a", ("org/a",), ()), ("b", ("b",), ()), ("r", (), ("org/r",)), ("/dir/c", ("/dir/c",), ())):
        own = pinned(replace(both, worker_model=name))
        assert (own.embedding_models, own.reranker_models, own.transport) == (embeds, ranks, LOCAL)
    assert pinned(replace(both, embedding_models=(), worker_model=None)).reranker_models == ("org/r",)
    with pytest.raises(ConfigError, match=r"MLXCEL_WORKER_MODEL is not set.*org/a, b, org/r"):
        pinned(both)
    with pytest.raises(ConfigError, match="MLXCEL_REDIS_URL"):
        pinned(replace(both, redis_url=None))


def test_hints() -> None:
    assert "manage.py serve --model m" in how_to_serve("m", settings=Settings())
    assert "manage.py serve --reranker-model m" in how_to_serve("m", "reranker", Settings())
    assert "MLXCEL_WORKER_MODEL=m celery -A inference.app" in how_to_serve("m", settings=Settings(transport=LANE))
