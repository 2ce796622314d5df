"""The model worker: `celery -A inference.app worker -P threads`, one model a process (MLXCEL_WORKER_MODEL).

Celery is the process around it: its command line, logs, signals and remote control. Requests do not come as Celery tasks but over the
lanes, which a step of the worker drains (five times the throughput of tasks with results, a quarter of their added latency). Nothing here
may fork once a model is loaded: MLX hangs in a child of a process that has used it. Hence threads, and one process a model.
"""
from __future__ import annotations

import logging
import os
from typing import Any

from celery import Celery, bootsteps
from celery.worker import state

from .config import Settings
from .errors import ConfigError, ServiceError
from .watchdog import watch
from .worker import Worker

log = logging.getLogger(__name__)


class ModelStep(bootsteps.StartStopStep):
    """Starts and stops the model with Celery's worker."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        self.worker: Worker | None = None
        self.failure: ServiceError | None = None
        super().__init__(parent, **options)

    def start(self, parent: Any) -> None:
        if (pool := type(parent.pool).__module__.rpartition(".")[2]) != "thread":
            raise SystemExit(f"error: model workers do not run in a {pool} pool; start them with -P threads")
        try:
            settings = Settings.from_env()
            self.worker = Worker(settings, self._failed)
            self.worker.start()
            watch(self.worker.client.health, settings.stall_seconds, self.worker.abandon)
        except ServiceError as error:
            self.worker = None
            raise SystemExit(f"error: {error.message}") from None

    def stop(self, parent: Any) -> None:
        if self.worker:
            self.worker.stop()
            self.worker = None

    terminate = stop

    def _failed(self, error: ServiceError) -> None:
        log.error("%s", error.message)
        state.should_stop = os.EX_UNAVAILABLE


def create() -> Celery:
    """The Celery app over the Redis of the settings; without fixups, since Celery would otherwise look for a Django project."""
    try:
        settings = Settings.from_env()
    except ConfigError as error:
        raise SystemExit(f"error: {error.message}") from None
    if not settings.redis_url:
        raise SystemExit("error: MLXCEL_REDIS_URL is not set: a model worker gets its requests over Redis")
    broker = settings.redis_url.replace("unix://", "redis+socket://", 1)      # as kombu spells it
    made = Celery("mlxcel-models", broker=broker, fixups=[])
    made.conf.update(
        task_default_queue="mlxcel-models", task_ignore_result=True, task_serializer="json", accept_content=["json"],
        worker_pool="threads", worker_concurrency=1, worker_prefetch_multiplier=1, worker_send_task_events=False,
        worker_log_format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        broker_connection_retry_on_startup=True, broker_connection_max_retries=None,
        broker_transport_options={"socket_timeout": 30, "socket_keepalive": True, "health_check_interval": 25})
    made.steps["worker"].add(ModelStep)
    return made


app = create()
