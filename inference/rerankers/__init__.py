"""Ways of scoring a query against a document. THE REGISTRY IS THE FOLDER: one file, one way.

A file has SCORING (its name on the wire), MODEL_TYPES, ARCHITECTURES (in words), INSTRUCTIONS (whether an instruction has an effect),
`accepts(checkpoint)`, `family(checkpoint)`, `Pairs(opened)` (called with query, documents and instruction: token ids of each pair; raises
for a checkpoint that can pair nothing), and `load(opened)`, whose forward pass gives one logit a pair.
"""
from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from ..checkpoint import Checkpoint
from ..errors import CheckpointError


@cache
def ways() -> tuple[ModuleType, ...]:
    """The modules of this folder, in the order of their names. Importing them imports no backend."""
    return tuple(import_module(f".{info.name}", __name__) for info in iter_modules(__path__))


def find(checkpoint: Checkpoint) -> ModuleType:
    """The way this checkpoint scores; CheckpointError where there is none."""
    for way in ways():
        if way.accepts(checkpoint):
            return way
    known = "; ".join(f"{way.SCORING} ({way.ARCHITECTURES}): {', '.join(way.MODEL_TYPES)}" for way in ways())
    embeds = " It has a pooling layout: embedders are named in MLXCEL_EMBEDDING_MODEL." if checkpoint.pools else ""
    raise CheckpointError(
        f"Unsupported reranker model type `{checkpoint.model_type}` (architectures[0] = `{checkpoint.architecture}`) in {checkpoint.root}. "
        f"Known: {known}.{embeds}")
