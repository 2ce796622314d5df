"""From a checkpoint to something that runs: which family it is, what it promises, and the forward pass on a backend."""
from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, cast

import numpy as np

from . import adapters, families, ops, rerankers
from .batching import Batch
from .checkpoint import Checkpoint
from .config import Settings
from .engine import Forward
from .errors import CheckpointError, ConfigError
from .layers import dense, late_interaction
from .opened import Backend, Opened, Pooling
from .ops.safetensors import read_header
from .tokenizer import Tokenizer
from .weights import read_config
from .wire import Kind, ModelSpec

PACK_TOKENS = {"host": 512, "mlx": 8192}


def choose_backend(settings: Settings) -> Backend:
    """`auto` is mlx on Apple silicon and where MLX was installed for CUDA, else host."""
    if settings.backend != "auto":
        if settings.backend == "mlx" and importlib.util.find_spec("mlx") is None:
            raise ConfigError("MLXCEL_BACKEND=mlx, but mlx is not installed: pip install 'mlxcel[metal]', 'mlxcel[cuda]' or 'mlxcel[cpu]'")
        return settings.backend
    if importlib.util.find_spec("mlx") is None:
        return "host"
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "mlx"
    cuda = any((d.metadata["Name"] or "").lower().startswith("mlx-cuda") for d in importlib.metadata.distributions())
    return "mlx" if cuda else "host"


def embedding_family(checkpoint: Checkpoint) -> ModuleType:
    """The family that embeds this checkpoint, or a CheckpointError that says why none does."""
    name, architecture = checkpoint.model_type, checkpoint.architecture
    if architecture.endswith("ForSequenceClassification"):
        raise CheckpointError(
            f"{checkpoint.root} is a reranker (architectures[0] is {architecture}), not an embedding checkpoint; "
            "rerankers are named in MLXCEL_RERANKER_MODEL")
    family = families.model_types().get(name)
    if family is None:
        layout = "an embedding checkpoint (sentence-transformers pooling layout), but" if checkpoint.pooling else "of an unknown kind:"
        known = ", ".join(sorted(families.model_types()))
        raise CheckpointError(f"{checkpoint.root} is {layout} model_type {name!r} has no embedding family; known: {known}")
    if not (checkpoint.pools or checkpoint.late_interaction or architecture in family.ARCHITECTURES):
        raise CheckpointError(
            f"{checkpoint.root} is not an embedding checkpoint: architectures[0] is {architecture or 'missing'} and there is no pooling "
            f"module; {name} embeds as {', '.join(family.ARCHITECTURES)}")
    if accepts := getattr(family, "accepts", None):
        accepts(checkpoint)
    return family


def open_checkpoint(checkpoint: Checkpoint, settings: Settings, kind: Kind = "embedding") -> Opened:
    """Reads everything but the weights. Raises CheckpointError or ConfigError."""
    way = rerankers.find(checkpoint) if kind == "reranker" else None
    family = way.family(checkpoint) if way else embedding_family(checkpoint)
    config = read_config(family.Config, dict(checkpoint.config))
    if checkpoint.adapter:
        adapters.read(checkpoint.adapter)          # raises for one that cannot be merged
    tokenizer = Tokenizer(checkpoint.tokenizer_folder)
    lowered = settings.rerank_max_length if way else settings.max_length
    limits = [checkpoint.length_limit, *([lowered] if lowered else [])]
    if (own := getattr(config, "max_length", None)) is not None:
        limits.append(own)
    backend = choose_backend(settings)
    provider = host(settings).provider() if backend == "host" else None
    fixed = getattr(family.Model, "pooling_is_fixed", False)
    pooling = cast(Pooling, (not fixed and (settings.pooling or checkpoint.pooling)) or family.Model.pooling)
    width = getattr(config, "dims", config.hidden_size)
    late = _late_interaction(checkpoint, config, tokenizer, width, limits, settings) if checkpoint.late_interaction and not way else None
    modules = late.modules if late else () if way else dense.read(checkpoint, width)
    dims = 1 if way else modules[-1].config.out_features if modules else width
    configured = [alias for alias, target in settings.aliases.items() if target in (checkpoint.id, checkpoint.repo)]
    aliases = dict.fromkeys(name for name in (checkpoint.repo, *configured) if name and name != checkpoint.id)
    normal = late.normalize if late else checkpoint.normalize
    weights_hash = checkpoint.weights_hash(settings.cache_dir)
    stored = _weights_by_dtype(checkpoint)
    precision = provider.precision if provider else max(stored, default="f32", key=stored.__getitem__).lower()
    spec = ModelSpec(
        id=checkpoint.id, aliases=tuple(aliases), kind=kind, family=checkpoint.model_type, revision=checkpoint.revision,
        weights_hash=hashlib.sha256(f"{weights_hash}{late.signature}".encode()).hexdigest() if late else weights_hash,
        dims=dims, max_length=late.document.limit if late else min(limits), vocab_size=config.vocab_size,
        pooling="" if way else "none" if late else pooling, multi_vector=late is not None,
        normalize=-1.0 if way else settings.normalize if settings.normalize is not None else 2.0 if normal else -1.0,
        prompts={name: text for name, text in checkpoint.prompts.items() if not late or name not in late_interaction.PROMPTS},
        instructions=way.INSTRUCTIONS if way else hasattr(family, "format_text"), scoring=way.SCORING if way else "",
        backend=backend, precision=precision,
        provider=provider.name if provider else "", parameters=stored.total(), bytes=checkpoint.bytes)
    opened = Opened(checkpoint, family, config, tokenizer, backend, pooling, spec, modules, late)
    if way:
        way.Pairs(opened)                          # raises for one that could pair nothing
    return opened


