"""Clients that send slowly, or less than they said: over real sockets, against a real server."""
from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.servers import FAKE, Server, serving

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


def stalled(server: Server, sent: bytes = b"{", length: int = 28) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)
    connection.sendall(HEAD % length + sent)
    return connection


def test_stalled_clients_leave_threads_for_others_and_are_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path / "var", **FAKE) as server, ExitStack() as connections:
        clients = [connections.enter_context(stalled(server)) for _ in range(90)]
        time.sleep(0.3)
        started = time.monotonic()
        assert httpx.get(f"{server.url}/health", timeout=3).status_code == 200 and time.monotonic() - started < 2
        answers = [client.recv(4096).partition(b"\r\n")[0] for client in clients]
        assert {answer.split()[1] for answer in answers} == {b"503", b"408"}, set(answers)
        assert time.monotonic() - started < 20
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=3).status_code == 200


@pytest.mark.parametrize("sent", [HEAD % 28 + b"{", b"GET /health HTTP/1.1\r\nHo"])
def test_a_stalled_client_does_not_delay_the_end(tmp_path: Path, sent: bytes) -> None:
    with serving(tmp_path / "var", **FAKE) as server, socket.create_connection(
            ("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(sent)
        time.sleep(0.3)
        started = time.monotonic()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(15) == 0 and time.monotonic() - started < 3


def test_a_chunked_body_that_does_not_end_is_answered_and_nobody_else_is_cut_off(tmp_path: Path) -> None:
    """It parses as it is, which must not be taken for all of it. Others of the same address are served all the while."""
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n"
    with serving(tmp_path / "var", **FAKE) as server, httpx.Client() as other:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as connection:
            connection.sendall(head + b'{"input":"a"}\r\n')
            started = time.monotonic()
            while time.monotonic() - started < 11:
                assert other.post(f"{server.url}/v1/embeddings", json={"input": "b"}, timeout=3).status_code == 200
                time.sleep(0.2)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert b" 408 " in answer and b"only 13 bytes came within 10 s" in answer


def test_a_body_that_ends_early(tmp_path: Path) -> None:
    body = b'{"input":"a"}'
    with serving(tmp_path / "var", **FAKE) as server, stalled(server, body, len(body) + 15) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert b" 400 " in answer and b"the body ended after 13 of the 28 bytes announced by Content-Length" in answer
