"""PEFT LoRA adapters, merged into the weights they change as those are read: W + scale B A, in f32. Reference: peft.

What only resembles a plain LoRA (DoRA, PiSSA, trained embeddings, biases) would merge without complaint and answer wrongly: it is
refused by the name of its setting.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import ops
from .checkpoint import ADAPTER, Checkpoint, read_json
from .errors import CheckpointError
from .opened import Backend
from .ops.safetensors import read_header
from .weights import Change, Weights, read_config

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "modules_to_save": (None, []), "use_dora": (None, False), "fan_in_fan_out": (None, False),
    "lora_bias": (None, False), "use_qalora": (None, False), "use_bdlora": (None, False), "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}), "target_parameters": (None, []), "alora_invocation_tokens": (None, []),
    "arrow_config": (None,), "velora_config": (None,), "monteclora_config": (None,), "kasa_config": (None,),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
"""Settings that change more than W + scale B A does, and the values with which they do not."""
FACTOR = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight$")


@dataclass(frozen=True)
class Config:
    """What of adapter_config.json is read; patterns give single modules a rank or alpha of their own."""

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, Any] = field(default_factory=dict)
    alpha_pattern: dict[str, Any] = field(default_factory=dict)
    target_modules: list[str] | str | None = None

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r)."""
        rank, alpha = self.rank(module), float(_matching(self.alpha_pattern, module, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.r))

    def targets(self, module: str) -> bool:
        match self.target_modules:
            case str(pattern):
                return pattern == "all-linear" or re.fullmatch(pattern, module) is not None
            case list(names):
                return any(module == name or module.endswith(f".{name}") for name in names)
        return True


def read(folder: Path) -> Config:
    """adapter_config.json, checked. CheckpointError names the setting that asks for more than a merge."""
    path = folder / ADAPTER[0]
    raw = read_json(path)
    for name, plain in PLAIN.items():
        found = raw.get(name, plain[0])
        if not any(found == value and type(found) is type(value) for value in plain):
            known = " or ".join(repr(value) for value in plain if value is not None) or "null"
            raise CheckpointError(
                f"{path}: {name} is {found!r}; only plain LoRA adapters are merged, with {known}. Merge this one with peft "
                "(merge_and_unload, save_pretrained) and load that")
    try:
        return read_config(Config, raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.message.removeprefix('config.json: ')}") from None


def weights(checkpoint: Checkpoint, backend: Backend, prefixes: tuple[str, ...]) -> Weights:
    """The checkpoint's weights under the family's names, with the changes of its adapter, if it has one."""
    found = Weights.open(checkpoint.trunk, ops.backend(backend), root=checkpoint.root).strip(*prefixes)
    return found.change(_changes(checkpoint.adapter, backend, prefixes, found)) if checkpoint.adapter else found


def _changes(folder: Path, backend: Backend, prefixes: tuple[str, ...], base: Weights) -> dict[str, Change]:
    path, config = folder / ADAPTER[1], read(folder)
    factors: dict[str, dict[str, str]] = {}
    entries = read_header(path)
    for name in entries:
        if not (found := FACTOR.match(name)):
            raise CheckpointError(f"{path} holds {name}, which is no factor of a linear layer (base_model.model.<module>.lora_A.weight or "
                                  "lora_B.weight): merge this adapter with peft and load that")
        module, side = found.groups()
        if not config.targets(module):
            raise CheckpointError(f"{path} changes {module}, which target_modules of {ADAPTER[0]} does not name")
        factors.setdefault(module, {})[side] = name
    if isinstance(config.target_modules, list):
        for target in config.target_modules:
            if not any(module == target or module.endswith(f".{target}") for module in factors):
                raise CheckpointError(
                    f"{ADAPTER[0]} targets {target}, and {path} has no factors for it; it has {', '.join(list(factors)[:4])}")
    changes: dict[str, Change] = {}
    tensors = ops.backend(backend).load(path)
    for module, sides in factors.items():
        name = next((module.removeprefix(p) for p in prefixes if module.startswith(p)), module) + ".weight"
        if not base.has(name) or len(base.shape(name)) != 2:
            raise CheckpointError(f"{path} changes {module}, which is no linear layer of the base model: it was trained on another")
        rows, columns, rank = *base.shape(name), config.rank(module)
        shapes = {side: entries[factor].shape for side, factor in sides.items()}
        if shapes != {"A": (rank, columns), "B": (rows, rank)}:
            shown = " and ".join(f"{side} {list(shape)}" for side, shape in sorted(shapes.items()))
            raise CheckpointError(
                f"{path}: the factors of {module} are {shown}; expected A [{rank}, {columns}] and B [{rows}, {rank}]")
        changes[name] = partial(_product, backend, tensors[sides["A"]], tensors[sides["B"]], config.scale(module))
    return changes


def _product(backend: Backend, a: Any, b: Any, scale: float) -> np.ndarray:
    side = ops.backend(backend)
    return np.asarray(np.float32(scale) * (side.numpy(side.read(b)) @ side.numpy(side.read(a))), np.float32)


def _matching(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """The value of the first pattern that fits the end of the module's name."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), usual)
