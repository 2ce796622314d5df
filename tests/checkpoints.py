"""Model directories for tests of the loader: a golden checkpoint, with the side files a published one has."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers, processors

from inference.checkpoint import Checkpoint
from inference.client import connect
from inference.config import Settings
from inference.resolve import Source
from inference.transports.local import LocalClient
from tests.families import Case

_opened: list[LocalClient] = []


def tokenizer(vocabulary: int, end: int = 2) -> tokenizers.Tokenizer:
    """Words `w3`, `w4`, ... are the ids 3, 4, ...; `</s>`, the id `end`, is appended to every text."""
    names = {"</s>" if i == end else f"w{i}": i for i in range(vocabulary)}
    built = tokenizers.Tokenizer(models.WordLevel(names, unk_token="w3"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(["</s>"])
    built.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    return built


def write(case: Case, folder: Path, **side: Any) -> Path:
    """The case's checkpoint with a tokenizer in `folder`; `side` are further JSON files by name, `/` spelled `__`."""
    shutil.copytree(case.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("reference.npz", "made_by.json"))
    tokenizer(case.config["vocab_size"]).save(str(folder / "tokenizer.json"))
    for name, content in side.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def colbert(folder: Path, data: Path, **settings: Any) -> Path:
    """A tiny random ColBERT in PyLate's layout with all-MiniLM-L6-v2's real tokenizer. Its layer adds little to the word embeddings, so
    that rows of one word are alike wherever they stand, and rows of different words are not."""
    folder.mkdir(parents=True)
    real = data / "checkpoints" / "sentence-transformers__all-MiniLM-L6-v2"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(real / name, folder / name)
    width, inner, vocabulary, rng = 16, 32, 30522, np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.02).astype(np.float32)

    tensors = {"embeddings.word_embeddings.weight": normal(vocabulary, width) * 50,
               "embeddings.position_embeddings.weight": normal(128, width), "embeddings.token_type_embeddings.weight": normal(2, width)}
    layer = "encoder.layer.0."
    for name, rows, columns in (("attention.self.query", width, width), ("attention.self.key", width, width),
                                ("attention.self.value", width, width), ("attention.output.dense", width, width),
                                ("intermediate.dense", inner, width), ("output.dense", width, inner)):
        tensors |= {f"{layer}{name}.weight": normal(rows, columns), f"{layer}{name}.bias": normal(rows)}
    for name in ("embeddings.LayerNorm", f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"):
        tensors |= {f"{name}.weight": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": np.eye(12, width, dtype=np.float32)}, folder / "1_Dense" / "model.safetensors")
    side = {
        "config": {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": vocabulary, "hidden_size": width,
                   "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": inner, "max_position_embeddings": 128},
        "modules": [{"type": "sentence_transformers.models.Transformer", "path": ""},
                    {"type": "pylate.models.Dense.Dense", "path": "1_Dense"}],
        "1_Dense/config": {"in_features": width, "out_features": 12, "bias": False,
                           "activation_function": "torch.nn.modules.linear.Identity"},
        "config_sentence_transformers": {"query_prefix": "[unused0]", "document_prefix": "[unused1]", "query_length": 16,
                                         "document_length": 64} | settings,
    }
    for name, content in side.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def read(folder: Path) -> Checkpoint:
    return Checkpoint.read(Source(folder, folder.name, "", "", "directory"))


def client(folder: Path, backend: str = "host", **options: Any) -> LocalClient:
    served = connect(Settings(embedding_models=(str(folder),), backend=backend, **options))
    assert isinstance(served, LocalClient)
    return kept(served)


def kept(served: LocalClient) -> LocalClient:
    """The same; it is closed at the end of its module, if the test does not."""
    _opened.append(served)
    return served


def close_all() -> None:
    while _opened:
        _opened.pop().close()


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
