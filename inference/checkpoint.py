"""A model directory as one frozen value: what its files say, checked, before a single weight is read.

Layouts: a plain transformers export; sentence-transformers' (modules.json with Transformer, Pooling, Dense, Normalize modules, for
multi-vectors without Pooling); colbert-ir's.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .config import parse_pooling
from .errors import CheckpointError
from .resolve import Source

LENGTH_CAP = 8192                                  # tokens; what no checkpoint's own limit may exceed
LFS_POINTER = b"version https://git-lfs"
SKIPPED_WEIGHTS = ("consolidated.safetensors", "adapter_model.safetensors")      # a copy in another layout; changes to other weights
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
STRENGTH = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""What of adapter_config.json decides how much an adapter changes; the rest says what it is of and how it was trained."""
MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore", "MultiVectorMask")

LEGACY_POOLING = {                                 # flag of 1_Pooling/config.json -> mode; None: not supported
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_weightedmean_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
}


@dataclass(frozen=True)
class Checkpoint:
    """`root` is the model directory, `trunk` the one with config.json (a sub-folder in old sentence-transformers exports).

    Of a LoRA adapter without weights of its own, `trunk` is the base model's, and `root` the adapter's if it has modules.json.
    """

    root: Path
    trunk: Path
    adapter: Path | None                           # directory of adapter_config.json and adapter_model.safetensors
    id: str
    repo: str
    revision: str
    config: Mapping[str, Any] = field(repr=False)
    model_type: str
    architecture: str                              # architectures[0], "" where config.json names none
    modules: tuple[str, ...]                       # class names of modules.json, in order; empty without one
    module_folders: tuple[str, ...]                # where each stands, relative to `root`
    pooling: str | None                            # cls | mean | max | lasttoken, None where nothing is declared
    normalize: bool
    length_limit: int                              # tokens, from the side files; a family may lower it
    prompts: Mapping[str, str] = field(repr=False)

    @classmethod
    def read(cls, source: Source) -> Checkpoint:
        """Raises CheckpointError naming the file, the value and what would be accepted."""
        base = source.base or source.path
        root = source.path if (source.path / "modules.json").exists() else base
        modules = _modules(root)
        trunk = base / next((m["path"] for m in _modules(base) if m["type"] == "Transformer"), "")
        adapter = _adapter(source.path)
        if not (trunk / "config.json").exists():
            raise CheckpointError(f"{trunk} has no config.json" + instead(trunk))
        config = read_json(trunk / "config.json")
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise CheckpointError(f"{trunk / 'config.json'} names no model_type; it is not a model this server can load")
        architectures = config.get("architectures") or [""]
        normalize = config.get("normalize", True)
        if not isinstance(normalize, bool):
            raise CheckpointError(f"{trunk / 'config.json'}: normalize is {normalize!r}; expected true or false")
        st = read_json(root / "config_sentence_transformers.json", {})
        return cls(
            root=root, trunk=trunk, adapter=adapter, id=source.id, repo=source.repo, revision=source.revision, config=config,
            model_type=model_type.lower(), architecture=str(architectures[0]), modules=tuple(m["type"] for m in modules),
            module_folders=tuple(m["path"] for m in modules),
            pooling=_pooling(root, modules), normalize=normalize,
            length_limit=_length_limit(root, trunk, _tokenizer_folder(trunk, adapter)),
            prompts={k: v for k, v in (st.get("prompts") or {}).items() if isinstance(v, str)})

    @property
    def pools(self) -> bool:
        """Whether it is laid out as an embedder."""
        return self.pooling is not None or "Pooling" in self.modules

    @property
    def tokenizer_folder(self) -> Path:
        return _tokenizer_folder(self.trunk, self.adapter)

    @property
    def late_interaction(self) -> bool:
        """One vector per token: modules without a Pooling but with something behind the trunk, or the layout of colbert-ir."""
        behind = {"Dense", "MultiVectorMask"} & set(self.modules)
        return self.colbert_ir or (bool(behind) and "Pooling" not in self.modules)

    @property
    def colbert_ir(self) -> bool:
        """The projection stands in the trunk's file, the settings in artifact.metadata."""
        return not self.modules and "ColBERT" in self.architecture

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        """Every *.safetensors of the trunk, and those of the root's immediate sub-folders (2_Dense/model.safetensors)."""
        beside = (p for p in self.root.iterdir() if p.is_dir() and not p.name.startswith(".") and p != self.trunk)
        folders = [self.trunk, *sorted(beside)]
        files = tuple(f for folder in folders for f in sorted(folder.glob("*.safetensors")) if f.name not in SKIPPED_WEIGHTS)
        if not any(f.parent == self.trunk for f in files):
            raise no_weights(self.trunk)
        for file in files:
            if _is_lfs_pointer(file):
                raise _lfs_error(file)
        return files

    @property
    def _hashed(self) -> tuple[Path, ...]:
        """The files that make the weights."""
        return (*self.weight_files, self.adapter / ADAPTER[1]) if self.adapter else self.weight_files

    @cached_property
    def bytes(self) -> int:
        return sum(f.stat().st_size for f in self._hashed)

    def weights_hash(self, cache_dir: Path) -> str:
        """sha256, hex, over names and contents of the weight files. Remembered by path, size and mtime, since 16 GB take a while."""
        strength = ""
        if self.adapter:
            raw = read_json(self.adapter / ADAPTER[0])
            strength = json.dumps({name: raw.get(name) for name in STRENGTH}, sort_keys=True)
        stamp = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in self._hashed]
        key = hashlib.sha256(json.dumps([stamp, strength]).encode()).hexdigest()
        kept = cache_dir / "weights" / key
        try:
            known = kept.read_text().strip()
            if len(known) == 64:
                return known
        except OSError:
            pass
        total = hashlib.sha256()
        for file in self._hashed:
            name = file.relative_to(self.root if file.is_relative_to(self.root) else file.parent)
            with file.open("rb") as stream:
                total.update(f"{name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
        total.update(strength.encode())
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            fresh = kept.with_name(f"{key}.{os.getpid()}")
            fresh.write_text(total.hexdigest())
            fresh.replace(kept)
        except OSError:
            pass                                   # a read-only home costs time, not the answer
        return total.hexdigest()


def read_json(path: Path, missing: Any = None) -> Any:
    """A JSON object; `missing` where there is no such file. NaN and Infinity are accepted, as Python writes them."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        if missing is None:
            raise CheckpointError(f"{path} is missing") from None
        return missing
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if raw.startswith(LFS_POINTER):
        raise _lfs_error(path)
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def _lfs_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a git-lfs pointer, not the file itself: the repository was cloned without git-lfs; run `git lfs pull` in it, "
        "or fetch the model with `hf download`")


def _is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(LFS_POINTER)) == LFS_POINTER


def no_weights(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder} has no *.safetensors" + instead(folder))


def instead(folder: Path) -> str:
    """What the folder holds in place of what was looked for, as the end of a message."""
    if not folder.is_dir():
        return ": it is not a directory"
    names = {p.name for p in folder.iterdir()}
    if names & set(ADAPTER):
        base = read_json(folder / ADAPTER[0], {}).get("base_model_name_or_path")
        return f": it is a LoRA adapter{f' of {base!r}' if base else ''}, and neither that model nor its weights are here"
    if any(n.endswith((".bin", ".pt", ".pth", ".ckpt")) for n in names):
        return (": it has PyTorch pickles only, which are not loaded because they can run code; convert them once with transformers' "
                "`AutoModel.from_pretrained(...).save_pretrained(..., safe_serialization=True)` or choose a revision with safetensors")
    if any(n.endswith(".gguf") for n in names):
        return ": it has GGUF files, which are llama.cpp's; this server loads safetensors"
    if any(n.endswith(".onnx") for n in names):
        return ": it has ONNX files; this server loads safetensors"
    return f"; it holds {', '.join(sorted(names)[:8])}" if names else "; it is empty"


def _modules(root: Path) -> list[dict[str, str]]:
    path = root / "modules.json"
    if not path.exists():
        return []
    raw = path.read_bytes()
    if raw.startswith(LFS_POINTER):
        raise _lfs_error(path)
    try:
        listed = json.loads(raw)
        if not isinstance(listed, list):
            raise TypeError(f"a {type(listed).__name__}")
        modules = [{"type": str(m["type"]).rpartition(".")[2], "path": str(m.get("path", ""))} for m in listed]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a list of modules with a type: {error!r}") from None
    for module in modules:
        if Path(module["path"]).is_absolute() or ".." in Path(module["path"]).parts:
            raise CheckpointError(f"{path} names a module outside the model's directory: {module['path']!r}")
        if module["type"] not in MODULES:
            raise CheckpointError(f"{path} lists a module of type {module['type']!r}; supported: {', '.join(MODULES)}")
    return modules


def _pooling(root: Path, modules: list[dict[str, str]]) -> str | None:
    folder = next((m["path"] for m in modules if m["type"] == "Pooling"), "1_Pooling")
    path = root / folder / "config.json"
    if not path.exists():
        return None
    config = read_json(path)
    if config.get("include_prompt") is False:
        raise CheckpointError(f"{path}: include_prompt false is not supported; prompts are part of the pooled text here")
    if (mode := config.get("pooling_mode")) is not None:
        try:
            return parse_pooling(mode)
        except (ValueError, AttributeError):
            raise CheckpointError(f"{path}: pooling_mode {mode!r} is not supported; supported: cls, mean, max, lasttoken") from None
    chosen = [flag for flag in LEGACY_POOLING if config.get(flag)]
    if len(chosen) > 1:
        raise CheckpointError(f"{path}: concatenated poolings are not supported, but it sets {', '.join(chosen)}")
    if not chosen:
        return "mean"
    if (legacy := LEGACY_POOLING[chosen[0]]) is None:
        raise CheckpointError(f"{path}: {chosen[0]} is not supported; supported: cls, mean, max, lasttoken")
    return legacy


def _adapter(folder: Path) -> Path | None:
    """The directory itself where it holds an adapter. A configuration alone is what merging one has left behind."""
    config, weights = (folder / name for name in ADAPTER)
    if weights.exists():
        if not config.exists():
            raise CheckpointError(f"{folder} has {weights.name} without {config.name}, which says how it is to be merged")
        if _is_lfs_pointer(weights):
            raise _lfs_error(weights)
        return folder
    if (folder / "adapter_model.bin").exists():
        raise CheckpointError(f"{folder} holds its adapter as a PyTorch pickle, which is not loaded because it can run code; save it again "
                              "with peft's `save_pretrained(..., safe_serialization=True)`")
    return None


def _tokenizer_folder(trunk: Path, adapter: Path | None) -> Path:
    return adapter if adapter and (adapter / "tokenizer.json").exists() else trunk


def _length_limit(root: Path, trunk: Path, tokenizer: Path) -> int:
    """sentence_bert_config.json (or its older names) and tokenizer_config.json, whichever is less."""
    limits = [LENGTH_CAP]
    for folder in dict.fromkeys((root, trunk)):
        for path in sorted(folder.glob("sentence_*_config.json")):
            value = read_json(path).get("max_seq_length")
            if isinstance(value, int) and value > 0:
                limits.append(value)
    value = read_json(tokenizer / "tokenizer_config.json", {}).get("model_max_length")
    if isinstance(value, int | float) and 0 < value < 1_000_000:
        limits.append(int(value))
    return min(limits)
