"""The product's settings with a database lock that is waited for one second, and a model that takes its time, one job after another."""
import time
from threading import Lock

from inference.wire import EmbedJob, EmbedResult
from mlxcel_site.settings import *  # noqa: F403
from mlxcel_site.settings import DATABASES
from tests.fakes import FakeClient

if "timeout" in DATABASES["default"].get("OPTIONS", {}):
    DATABASES["default"]["OPTIONS"]["timeout"] = 1

_one_at_a_time = Lock()


class SlowClient(FakeClient):
    def embed(self, job: EmbedJob) -> EmbedResult:
        with _one_at_a_time:
            time.sleep(0.002 * len(job.items))
            return super().embed(job)
