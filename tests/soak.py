"""Mixed load on a whole installation of real processes, and a look at their memory: `make soak`.

Web, a model worker with the real default model, a bulk worker, Redis, and SQLite or (--postgres) a throwaway PostgreSQL. Callers send
single texts, batches of 64 and searches; a bulk job embeds a changed corpus into the searched collection again and again. Ends with a
verdict, and status 1 if one of these is not so:

memory    in the last two thirds of the time no process grows, by the median slope between its samples, by more than GROWTH of its RSS and
          SPARE MiB together. PostgreSQL's shared memory does not count: a page of it is counted to every process that has touched it
answers   are 200, or 503 when the machine is busy; every job completes; no process ends
leavings  half a minute after the last request Redis holds no list and no reply, and no chunk is leased or waiting
"""
from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from tests import postgres
from tests.bench import workloads
from tests.bench.__main__ import checkpoint
from tests.installation import Installation
from tests.servers import ROOT

GROWTH, SPARE = 0.05, 4.0                  # of a process' RSS, and MiB
SAMPLE_SECONDS, SAY_SECONDS = 5.0, 30.0
DOCUMENTS, BATCH, SINGLES = 300, 64, 4     # of a job; texts of a batch; callers of single texts
LEFT_SECONDS = 31.0
MIB = 1 << 20


class Load:
    """Callers on threads, and what they were answered."""

    def __init__(self, running: Installation, url: str) -> None:
        self.running, self.url = running, url
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.jobs = 0
        self._stop = threading.Event()
        self._texts = workloads.mixed(2_000)
        calls: list[Callable[[httpx.Client, random.Random], None]] = [*[self._single] * SINGLES, self._batch, self._search]
        self._threads = [threading.Thread(target=self._call, args=(call, number)) for number, call in enumerate(calls)]
        self._threads.append(threading.Thread(target=self._bulk))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def job(self) -> None:
        """A job over the corpus, every document of which has changed since the last one."""
        self.jobs += 1
        command = self.running.embed("soak", (f"{self.jobs}. {text}" for text in self._texts[:DOCUMENTS]))
        if status := command.wait():
            self.wrong.append(f"job {self.jobs} ended with status {status}")

    def _bulk(self) -> None:
        while not self._stop.is_set():
            self.job()

    def _call(self, call: Callable[[httpx.Client, random.Random], None], seed: int) -> None:
        chance = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self._stop.wait(chance.uniform(0, 0.1)):
                try:
                    call(client, chance)
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))

    def _single(self, client: httpx.Client, chance: random.Random) -> None:
        self._post(client, "single", "/v1/embeddings", {"input": self._text(chance)})

    def _batch(self, client: httpx.Client, chance: random.Random) -> None:
        self._post(client, "batch", "/v1/embeddings", {"input": [self._text(chance) for _ in range(BATCH)], "encoding_format": "base64"})

    def _search(self, client: httpx.Client, chance: random.Random) -> None:
        self._post(client, "search", "/collections/soak/search", {"query": self._text(chance)[:60], "limit": 5, "include_text": True})

    def _text(self, chance: random.Random) -> str:
        return f"{chance.randrange(10**9)} {chance.choice(self._texts)}"

    def _post(self, client: httpx.Client, what: str, path: str, body: dict[str, Any]) -> None:
        response = client.post(path, json=body)
        self.answers[f"{what} {response.status_code}"] += 1
        if response.status_code not in (200, 503):
            self.wrong.append(f"{what}: {response.status_code} {response.text[:300]}")


