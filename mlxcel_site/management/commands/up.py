"""`manage.py up`: everything on this machine at once, as processes that a crash of one does not take down."""
from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from django.conf import settings as site
from django.core.management.base import BaseCommand, CommandError, OutputWrapper

from inference.client import connect
from inference.config import LANE, Settings
from inference.errors import ConfigError, ServiceError
from mlxcel_site import guardian
from mlxcel_site.auth import load_keys
from mlxcel_site.management.commands.serve import USAGE, claim, refuse_openness

LONGEST_PAUSE = 30.0       # between two starts of a worker that keeps ending
WORKER = ("worker", "-P", "threads", "-l", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat")
CELERY = ("-m", "celery", "-q", "-A", "inference.app", *WORKER)
BULK = ("-m", "celery", "-q", "-A", "mlxcel_site", *WORKER, "-Q", "bulk", "-c", "2")
COLOURS = (36, 33, 32, 35, 34)


class Command(BaseCommand):
    help = ("Start Redis (unless MLXCEL_REDIS_URL names one), a worker process for each configured model, a bulk worker and the web, "
            "and stop them all with Ctrl-C. What ends is started again.")
    requires_system_checks = []      # `serve` runs them

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1; any but this machine's own needs a key)")
        parser.add_argument("--port", type=int, default=8080, help="port to listen on (8080)")
        parser.add_argument("--web-processes", type=int, metavar="N", help="web processes that share the port (2)")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            settings = Settings.from_env()
            keys = load_keys(os.environ.get("MLXCEL_API_KEYS", ""), os.environ.get("MLXCEL_API_KEY_FILE", ""))
        except ConfigError as error:
            raise CommandError(str(error), returncode=USAGE) from None
        host, port = options["host"], options["port"]
        refuse_openness(host, keys, "Set MLXCEL_API_KEYS or MLXCEL_API_KEY_FILE")      # now, not when the models are loaded
        claim(host, port)
        models = [*settings.embedding_models, *settings.reranker_models]
        if not models:
            raise CommandError("no model is configured: set MLXCEL_EMBEDDING_MODEL or MLXCEL_RERANKER_MODEL", returncode=USAGE)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        with ExitStack() as running:
            self._guard = running.enter_context(Guardian(len(models) + 2 + (not settings.redis_url)))
            url = settings.redis_url or self._redis(running)
            workers = [self._start(running, f"worker {_basename(model)}", *CELERY, "-n", f"{_basename(model)}-{os.getpid()}@%h",
                                   MLXCEL_REDIS_URL=url, MLXCEL_WORKER_MODEL=model) for model in models]
            self._wait_ready(workers, url, stop)
            if stop.is_set():
                return
            self._start(running, "bulk", *BULK, "-n", f"bulk-{os.getpid()}@%h", MLXCEL_REDIS_URL=url, MLXCEL_TRANSPORT=LANE)
            web = self._start(running, "web", "manage.py", "serve", "--host", host, "--port", str(port),
                              *(("--web-processes", str(options["web_processes"])) if options["web_processes"] else ()),
                              MLXCEL_REDIS_URL=url, MLXCEL_TRANSPORT=LANE)
            self._wait_listening(web, host, port, stop)
            if not settings.redis_url:
                self.stdout.write(f"\nFor commands such as embed_corpus --workers celery:\n  export MLXCEL_REDIS_URL={url}\n")
            while not stop.wait(0.2):
                self._guard.keep_alive()
                for role in self._guard.roles:
                    role.keep_alive()
            self.stdout.write("Stopping ...")

    def _start(self, running: ExitStack, name: str, *command: str, **environment: str) -> Role:
        role = Role(name, (sys.executable, *command), environment, self.stdout, self._guard)
        running.callback(role.stop)
        return role

    def _redis(self, running: ExitStack) -> str:
        """A Redis for this run, on a socket that only this user can open; nothing of it is kept."""
        if (program := shutil.which("redis-server")) is None:
            raise CommandError("redis-server is not installed, and MLXCEL_REDIS_URL is not set. "
                               "Debian: apt install redis-server; macOS: brew install redis")
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="mlxcel-", ignore_cleanup_errors=True))
        self._guard.tell(f"folder {folder}")
        path, log = Path(folder, "redis.sock"), Path(folder, "redis.log")
        role = Role("redis", (program, "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700", "--save", "", "--dir", folder,
                              "--logfile", str(log)), {}, self.stdout, self._guard)
        running.callback(role.stop)
        for _ in range(200):
            if path.exists():
                return f"unix://{path}"
            if role.process.poll() is not None:
                break
            time.sleep(0.05)
        raise CommandError(f"redis-server did not start: {log.read_text() if log.exists() else ''}")

    def _wait_listening(self, web: Role, host: str, port: int, stop: threading.Event) -> None:
        """A web that ends before it ever listened has something to say about the configuration."""
        while not stop.wait(0.2):
            if (status := web.process.poll()) is not None:
                raise CommandError("the web server ended", returncode=status or 1)
            with suppress(OSError), socket.create_connection((host, port), 1):
                return

    def _wait_ready(self, workers: list[Role], url: str, stop: threading.Event) -> None:
        """Until every model is served. A worker that ends before it ever served has something to say about the configuration."""
        client = connect(Settings(redis_url=url, transport=LANE))
        try:
            client.load()
            while not stop.wait(0.2):
                if ended := [worker for worker in workers if worker.process.poll() is not None]:
                    raise CommandError(f"{ended[0].name} ended before it served its model")
                states = [model.state for model in client.models()]
                if len(states) >= len(workers) and all(state == "ready" for state in states):
                    return
        except ServiceError as error:
            raise CommandError(str(error)) from None
        finally:
            client.close()


