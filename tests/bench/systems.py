"""One system under test in a process of its own: `python -m tests.bench.systems NAME THREADS FOLDER`, commands as JSON lines.

Every command answers with one line: seconds of wall and of CPU (all threads), and what it was about. FOLDER holds the checkpoint and
what was prepared from it (export.onnx, decoder/).
"""
from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = sys.argv[2] if len(sys.argv) > 2 else "1"
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import numpy as np  # noqa: E402

from tests.bench.workloads import DECODER, DECODER_LENGTHS  # noqa: E402


class System(Protocol):
    about: dict[str, Any]
    batch: int                                             # texts padded together, where texts are padded

    def encode(self, texts: list[str]) -> np.ndarray: ...
    def decoder(self) -> Callable[[], np.ndarray]: ...


def _decoder_ids() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, DECODER["vocab_size"], n).astype(np.int32) for n in DECODER_LENGTHS]


class Host:
    """This package, through the door its commands use: tokenising, packing, pooling and normalising included."""

    batch = 0

    def __init__(self, folder: Path, threads: int, precision: str, blas: str) -> None:
        from inference.config import Settings
        from inference.transports.local import LocalClient

        self.settings = Settings(embedding_models=(str(folder / "model"),), backend="host", threads=threads, host_precision=precision,
                                 host_blas=blas)
        self.client = LocalClient(self.settings)
        self.client.load()
        spec = self.client.describe("embedding")
        assert spec is not None
        self.about = {"provider": spec.provider, "precision": spec.precision}
        self.folder = folder

    def encode(self, texts: list[str]) -> np.ndarray:
        from inference.wire import EmbedJob

        return self.client.embed(EmbedJob(tuple(texts), lane="bulk" if len(texts) > 1 else "interactive")).data

    def decoder(self) -> Callable[[], np.ndarray]:
        from inference import ops
        from inference.batching import Batch
        from inference.families import qwen3
        from inference.weights import Weights, read_config

        model = qwen3.Model(Weights.open(self.folder / "decoder", ops.backend("host")), read_config(qwen3.Config, DECODER))
        ids = _decoder_ids()
        return lambda: ops.numpy(model(Batch.of(ids)))

    def gemm(self) -> float:
        """GFLOP/s of the provider on MiniLM's four weights, 512 rows, hot."""
        from inference.ops import host

        flops = seconds = 0.0
        for outputs, inputs in ((1152, 384), (384, 384), (1536, 384), (384, 1536)):
            linear = host.Linear(np.random.rand(outputs, inputs).astype(np.float32), np.zeros(outputs, np.float32))
            x = np.random.rand(512, inputs).astype(np.float32)
            linear(x)
            best = float("inf")
            for _ in range(20):
                began = time.thread_time()
                linear(x)
                best = min(best, time.thread_time() - began)
            flops, seconds = flops + 2.0 * 512 * outputs * inputs, seconds + best
        return flops / seconds / 1e9


class SentenceTransformers:
    batch = 32

    def __init__(self, folder: Path, threads: int, precision: str) -> None:
        import sentence_transformers
        import torch

        torch.set_num_threads(threads)
        self.torch, self.dtype = torch, torch.bfloat16 if precision == "bf16" else torch.float32
        self.model = sentence_transformers.SentenceTransformer(str(folder / "model"), device="cpu", model_kwargs={"dtype": self.dtype})
        self.folder = folder
        self.about = {"provider": f"torch {torch.__version__}", "precision": precision, "version": sentence_transformers.__version__}

    def encode(self, texts: list[str]) -> np.ndarray:
        vectors = self.model.encode(texts, batch_size=self.batch, convert_to_tensor=True, show_progress_bar=False,
                                    normalize_embeddings=True)
        return vectors.float().numpy()

    def decoder(self) -> Callable[[], np.ndarray]:
        from transformers import Qwen3Model

        model = Qwen3Model.from_pretrained(self.folder / "decoder", dtype=self.dtype).eval()
        ids = _decoder_ids()
        padded = self.torch.zeros(len(ids), max(map(len, ids)), dtype=self.torch.long)
        mask = self.torch.zeros_like(padded)
        for row, (i, one) in enumerate(zip(ids, mask, strict=True)):
            padded[row, :len(i)] = self.torch.tensor(i)
            one[:len(i)] = 1

        def run() -> np.ndarray:
            with self.torch.inference_mode():
                hidden = model(input_ids=padded, attention_mask=mask).last_hidden_state.float().numpy()
            return np.concatenate([row[:len(i)] for row, i in zip(hidden, ids, strict=True)])
        return run


