"""`/metrics` for Prometheus: the requests this process answered, and what the models count, by model, lane and instance.

What models count comes through the client, wherever they run. Where several web processes share a port, set PROMETHEUS_MULTIPROC_DIR to an
empty directory and the requests of all of them are added up (prometheus-client's own way)."""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from inference.client import get_client
from inference.errors import ServiceError
from inference.wire import STAGES, Lane, State

BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
LANES: tuple[Lane, ...] = get_args(Lane)
MODEL, BY_LANE, BY_STAGE = (("model", "kind", "instance", *more) for more in ((), ("lane",), ("stage",)))

disable_created_metrics()  # type: ignore[no-untyped-call]
REQUESTS = Counter("mlxcel_http_requests", "Answered requests.", ("method", "route", "status"))
DURATION = Histogram(
    "mlxcel_http_request_duration_seconds", "From the request's arrival to its answer.", ("method", "route"), buckets=BUCKETS)
ERRORS = Counter("mlxcel_http_errors", "Errors answered, by the `type` that callers see.", ("type", "status"))

# What an engine counts, by its names there: (metric, help).
LANE_COUNTERS = {
    "requests": ("mlxcel_model_requests", "Jobs that arrived, refused ones included."),
    "rejected": ("mlxcel_model_rejected", "Jobs refused because too many were waiting."),
    "dropped": ("mlxcel_model_dropped", "Sequences dropped unrun, because nobody waited for them any more."),
}
COUNTERS = {
    "sequences": ("mlxcel_model_sequences", "Texts, token lists or pairs that arrived."),
    "shared": ("mlxcel_model_shared", "Of these, answered by an equal one in flight."),
    "failed": ("mlxcel_model_failed", "Sequences whose forward pass failed."),
    "retried": ("mlxcel_model_retried", "Sequences run again one by one, because their pack failed."),
    "restarts": ("mlxcel_model_restarts", "Times a worker of this model was started anew."),
}
LANE_GAUGES = {
    "waiting": ("mlxcel_model_waiting", "Jobs waiting for their first forward pass."),
    "queued": ("mlxcel_model_queued", "Jobs waiting in the broker for any worker of the model."),
}


class Measured:
    """Counts and times every answer, and adds the whole time to its `Server-Timing`."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        began = time.perf_counter()
        response = self.get_response(request)
        seconds = time.perf_counter() - began
        method = request.method if request.method in METHODS else "other"
        route = f"/{request.resolver_match.route}" if request.resolver_match else "unmatched"
        REQUESTS.labels(method, route, response.status_code).inc()
        DURATION.labels(method, route).observe(seconds)
        stages = [response["Server-Timing"]] if "Server-Timing" in response else []
        response["Server-Timing"] = ", ".join([*stages, f"total;dur={seconds * 1000:.2f}"])
        return response


class Models(Collector):
    """What `InferenceClient.health` tells, at the moment it is asked."""

    def collect(self) -> Iterator[Metric]:
        try:
            models: Mapping[str, Any] = get_client().health()["models"]
        except ServiceError:
            models = {}
        state = GaugeMetricFamily("mlxcel_model_state", "1 for the state a model is in.", labels=("model", "kind", "state"))
        for model, entry in models.items():
            for name in get_args(State):
                state.add_metric((model, entry.get("kind", ""), name), float(entry["state"] == name))
        yield state
        counted = [((model, entry.get("kind", ""), instance), counters) for model, entry in models.items()
                   for instance, counters in entry.get("instances", {"web": entry}).items()]
        yield from _engines(counted)
        queued = GaugeMetricFamily(*LANE_GAUGES["queued"], labels=("model", "kind", "lane"))
        for model, entry in models.items():
            for lane in LANES:
                if (value := entry.get(f"queued_{lane}")) is not None:
                    queued.add_metric((model, entry.get("kind", ""), lane), value)
        yield queued


def _engines(counted: list[tuple[tuple[str, str, str], Mapping[str, Any]]]) -> Iterator[Metric]:
    for name, about in LANE_COUNTERS.items():
        counter = CounterMetricFamily(*about, labels=BY_LANE)
        for labels, counters in counted:
            for lane in LANES:
                if (value := counters.get(f"{name}_{lane}")) is not None:
                    counter.add_metric((*labels, lane), value)
        yield counter
    for name, about in COUNTERS.items():
        counter = CounterMetricFamily(*about, labels=MODEL)
        for labels, counters in counted:
            if (value := counters.get(name)) is not None:
                counter.add_metric(labels, value)
        yield counter
    waiting = GaugeMetricFamily(*LANE_GAUGES["waiting"], labels=BY_LANE)
    wait = SummaryMetricFamily("mlxcel_model_queue_seconds", "Seconds that sequences waited before they were run.", labels=BY_LANE)
    broker = SummaryMetricFamily("mlxcel_model_broker_seconds", "Seconds that jobs waited in the broker for a worker.", labels=BY_LANE)
    stages = CounterMetricFamily("mlxcel_model_stage_seconds", "Seconds in each stage: of `queue` summed over sequences, of `forward` "
                                 "over packs, else over jobs.", labels=BY_STAGE)
    packs = SummaryMetricFamily("mlxcel_model_pack_tokens", "Tokens of forward passes.", labels=MODEL)
    stalled = GaugeMetricFamily("mlxcel_model_stalled_seconds", "Since work was there to do and none of it got done.", labels=MODEL)
    for labels, counters in counted:
        for lane in LANES:
            if f"waiting_{lane}" in counters:
                waiting.add_metric((*labels, lane), counters[f"waiting_{lane}"])
            if f"taken_{lane}" in counters:
                wait.add_metric((*labels, lane), counters[f"taken_{lane}"], counters[f"queue_seconds_{lane}"])
            if f"brokered_{lane}" in counters:
                broker.add_metric((*labels, lane), counters[f"brokered_{lane}"], counters[f"broker_seconds_{lane}"])
        for stage in STAGES:
            if f"{stage}_seconds" in counters:
                stages.add_metric((*labels, stage), counters[f"{stage}_seconds"])
        if "packs" in counters:
            packs.add_metric(labels, counters["packs"], counters["tokens"])
        if "stalled_seconds" in counters:
            stalled.add_metric(labels, counters["stalled_seconds"])
    yield from (waiting, wait, broker, stages, packs, stalled)


def registry() -> CollectorRegistry:
    found = CollectorRegistry()
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        MultiProcessCollector(found)  # type: ignore[no-untyped-call]
    else:
        found.register(REGISTRY)      # a registry collects like what is registered in one
    found.register(Models())
    return found


@csrf_exempt
@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(registry()), content_type=content_type)
