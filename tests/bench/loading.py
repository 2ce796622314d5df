"""`python -m tests.bench.loading`: how long a model takes to load with a warm page cache, and how much memory on the way.

The floor is what no loader can go below: reading every tensor into memory of its own and widening it to f32, in numpy; for mlx, which
keeps the stored type, `mx.load` and one `mx.eval` of everything. Every run is a process of its own, rounds are interleaved, and the best
one of each counts: a busy machine only adds. "Extra" is the peak of resident memory while
loading, less what was resident before and the weights that stay, as a part of the file's size.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TIME, EXTRA = 1.2, 0.3                                      # goals: of the floor's time, of the file's size
BLOCK = 1 << 22
Shapes = dict[str, tuple[int, ...]]

QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3Model"], "hidden_size": 1024, "num_hidden_layers": 9, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151669, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 1e6, "attention_bias": False}
"""Qwen3-Embedding-0.6B with 9 of its 28 layers: 600 MB in bf16."""
MODERNBERT = {
    "model_type": "modernbert", "architectures": ["ModernBertModel"], "hidden_size": 768, "num_hidden_layers": 22,
    "num_attention_heads": 12, "intermediate_size": 1152, "vocab_size": 50368, "max_position_embeddings": 8192, "local_attention": 128,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "norm_eps": 1e-5, "norm_bias": False,
    "attention_bias": False, "mlp_bias": False, "hidden_activation": "gelu", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2}
"""ModernBERT-base: 600 MB in f32."""


def _qwen3(c: dict[str, Any]) -> Shapes:
    hidden, inner, width = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    shapes: Shapes = {"embed_tokens.weight": (c["vocab_size"], hidden), "norm.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        at = f"layers.{i}."
        queries, keys = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
        shapes |= {at + "self_attn.q_proj.weight": (queries, hidden), at + "self_attn.k_proj.weight": (keys, hidden),
                   at + "self_attn.v_proj.weight": (keys, hidden), at + "self_attn.o_proj.weight": (hidden, queries),
                   at + "self_attn.q_norm.weight": (width,), at + "self_attn.k_norm.weight": (width,),
                   at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,),
                   at + "mlp.gate_proj.weight": (inner, hidden), at + "mlp.up_proj.weight": (inner, hidden),
                   at + "mlp.down_proj.weight": (hidden, inner)}
    return shapes


def _modernbert(c: dict[str, Any]) -> Shapes:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    shapes: Shapes = {"embeddings.tok_embeddings.weight": (c["vocab_size"], hidden), "embeddings.norm.weight": (hidden,),
                      "final_norm.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes |= {at + "attn_norm.weight": (hidden,)} if i else {}
        shapes |= {at + "attn.Wqkv.weight": (3 * hidden, hidden), at + "attn.Wo.weight": (hidden, hidden),
                   at + "mlp_norm.weight": (hidden,), at + "mlp.Wi.weight": (2 * inner, hidden), at + "mlp.Wo.weight": (hidden, inner)}
    return shapes


MADE: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Shapes], str]] = {
    "qwen3-bf16": (QWEN3, _qwen3, "BF16"), "modernbert-f32": (MODERNBERT, _modernbert, "F32")}


def make(name: str, folder: Path, tokenizer: Path) -> Path:
    """A checkpoint of random weights (norms around 1) with the tokenizer of another: only its shape and type are what they claim."""
    config, shapes_of, dtype = MADE[name]
    target = folder / name
    if (target / "model.safetensors").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / file, target / file)
    (target / "config.json").write_text(json.dumps(config))
    pooling = {"pooling_mode_lasttoken" if name.startswith("qwen3") else "pooling_mode_mean_tokens": True}
    (target / "1_Pooling").mkdir(exist_ok=True)
    (target / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": config["hidden_size"]} | pooling))
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path, "name": str(i), "idx": i}
               for i, (kind, path) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling")))]
    (target / "modules.json").write_text(json.dumps(modules))
    write(target / "model.safetensors", shapes_of(config), dtype)
    return target


def write(path: Path, shapes: Shapes, dtype: str) -> None:
    size, header, at = {"F32": 4, "BF16": 2}[dtype], {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + prod(shape) * size]}
        at += prod(shape) * size
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    rng, fresh = np.random.default_rng(0), path.with_suffix(".part")
    with fresh.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            for start in range(0, prod(shape), BLOCK):
                x = rng.standard_normal(min(BLOCK, prod(shape) - start), np.float32) * np.float32(0.02) + np.float32(len(shape) == 1)
                file.write((x if dtype == "F32" else (x.view(np.uint32) >> 16).astype(np.uint16)).tobytes())
    fresh.replace(path)


# ---- in a process of its own

def _memory(field: str) -> int:
    """Bytes, of /proc/self/status."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> dict[str, float]:
    return {"seconds": time.perf_counter() - began[0], "cpu": time.process_time() - began[1]}


