"""Reading request bodies, so that clients that send none of what they announced cannot keep the server from everyone else.

A read takes a thread until the body is there, and the WSGI server offers no timed one. So at most a share of the threads reads at any
time, and a body that is not there after LIMIT seconds is cut off: the connection is closed for reading, the read returns what there was,
and the request is answered 408. Which connection a request came by is not told; an address is cut off as a whole, and only while
nothing else of it is being answered. A proxy in front that buffers bodies does this better.
"""
from __future__ import annotations

import io
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from django.conf import settings

from inference.errors import Busy, InvalidRequest, ServiceError

from .errors import respond

LIMIT = 10.0                     # seconds
STOPPING = 1.0                   # seconds that a body may take once the server is told to stop
PATIENCE = 0.25                  # seconds to wait for a turn to read
LAST_RECEIVED = 52               # in Linux' struct tcp_info: milliseconds since data came, u32


class BodyTimeout(ServiceError):
    status = 408
    type = "invalid_request_error"


class Bodies:
    """WSGI middleware: `wsgi.input` is read whole at its first use, by at most `readers` requests at a time."""

    def __init__(self, application: Callable[..., Iterable[bytes]], readers: int, limit: float = LIMIT) -> None:
        self.application, self.limit = application, limit
        self._turns, self._lock = threading.Semaphore(readers), threading.Lock()
        self._active: dict[object, tuple[str, float | None]] = {}        # address, since when it reads
        self._some = threading.Event()
        self._watcher: threading.Thread | None = None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        token, address = object(), environ.get("REMOTE_ADDR", "")
        self._active[token] = address, None
        environ["wsgi.input"] = Body(self, environ, token)
        try:
            if environ.get("HTTP_TRANSFER_ENCODING", "").lower() == "chunked" and not environ.get("CONTENT_LENGTH"):
                environ["CONTENT_LENGTH"] = str(environ["wsgi.input"].whole())       # Django asks for a length
            return self.application(environ, start_response)
        except ServiceError as error:
            response = respond(error)
            start_response(f"{response.status_code} {response.reason_phrase}", [*response.items(), ("Connection", "close")])
            return [response.content]
        finally:
            del self._active[token]

    def read(self, token: object, stream: Any, length: int | None) -> bytes:
        """At most one byte over the limit is read; Django then refuses it as it does any other body that is too long."""
        wanted = settings.DATA_UPLOAD_MAX_MEMORY_SIZE + 1
        wanted = wanted if length is None else min(length, wanted)
        if not self._turns.acquire(timeout=PATIENCE):
            raise Busy("too many requests are sending their bodies slowly")
        address, _ = self._active[token]
        started = time.monotonic()
        self._active[token] = address, started
        self._watch()
        try:
            pieces, left = [], wanted
            while left and (piece := stream.read(left if length is not None else min(left, 1 << 20))):
                pieces.append(piece)
                left -= len(piece)
        finally:
            self._turns.release()
            self._active[token] = address, None
        if left and time.monotonic() - started >= self.limit:
            announced = "" if length is None else f" of the {length} announced by Content-Length"
            raise BodyTimeout(f"only {wanted - left} bytes{announced} came within {self.limit:g} s")
        if left and length is not None:
            raise InvalidRequest(f"the body ended after {wanted - left} of the {length} bytes announced by Content-Length")
        return b"".join(pieces)

    def stop(self) -> None:
        """Whoever still sends gets STOPPING seconds from now."""
        self.limit = min(self.limit, STOPPING)

    def hang_up(self) -> None:
        """Once nothing is being answered, cuts off connections on which a request has only begun: the server would wait for them."""
        while True:
            time.sleep(0.5)
            if not self._active:
                cut_off(None)

    def _watch(self) -> None:
        if self._watcher is None:
            with self._lock:
                if self._watcher is None:
                    self._watcher = threading.Thread(target=self._keep_time, name="body-timeouts", daemon=True)
                    self._watcher.start()
        if not self._some.is_set():
            self._some.set()

    def _keep_time(self) -> None:
        while self._some.wait():
            time.sleep(min(self.limit / 10, 0.5))
            now, active = time.monotonic(), list(self._active.values())
            if not any(since is not None for _, since in active):
                self._some.clear()
                if any(since is not None for _, since in list(self._active.values())):      # it came in between
                    self._some.set()
                continue
            overdue = {address for address, since in active if since is not None and now - since >= self.limit}
            for address in overdue - {address for address, since in active if since is None or now - since < self.limit}:
                cut_off(address)


class Body:
    """`wsgi.input`, read at its first use."""

    def __init__(self, bodies: Bodies, environ: dict[str, Any], token: object) -> None:
        self._bodies, self._stream, self._token = bodies, environ["wsgi.input"], token
        length = environ.get("CONTENT_LENGTH") or ""
        chunked = "HTTP_TRANSFER_ENCODING" in environ
        self._length = int(length) if length.isdecimal() else None if chunked else 0
        self._read: io.BytesIO | None = None

    def whole(self) -> int:
        """Reads all of it; how many bytes there are."""
        return len(self._buffer().getbuffer())

    def read(self, size: int = -1, /) -> bytes:
        return self._buffer().read(size)

    def readline(self, size: int = -1, /) -> bytes:
        return self._buffer().readline(size)

    def readlines(self, hint: int = -1, /) -> list[bytes]:
        return self._buffer().readlines(hint)

    def __iter__(self) -> Iterable[bytes]:
        return iter(self._buffer())

    def _buffer(self) -> io.BytesIO:
        if self._read is None:
            self._read = io.BytesIO(self._bodies.read(self._token, self._stream, self._length) if self._length != 0 else b"")
        return self._read


def cut_off(address: str | None) -> None:
    """Closes this process's connections from `address`, None for any, for reading, except those on which something has just come."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            peer = connection.getpeername()
            wanted = isinstance(peer, tuple) and (address is None or peer[0].removeprefix("::ffff:") == address.removeprefix("::ffff:"))
            if wanted and _served(connection):
                connection.shutdown(socket.SHUT_RD)


def _served(connection: socket.socket) -> bool:
    """A connection that came to the port we listen on, and is silent. Where the system does not say, it counts as silent."""
    if str(connection.getsockname()[1]) != os.environ.get("MLXCEL_PORT"):
        return False
    if not hasattr(socket, "TCP_INFO") or os.uname().sysname != "Linux":
        return True
    silent = struct.unpack_from("I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), LAST_RECEIVED)[0]
    return bool(silent >= 50)
