"""HTTP callers that cost little: plain connections and prepared requests, since a client library would take more CPU than the server."""
from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from statistics import quantiles
from typing import Any

Body = dict[str, Any]


def embedding(*texts: str) -> Body:
    """What OpenAI's client sends, which asks for base64."""
    return {"input": texts[0] if len(texts) == 1 else texts, "encoding_format": "base64"}


def ask(url: str, bodies: Iterable[Body], callers: int, seconds: float = float("inf")) -> list[float]:
    """Milliseconds of each request. A caller sends its next one when it has its answer, until there are no more or the time is up."""
    return asyncio.run(_ask(url, iter(bodies), callers, time.monotonic() + seconds))


def paced(url: str, bodies: Iterable[Body], every: float, seconds: float) -> list[float]:
    """The same with a request begun every so many seconds, whether or not the ones before it are answered."""
    return asyncio.run(_paced(url, iter(bodies), every, seconds))


def p95(times: list[float]) -> float:
    return quantiles(times, n=20)[-1]


async def _ask(url: str, bodies: Iterator[Body], callers: int, until: float) -> list[float]:
    times: list[float] = []

    async def call() -> None:
        async with _Connection(url) as connection:
            while time.monotonic() < until and (body := next(bodies, None)) is not None:
                times.append(await connection.post(body))

    await asyncio.gather(*(call() for _ in range(callers)))
    return times


async def _paced(url: str, bodies: Iterator[Body], every: float, seconds: float) -> list[float]:
    async def call(number: int) -> float:
        await asyncio.sleep(every * number)
        async with _Connection(url) as connection:
            return await connection.post(next(bodies))

    return await asyncio.gather(*(call(number) for number in range(int(seconds / every))))


class _Connection:
    def __init__(self, url: str) -> None:
        self.port = int(url.rpartition(":")[2])

    async def __aenter__(self) -> _Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()

    async def post(self, body: Body) -> float:
        data = json.dumps(body).encode()
        request = (b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                   b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        started = time.perf_counter()
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await self.reader.readexactly(length)
        return (time.perf_counter() - started) * 1000
