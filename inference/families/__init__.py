"""Model families. THE REGISTRY IS THE FOLDER: one file, one family; which `model_type`s it serves, the file says itself.

A family file has MODEL_TYPES, ARCHITECTURES, PREFIXES, DROPPED, Config and Model, and may have heads beside the model. Two
functions are optional: `accepts(checkpoint)` raises CheckpointError for one that has the model_type and is no embedder, and
`format_text(text, instruction, prompts)` writes what the model reads, `prompts` being the checkpoint's own by name.
"""
from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


@cache
def model_types() -> dict[str, ModuleType]:
    """model_type -> family module, in the order of the files. Imports the families, and with them no backend."""
    claimed: dict[str, ModuleType] = {}
    for info in iter_modules(__path__):
        module = import_module(f".{info.name}", __name__)
        for model_type in module.MODEL_TYPES:
            if model_type in claimed:
                raise RuntimeError(f"model_type {model_type!r} is claimed by both {claimed[model_type].__name__} and {module.__name__}")
            claimed[model_type] = module
    return claimed


def find(model_type: str) -> ModuleType | None:
    """The family of a `model_type`, whatever its case; None for one that no file claims."""
    return model_types().get(model_type.lower())
