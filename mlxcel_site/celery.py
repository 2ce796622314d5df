"""Bulk workers: `celery -A mlxcel_site worker -Q bulk -P threads -c 2 --without-gossip --without-mingle`.

They hold Django and no model. A message carries the id of a chunk and nothing else: who may work on it, how often it was tried and what
came of it stands in the database (embeddings/jobs.py), since what a dying worker had taken from Redis does not come back by itself.
"""
from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery, signals
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from kombu.exceptions import OperationalError
from redis import RedisError

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mlxcel_site.settings")

logger = logging.getLogger(__name__)

REAP_SECONDS = 3.0

try:
    broker = settings.BULK_BROKER
except ImproperlyConfigured as error:
    raise SystemExit(f"error: {error}") from None
if not broker:
    raise SystemExit("error: MLXCEL_REDIS_URL is not set: bulk workers are told of their work over Redis")

app = Celery("mlxcel", broker=broker.replace("unix://", "redis+socket://", 1))      # as kombu spells it
app.conf.update(
    task_default_queue="bulk",
    task_ignore_result=True,
    task_acks_late=False,                  # leases in the database decide, not the broker
    task_serializer="json",
    accept_content=["json"],
    task_store_eager_result=False,
    task_publish_retry=False,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    worker_send_task_events=False,
    worker_enable_remote_control=False,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_pool_limit=2,
    broker_transport_options={
        "visibility_timeout": 3600, "socket_timeout": 30, "socket_connect_timeout": 5, "socket_keepalive": True,
        "health_check_interval": 25, "global_keyprefix": "mlxcel:"},
)

_stopping = threading.Event()


class Room:
    """Chunks work side by side, suspects (`jobs.suspect`) alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.inside = 0
        self._alone = False
        self._asking = 0

    @contextmanager
    def entered(self, alone: bool) -> Iterator[None]:
        with self._changed:
            self._asking += alone
            self._changed.wait_for(lambda: not self.inside if alone else not (self._alone or self._asking))
            self._asking -= alone
            self._alone = alone
            self.inside += 1
        try:
            yield
        finally:
            with self._changed:
                self.inside -= 1
                self._alone = False
                self._changed.notify_all()


room = Room()


@app.task(name="embed_chunk")  # type: ignore[untyped-decorator]
def embed_chunk(chunk: int) -> None:
    """Embeds the chunk, unless it is done, someone else has it, or its job has ended."""
    from embeddings import chunks, jobs
    from inference.client import get_client

    with room.entered(alone := jobs.suspect(chunk)):
        lease = None if _stopping.is_set() else jobs.take(chunk, suspects=alone)
        if lease is not None and chunks.run(lease, get_client()):
            logger.info("chunk %s of job %s: %s documents", chunk, lease.job.pk, len(lease.records))


def send(chunks: list[int]) -> None:
    """Tells the workers of chunks. A broker that is away is no error: what waits in the database is sent again later."""
    try:
        with app.producer_or_acquire() as producer:
            for chunk in chunks:
                app.send_task("embed_chunk", [chunk], producer=producer, retry=False)
    except (OperationalError, RedisError, OSError) as error:
        logger.warning("the broker is away; what it was not told waits in the database: %s", error)


def _reap() -> None:
    """The worker's idle loop: mends what others left behind, and finds chunks whose message was lost."""
    from django.db import DatabaseError, InterfaceError, connection

    from embeddings import jobs

    while not _stopping.is_set():
        try:
            jobs.reap(idle=not room.inside)
        except (DatabaseError, InterfaceError) as error:
            logger.warning("the database cannot be used, tried again in %s s: %s", REAP_SECONDS, str(error).strip().split("\n")[0])
        except Exception:
            logger.exception("mending failed; tried again in %s s", REAP_SECONDS)
        finally:
            connection.close()
        _stopping.wait(REAP_SECONDS)


@signals.worker_ready.connect  # type: ignore[untyped-decorator]
def _started(**_: Any) -> None:
    threading.Thread(target=_reap, name="reaper", daemon=True).start()


@signals.worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _stop(**_: Any) -> None:
    _stopping.set()
