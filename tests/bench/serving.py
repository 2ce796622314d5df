"""Web, workers and bulk jobs on this machine: `make bench-serving`. A table, bench-results/serving.json and a picture.

added latency    p50 of a one-text request from one caller, over the lane and in this process, with the real default model. The two take
                 turns, so that a busy machine slows both
the lane itself  the same with a model that takes no time: what the way over Redis takes when nothing competes with the model for the CPU
throughput       requests a second through web, lane and a model that takes 3 ms a pack of 16, with 32 callers over HTTP
CPU a text       of web and worker with the real model and one thread, in the share of what sentence-transformers' `encode()` takes for
                 the same texts in batches of 32 on one thread
under bulk work  how much later a query is answered while a bulk job runs, and how much slower the job is under queries
two workers      what a bulk job gets out of two model workers of one thread, and of one
load             the machine's load average then: figures of a busy machine are worth less
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inference.client import InferenceClient
from inference.config import Settings
from inference.transports.local import LocalClient
from inference.wire import EmbedJob
from tests.bench import serving_model
from tests.bench.__main__ import checkpoint, processor
from tests.bench.callers import ask, embedding, p95
from tests.lanes import WorkerProcess, client_of, redis_server
from tests.servers import ROOT, serving

PARTS = ("latency", "throughput", "cpu", "bulk", "workers")
GOALS = {"added_ms": 3.0, "requests_per_s": 600.0, "callers_1": 1.2, "callers_8": 1.0, "callers_32": 0.7, "batch_64": 0.6,
         "bulk_kept": 0.7, "two_workers": 1.6}


def milliseconds(client: InferenceClient, text: str) -> float:
    started = time.perf_counter()
    client.embed(EmbedJob((text,)))
    return (time.perf_counter() - started) * 1000


def added_latency(rounds: int) -> dict[str, Any]:
    model = str(checkpoint())
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as redis:
        worker = WorkerProcess(redis.url, Path(name, "worker.log"), model=model, MLXCEL_TRANSPORT="", MLXCEL_BACKEND="host",
                               MLXCEL_THREADS="1")
        local, lane = LocalClient(Settings(embedding_models=(model,), backend="host", threads=1)), client_of(redis.url)
        try:
            local.load()
            worker.wait_ready(lane)
            times: dict[str, list[float]] = {"local": [], "lane": []}
            for i in range(rounds + 20):
                for way, client in (("local", local), ("lane", lane)):
                    times[way].append(milliseconds(client, f"How does boat number {i} sail against the wind?"))
            worker.stop()
            worker = WorkerProcess(redis.url, Path(name, "worker.log"), TEST_FORWARD_SECONDS="0")
            worker.wait_ready(lane, "fake-8")
            itself = statistics.median([milliseconds(lane, f"text {i}") for i in range(rounds + 20)][20:])
            p50 = {way: statistics.median(found[20:]) for way, found in times.items()}
            p95 = {way: statistics.quantiles(found[20:], n=20)[-1] for way, found in times.items()}
        finally:
            local.close()
            worker.stop()
    return {"local_p50_ms": p50["local"], "lane_p50_ms": p50["lane"], "local_p95_ms": p95["local"], "lane_p95_ms": p95["lane"],
            "added_ms": p50["lane"] - p50["local"], "lane_itself_p50_ms": itself}


@contextmanager
def web_and_worker(folder: Path) -> Iterator[str]:
    with redis_server(folder) as redis:
        worker = WorkerProcess(redis.url, folder / "worker.log", TEST_FORWARD_SECONDS="0.003")
        try:
            worker.wait_ready(client_of(redis.url))
            with serving(folder / "var", MLXCEL_REDIS_URL=redis.url, MLXCEL_LOG_LEVEL="WARNING") as server:
                yield server.url
        finally:
            worker.stop()


def throughput(seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    bodies = (embedding(f"text {number}") for number in itertools.count())
    with tempfile.TemporaryDirectory() as name, web_and_worker(Path(name)) as url:
        ask(url, bodies, 4, 1.0)
        for callers in (1, 8, 32):
            times = ask(url, bodies, callers, seconds)
            found[f"callers_{callers}"] = {
                "requests_per_s": len(times) / seconds, "p50_ms": statistics.median(times), "p95_ms": p95(times)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.serving")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure; what was measured before stays in the table")
    parser.add_argument("--requests", type=int, default=300, help="requests each way for the added latency")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement over HTTP; under bulk work, twice as long")
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison with sentence-transformers; half as many of the bulk ones")
    parser.add_argument("--texts", type=int, default=192, help="mixed texts a round")
    parser.add_argument("--reference", default=sys.executable, metavar="PYTHON", help="interpreter with the `reference` extra installed")
    options = parser.parse_args()
    turns = max(options.rounds // 2, 1)
    run = {"latency": lambda: added_latency(options.requests), "throughput": lambda: throughput(options.seconds),
           "cpu": lambda: serving_model.cpu_per_text(options.rounds, options.texts, options.reference),
           "bulk": lambda: serving_model.online_under_bulk(2 * options.seconds, turns),
           "workers": lambda: serving_model.two_workers(options.seconds, turns + 1)}
    target = ROOT / "bench-results" / "serving.json"
    target.parent.mkdir(exist_ok=True)
    report: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    report["machine"] = {"cpus": os.cpu_count(), "processor": processor(), "python": platform.python_version()}
    for part in options.parts.split(","):
        print(f"measuring {part}", file=sys.stderr)
        before = os.getloadavg()
        report[part] = run[part]() | {"when": time.strftime("%Y-%m-%d %H:%M"), "load_before": before, "load_after": os.getloadavg()}
        target.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    picture = target.with_suffix(".png")
    drawn = subprocess.run([options.reference, "-m", "tests.bench.plot_serving", str(target), str(picture)], cwd=ROOT, check=False)
    print(f"\n{target}" + (f", {picture}" if drawn.returncode == 0 else ""))


def show(report: dict[str, Any]) -> None:
    machine = report["machine"]
    table = Table("figure", "value", "goal", "", "load average", title=f"serving on {machine['cpus']} CPUs ({machine['processor']})")

    def add(part: str, figure: str, value: str, goal: str = "", held: bool | None = None) -> None:
        load = f"{report[part]['load_before'][0]:.1f} to {report[part]['load_after'][0]:.1f}"
        table.add_row(figure, value, goal, "" if held is None else "held" if held else "[bold]missed[/]", load)

    if latency := report.get("latency"):
        add("latency", "one text, one caller, in this process, p50", f"{latency['local_p50_ms']:.2f} ms")
        add("latency", "the same over the lane, p50", f"{latency['lane_p50_ms']:.2f} ms")
        add("latency", "the lane itself: a model that takes no time, p50", f"{latency['lane_itself_p50_ms']:.2f} ms")
        added, most = latency["added_ms"], GOALS["added_ms"]
        add("latency", "added by the lane, p50", f"{added:.2f} ms", f"<= {most:.0f} ms", added <= most)
    if web := report.get("throughput"):
        for callers in (1, 8, 32):
            found = web[f"callers_{callers}"]
            goal = (f">= {GOALS['requests_per_s']:.0f}/s", found["requests_per_s"] >= GOALS["requests_per_s"]) if callers == 32 else ()
            add("throughput", f"web + lane + 3 ms model, {callers} callers",
                f"{found['requests_per_s']:.0f}/s, p50 {found['p50_ms']:.1f} ms, p95 {found['p95_ms']:.1f} ms", *goal)
    if cpu := report.get("cpu"):
        spent = {name: statistics.median(found) for name, found in cpu["cpu_ms_per_text"].items()}
        add("cpu", "sentence-transformers, batches of 32: CPU a text", f"{spent['reference']:.1f} ms")
        for name, what in (("callers_1", "one text, 1 caller"), ("callers_8", "one text, 8 callers"),
                           ("callers_32", "one text, 32 callers"), ("batch_64", "64 texts, 1 caller")):
            relative = cpu["relative"][name]
            add("cpu", f"web + worker, {what}: CPU a text", f"{relative:.2f}x ({spent[name]:.1f} ms)", f"<= {GOALS[name]}x",
                relative <= GOALS[name])
    if bulk := report.get("bulk"):
        times = bulk["online_p95_ms"]
        add("bulk", "a query every 0.2 s, nothing else: p50, p95", f"{bulk['online_p50_ms']['alone']:.1f} ms, {times['alone']:.1f} ms")
        add("bulk", "the same under a bulk job: p50, p95", f"{bulk['online_p50_ms']['under']:.1f} ms, {times['under']:.1f} ms",
            f"<= {times['alone'] + bulk['longest_pack_ms']:.0f} ms", times["under"] <= times["alone"] + bulk["longest_pack_ms"])
        add("bulk", "one bulk pack of 64 tokens; of the longest text", f"{bulk['small_pack_ms']:.0f} ms; {bulk['longest_pack_ms']:.0f} ms")
        rates = {name: statistics.median(found) for name, found in bulk["bulk_texts_per_s"].items()}
        add("bulk", "what bulk keeps of its rate under these queries",
            f"{bulk['bulk_kept']:.2f}x ({rates['under']:.0f} of {rates['alone']:.0f} texts/s)", f">= {GOALS['bulk_kept']}x",
            bulk["bulk_kept"] >= GOALS["bulk_kept"])
    if workers := report.get("workers"):
        rates = {name: statistics.median(found) for name, found in workers["tokens_per_s"].items()}
        add("workers", "bulk over two model workers of one thread",
            f"{workers['relative']:.2f}x one ({rates['two']:,.0f} and {rates['one']:,.0f} tokens/s)", f">= {GOALS['two_workers']}x",
            workers["relative"] >= GOALS["two_workers"])
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
