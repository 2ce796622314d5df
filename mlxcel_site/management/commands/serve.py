"""`manage.py serve`: the API, its docs and the admin, on one machine."""
from __future__ import annotations

import csv
import io
import ipaddress
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from django.core.checks import Error
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connections

from embeddings import tables
from inference.config import LANE, Settings, describe
from inference.errors import ConfigError
from mlxcel_site.auth import ApiKeys, load_keys
from mlxcel_site.serving import SAID, STOP_SECONDS

WEB_PROCESSES = 2      # one takes about 1.5 ms of Python a request, and Python runs on one CPU
USAGE = 2      # exit code of wrong usage or configuration
SETTINGS = {     # what options set, where they are given
    "api_key_file": "MLXCEL_API_KEY_FILE", "api_prefix": "MLXCEL_API_PREFIX", "mode": "MLXCEL_MODE", "pooling": "MLXCEL_EMBEDDING_POOLING",
    "embd_normalize": "MLXCEL_EMBEDDING_NORMALIZE", "embedding_batch_size": "MLXCEL_EMBEDDING_BATCH_SIZE",
    "embedding_max_length": "MLXCEL_EMBEDDING_MAX_LENGTH", "queue_depth": "MLXCEL_EMBEDDING_QUEUE_DEPTH",
    "timeout": "MLXCEL_EMBEDDING_REQUEST_TIMEOUT_SECS", "backend": "MLXCEL_BACKEND", "threads": "MLXCEL_THREADS",
}
SWITCHES = {"download": "MLXCEL_ALLOW_DOWNLOAD", "props": "MLXCEL_PROPS"}


class Command(BaseCommand):
    help = "Serve the API, its documentation and the admin."
    requires_system_checks = []     # run below, when the options have become settings

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.formatter_class = RawDescriptionHelpFormatter
        parser.epilog = "environment:\n" + "\n".join(
            f"  {name}={default}\n      {meaning}" for name, default, meaning in describe()).replace("%", "%%")
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1; any but this machine's own needs a key)")
        parser.add_argument("--port", type=int, default=8080, help="port to listen on (8080)")
        parser.add_argument("--model", action="append", metavar="MODEL",
                            help="embedding model: a directory or a Hugging Face id; may be repeated")
        parser.add_argument("--reranker-model", action="append", metavar="MODEL", help="reranker, likewise")
        only = parser.add_mutually_exclusive_group()
        only.add_argument("--embeddings", "--embedding", dest="mode", action="store_const", const="embeddings",
                          help="serve embeddings only: 501 on the routes of rerankers, which are not loaded")
        only.add_argument("--reranking", "--rerank", dest="mode", action="store_const", const="reranking",
                          help="serve rerankers only, likewise")
        parser.add_argument("--alias", action="append", metavar="NAME=MODEL", help="another name for a model; may be repeated")
        parser.add_argument("--pooling", metavar="MODE",
                            help="overrides the checkpoint's pooling: mean, cls, last or max; rank is the same as --reranking")
        parser.add_argument("--embd-normalize", metavar="P",
                            help="overrides the checkpoint's normalisation: -1 none, 0 max-absolute int16, 1 taxicab, 2 euclidean, "
                                 "or another p")
        parser.add_argument("--embedding-batch-size", metavar="N", help="items a forward pass takes at most (as its tokens allow)")
        parser.add_argument("--embedding-max-length", metavar="N", help="lowers the model's limit of tokens an item")
        parser.add_argument("--queue-depth", metavar="N", help="requests that may wait for a model; one more is answered 503 (64)")
        parser.add_argument("--timeout", metavar="SECONDS", help="seconds a request may take before it is answered 504 (120)")
        parser.add_argument("--api-prefix", metavar="PATH", help="path that everything lies under, such as /ai")
        parser.add_argument("--props", action="store_true", help="answer GET /props")
        parser.add_argument("--api-key", action="append", metavar="KEY",
                            help="key callers have to send; may be repeated. Others on this machine can see it in the list of processes: "
                                 "prefer --api-key-file or MLXCEL_API_KEYS")
        parser.add_argument("--api-key-file", metavar="FILE", help="file with one key a line")
        parser.add_argument("--insecure-no-key", action="store_true", help="listen elsewhere than on this machine without a key")
        parser.add_argument("--backend", choices=("auto", "mlx", "host"), help="what runs the models (auto)")
        parser.add_argument("--threads", type=int, metavar="N", help="worker threads of the host backend (number of CPUs)")
        parser.add_argument("--web-threads", type=int, metavar="N",
                            help="requests a web process handles at a time, waiting ones included (queue depth + 16)")
        parser.add_argument("--web-processes", type=int, metavar="N",
                            help="web processes that share the port (2 where models run in model workers, else 1, which holds them)")
        parser.add_argument("--download", action="store_true", help="fetch models that are not on this machine from the Hugging Face hub")

    def handle(self, *args: Any, **options: Any) -> None:
        _to_environment(options)
        try:
            models, keys = Settings.from_env(), load_keys(os.environ.get("MLXCEL_API_KEYS", ""), os.environ.get("MLXCEL_API_KEY_FILE", ""))
        except ConfigError as error:
            raise CommandError(str(error), returncode=USAGE) from None
        host, port = options["host"], options["port"]
        if not options["insecure_no_key"]:
            refuse_openness(host, keys, "Give --api-key-file or set MLXCEL_API_KEYS; or say --insecure-no-key")
        processes = options["web_processes"]
        if processes is None:
            processes = min(WEB_PROCESSES, os.cpu_count() or 1) if models.transport == LANE else 1
        if processes < 1:
            raise CommandError(f"--web-processes {processes}: expected 1 or more", returncode=USAGE)
        if processes > 1 and models.transport != LANE:
            raise CommandError(f"--web-processes {processes}: every web process would load its own copy of each model. Run model workers "
                               "(MLXCEL_REDIS_URL), or one web process, whose threads share the model",
                               returncode=USAGE)
        address = claim(host, port)
        from mlxcel_site.checks import check_model_settings

        if problems := [problem for problem in check_model_settings(None) if isinstance(problem, Error)]:
            raise CommandError("; ".join(f"{problem.msg} ({problem.hint})" for problem in problems), returncode=USAGE)
        try:
            tables.ensure(self.stdout.write, anywhere=True)
        except DatabaseError as error:
            raise CommandError(f"the database {tables.database()} cannot be used: {error}", returncode=USAGE) from None
        connections.close_all()
        if not _is_local(host):
            os.environ.setdefault("DJANGO_ALLOWED_HOSTS", "*")
        shown = "localhost" if host in ("127.0.0.1", "0.0.0.0", "::", "::1") else host
        prefix = f"/{os.environ.get('MLXCEL_API_PREFIX', '').strip().strip('/')}".rstrip("/")
        os.environ["MLXCEL_ORIGIN"] = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}{prefix}"
        threads = options["web_threads"] or models.queue_depth + 16
        os.environ |= {"MLXCEL_PORT": str(port), "MLXCEL_WEB_THREADS": str(threads)}
        with tempfile.TemporaryDirectory(prefix="mlxcel-web-") as folder:
            os.environ["MLXCEL_WEB_FOLDER"] = folder
            if processes > 1:
                os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", folder)
            _run(address, port, threads, processes)


