"""Real processes killed, stopped and starved: callers get an answer or an error within their time, and nothing is left behind.

Each test begins with a Redis of its own and ends by looking at what is left in it.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from inference.errors import ServiceError
from inference.transports.lane import LaneClient
from inference.watchdog import HUNG, SILENCE_SECONDS
from inference.wire import EmbedJob
from tests.fakes import FakeClient
from tests.lanes import ENGINE, RedisServer, WorkerProcess, client_of, redis_server, wait_until
from tests.servers import ROOT, Server, serving

pytestmark = pytest.mark.faults

NOTICED = 4.0              # seconds until a worker that died is noticed
AGAIN = 3.0                # seconds beyond its loading until a restarted one serves
LEFT = 31.0                # seconds until nothing is left of requests


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server
        if server.process.poll() is None:
            wait_until(lambda: not server.remains(), LEFT, server.remains)


@pytest.fixture
def start(redis: RedisServer, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts a worker; the first is waited for until it serves."""
    workers: list[WorkerProcess] = []

    def start(**settings: str) -> WorkerProcess:
        workers.append(WorkerProcess(redis.url, tmp_path / f"worker-{len(workers)}.log", **settings))
        if len(workers) == 1:
            workers[0].wait_ready(client_of(redis.url))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


@pytest.fixture
def client(redis: RedisServer) -> LaneClient:
    return client_of(redis.url)


@dataclass
class Answer:
    status: int
    seconds: float
    message: str = ""


def call(client: LaneClient, *texts: str, **options: Any) -> Answer:
    """One caller's experience. A vector that is not the text's own ends the test."""
    started = time.monotonic()
    try:
        result = client.embed(EmbedJob(texts, **options))
    except ServiceError as error:
        return Answer(error.status, time.monotonic() - started, str(error))
    assert np.array_equal(result.data, FakeClient().embed(EmbedJob(texts)).data)
    return Answer(200, time.monotonic() - started)


class Callers:
    """Calls that run at the same time."""

    def __init__(self, client: LaneClient) -> None:
        self.client, self.pool = client, ThreadPoolExecutor(100)
        self.calls: list[Future[Answer]] = []

    def add(self, count: int, *texts: str, **options: Any) -> None:
        for i in range(count):
            self.calls.append(self.pool.submit(call, self.client, *(texts or (f"text {len(self.calls)} {i}",)), **options))

    def answers(self, within: float) -> list[Answer]:
        until = time.monotonic() + within
        found = [future.result(max(until - time.monotonic(), 0)) for future in self.calls]
        self.pool.shutdown()
        return found

    def statuses(self, within: float) -> Counter[int]:
        return Counter(answer.status for answer in self.answers(within))


def queued(redis: RedisServer) -> int:
    return redis.redis.llen("m:embedding:fake-8:online")


def serves_again(client: LaneClient, seconds: float) -> float:
    return wait_until(lambda: call(client, "again").status == 200, seconds)


