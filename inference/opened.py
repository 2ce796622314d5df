"""A checkpoint that was read but not loaded, as the loader, the embedder and the rerankers pass it on."""
from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from .checkpoint import Checkpoint
from .tokenizer import Tokenizer
from .wire import ModelSpec

Backend = Literal["mlx", "host"]
Pooling = Literal["cls", "mean", "max", "lasttoken"]


@dataclass(frozen=True)
class Opened:
    """`config` is the family's reading of config.json; `spec` what the model promises."""

    checkpoint: Checkpoint
    family: ModuleType
    config: Any
    tokenizer: Tokenizer
    backend: Backend
    pooling: Pooling
    spec: ModelSpec