class Guardian:
    """The process that stops all others should this one be killed (mlxcel_site/guardian.py). It notices by the end of a pipe that nobody
    else holds open, or only until it has told its number. It also keeps open what the others write to: a worker of Celery's that cannot
    say that it stops does not stop."""

    def __init__(self, places: int) -> None:
        self.outputs = [os.pipe() for _ in range(places)]
        self._told: list[str] = []
        self.roles: list[Role] = []
        self._run()

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.pipe)
        self._process.wait()

    def add(self, role: Role) -> int:
        """Its place: those that come later are stopped sooner."""
        self.roles.append(role)
        return len(self.roles) - 1

    def tell(self, line: str) -> None:
        self._told.append(line)
        os.write(self.pipe, f"{line}\n".encode())

    def keep_alive(self) -> None:
        """Starts it again, with all that it has to know, should someone have killed it."""
        if self._process.poll() is not None:
            os.close(self.pipe)
            self._run()
            alive = (f"role {place} {role.process.pid}" for place, role in enumerate(self.roles) if role.process.poll() is None)
            for line in (*self._told, *alive):
                os.write(self.pipe, f"{line}\n".encode())

    def _run(self) -> None:
        end, self.pipe = os.pipe()
        read = [output for output, _ in self.outputs]
        self._process = subprocess.Popen([sys.executable, "-I", "-S", guardian.__file__, *map(str, read)], stdin=end, pass_fds=read,
                                         start_new_session=True)
        os.close(end)


class Role:
    """A process, whose lines are passed on behind its name."""

    def __init__(self, name: str, command: tuple[str, ...], environment: Mapping[str, str], out: OutputWrapper, guard: Guardian) -> None:
        self.name, self._command, self._out = name, command, out
        self._environment = {key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"} | {
            "PYTHONUNBUFFERED": "1", **environment}
        self._guard, self._place = guard, guard.add(self)
        self._colour = COLOURS[self._place % len(COLOURS)]
        self._pause, self._again = 0.5, 0.0
        self._output, self._input = guard.outputs[self._place]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._run()

    def keep_alive(self) -> None:
        """Starts it again when it has ended, after a pause that grows while it keeps ending."""
        if self.process.poll() is None:
            return
        now = time.monotonic()
        if not self._again:
            self._pause = 1.0 if now - self._started > 60 else min(self._pause * 2, LONGEST_PAUSE)
            self._again = now + self._pause
            self._say(f"ended with status {self.process.returncode}; starting it again in {self._pause:.0f} s")
        elif now >= self._again:
            self._again = 0.0
            self._run()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(guardian.STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._say(f"did not stop within {guardian.STOP_SECONDS:.0f} s and is killed")
                self.process.kill()
                self.process.wait()
        os.close(self._input)
        self._reader.join(2)

    def _run(self) -> None:
        # A session of its own: Ctrl-C reaches this command alone, which then stops the others in their order.
        self.process = subprocess.Popen(
            guardian.announced(self._place, self._command), cwd=site.BASE_DIR, env=self._environment, stdin=self._guard.pipe,
            stdout=self._input, stderr=subprocess.STDOUT, start_new_session=True)
        self._started = time.monotonic()

    def _read(self) -> None:
        with os.fdopen(self._output, "rb") as output:
            for line in output:
                self._say(line.decode("utf-8", "replace").rstrip())

    def _say(self, line: str) -> None:
        name = f"{self.name:<24}"
        self._out.write(f"\x1b[{self._colour}m{name}\x1b[0m {line}" if self._out.isatty() else f"{name} {line}")


def _basename(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]
