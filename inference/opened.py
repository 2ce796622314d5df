"""A checkpoint that was read but not loaded, as the loader, the embedder and the rerankers pass it on."""
from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from .checkpoint import Checkpoint
from .tokenizer import Tokenizer
from .wire import ModelSpec

if TYPE_CHECKING:
    from .layers import dense, late_interaction

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
    dense: tuple[dense.Module, ...] = ()           # what the pooled vector, or every row, goes through
    late: late_interaction.LateInteraction | None = None       # of a multi-vector model; its `pooling` has no meaning

    @property
    def pad_to(self) -> tuple[int, int] | None:
        """(tokens, id) where the family fills every text with `id` up to that many tokens, and the model takes them for words."""
        pad_to: tuple[int, int] | None = getattr(self.config, "pad_to", None)
        return pad_to