def _to_environment(options: dict[str, Any]) -> None:
    """The web process starts afresh and reads only the environment."""
    if options["model"]:
        os.environ["MLXCEL_EMBEDDING_MODEL"] = ",".join(options["model"])
    if options["reranker_model"]:
        os.environ["MLXCEL_RERANKER_MODEL"] = ",".join(options["reranker_model"])
    if options["pooling"] == "rank":
        if options["mode"] == "embeddings":
            raise CommandError("--pooling rank is the same as --reranking, which contradicts --embeddings", returncode=USAGE)
        options |= {"pooling": None, "mode": "reranking"}
    if options["alias"]:
        os.environ["MLXCEL_MODEL_ALIASES"] = ",".join(options["alias"])
    if options["api_key"]:
        row = io.StringIO()
        csv.writer(row, lineterminator="").writerow(options["api_key"])
        os.environ["MLXCEL_API_KEYS"] = ",".join(filter(None, (os.environ.get("MLXCEL_API_KEYS"), row.getvalue())))
    os.environ |= {name: str(options[option]) for option, name in SETTINGS.items() if options[option] is not None}
    os.environ |= {name: "1" for option, name in SWITCHES.items() if options[option]}


def refuse_openness(host: str, keys: ApiKeys, advice: str) -> None:
    if not _is_local(host) and not keys:
        raise CommandError(f"refusing to listen on {host} without an API key: anyone who reaches this machine could use it. {advice}",
                           returncode=USAGE)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def claim(host: str, port: int) -> str:
    """The numeric address of `host`, free to listen on. Fails where granian would not: it shares ports, so a second server would take
    half of the first one's requests."""
    if not 1 <= port <= 65535:
        raise CommandError(f"cannot listen on port {port}: expected 1 to 65535", returncode=USAGE)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return str(address[0])
    except OSError as error:
        raise CommandError(f"cannot listen on {host} port {port}: {error.strerror}. Choose another with --port or --host",
                           returncode=USAGE) from None


def _run(address: str, port: int, threads: int, processes: int) -> None:
    import granian.log
    from granian import Granian
    from granian.constants import Interfaces
    from granian.log import LogLevels

    # A fresh process, not a fork of this one: MLX does not survive a fork, and no connection or lock is shared.
    multiprocessing.set_start_method("spawn", force=True)
    server = Granian(
        "mlxcel_site.serving:create", factory=True, address=address, port=port, interface=Interfaces.WSGI, workers=processes,
        blocking_threads=threads, backpressure=max(threads, 128), log_level=LogLevels.error, workers_kill_timeout=STOP_SECONDS,
    )
    status = 0

    def ended(record: logging.LogRecord) -> bool:
        """granian's line about a web process that ended by itself, which hides why, gives way to the message below."""
        nonlocal status
        if not record.getMessage().startswith("Unexpected exit from worker"):
            return True
        status = next((worker.inner.exitcode for worker in server.wrks if worker.inner.exitcode), 1)
        return False

    granian.log.logger.addFilter(ended)
    try:
        server.serve()
    except SystemExit:
        if status in (0, SAID):
            raise SystemExit(1) from None
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        raise CommandError(f"the web process {how}", returncode=1 if status < 0 else status) from None