def test_a_worker_killed_while_it_works(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    worker = start(TEST_FORWARD_SECONDS="5")
    callers = Callers(client)
    callers.add(30)
    wait_until(lambda: queued(redis) == 14, 5)
    time.sleep(1.2)
    died = time.monotonic()
    worker.kill()
    answers = callers.answers(NOTICED)
    assert time.monotonic() - died < NOTICED
    assert Counter(answer.status for answer in answers) == {500: 16, 503: 14}, answers     # 16 were in its hands, the others never ran
    after = call(client, "next")
    assert after.status == 503 and after.seconds < 0.1
    again = start()
    serves_again(client, 30)
    assert time.monotonic() - again.started < worker.took + AGAIN


def test_a_worker_killed_with_another_beside_it(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    """The one that lives takes what waits; only what the dead one held is lost."""
    worker, other = start(TEST_FORWARD_SECONDS="0.5"), start(TEST_FORWARD_SECONDS="0.5")
    wait_until(lambda: len(client.health()["models"]["fake-8"]["instances"]) == 2, 30)
    wait_until(lambda: all(entry["state"] == "ready" for entry in client.health()["models"]["fake-8"]["instances"].values()), 30)
    callers = Callers(client)
    callers.add(60)
    time.sleep(0.2)
    worker.kill()
    statuses = callers.statuses(10)
    assert statuses.keys() <= {200, 500} and 1 <= statuses[500] <= 16, statuses
    assert call(client, "next").status == 200
    assert other.stop() == 0


def test_a_text_that_kills_the_worker(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    """It takes down what was in hand with it, is not tried again, and the next worker serves."""
    worker = start(TEST_DEADLY="poison", TEST_FORWARD_SECONDS="0.3")
    callers = Callers(client)
    callers.add(6)
    callers.add(1, "a poison text")
    callers.add(6)
    answers = callers.answers(NOTICED + 1)
    assert {answer.status for answer in answers} <= {200, 500, 503} and answers[6].status == 500, answers
    assert worker.process.wait(1) == 139
    again = start(TEST_DEADLY="poison")
    serves_again(client, 30)
    assert time.monotonic() - again.started < worker.took + AGAIN
    time.sleep(1)
    assert again.process.poll() is None and call(client, "still there").status == 200


def test_a_text_that_hangs(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    """The worker ends itself: whoever waits is told at once, the log says what hung and where, and the next worker serves."""
    worker = start(TEST_HANGING="tarpit", MLXCEL_STALL_LIMIT_SECS="3", TEST_FORWARD_SECONDS="0.3")
    callers = Callers(client)
    callers.add(1, "a tarpit text")
    time.sleep(0.5)
    callers.add(20)
    wait_until(lambda: queued(redis) == 5, 5)
    began = time.monotonic()
    assert worker.process.wait(12) == HUNG
    ended = time.monotonic()
    answers = callers.answers(2)
    assert ended - began < 3 + 1 + 1 + 2, "limit, a look, a farewell"
    assert answers[0].status == 500 and "forward pass of fake-8 over 1 sequences with" in answers[0].message, answers[0]
    assert {answer.status for answer in answers[1:]} == {503} and max(answer.seconds for answer in answers[1:]) < 8, answers
    said = worker.log.read_text()
    assert "CRITICAL" in said and "has not ended after" in said and "MLXCEL_STALL_LIMIT_SECS" in said
    assert "tests/engines.py" in said and "in _forward" in said, "threads are shown"
    refused = call(client, "next")
    assert refused.status == 503 and refused.seconds < 0.1
    again = start(TEST_HANGING="tarpit", MLXCEL_STALL_LIMIT_SECS="3")
    serves_again(client, 30)
    assert time.monotonic() - again.started < worker.took + AGAIN
    time.sleep(4)
    assert again.process.poll() is None and call(client, "still there").status == 200, "an idle worker does not hang"


def test_a_text_that_hangs_and_holds_the_interpreter(
        redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    """No thread can say farewell; the heartbeat stops, and the process ends all the same."""
    worker = start(TEST_DEAF="tarpit", MLXCEL_STALL_LIMIT_SECS="1")
    callers = Callers(client)
    callers.add(1, "a tarpit text")
    assert [answer.status for answer in callers.answers(NOTICED + 1)] == [500]
    assert worker.process.wait(1 + SILENCE_SECONDS + 3) == 1
    assert "Timeout" in worker.log.read_text() and "in _forward" in worker.log.read_text()


def test_long_batches_are_no_hang(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    """A job that takes three times the limit, in passes that each take less."""
    worker = start(TEST_FORWARD_SECONDS="1.5", MLXCEL_STALL_LIMIT_SECS="3")
    answer = call(client, *(f"text {i}" for i in range(16 * 6)))
    assert answer.status == 200 and answer.seconds > 8.5
    assert worker.process.poll() is None


def test_a_text_that_hangs_in_the_web_process(redis: RedisServer, tmp_path: Path) -> None:
    """One process for all: it turns unready, answers those who wait, and ends with a status that its supervisor sees."""
    with serving(tmp_path / "var", MLXCEL_TRANSPORT=ENGINE, TEST_HANGING="tarpit", MLXCEL_STALL_LIMIT_SECS="4",
                 MLXCEL_EMBEDDING_REQUEST_TIMEOUT_SECS="2") as server:
        def post(text: str) -> int:
            return httpx.post(f"{server.url}/v1/embeddings", json={"input": text}, timeout=30).status_code

        with ThreadPoolExecutor(2) as pool:
            hanging = pool.submit(post, "a tarpit text")
            wait_until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503, 10)
            assert hanging.result() == 504 and httpx.get(f"{server.url}/health").status_code == 200
            time.sleep(1)
            assert pool.submit(post, "another").result() == 503
        assert server.process.wait(15) == HUNG
        said = server.log.read_text()
    assert "has not ended after" in said and "in _forward" in said and f"the web process ended with status {HUNG}" in said
    assert "Unexpected exit" not in said and "Traceback" not in said
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health")


def test_the_web_processs_parent_killed(redis: RedisServer, tmp_path: Path) -> None:
    """Its port is free again two seconds later."""
    with web(tmp_path, redis) as server:
        _, *children = family(server.process.pid)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(running(pid) for pid in children), 2, server.log.read_text)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_a_frozen_worker(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    worker = start(TEST_FORWARD_SECONDS="0.2")
    assert call(client, "before").status == 200
    worker.signal(signal.SIGSTOP)
    callers = Callers(client)
    callers.add(20)
    answers = callers.answers(NOTICED + 1)
    assert {answer.status for answer in answers} <= {500, 503} and max(answer.seconds for answer in answers) < NOTICED + 0.5
    refused = call(client, "frozen")
    assert refused.status == 503 and refused.seconds < 0.1
    worker.signal(signal.SIGCONT)
    assert serves_again(client, 3) < 2.5


def test_redis_restarted(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    """What the worker holds is answered all the same; what waited in Redis is told to come again."""
    worker = start(TEST_FORWARD_SECONDS="1.5", MLXCEL_EMBEDDING_QUEUE_DEPTH="4")
    callers = Callers(client)
    callers.add(10)
    wait_until(lambda: queued(redis) == 6, 5)
    redis.restart()
    statuses = callers.statuses(10)
    assert statuses == {200: 4, 503: 6}, statuses
    assert serves_again(client, 10) < 5
    redis.restart()
    assert serves_again(client, 10) < 5
    assert worker.process.poll() is None
    assert worker.stop() == 0


def test_redis_away_and_back(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    worker = start()
    redis.stop()
    for _ in range(3):
        refused = call(client, "a")
        assert refused.status == 503 and "cannot be reached" in refused.message and refused.seconds < 0.1
    time.sleep(8)                    # longer than Celery's and the lane's first attempts
    redis.start()
    assert serves_again(client, 10) < 5
    assert worker.process.poll() is None


def test_redis_out_of_memory(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    worker = start(TEST_FORWARD_SECONDS="0.3")
    callers = Callers(client)
    callers.add(10)
    time.sleep(0.1)
    redis.redis.config_set("maxmemory-policy", "noeviction")
    redis.redis.config_set("maxmemory", 1)
    try:
        refused = call(client, "no room")
        assert refused.status == 503 and refused.seconds < 0.1 and "maxmemory" in refused.message
        assert callers.statuses(5 + NOTICED).keys() <= {200, 500, 503}
        assert call(client, "no room").status == 503
    finally:
        redis.redis.config_set("maxmemory", 0)
    assert serves_again(client, 10) < 3
    assert worker.process.poll() is None


def test_a_caller_killed_while_its_requests_wait(
        redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess]) -> None:
    """What a dead process left in the list is in nobody's way for longer than its deadline."""
    start(TEST_FORWARD_SECONDS="1", MLXCEL_EMBEDDING_QUEUE_DEPTH="1")
    process = subprocess.Popen([sys.executable, "-c", f"""
import threading
from inference.transports.lane import LaneClient
from inference.config import Settings
from inference.wire import EmbedJob
client = LaneClient(Settings(redis_url={redis.url!r}, queue_depth=8))
for i in range(9):
    threading.Thread(target=client.embed, args=(EmbedJob((str(i),), timeout=3),)).start()
"""], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_until(lambda: queued(redis) == 8, 20)
    process.kill()
    process.wait()
    assert call(client_of(redis.url, queue_depth=8), "full").status == 503
    wait_until(lambda: call(client_of(redis.url, queue_depth=8), "room").status == 200, 6)
    wait_until(lambda: queued(redis) == 0, 3)


@pytest.mark.parametrize("skew", [-60, 60])
def test_a_worker_whose_clock_is_wrong(
        redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess], skew: int) -> None:
    start(TEST_CLOCK_SKEW=str(skew), TEST_FORWARD_SECONDS="0.05")
    assert call(client, "a", timeout=2).status == 200
    late = call(client, *(str(i) for i in range(160)), timeout=0.3)
    assert late.status == 504 and late.seconds < 0.5


@pytest.mark.parametrize("skew", [-60, 60])
def test_a_caller_whose_clock_is_wrong(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess],
                                       monkeypatch: pytest.MonkeyPatch, skew: int) -> None:
    start(TEST_FORWARD_SECONDS="0.05")
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + skew)
    assert call(client, "a", timeout=2).status == 200
    late = call(client, *(str(i) for i in range(160)), timeout=0.3)
    assert late.status == 504 and late.seconds < 0.5


def test_sixty_callers_on_depth_eight(redis: RedisServer, start: Callable[..., WorkerProcess]) -> None:
    client = client_of(redis.url, queue_depth=8)
    start(TEST_FORWARD_SECONDS="0.5", MLXCEL_EMBEDDING_QUEUE_DEPTH="8")
    callers = Callers(client)
    callers.add(60, *(f"text {i}" for i in range(16)))
    answers = callers.answers(30)
    assert Counter(answer.status for answer in answers).keys() == {200, 503}
    busy = sorted(answer.seconds for answer in answers if answer.status == 503)
    assert 43 <= len(busy) <= 51 and busy[len(busy) // 2] < 0.1, (len(busy), busy)


def test_callers_that_hang_up(redis: RedisServer, start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    """Over HTTP, through the web: the connections go, the requests are finished or expire, others are served."""
    start(TEST_FORWARD_SECONDS="0.2")
    with web(tmp_path, redis) as server:
        def hang_up(i: int) -> None:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/embeddings", json={"input": [f"{i} {j}" for j in range(32)]}, timeout=0.1)

        threads = [threading.Thread(target=hang_up, args=(i,)) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=30).status_code == 200
        wait_until(lambda: queued(redis) == 0, 20)


def test_the_web_killed_while_its_requests_wait(redis: RedisServer, start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    start(TEST_FORWARD_SECONDS="0.3", MLXCEL_EMBEDDING_QUEUE_DEPTH="1")
    with web(tmp_path, redis, MLXCEL_EMBEDDING_REQUEST_TIMEOUT_SECS="5") as server:
        def post(i: int) -> None:
            with pytest.raises(httpx.TransportError):
                httpx.post(f"{server.url}/v1/embeddings", json={"input": [f"{i} {j}" for j in range(64)]}, timeout=20)

        threads = [threading.Thread(target=post, args=(i,)) for i in range(10)]
        for thread in threads:
            thread.start()
        wait_until(lambda: queued(redis) >= 8, 10)
        for pid in family(server.process.pid):
            os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
    with web(tmp_path / "again", redis) as server:
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=30).status_code == 200


def test_the_web_without_a_worker(redis: RedisServer, client: LaneClient, start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    """501 before there was one, 503 while it loads and when it is gone, 200 in between; readiness says the same."""
    with web(tmp_path, redis) as server:
        def status() -> int:
            return httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code

        def ready() -> int:
            return httpx.get(f"{server.url}/health/ready").status_code

        assert (status(), ready()) == (501, 503)
        worker = start(TEST_LOAD_SECONDS="2")
        wait_until(lambda: status() == 200 and ready() == 200, 10)
        worker.kill()
        assert wait_until(lambda: status() == 503 and ready() == 503, 5) < NOTICED
        assert httpx.get(f"{server.url}/health").status_code == 200
        again = start()
        wait_until(lambda: status() == 200, 20)
        assert again.stop() == 0
        wait_until(lambda: status() == 501, 2)


def running(pid: int) -> bool:
    """Not so for a process that has ended and whose parent has yet to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def family(pid: int) -> list[int]:
    """The process and its children."""
    if not Path("/proc").is_dir():
        pytest.skip("a process's children are found in /proc, which this system does not have")
    parents = {int(stat.parent.name): int(stat.read_text().rpartition(")")[2].split()[1]) for stat in Path("/proc").glob("[0-9]*/stat")}
    return [pid, *(child for child, parent in parents.items() if parent == pid)]


def web(folder: Path, redis: RedisServer, **settings: str) -> AbstractContextManager[Server]:
    folder.mkdir(exist_ok=True)
    return serving(folder / "var", MLXCEL_REDIS_URL=redis.url, **settings)
