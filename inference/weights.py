"""Weights are asked for by the checkpoint's own names and with the shapes the config promises; what nobody asked for and
nobody dropped is an error. So a checkpoint that loads is the checkpoint the family file describes.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from .checkpoint import SKIPPED_WEIGHTS, no_weights
from .errors import CheckpointError
from .ops import Depthwise, Embedding, Linear, Linears, Norm, Tensor

C = TypeVar("C")
Change = Callable[[], np.ndarray]
"""What is added to a tensor when it is read, f32 of its shape."""
BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
"""Of MLX's affine quantisation."""


def read_config(cls: type[C], raw: Mapping[str, Any]) -> C:
    """The fields of the dataclass `cls` out of config.json, with their types checked; null means the default.

    `cls.rename(raw)`, where there is one, settles older spellings first.
    """
    rename: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = getattr(cls, "rename", None)
    raw = rename(raw) if rename else raw
    types, values = get_type_hints(cls), {}
    for f in fields(cls):                                                                          # type: ignore[arg-type]
        value = raw.get(f.name)
        if value is None:
            if f.default is MISSING and f.default_factory is MISSING:
                raise CheckpointError(f"config.json lacks {f.name!r} ({_spell(types[f.name])})")
            continue
        if not _fits(value, types[f.name]):
            raise CheckpointError(f"config.json: {f.name} is {value!r}; expected {_spell(types[f.name])}")
        values[f.name] = float(value) if types[f.name] is float else value
    return cls(**values)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if isinstance(value, bool):
        return kind in (bool, Any)
    kind = get_origin(kind) or kind
    return kind is Any or isinstance(value, (int, float) if kind is float else list if kind is tuple else kind)


def _spell(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", list: "a list", tuple: "a list",
             dict: "an object"}
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_spell(one) for one in get_args(kind) if one is not NoneType)
    return names.get(get_origin(kind) or kind, str(kind))


