"""Models without a server: `python -m inference embed` and `python -m inference arch`.

The same loading, tokenising, pooling and normalisation as the server's, in this process.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .client import connect
from .config import DEFAULT_MODEL, Settings, parse_normalize, parse_pooling
from .errors import InvalidRequest, ServiceError
from .wire import EmbedJob, InputType


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except ServiceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inference", description="Run embedding models without a server.")
    commands = parser.add_subparsers(required=True, metavar="command")

    embed = commands.add_parser("embed", help="embed texts and print their vectors and similarities")
    embed.add_argument("-m", "--model", default=DEFAULT_MODEL,
                       help=f"a directory, a name under the models directory, or a hub id (default {DEFAULT_MODEL})")
    embed.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="a text to embed; give it again for more")
    embed.add_argument("-q", "--query", action="append", default=[], metavar="TEXT",
                       help="a text to embed as a query, for multi-vector models, which read the others as documents; shown first")
    embed.add_argument("--image", action="append", default=[], metavar="FILE", help="an image to embed, for models that take images")
    embed.add_argument("--instruction", help="task for families that document an instruction format")
    embed.add_argument("--dimensions", type=_at_least(1), metavar="N", help="keep the first N components and normalise again")
    embed.add_argument("--max-length", type=_at_least(1), metavar="N", help="lower the model's limit of tokens")
    embed.add_argument("--batch-size", type=_at_least(1), metavar="N", help="texts a forward pass takes at most")
    embed.add_argument("--pooling", type=_parsed(parse_pooling), metavar="MODE", help="cls, mean, max or last, instead of the checkpoint's")
    embed.add_argument("--embd-normalize", type=_parsed(parse_normalize), metavar="P", help="-1 none, 0 int16, 1, 2 or another p-norm")
    embed.add_argument("--backend", choices=("auto", "mlx", "host"), help="where to run")
    embed.add_argument("--models-dir", metavar="PATH", help="a directory of model directories")
    embed.add_argument("--download", action="store_true", help="fetch the model from the Hugging Face hub if it is not on this machine")
    embed.add_argument("--json", action="store_true", help="print one JSON object")
    embed.set_defaults(run=_embed)

    arch = commands.add_parser("arch", help="list the model families that can be loaded")
    arch.add_argument("--json", action="store_true", help="print one JSON object")
    arch.set_defaults(run=_arch)
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value
    parse.__name__ = "whole number"
    return parse


def _parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return checked


def _embed(options: argparse.Namespace) -> int:
    if not (options.prompt or options.query or options.image):
        raise InvalidRequest("nothing to embed: give at least one -p TEXT")
    env = {**os.environ, "MLXCEL_EMBEDDING_MODEL": options.model, "MLXCEL_TRANSPORT": "inference.transports.local.LocalClient"}
    for name, value in (("MLXCEL_MODELS_DIR", options.models_dir), ("MLXCEL_EMBEDDING_MAX_LENGTH", options.max_length),
                        ("MLXCEL_EMBEDDING_BATCH_SIZE", options.batch_size), ("MLXCEL_EMBEDDING_POOLING", options.pooling),
                        ("MLXCEL_EMBEDDING_NORMALIZE", options.embd_normalize), ("MLXCEL_BACKEND", options.backend),
                        ("MLXCEL_ALLOW_DOWNLOAD", "1" if options.download else None)):
        if value is not None:
            env[name] = str(value)
    client = connect(Settings.from_env(env))
    spec = client.describe("embedding")
    assert spec is not None
    if options.image and not spec.images:
        raise InvalidRequest(f"{options.image[0]} is an image, but {spec.id} does not accept images")
    if options.query and not spec.multi_vector:
        raise InvalidRequest(f"-q is for multi-vector models; put the query prompt of {spec.id} before a -p TEXT instead")
    sides: list[tuple[list[str], InputType | None]] = [(options.query, "query"), (options.prompt, None)]
    results = [client.embed(EmbedJob(tuple(texts), dimensions=options.dimensions, instruction=options.instruction, input_type=side))
               for texts, side in sides if texts]
    vectors = [vector for result in results for vector in result.vectors()]
    truncated = [i + (len(options.query) if result is not results[0] else 0) for result in results for i in result.truncated]
    similarity = _similarity(vectors, spec.multi_vector) if len(vectors) > 1 else None
    if options.json:
        shown: dict[str, Any] = {
            "model": spec.id,
            "embeddings": [_rounded(v if spec.multi_vector else v[0]) for v in vectors],
            "shapes": [list(v.shape) if spec.multi_vector else [v.shape[1]] for v in vectors],
            "prompt_tokens": sum(int(result.tokens.sum()) for result in results),
        }
        if truncated:
            shown["truncated"] = truncated
        if similarity is not None:
            shown["similarity"] = similarity.round(6).tolist()
        print(json.dumps(shown))
        return 0
    for vector in vectors:
        print(json.dumps(_rounded(vector if spec.multi_vector else vector[0])))
    for i in truncated:
        limit = "the model's limit of query tokens" if i < len(options.query) else f"{spec.max_length} tokens"
        print(f"note: text {i + 1} is longer than {limit} and was cut", file=sys.stderr)
    if similarity is not None:
        print(f"\n{'MaxSim' if spec.multi_vector else 'cosine'} similarity:")
        for row in similarity:
            print("  ".join(f"{value:8.4f}" for value in row))
    return 0


def _rounded(x: np.ndarray) -> Any:
    """f32 in its shortest decimal form, as nested lists."""
    return [_rounded(row) for row in x] if x.ndim > 1 else [float(str(value)) for value in x]


def _similarity(vectors: list[np.ndarray], multi_vector: bool) -> np.ndarray:
    """[N, N]: cosine of single vectors; of several rows each, the sum over i's rows of the best dot product among j's."""
    if multi_vector:
        return np.array([[(a @ b.T).max(1).sum() for b in vectors] for a in vectors])
    rows = np.concatenate(vectors).astype(np.float64)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return rows @ rows.T


def _arch(options: argparse.Namespace) -> int:
    from . import families
    from .loader import choose_backend

    known = [
        {"family": name, "kind": "embedding", "model_types": list(module.MODEL_TYPES), "architectures": list(module.ARCHITECTURES),
         "pooling": module.Model.pooling, "about": (module.__doc__ or "").strip().splitlines()[0]}
        for module in dict.fromkeys(families.model_types().values()) for name in [module.__name__.rpartition(".")[2]]]
    settings = Settings.from_env()
    backend = choose_backend(settings)
    if options.json:
        print(json.dumps({"families": known, "rerankers": [], "backend": backend, "threads": settings.threads if backend == "host" else 1}))
        return 0
    for entry in known:
        print(f"{entry['family']:<12} embedding  model_type {', '.join(entry['model_types']):<24} pooling {entry['pooling']}")
        print(f"{'':<12} {entry['about']}")
    print(f"\nrerankers: none\nbackend: {backend}" + (f", {settings.threads} threads" if backend == "host" else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