class OnnxRuntime:
    """The exported model with onnxruntime's own BERT fusions, fed in batches of neighbours in length."""

    batch = 32

    def __init__(self, folder: Path, threads: int) -> None:
        import onnxruntime
        import tokenizers

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self.session = onnxruntime.InferenceSession(str(folder / "export.onnx"), options, providers=["CPUExecutionProvider"])
        self.inputs = {entry.name for entry in self.session.get_inputs()}
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        self.tokenizer.enable_truncation(256)
        self.tokenizer.no_padding()
        self.about = {"provider": f"onnxruntime {onnxruntime.__version__}", "precision": "f32"}

    def encode(self, texts: list[str]) -> np.ndarray:
        encoded = [e.ids for e in self.tokenizer.encode_batch_fast(texts)]
        order = np.argsort([len(ids) for ids in encoded], kind="stable")
        vectors = np.empty((len(texts), 384), np.float32)
        for begin in range(0, len(texts), self.batch):
            batch = order[begin:begin + self.batch]
            ids = np.zeros((len(batch), max(len(encoded[i]) for i in batch)), np.int64)
            mask = np.zeros_like(ids)
            for row, i in enumerate(batch):
                ids[row, :len(encoded[i])], mask[row, :len(encoded[i])] = encoded[i], 1
            feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            hidden = self.session.run(None, {name: array for name, array in feed.items() if name in self.inputs})[0]
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors[batch] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return vectors


def prepare(folder: Path) -> None:
    """export.onnx and decoder/, by the reference's own programs. Run with the interpreter that has torch."""
    import torch
    from transformers import AutoModel, Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    if not (folder / "decoder").exists():
        Qwen3Model(Qwen3Config(**{k: v for k, v in DECODER.items() if k not in ("model_type", "architectures")})).save_pretrained(
            folder / "decoder")
    if not (folder / "export.onnx").exists():
        model = AutoModel.from_pretrained(folder / "model", attn_implementation="eager").eval()

        class Wrapped(torch.nn.Module):
            def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
                return model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state

        wrapped = Wrapped()
        wrapped.model = model
        ids = torch.ones(2, 9, dtype=torch.long)
        names = ["input_ids", "attention_mask", "token_type_ids"]
        axes = {0: "batch", 1: "length"}
        torch.onnx.export(wrapped, (ids, ids, ids * 0), str(folder / "plain.onnx"), input_names=names, output_names=["hidden"],
                          dynamic_axes=dict.fromkeys([*names, "hidden"], axes), opset_version=17, dynamo=False)
        from onnxruntime.transformers.optimizer import optimize_model

        fused = optimize_model(str(folder / "plain.onnx"), model_type="bert", num_heads=12, hidden_size=384, opt_level=1)
        fused.save_model_to_file(str(folder / "export.onnx"))
        print(json.dumps(fused.get_fused_operator_statistics()), file=sys.stderr)


def make(name: str, folder: Path, threads: int) -> System:
    kind, _, rest = name.partition(":")
    if kind == "host":
        precision, _, blas = rest.partition(":")
        return Host(folder, threads, precision, blas or "auto")
    return SentenceTransformers(folder, threads, rest) if kind == "st" else OnnxRuntime(folder, threads)


def _rss() -> float:
    """MiB, the most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(name: str, threads: int, folder: Path) -> None:
    began = time.perf_counter()
    system = make(name, folder, threads)
    system.encode(["a first text"])
    print(json.dumps({"seconds": time.perf_counter() - began, "rss": _rss(), "about": system.about}), flush=True)
    block: Callable[[], np.ndarray] | None = None
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "encode":
            system.batch = command.get("batch", system.batch)
            cpu, wall = time.process_time(), time.perf_counter()
            vectors = system.encode(command["texts"])
            answer = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            if command.get("keep"):
                np.save(command["keep"], vectors)
        elif command["do"] == "single":
            walls, cpu = [], time.process_time()
            for _ in range(command["times"]):
                wall = time.perf_counter()
                system.encode([command["text"]])
                walls.append(time.perf_counter() - wall)
            answer = {"walls": walls, "cpu": (time.process_time() - cpu) / len(walls)}
        elif command["do"] == "decoder":
            if block is None:
                block = system.decoder()
                block()
            cpu = time.process_time()
            hidden = block()
            answer = {"cpu": time.process_time() - cpu}
            if command.get("keep"):
                np.save(command["keep"], hidden)
        elif command["do"] == "gemm":
            answer = {"gflops": system.gemm() if isinstance(system, Host) else None}
        elif command["do"] == "rss":
            answer = {"rss": _rss()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[3]))
    else:
        serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