class Weights:
    """Named tensors of one checkpoint on one backend. `at()` narrows the names; all narrowed views share one ledger.

    A weight with `<name>.scales` beside it is quantised; how, its shapes say, whatever config.json tells of the others.
    """

    def __init__(self, tensors: dict[str, Any], backend: ModuleType) -> None:
        self._tensors, self._backend = tensors, backend
        self._used: set[str] = set()
        self._changes: Mapping[str, Change] = {}
        self._prefix = ""

    @classmethod
    def open(cls, folder: Path, backend: ModuleType, root: Path | None = None) -> Weights:
        """All `*.safetensors` of a folder, then those of its immediate sub-folders under `<folder>.` (1_Dense.linear.weight).

        `root`: where the sub-folders stand, if not in `folder`. CheckpointError where there are no files, where one is damaged, or
        where two hold one name.
        """
        top = _files(folder, "*.safetensors")
        below = [path for path in _files(root or folder, "[!.]*/*.safetensors") if path.parent != folder]
        if not top:
            raise no_weights(folder)
        tensors: dict[str, Any] = {}
        origin: dict[str, Path] = {}
        for path in top + below:
            prefix = "" if path.parent == folder else f"{path.parent.name}."
            for name, entry in backend.load(path).items():
                full = prefix + name
                if full in tensors:
                    raise CheckpointError(
                        f"{full} stands in both {origin[full].name} and {path.name} of {path.parent}: remove the file that does not belong")
                tensors[full], origin[full] = entry, path
        return cls(tensors, backend)

    # ---- settling names: once, before a family asks

    def rename(self, change: Callable[[str], str]) -> Weights:
        """Every name through `change`; two names that become one are an error."""
        renamed: dict[str, Any] = {}
        for name, entry in self._tensors.items():
            new = change(name)
            if new in renamed:
                raise CheckpointError(f"two tensors would be called {new!r}, one of them {name!r}")
            renamed[new] = entry
        self._tensors, self._changes = renamed, {change(name): delta for name, delta in self._changes.items()}
        return self

    def strip(self, *prefixes: str) -> Weights:
        """`bert.encoder...` and `encoder...` are one checkpoint, exported by two programs."""
        return self.rename(lambda name: next((name.removeprefix(p) for p in prefixes if name.startswith(p)), name))

    def change(self, changes: Mapping[str, Change]) -> Weights:
        """Adds to the tensors of these names when they are read, in f32. CheckpointError for a name that there is no tensor of, or
        that is quantised."""
        for name in changes:
            self._entry(name)
            if f"{name.removesuffix('weight')}scales" in self._tensors:
                raise CheckpointError(f"{name} is quantised and cannot be changed; use the adapter with the weights it was trained on")
        self._changes = changes
        return self

    def at(self, scope: str) -> Weights:
        view = object.__new__(Weights)
        view.__dict__ = self.__dict__ | {"_prefix": f"{self._prefix}{scope}."}
        return view

    # ---- handing out

    def has(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name).shape)

    def _entry(self, name: str) -> Any:
        full = self._prefix + name
        if full not in self._tensors:
            near = get_close_matches(full, self._tensors, 3, 0.5)
            raise CheckpointError(f"the checkpoint has no {full!r}; nearest: {', '.join(near) or 'nothing like it'}")
        return self._tensors[full]

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor on the backend; CheckpointError where it is missing or not of the shape the config promises."""
        full, entry = self._taken(name, shape)
        x = self._backend.read(entry)
        return self._backend.shifted(x, self._changes[full]()) if full in self._changes else x

    def _taken(self, name: str, shape: tuple[int, ...] | None) -> tuple[str, Any]:
        full, entry = self._prefix + name, self._entry(name)
        if shape is not None and tuple(entry.shape) != shape:
            raise CheckpointError(f"{full} has shape {list(entry.shape)}; the config promises {list(shape)}")
        self._used.add(full)
        return full, entry

    def _quantised(self, name: str, rows: int, width: int) -> tuple[Tensor, tuple[Tensor, Tensor, int, int]]:
        """The packed words of [rows, width] with (scales, biases, bits, group size); bits follow from the shapes."""
        full = f"{self._prefix}{name}"
        if not self.has(f"{name}.biases"):
            raise CheckpointError(f"{full} is quantised without biases (mxfp4, nvfp4 or another mode that is not affine); known: affine")
        words, scales = self.tensor(f"{name}.weight"), self.tensor(f"{name}.scales")
        bits, rest = divmod(32 * words.shape[-1], width)
        group_size, odd = divmod(width, scales.shape[-1])
        if rest or odd or words.shape[0] != rows or bits not in BITS or group_size not in GROUP_SIZES:
            raise CheckpointError(
                f"{full}.weight packs [{rows}, {width}] into {list(words.shape)} words with {list(scales.shape)} scales; "
                f"known: {', '.join(map(str, BITS))} bits in groups of {', '.join(map(str, GROUP_SIZES))}")
        biases, _ = self.tensor(f"{name}.biases", (rows, width // group_size)), self.tensor(f"{name}.scales", (rows, width // group_size))
        return words, (scales, biases, bits, group_size)

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = True) -> Linear:
        """`<name>.weight` [outputs, inputs] and, if `bias`, `<name>.bias` [outputs]."""
        linear: Linear = self._backend.Linear(*self._part(name, inputs, outputs, bias))
        return linear

    def _part(self, name: str, inputs: int, outputs: int, bias: bool) -> tuple[Any, Tensor | None, Any]:
        """Weight, bias, how it is quantised. A weight that nothing changes may stay in its file until the backend packs it."""
        quantised = None
        if self.has(f"{name}.scales"):
            weight, quantised = self._quantised(name, outputs, inputs)
        elif f"{self._prefix}{name}.weight" in self._changes:
            weight = self.tensor(f"{name}.weight", (outputs, inputs))
        else:
            weight = self._backend.stored(self._taken(f"{name}.weight", (outputs, inputs))[1])
        return weight, self._bias(name, outputs, bias), quantised

    def _bias(self, name: str, width: int, wanted: bool) -> Tensor | None:
        return self.tensor(f"{name}.bias", (width,)) if wanted else None

    def linears(self, *names: str, inputs: int, outputs: int | tuple[int, ...], bias: bool = True) -> Linears:
        """Several projections of one input, called together; `outputs` is one width for all or one for each."""
        widths = (outputs,) * len(names) if isinstance(outputs, int) else outputs
        parts = [self._part(name, inputs, width, bias) for name, width in zip(names, widths, strict=True)]
        linears: Linears = self._backend.Linears(parts)
        return linears

    def embedding(self, name: str, rows: int, width: int) -> Embedding:
        """`<name>.weight` [rows, width]"""
        quantised = self.has(f"{name}.scales")
        embedding: Embedding = self._backend.Embedding(*(
            self._quantised(name, rows, width) if quantised else (self.tensor(f"{name}.weight", (rows, width)), None)))
        return embedding

    def layer_norm(self, name: str, width: int, eps: float, *, bias: bool = True) -> Norm:
        """`<name>.weight` [width] and, if `bias`, `<name>.bias` [width]."""
        norm: Norm = self._backend.LayerNorm(self.tensor(f"{name}.weight", (width,)), self._bias(name, width, bias), eps)
        return norm

    def rms_norm(self, name: str, width: int, eps: float, *, offset: float = 0.0) -> Norm:
        """`<name>.weight` [width]; offset 1.0 is Gemma's `1 + weight`."""
        norm: Norm = self._backend.RMSNorm(self.tensor(f"{name}.weight", (width,)), eps, offset)
        return norm

    def depthwise(self, name: str, width: int, taps: int, *, bias: bool = False) -> Depthwise:
        """`<name>.weight` [width, 1, taps], or [width, taps, 1] as MLX stores it, and, if `bias`, `<name>.bias` [width]."""
        weight = self.tensor(f"{name}.weight")
        if tuple(weight.shape) not in ((width, 1, taps), (width, taps, 1)):
            promised = f"[{width}, 1, {taps}] or [{width}, {taps}, 1]"
            raise CheckpointError(f"{self._prefix}{name}.weight has shape {list(weight.shape)}; the config promises {promised}")
        depthwise: Depthwise = self._backend.Depthwise(weight.reshape(width, taps).T, self._bias(name, width, bias))
        return depthwise

    # ---- strict at the end

    def close(self, dropped: Iterable[str] = ()) -> None:
        """`dropped`: regular expressions for names a family has no use for. Only what nobody asked for is judged by them,
        so a classifier may take what the plain model drops."""
        patterns = [re.compile(p) for p in dropped]
        left = sorted(name for name in self._tensors.keys() - self._used if not any(p.search(name) for p in patterns))
        if left:
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            raise CheckpointError(f"the checkpoint is not what its config says: the model has no use for {', '.join(left[:8])}{more}")


def one_label(w: Weights, name: str) -> int:
    """1, where the head `<name>.weight` has one row; what config.json says of labels is often wrong."""
    labels = w.shape(f"{name}.weight")[0]
    if labels != 1:
        raise CheckpointError(f"reranker sequence classifiers must expose exactly one output label, this checkpoint has {labels}")
    return 1


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.name not in SKIPPED_WEIGHTS)