class Memory:
    """MiB of every role, at the times in `at` (seconds)."""

    def __init__(self, running: Installation) -> None:
        self.running, self.at = running, list[float]()
        self.samples: dict[str, list[float]] = {role: [] for role in running.processes}

    def sample(self, seconds: float) -> None:
        self.at.append(seconds)
        for role, found in self.samples.items():
            found.append(self.running.rss(role) / MIB)

    def growth(self, role: str) -> tuple[float, float, float]:
        """(MiB it grew in the last two thirds, MiB it may, MiB an hour)"""
        late = np.array(self.at) >= self.at[-1] / 3
        at, found = np.array(self.at)[late], np.array(self.samples[role])[late]
        first, second = np.triu_indices(len(at), 1)
        slope = float(np.median((found[second] - found[first]) / (at[second] - at[first])))
        return slope * float(at[-1] - at[0]), GROWTH * float(np.median(found)) + SPARE, slope * 3600

    def line(self) -> str:
        return ", ".join(f"{role} {found[-1]:.0f}" for role, found in self.samples.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--postgres", action="store_true", help="a throwaway PostgreSQL instead of SQLite")
    options = parser.parse_args()
    before = os.getloadavg()
    with installation(options.postgres) as running:
        running.model_worker()
        web = running.web()
        running.bulk_worker()
        load = Load(running, web.url)
        load.job()
        memory = Memory(running)
        _run(load, memory, options.seconds)
        left = _left(running, web.url)
        wrong = load.wrong + [f"{role} ended" for role in running.ended()]
        if wrong:
            print(running.logs(), file=sys.stderr)
    report = {"seconds": options.seconds, "database": "PostgreSQL" if options.postgres else "SQLite", "answers": dict(load.answers),
              "jobs": load.jobs, "wrong": wrong, "left": left, "load_before": before, "load_after": os.getloadavg(),
              "at": memory.at, "rss_mib": memory.samples, "growth": {role: memory.growth(role) for role in memory.samples}}
    target = ROOT / "bench-results" / "soak.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n")
    return show(report, target)


@contextmanager
def installation(on_postgres: bool) -> Iterator[Installation]:
    with tempfile.TemporaryDirectory(prefix="mlxcel-soak-") as name:
        if not on_postgres:
            with Installation(Path(name), str(checkpoint())) as running:
                yield running
            return
        with postgres.running() as server, Installation(Path(name), str(checkpoint()), server.database("soak")) as running:
            assert server.process is not None
            running.known("postgresql", server.process.pid)
            yield running


def _run(load: Load, memory: Memory, seconds: float) -> None:
    began, said = time.monotonic(), float("-inf")
    load.start()
    try:
        while (now := time.monotonic() - began) < seconds and not load.running.ended():
            memory.sample(now)
            if now - said >= SAY_SECONDS:
                said = now
                print(f"{now:6.0f} s  {sum(load.answers.values())} answers, {load.jobs} jobs, {len(load.wrong)} wrong; "
                      f"MiB: {memory.line()}; load {os.getloadavg()[0]:.1f}", flush=True)
            time.sleep(SAMPLE_SECONDS)
    finally:
        load.stop()


def _left(running: Installation, url: str) -> list[str]:
    """What is still there half a minute after the last request."""
    def found() -> list[str]:
        jobs = httpx.get(f"{url}/jobs").json()["data"]
        open_ones = [f"job {job['id']}: {job['state']}, {job['error']}" for job in jobs if job["state"] != "completed"]
        chunks = httpx.get(f"{url}/jobs/{jobs[0]['id']}").json()["chunks"]
        return running.redis.remains() + open_ones + [f"{n} chunks {state}" for state, n in chunks.items() if state != "done" and n]

    until = time.monotonic() + LEFT_SECONDS
    while (left := found()) and time.monotonic() < until:
        time.sleep(0.5)
    return left


def show(report: dict[str, Any], target: Path) -> int:
    table = Table("process", "RSS at first, MiB", "most", "at last", "grew in the last two thirds", "may grow", "MiB an hour",
                  title=f"{report['seconds']:.0f} s of mixed load, {report['database']}")
    flat = True
    for role, (grew, most, hourly) in report["growth"].items():
        found = report["rss_mib"][role]
        flat = flat and grew <= most
        table.add_row(role, *(f"{value:.1f}" for value in (found[0], max(found), found[-1], grew, most, hourly)))
    Console(width=130).print(table)
    print(", ".join(f"{count} x {what}" for what, count in sorted(report["answers"].items())) + f", {report['jobs']} jobs; "
          f"load average {report['load_before'][0]:.1f} before, {report['load_after'][0]:.1f} after; {target.relative_to(ROOT)}")
    verdict = {"memory is flat": flat, "no errors but 503": not report["wrong"], "nothing is left behind": not report["left"]}
    for what, so in verdict.items():
        print(f"  {'yes' if so else 'NO '}  {what}")
    for what in (*report["wrong"][:20], *report["left"]):
        print(f"       {what}")
    return 0 if all(verdict.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
