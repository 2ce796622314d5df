"""What a closed model held is free again: nothing of it stays alive in threads, arenas or caches."""
from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import psutil

from inference.config import Settings
from inference.embedder import Embedder
from inference.transports.local import LocalClient
from inference.wire import EmbedJob
from tests.bench import workloads
from tests.servers import ROOT

TIMES, WARM = 20, 5
SPARE = 60                     # MiB that allocators may keep more at one time than at another; the weights are 87
MIB = 1 << 20


def opened(model: Path, texts: tuple[str, ...]) -> LocalClient:
    client = LocalClient(Settings(embedding_models=(str(model),), backend="host", threads=2))
    client.load()
    client.embed(EmbedJob(texts))
    return client


def main(model: Path) -> None:
    """RSS in MiB after each time, threads that are left, clients that are still alive."""
    process, texts = psutil.Process(), tuple(workloads.mixed(16))
    clients = []
    for _ in range(TIMES):
        client = opened(model, texts)
        client.close()
        clients.append(weakref.ref(client))
        del client
        gc.collect()
        print(process.memory_info().rss // MIB, process.num_threads(), sum(client() is not None for client in clients), flush=True)


def test_opening_and_closing_a_model_again_and_again_takes_no_memory(minilm: Path) -> None:
    """In a process of its own: what other tests have left would move the figures."""
    done = subprocess.run([sys.executable, "-m", "tests.test_memory", str(minilm)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    memory, threads, alive = zip(*(tuple(map(int, line.split())) for line in done.stdout.splitlines()), strict=True)
    assert max(memory[-5:]) < max(memory[:WARM]) + SPARE, memory
    assert threads[-1] == threads[WARM] and alive[-1] == 0, (threads, alive)


def test_a_closed_client_holds_no_weights(minilm: Path) -> None:
    client = opened(minilm, ("a text",))
    embedder = client._served[0].running
    assert isinstance(embedder, Embedder)
    forward = weakref.ref(embedder.engine._forward)
    client.close()
    gc.collect()
    assert forward() is None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
