"""The parts of `make bench-serving` that run the real default model in an installation of real processes."""
from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from inference.engine import SMALL_PACK
from tests.bench import workloads
from tests.bench.__main__ import Worker, checkpoint
from tests.bench.callers import Body, ask, embedding, p95, paced
from tests.installation import Installation
from tests.lanes import wait_until

SINGLE, BATCH = (1, 8, 32), 64             # callers of one-text requests; texts of the larger ones
ONLINE_EVERY = 0.2                         # seconds between two requests under a bulk job
LONGEST = 256                              # tokens of the longest of these texts, and the model's limit
SETTLE = 3.0                               # seconds after a change, before anything is counted


@contextmanager
def installation() -> Iterator[Installation]:
    with tempfile.TemporaryDirectory(prefix="mlxcel-bench-") as name, Installation(Path(name), str(checkpoint())) as found:
        yield found


def cpu_per_text(rounds: int, count: int, reference: str) -> dict[str, Any]:
    """CPU of web and worker for `count` mixed texts, beside sentence-transformers' `encode()` of the same ones: ms a text, a number a
    round. What runs in a round is measured in turns, so that what else the machine does meets all alike."""
    texts = workloads.mixed(count)
    requests: dict[str, tuple[list[Body], int]] = {f"callers_{n}": ([embedding(text) for text in texts], n) for n in SINGLE}
    requests["batch_64"] = [embedding(*texts[i:i + BATCH]) for i in range(0, count, BATCH)], 1
    found: dict[str, list[float]] = {name: [] for name in ("reference", *requests)}
    web: dict[str, list[float]] = {name: [] for name in requests}
    with installation() as running:
        folder = running.folder / "reference"
        folder.mkdir()
        (folder / "model").symlink_to(running.model)
        peer = Worker("st:f32", 1, folder, reference)
        try:
            running.model_worker(MLXCEL_THREADS="1")
            url = running.web().url
            peer.ask("encode", texts=texts)
            ask(url, [embedding(text) for text in texts[:64]], 8)
            for turn in range(rounds):
                for name in list(found)[:: 1 if turn % 2 == 0 else -1]:
                    if name == "reference":
                        found[name].append(peer.ask("encode", texts=texts)["cpu"] * 1000 / count)
                        continue
                    before, before_web = running.cpu("web", "model worker"), running.cpu("web")
                    ask(url, *requests[name])
                    found[name].append((running.cpu("web", "model worker") - before) * 1000 / count)
                    web[name].append((running.cpu("web") - before_web) * 1000 / count)
        finally:
            peer.close()
    ratios = {name: median(ours / theirs for ours, theirs in zip(found[name], found["reference"], strict=True)) for name in requests}
    return {"cpu_ms_per_text": found, "web_cpu_ms_per_text": web, "relative": ratios, "reference": peer.start["about"], "texts": count}


def online_under_bulk(seconds: float, turns: int) -> dict[str, Any]:
    """A query every 0.2 s, alone and while a bulk job runs; the job, alone and under these queries.

    Packs of bulk work are small while queries are recent, so a query waits for SMALL_PACK tokens, or for one text that has more."""
    queries = (embedding(f"how does boat number {i} sail against the wind") for i in itertools.count())
    alone: list[float] = []
    under: list[float] = []
    rates: dict[str, list[float]] = {"alone": [], "under": []}
    packs: list[float] = []                # thread seconds a token
    texts = _corpus(30_000)
    with installation() as running:
        running.model_worker()
        url = running.web().url
        for _ in range(turns):
            alone += paced(url, queries, ONLINE_EVERY, seconds)
        running.bulk_worker()
        command = running.embed("bench", texts)
        wait_until(lambda: running.counters()["taken_bulk"] > 512, 120, running.logs)
        for _ in range(turns):
            time.sleep(SETTLE)
            rates["alone"].append(_rate(running, "taken_bulk", lambda: time.sleep(seconds)))
            paced(url, queries, ONLINE_EVERY, SETTLE)
            before = running.counters()
            rates["under"].append(_rate(running, "taken_bulk", lambda: under.extend(paced(url, queries, ONLINE_EVERY, seconds))))
            after = running.counters()
            spent = after["forward_seconds"] - before["forward_seconds"]
            packs.append(1000 * spent / (after["tokens"] - before["tokens"]))
        assert command.poll() is None, f"the job ended too soon: {running.logs()}"
    return {"requests": {"alone": len(alone), "under": len(under)}, "bulk_texts_per_s": rates, "small_pack_ms": SMALL_PACK * median(packs),
            "longest_pack_ms": LONGEST * median(packs),
            "online_p50_ms": {"alone": median(alone), "under": median(under)},
            "online_p95_ms": {"alone": p95(alone), "under": p95(under)}, "added_p95_ms": p95(under) - p95(alone),
            "bulk_kept": median(b / a for a, b in zip(rates["alone"], rates["under"], strict=True))}


def two_workers(seconds: float, turns: int) -> dict[str, Any]:
    """Tokens a second that a bulk job gets out of one model worker of one thread, and of two."""
    rates: dict[str, list[float]] = {"one": [], "two": []}
    with installation() as running:
        running.model_worker(MLXCEL_THREADS="1")
        running.bulk_worker()
        command = running.embed("bench", _corpus(30_000))
        wait_until(lambda: running.counters()["taken_bulk"] > 512, 120, running.logs)
        for turn in range(turns):
            time.sleep(SETTLE)
            rates["one"].append(_rate(running, "tokens", lambda: time.sleep(seconds)))
            second = running.model_worker(f"second model worker {turn}", MLXCEL_THREADS="1")
            time.sleep(SETTLE)
            rates["two"].append(_rate(running, "tokens", lambda: time.sleep(seconds)))
            second.stop()
        assert command.poll() is None, f"the job ended too soon: {running.logs()}"
    return {"tokens_per_s": rates, "relative": median(b / a for a, b in zip(rates["one"], rates["two"], strict=True))}


def _corpus(count: int) -> list[str]:
    return [f"{i}: {text}" for i, text in enumerate(workloads.mixed(count))]


def _rate(running: Installation, name: str, meanwhile: Callable[[], object]) -> float:
    """By how much a counter grows a second while something else is done. Heartbeats tell it once a second: they are waited for."""
    before, began = _told(running, name)
    meanwhile()
    after, ended = _told(running, name)
    return (after - before) / (ended - began)


def _told(running: Installation, name: str) -> tuple[float, float]:
    last = running.counters()[name]
    while (now := running.counters()[name]) == last:
        time.sleep(0.02)
    return now, time.monotonic()

