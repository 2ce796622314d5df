"""Dense modules of sentence-transformers: linear layers that the pooled vector, or every row, goes through. Reference: its `Dense`.

Two layouts: `2_Dense/config.json` beside `2_Dense/model.safetensors`, and weights folded into the trunk's file as `dense.0.weight`,
`dense.1.weight`, ... (MLX conversions), with or without the modules' configs.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .. import ops
from ..checkpoint import Checkpoint, no_weights, read_json
from ..errors import CheckpointError
from ..ops import Tensor
from ..ops.safetensors import read_header
from ..weights import Weights, read_config

ACTIVATIONS = {"Identity": None, "Tanh": ops.tanh, "GELU": ops.gelu, "ReLU": ops.relu, "SiLU": ops.silu}
"""By the last part of `activation_function`, the name of a torch class."""
FOLDED = re.compile(r"^dense\.(\d+)\.")


@dataclass(frozen=True)
class Config:
    """`<n>_Dense/config.json`, with the defaults of sentence-transformers."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = ""                           # empty: what the modules before it make
    module_output_name: str = ""
    use_residual: bool = False

    def __post_init__(self) -> None:
        if self.activation_function.rpartition(".")[2] not in ACTIVATIONS:
            raise CheckpointError(
                f"config.json: activation_function is {self.activation_function!r}; known: torch's {', '.join(ACTIVATIONS)}")


@dataclass(frozen=True)
class Module:
    """`folder` is the module's, "" where only its folded weights are there."""

    folder: str
    config: Config


def read(checkpoint: Checkpoint, width: int) -> tuple[Module, ...]:
    """The modules behind pooling, or behind the trunk where nothing is pooled, in order; `width` is what the first has to take.

    CheckpointError where they do not fit together.
    """
    kinds = checkpoint.modules
    first = kinds.index("Dense") if "Dense" in kinds else len(kinds)
    if first < len(kinds) and (("Pooling" in kinds and "Pooling" not in kinds[:first]) or "Normalize" in kinds[:first]):
        raise CheckpointError(
            f"{checkpoint.root / 'modules.json'} lists {', '.join(kinds)}; a Dense module is expected after Pooling and before Normalize")
    listed = [folder for kind, folder in zip(kinds, checkpoint.module_folders, strict=True) if kind == "Dense"]
    modules = tuple(Module(folder, _config(checkpoint, folder)) for folder in listed) or _folded(checkpoint, width)
    for k, module in enumerate(modules):
        if module.config.in_features != width:
            raise CheckpointError(
                f"{module.folder or f'dense.{k}'} of {checkpoint.root} takes vectors of width {module.config.in_features}, but what stands "
                f"before it gives {width}: the Dense modules are out of order or belong to a different checkpoint")
        width = module.config.out_features
    return modules


def _config(checkpoint: Checkpoint, folder: str) -> Config:
    raw = read_json(checkpoint.root / folder / "config.json")
    weights = [file for file in checkpoint.weight_files if file.parent == checkpoint.root / folder]
    if not weights and not any(FOLDED.match(name) for file in checkpoint.weight_files for name in read_header(file)):
        raise no_weights(checkpoint.root / folder)
    try:
        config = read_config(Config, raw)
        given = "token_embeddings" if checkpoint.late_interaction else "sentence_embedding"
        source = config.module_input_name or given
        if (source, config.module_output_name or source) != (given, given):
            raise CheckpointError(
                f"config.json: the module maps {source!r} to {config.module_output_name or source!r}; expected {given!r} for both")
        return config
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.root / folder}/{error.message}") from None


def _folded(checkpoint: Checkpoint, width: int) -> tuple[Module, ...]:
    """Without configs, the shapes say the widths, and the linear layers stand alone: nobody has folded an activation."""
    entries = {name: entry for file in checkpoint.weight_files for name, entry in read_header(file).items() if FOLDED.match(name)}
    count = len({name.split(".")[1] for name in entries})
    modules: list[Module] = []
    for k in range(count):
        if f"dense.{k}.weight" not in entries:
            raise CheckpointError(
                f"{checkpoint.root} has {', '.join(sorted(entries))}; expected dense.0 to dense.{count - 1}, each with a weight")
        rows, columns = entries[f"dense.{k}.weight"].shape
        if f"dense.{k}.scales" in entries:                # packed: the columns are words, and the layer takes what the one before gives
            columns = modules[-1].config.out_features if modules else width
        modules.append(Module("", Config(columns, rows, f"dense.{k}.bias" in entries, "Identity")))
    return tuple(modules)


class Dense:
    def __init__(self, w: Weights, name: str, residual: str, c: Config) -> None:
        self.linear = w.linear(name, c.in_features, c.out_features, bias=c.bias)
        self.activation = ACTIVATIONS[c.activation_function.rpartition(".")[2]]
        self.use_residual = c.use_residual
        projected = c.use_residual and c.in_features != c.out_features
        self.residual = w.linear(residual, c.in_features, c.out_features, bias=False) if projected else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = self.activation(y) if self.activation else y
        if not self.use_residual:
            return y
        return y + (self.residual(x) if self.residual else x)


class Chain:
    """[N, D] -> [N, the last module's width]. Takes its weights from their folder, and the folded ones where that has none."""

    def __init__(self, w: Weights, modules: Sequence[Module]) -> None:
        self.modules: list[Dense] = []
        self.dropped: list[str] = []                      # folded copies of what was read from its own folder
        for k, module in enumerate(modules):
            name = f"dense.{k}"
            if module.folder and w.has(f"{module.folder}.linear.weight"):
                name = f"{module.folder}.linear"
                self.dropped.append(rf"^dense\.{k}\.")
            self.modules.append(Dense(w, name, f"{module.folder}.residual", module.config))

    def __call__(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x
