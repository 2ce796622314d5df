"""One leased chunk, from its documents to its vectors: a few requests at the model, one transaction at the end, the lease kept."""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from django.db import DatabaseError, InterfaceError, connection

from inference.client import InferenceClient
from inference.errors import Busy, Conflict, InvalidRequest, NotLoaded, ServiceError, TimedOut

from . import jobs, owners, spaces
from .corpus import NewDocument
from .encoding import Encoder, Failure
from .jobs import Lease, Lost

logger = logging.getLogger(__name__)

REQUEST_DOCUMENTS = 32         # documents a request
IN_FLIGHT = 3                  # requests at the model
DATABASE_SECONDS = 300.0       # how long a database that is away is waited for with vectors in hand


def run(lease: Lease, client: InferenceClient) -> bool:
    """Embeds and stores a chunk; False where it was given back, lost, or ended its job. Raises nothing but what the process is told to."""
    gone = Event()
    try:
        with _kept(lease, gone):
            encoded = _encode(lease, client, gone)
            _patiently_store(lease, encoded)
        return True
    except Lost:
        logger.warning("chunk %s: the lease was lost, someone else has it", lease.chunk)
    except (Busy, NotLoaded, TimedOut) as error:
        jobs.give_back(lease, error.message)
    except ServiceError as error:
        if _may_come(error):
            jobs.give_back(lease, error.message)
        else:
            logger.error("job %s stops: %s", lease.job.pk, error.message)
            jobs.fail(lease.job, error.message)
            jobs.give_back(lease)
    except KeyboardInterrupt:
        jobs.give_back(lease)
        raise
    return False


def _may_come(error: ServiceError) -> bool:
    """A model that nobody serves at the moment."""
    return error.code == "model_not_served" or (isinstance(error, InvalidRequest) and error.param == "model")


def _encode(lease: Lease, client: InferenceClient, gone: Event) -> list[NewDocument | Failure]:
    spec = spaces.served(lease.job.collection, client)
    encoder = Encoder.of(lease.job.collection, client, spec, gone)
    records = lease.records
    parts = [records[at:at + REQUEST_DOCUMENTS] for at in range(0, len(records), REQUEST_DOCUMENTS)]
    with ThreadPoolExecutor(min(IN_FLIGHT, len(parts)), "chunk") as pool:
        running = [pool.submit(encoder.encode, part) for part in parts]
        try:
            encoded = [result for request in running for result in request.result()]
        except BaseException:
            gone.set()
            pool.shutdown(cancel_futures=True)
            raise
    if gone.is_set():
        raise Lost
    return encoded


def _patiently_store(lease: Lease, encoded: list[NewDocument | Failure]) -> None:
    """Vectors in hand are not thrown away because the database is away for a moment."""
    deadline = time.monotonic() + DATABASE_SECONDS
    while True:
        try:
            return jobs.store(lease, encoded)
        except (DatabaseError, InterfaceError) as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("chunk %s: the database is away, its vectors wait for it: %s", lease.chunk, str(error).strip().split("\n")[0])
            connection.close()
            time.sleep(1)
        except ValueError as error:
            raise Conflict(str(error)) from error


@contextmanager
def _kept(lease: Lease, gone: Event) -> Iterator[None]:
    """Renews the lease until the end, and releases its lock then. `gone` is set when it is lost."""
    ended = Event()

    def keep() -> None:
        try:
            while not ended.wait(jobs.lease_seconds() / 3):
                try:
                    jobs.renew(lease)
                except (DatabaseError, InterfaceError):
                    connection.close()      # it may be back at the next turn
        except Lost:
            gone.set()
        finally:
            connection.close()
    thread = threading.Thread(target=keep, name=f"lease-{lease.chunk}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        owners.release(lease.owner, lease.lock)
