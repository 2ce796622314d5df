"""Models for processes that are going to be hurt: slow enough to be caught at work, and one that a certain text kills."""
from __future__ import annotations

import os
import signal
import time
from threading import Lock

from inference.wire import EmbedJob, EmbedResult
from tests.fakes import FakeClient

DEADLY = "deadly"
_one_at_a_time = Lock()


class SlowClient(FakeClient):
    """Two milliseconds a document, one request after another."""

    def embed(self, job: EmbedJob) -> EmbedResult:
        with _one_at_a_time:
            time.sleep(0.002 * len(job.items))
            return super().embed(job)


class MortalClient(SlowClient):
    """As a text that makes native code write where it should not: the process is gone, without a word."""

    def embed(self, job: EmbedJob) -> EmbedResult:
        if any(DEADLY in str(item) for item in job.items):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().embed(job)