def _late_interaction(checkpoint: Checkpoint, config: Any, tokenizer: Tokenizer, width: int, limits: Sequence[int],
                      settings: Settings) -> late_interaction.LateInteraction:
    if settings.pooling:
        raise ConfigError(f"MLXCEL_EMBEDDING_POOLING={settings.pooling}, but {checkpoint.id} gives a vector for every token and pools none")
    if getattr(config, "pad_to", None):
        raise CheckpointError(f"{checkpoint.root} has no Pooling module; {checkpoint.model_type} is served with one vector a text only")
    bounds = [n for n in (settings.max_length, getattr(config, "max_length", None)) if n]
    return late_interaction.read(checkpoint, tokenizer, width, bounds)


def engine_options(opened: Opened, settings: Settings) -> dict[str, Any]:
    """How an engine runs this model: MLX arrays belong to one thread, numpy's to none."""
    rows = settings.rerank_batch_size if opened.spec.kind == "reranker" else settings.batch_size
    own = {"workers": settings.threads, "anywhere": True, "around": host(settings).pack} if opened.backend == "host" else {"workers": 1}
    return own | {
        "pack_tokens": settings.batch_tokens or PACK_TOKENS[opened.backend],
        "pack_rows": rows or None, "queue_depth": settings.queue_depth}


def host(settings: Settings) -> ModuleType:
    """The host backend as the settings want it. ConfigError where this machine cannot."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(settings.cache_dir / "kernels"))     # numba reads it when it is imported
    return ops.backend("host", library=settings.host_blas, precision=settings.host_precision, threads=settings.threads)


def load(opened: Opened) -> Forward:
    """Reads the weights. The returned function must be called on threads of this backend: for mlx, only the calling one."""
    family, checkpoint = opened.family, opened.checkpoint
    weights = adapters.weights(checkpoint, opened.backend, family.PREFIXES)
    if checkpoint.colbert_ir:
        weights.rename(late_interaction.rename)
    model, chain = family.Model(weights, opened.config), dense.Chain(weights, opened.dense)
    weights.close((*family.DROPPED, *chain.dropped))
    if opened.late:
        return partial(late_interaction.forward, model, chain)

    def forward(sequences: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        batch = Batch.of(sequences)
        return list(ops.numpy(chain(ops.pool(model(batch), batch.segments, opened.pooling)))[:, None])

    return forward


def _weights_by_dtype(checkpoint: Checkpoint) -> Counter[str]:
    """How many numbers of each stored type the weight files hold, by their headers alone."""
    found: Counter[str] = Counter()
    for file in checkpoint.weight_files:
        for entry in read_header(file).values():
            found[entry.dtype] += math.prod(entry.shape)
    return found
