"""Models without a server: `python -m inference embed`, `rerank` and `arch`.

The same loading, tokenising, pooling, normalisation and scoring as the server's, in this process.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .client import InferenceClient, connect
from .config import DEFAULT_MODEL, Settings, parse_normalize, parse_pooling
from .errors import InvalidRequest, ServiceError, told
from .wire import EmbedJob, InputType, RerankJob


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except ServiceError as error:
        print(f"error: {told(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inference", description="Run embedding models and rerankers without a server.")
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
    _add_common(embed)
    embed.set_defaults(run=_embed)

    rerank = commands.add_parser("rerank", help="score documents against a query and print scores and ranking")
    rerank.add_argument("-m", "--model", required=True, help="a directory, a name under the models directory, or a hub id")
    rerank.add_argument("-q", "--query", required=True, metavar="TEXT", help="what is asked")
    rerank.add_argument("-d", "--document", action="append", default=[], metavar="TEXT", help="a document to score; give it again for more")
    rerank.add_argument("--image", action="append", default=[], metavar="FILE", help="an image to score, for rerankers that take images")
    rerank.add_argument("--query-image", metavar="FILE", help="an image that belongs to the query, likewise")
    rerank.add_argument("--instruction", help="task for the generative rerankers")
    rerank.add_argument("--top-n", type=_at_least(1), metavar="N", help="rank the best N only")
    rerank.add_argument("--raw-scores", action="store_true", help="logits instead of probabilities")
    rerank.add_argument("--max-length", type=_at_least(1), metavar="N", help="lower the model's limit of tokens a pair")
    rerank.add_argument("--batch-size", type=_at_least(0), metavar="N", help="pairs a forward pass takes at most; 0 is no limit")
    _add_common(rerank)
    rerank.set_defaults(run=_rerank)

    arch = commands.add_parser("arch", help="list the model families and rerankers that can be loaded")
    arch.add_argument("--json", action="store_true", help="print one JSON object")
    arch.set_defaults(run=_arch)

    warm = commands.add_parser("warm", help="compile the kernels of the CPU backend now, so that no start has to")
    warm.set_defaults(run=_warm)
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--backend", choices=("auto", "mlx", "host"), help="where to run")
    command.add_argument("--models-dir", metavar="PATH", help="a directory of model directories")
    command.add_argument("--download", action="store_true", help="fetch the model from the Hugging Face hub if it is not on this machine")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _connect(options: argparse.Namespace, **settings: Any) -> InferenceClient:
    """A client in this process, on the environment, the options that every command has, and `settings`; None leaves one as it is."""
    common = {"MLXCEL_MODELS_DIR": options.models_dir, "MLXCEL_BACKEND": options.backend,
              "MLXCEL_ALLOW_DOWNLOAD": "1" if options.download else None}
    given = {name: str(value) for name, value in (common | settings).items() if value is not None}
    return connect(Settings.from_env({**os.environ, "MLXCEL_TRANSPORT": "inference.transports.local.LocalClient", **given}))


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
    client = _connect(
        options, MLXCEL_EMBEDDING_MODEL=options.model, MLXCEL_EMBEDDING_MAX_LENGTH=options.max_length,
        MLXCEL_EMBEDDING_BATCH_SIZE=options.batch_size, MLXCEL_EMBEDDING_POOLING=options.pooling,
        MLXCEL_EMBEDDING_NORMALIZE=options.embd_normalize)
    spec = client.describe("embedding")
    assert spec is not None
    if options.image and not spec.images:
        raise InvalidRequest(f"{options.image[0]} is an image, but {spec.id} does not accept images")
    if options.query and not spec.multi_vector:
        raise InvalidRequest(f"-q is for multi-vector models; put the query prompt of {spec.id} before a -p TEXT instead")
    if options.instruction and not spec.instructions:
        print(f"note: --instruction has no effect: {spec.id} takes none", file=sys.stderr)
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


def _rerank(options: argparse.Namespace) -> int:
    if not options.document and not options.image:
        raise InvalidRequest("nothing to score: give at least one -d TEXT")
    client = _connect(options, MLXCEL_EMBEDDING_MODEL="", MLXCEL_RERANKER_MODEL=options.model,
                      MLXCEL_RERANK_MAX_LENGTH=options.max_length, MLXCEL_RERANK_BATCH_SIZE=options.batch_size)
    spec = client.describe("reranker")
    assert spec is not None
    if not spec.images and (images := [*filter(None, [options.query_image]), *options.image]):
        raise InvalidRequest(f"{images[0]} is an image, but {spec.id} does not accept images")
    result = client.rerank(RerankJob(options.query, tuple(options.document), instruction=options.instruction,
                                     raw_scores=options.raw_scores))
    scores = _rounded(result.scores)
    ranking = np.argsort(-result.scores, kind="stable")[:options.top_n].tolist()
    if options.json:
        shown = {"model": result.model, "kind": spec.scoring, "scores": scores, "ranking": ranking,
                 "prompt_tokens": int(result.tokens.sum())}
        print(json.dumps(shown | ({"truncated": list(result.truncated)} if result.truncated else {})))
        return 0
    for score in scores:
        print(f"{score:.6g}")
    for i in result.truncated:
        print(f"note: document {i + 1} and the query are longer than {spec.max_length} tokens and were cut", file=sys.stderr)
    print("\nranking:")
    for rank, i in enumerate(ranking, 1):
        text = " ".join(options.document[i].split())
        print(f"{rank:>3}. {scores[i]:<12.6g} document {i + 1}: {text if len(text) <= 72 else text[:71] + '…'}")
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
    from . import families, rerankers
    from .loader import choose_backend, host

    known = [
        {"family": name, "kind": "embedding", "model_types": list(module.MODEL_TYPES), "architectures": list(module.ARCHITECTURES),
         "pooling": module.Model.pooling, "about": (module.__doc__ or "").strip().splitlines()[0]}
        for module in dict.fromkeys(families.model_types().values()) for name in [module.__name__.rpartition(".")[2]]]
    ways = [{"scoring": way.SCORING, "kind": "reranker", "model_types": list(way.MODEL_TYPES), "architectures": [way.ARCHITECTURES],
             "instructions": way.INSTRUCTIONS, "about": (way.__doc__ or "").strip().splitlines()[0]} for way in rerankers.ways()]
    settings = Settings.from_env()
    backend = choose_backend(settings)
    provider = host(settings).provider() if backend == "host" else None
    threads = settings.threads if provider else 1
    arithmetic = {"provider": provider.name, "precision": provider.precision} if provider else {}
    if options.json:
        print(json.dumps({"families": known, "rerankers": ways, "backend": backend, "threads": threads} | arithmetic))
        return 0
    width = max(len(entry["family"]) for entry in known)
    for entry in known:
        print(f"{entry['family']:<{width}}  embedding  model_type {', '.join(entry['model_types']):<33} pooling {entry['pooling']}")
        print(f"{'':<{width}}  {entry['about']}")
    for way in ways:
        print(f"{way['scoring']:<{width}}  reranker   model_type {', '.join(way['model_types'])}  ({', '.join(way['architectures'])})")
        print(f"{'':<{width}}  {way['about']}")
    print(f"\nbackend: {backend}" + (f", {threads} thread{'s' * (threads > 1)}, {provider.name}, {provider.precision}" if provider else ""))
    return 0


def _warm(options: argparse.Namespace) -> int:
    import time

    from .loader import choose_backend, host

    settings = Settings.from_env()
    if choose_backend(settings) != "host":
        print("nothing to compile: the backend is mlx")
        return 0
    began = time.monotonic()
    provider = host(settings).provider()
    print(f"{provider.name}, {provider.precision}: ready in {time.monotonic() - began:.1f} s"
          + (f", kept in {os.environ['NUMBA_CACHE_DIR']}" if "numba" in sys.modules else "; numba is not installed, numpy does the work"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
