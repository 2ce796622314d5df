"""Model directories for tests of the loader: a golden checkpoint, with the side files a published one has."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from inference.checkpoint import Checkpoint
from inference.client import connect
from inference.config import Settings
from inference.resolve import Source
from inference.transports.local import LocalClient
from tests.families import Case


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


def read(folder: Path) -> Checkpoint:
    return Checkpoint.read(Source(folder, folder.name, "", "", "directory"))


def client(folder: Path, backend: str = "host", **options: Any) -> LocalClient:
    served = connect(Settings(embedding_models=(str(folder),), backend=backend, **options))
    assert isinstance(served, LocalClient)
    return served


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