def floor(folder: Path, backend: str) -> dict[str, Any]:
    from inference.ops.safetensors import read_header

    if backend == "mlx":
        import mlx.core as mx

        mx.eval(mx.zeros(1))
        began = _now()
        tensors = [mx.load(str(path)) for path in sorted(folder.glob("*.safetensors"))]
        mx.eval(tensors)
        return _since(began)
    kept, began = [], _now()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            for entry in read_header(path).values():
                file.seek(entry.begin)
                x: np.ndarray = np.fromfile(file, np.uint8, entry.end - entry.begin)
                if entry.dtype == "BF16":
                    wide = x.view(np.uint16).astype(np.uint32)
                    wide <<= 16
                    kept.append(wide.view(np.float32))
                else:
                    kept.append(x.view({"F32": np.float32, "F16": np.float16, "I64": np.int64}[entry.dtype]).astype(np.float32, copy=False))
    return _since(began)


def load(folder: Path, backend: str) -> dict[str, Any]:
    from inference import loader, ops
    from inference.checkpoint import Checkpoint
    from inference.config import Settings
    from inference.resolve import resolve

    settings = replace(Settings(embedding_models=(str(folder),), threads=1), backend=backend)
    opened = loader.open_checkpoint(Checkpoint.read(resolve(str(folder), settings)), settings)
    ops.backend(backend)
    if backend == "mlx":
        import mlx.core as mx

        mx.eval(mx.zeros(1))
    Path("/proc/self/clear_refs").write_text("5")          # the peak starts again from here
    before, began = _memory("VmRSS"), _now()
    forward = loader.load(opened)
    took = _since(began)
    peak, after = _memory("VmHWM"), _memory("VmRSS")
    kept = opened.spec.parameters * 4 if backend == "host" else opened.spec.bytes
    forward([np.arange(3, dtype=np.int32)])
    return took | {"peak": peak - before, "stays": after - before, "weights": kept}


def _child(*arguments: str) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-m", "tests.bench.loading", "child", *arguments], cwd=ROOT, check=True, text=True,
                         stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


# ---- the table

def measure(folders: dict[str, Path], backends: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """One row for each checkpoint and backend: best seconds of the rounds, largest peaks."""
    rows = []
    for name, folder in folders.items():
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        _child("floor", str(folder), "host")               # warms the page cache
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for _ in range(rounds):
            for backend in backends:
                for kind in ("floor", "load"):
                    found.setdefault((kind, backend), []).append(_child(kind, str(folder), backend))
        for backend in backends:
            runs = found["load", backend]
            best = {(kind, what): min(run[what] for run in found[kind, backend])
                    for kind in ("floor", "load") for what in ("seconds", "cpu")}
            peak = max(run["peak"] for run in runs)
            rows.append({
                "checkpoint": name, "backend": backend, "bytes": size, "weights": runs[0]["weights"],
                "floor": best["floor", "seconds"], "seconds": best["load", "seconds"],
                "ratio": best["load", "seconds"] / best["floor", "seconds"], "cpu_ratio": best["load", "cpu"] / best["floor", "cpu"],
                "peak": peak, "stays": max(run["stays"] for run in runs),
                "extra": (peak - runs[0]["weights"]) / size})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\nloading, warm page cache (goals: at most {TIME}x the floor's time, at most {EXTRA}x the file's size of extra memory)")
    print(f"{'checkpoint':<16} {'backend':<8} {'file MB':>8} {'weights':>8} {'floor s':>8} {'load s':>8} {'ratio':>6}   {'CPU':>6} "
          f"{'peak MB':>8} {'stays':>8} {'extra':>6}")
    for row in rows:
        late, large = (" !" if row[key] > goal else "  " for key, goal in (("ratio", TIME), ("extra", EXTRA)))
        print(f"{row['checkpoint']:<16} {row['backend']:<8} {row['bytes'] / 1e6:>8.0f} {row['weights'] / 1e6:>8.0f} "
              f"{row['floor']:>8.2f} {row['seconds']:>8.2f} {row['ratio']:>5.2f}x{late} {row['cpu_ratio']:>5.2f}x "
              f"{row['peak'] / 1e6:>8.0f} {row['stays'] / 1e6:>8.0f} "
              f"{row['extra']:>5.2f}x{large}")


def checkpoints(out: Path) -> dict[str, Path]:
    """A real one, and two of random weights under `out`."""
    from tests.bench.__main__ import checkpoint

    return {"minilm-f32": checkpoint()} | {name: make(name, out / "prepared", checkpoint()) for name in MADE}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.loading", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backends", default="host,mlx")
    parser.add_argument("--only", default="", help="one of minilm-f32, " + ", ".join(MADE))
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results")
    options = parser.parse_args(argv)
    chosen = {name: folder for name, folder in checkpoints(options.out).items() if options.only in ("", name)}
    before = os.getloadavg()[0]
    show(measure(chosen, options.backends.split(","), options.rounds))
    print(f"load average {before:.1f} (before), {os.getloadavg()[0]:.1f} (after)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        kind, where, *more = sys.argv[2:]
        print(json.dumps((floor if kind == "floor" else load)(Path(where), *more)))
    else:
        main()
