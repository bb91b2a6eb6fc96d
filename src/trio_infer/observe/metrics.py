"""Metrics for Prometheus: what the books, the counters and the machine say, as families of samples.

`FAMILIES` is the one table of all metrics of the server's own; the collector fills it in at each scrape, the docs'
table is made from it, and a model's own metrics may not take its names. Names that begin with `nv_` are Triton's, with
Triton's labels and units, so that its dashboards work; those with `trio_infer_` say what Triton doesn't: who left,
when, and what that saved.

A model or version comes into a label only from the books (see `model_statistics.py`), so the number of series is
bounded by what has been loaded, not by what clients ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import attrs
from prometheus_client.core import Metric

from trio_infer.lifecycle import CancelReason, Outcome, Phase
from trio_infer.observe.live_models import LiveModel
from trio_infer.observe.machine import Machine
from trio_infer.observe.metrics_policy import MetricsPolicy
from trio_infer.observe.model_statistics import ModelBooks, ModelStatistics, Sum
from trio_infer.observe.statistics import RequestCounters

__all__ = ["FAMILIES", "Collector", "Family", "Live"]

MICRO: Final = 1000
"""Nanoseconds in a microsecond, which is Triton's unit."""


@attrs.frozen
class Family:
    """One metric.

    Args:
        name: of the family, and of its samples.
        kind: "counter", "gauge", "histogram" or "summary".
        labels: in the order in which they are written.
        about: what it counts.
        when: what it takes for it to be there; "" if it always is.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str
    when: str = ""


_MODEL: Final = ("model", "version")
_COUNTERS: Final = "`counter_latencies=true` (the default)"
_SUMMARIES: Final = "`summary_latencies=true`"
_HISTOGRAMS: Final = "`histogram_latencies=true`"
_CACHED: Final = "`--cache-config`, of models with `response_cache`"
_PROCESSES: Final = "models that run in worker processes"
_CPU: Final = "`--allow-cpu-metrics` (the default), on Linux"

FAMILIES: Final = tuple(
    Family(*fields)
    for fields in (
        ("nv_inference_request_success", "counter", _MODEL, "Requests that were answered as asked"),
        (
            "nv_inference_request_failure",
            "counter",
            ("model", "reason", "version"),
            "Requests that were not, by reason: REJECTED, CANCELED, BACKEND or OTHER",
        ),
        ("nv_inference_count", "counter", _MODEL, "Inferences of successful requests; a batch of n counts n"),
        ("nv_inference_exec_count", "counter", _MODEL, "Runs of the model, whatever became of them"),
        (
            "nv_inference_request_duration_us",
            "counter",
            _MODEL,
            "Microseconds that successful requests took from their first byte to their last",
            _COUNTERS,
        ),
        (
            "nv_inference_queue_duration_us",
            "counter",
            _MODEL,
            "Microseconds that successful requests waited for an instance",
            _COUNTERS,
        ),
        (
            "nv_inference_compute_input_duration_us",
            "counter",
            _MODEL,
            "Microseconds that handing their inputs to the model took",
            _COUNTERS,
        ),
        (
            "nv_inference_compute_infer_duration_us",
            "counter",
            _MODEL,
            "Microseconds that the model itself took for them",
            _COUNTERS,
        ),
        (
            "nv_inference_compute_output_duration_us",
            "counter",
            _MODEL,
            "Microseconds that taking their outputs over took",
            _COUNTERS,
        ),
        ("nv_inference_pending_request_count", "gauge", _MODEL, "Requests that wait for an instance, now"),
        (
            "nv_inference_first_response_histogram_ms",
            "histogram",
            _MODEL,
            "Milliseconds from a request's first byte to its first response, of models that give any number",
            _HISTOGRAMS,
        ),
        ("nv_inference_request_summary_us", "summary", _MODEL, "Of nv_inference_request_duration_us", _SUMMARIES),
        ("nv_inference_queue_summary_us", "summary", _MODEL, "Of nv_inference_queue_duration_us", _SUMMARIES),
        (
            "nv_inference_compute_input_summary_us",
            "summary",
            _MODEL,
            "Of nv_inference_compute_input_duration_us",
            _SUMMARIES,
        ),
        (
            "nv_inference_compute_infer_summary_us",
            "summary",
            _MODEL,
            "Of nv_inference_compute_infer_duration_us",
            _SUMMARIES,
        ),
        (
            "nv_inference_compute_output_summary_us",
            "summary",
            _MODEL,
            "Of nv_inference_compute_output_duration_us",
            _SUMMARIES,
        ),
        ("nv_cache_num_hits_per_model", "counter", _MODEL, "Requests that were answered without a run", _CACHED),
        ("nv_cache_num_misses_per_model", "counter", _MODEL, "Requests that a run was made for", _CACHED),
        (
            "nv_cache_hit_duration_per_model",
            "counter",
            _MODEL,
            "Microseconds that looking up what hits asked for took",
            _CACHED,
        ),
        (
            "nv_cache_miss_duration_per_model",
            "counter",
            _MODEL,
            "Microseconds that looking up what misses asked for, and keeping their answers, took",
            _CACHED,
        ),
        ("nv_model_load_duration_secs", "gauge", _MODEL, "Seconds that loading the model took"),
        ("nv_cpu_utilization", "gauge", (), "Share of the machine's CPUs in use since the last look, 0 to 1", _CPU),
        ("nv_cpu_memory_total_bytes", "gauge", (), "Memory of the machine", _CPU),
        ("nv_cpu_memory_used_bytes", "gauge", (), "Memory in use, all programs together", _CPU),
        (
            "trio_infer_cancelled_total",
            "counter",
            ("model", "phase", "reason"),
            "Requests that were cancelled, by the phase they were struck in; model is empty if none was known yet",
        ),
        (
            "trio_infer_compute_seconds_total",
            "counter",
            ("model", "outcome"),
            "Seconds of work by what became of its request; of cancelled ones, cancelled is before the cancel and "
            "wasted after it",
        ),
        (
            "trio_infer_stop_seconds",
            "histogram",
            ("model",),
            "Seconds for which work went on after its request was cancelled under it",
        ),
        (
            "trio_infer_abandoned",
            "gauge",
            ("model",),
            "Instances that work on although their request has left, now",
        ),
        (
            "trio_infer_model_stops",
            "gauge",
            ("model", "version", "stops"),
            "1: where a cancelled run of the model ends",
        ),
        (
            "trio_infer_loop_blocked_total",
            "counter",
            ("model",),
            "How often the event loop was blocked for longer than it may be, by the model; empty if none was seen",
            "`--loop-block-ms` is not 0, and it has happened",
        ),
        (
            "trio_infer_loop_blocked_seconds_total",
            "counter",
            ("model",),
            "For how long, in all",
            "`--loop-block-ms` is not 0, and it has happened",
        ),
        (
            "trio_infer_worker_processes",
            "gauge",
            ("model", "version", "state"),
            "Processes of the model: serving in an instance's place, spare, or starting, now",
            _PROCESSES,
        ),
        (
            "trio_infer_worker_exits_total",
            "counter",
            ("model", "version", "cause"),
            "Processes of the model that have ended since it was loaded: killed after a cancel, crashed, or worn",
            _PROCESSES,
        ),
        ("trio_infer_requests_total", "counter", ("outcome",), "Requests of all kinds, by how they ended"),
        ("trio_infer_requests_in_flight", "gauge", ("phase",), "Requests of all kinds, by where they are, now"),
        ("trio_infer_connections", "gauge", (), "Connections that are open, now"),
    )
)

_FAMILY: Final = {family.name: family for family in FAMILIES}
_PARTS: Final[dict[str, Callable[[ModelBooks], Sum]]] = {
    "request": lambda books: books.success,
    "queue": lambda books: books.queue,
    "compute_input": lambda books: books.compute.input,
    "compute_infer": lambda books: books.compute.infer,
    "compute_output": lambda books: books.compute.output,
}

Live = Callable[[], Iterable[LiveModel]]
"""Gives each model that is loaded or drains."""

_CAUSES: Final = ("killed", "crashed", "worn")


class Collector:
    """All metrics of one server; may be registered in any `prometheus_client` registry, too.

    Args:
        models: the books.
        requests: counters of clients' requests.
        policy: what is left out.
        live, blocked: asked at each scrape.
        connections: how many are open.
        others: collectors of more families, such as those that models keep.
    """

    def __init__(
        self,
        models: ModelStatistics,
        requests: RequestCounters,
        policy: MetricsPolicy,
        *,
        live: Live = tuple,
        blocked: Callable[[], Iterable[tuple[str, int, float]]] = tuple,
        connections: Callable[[], int] = int,
        others: Iterable[Any] = (),
    ) -> None:
        self._models = models
        self._requests = requests
        self._policy = policy
        self._live = live
        self._blocked = blocked
        self._connections = connections
        self._others = tuple(others)
        self._machine = Machine(policy.interval_ms / 1000) if policy.cpu else None

    def collect(self) -> Iterator[Metric]:
        """The families, with what they say now."""
        made = {name: Metric(name, family.about, family.kind) for name, family in _FAMILY.items()}
        for books in self._models:
            self._of_model(made, books)
        self._of_names(made)
        self._of_server(made)
        yield from made.values()
        for other in self._others:
            yield from other.collect()

    def _of_model(self, made: dict[str, Metric], books: ModelBooks) -> None:
        labels = {"model": books.model, "version": books.version}

        def put(name: str, value: float) -> None:
            made[name].add_sample(name, labels, value)

        put("nv_inference_request_success", books.success.count)
        for reason, count in books.failures.items():
            failure = {"model": books.model, "reason": reason.value, "version": books.version}
            made["nv_inference_request_failure"].add_sample("nv_inference_request_failure", failure, count)
        put("nv_inference_count", books.rows)
        put("nv_inference_exec_count", books.executions)
        put("nv_inference_pending_request_count", books.pending)
        if books.load_seconds is not None:
            put("nv_model_load_duration_secs", books.load_seconds)
        if books.cached:
            put("nv_cache_num_hits_per_model", books.cache_hit.count)
            put("nv_cache_num_misses_per_model", books.cache_miss.count)
            put("nv_cache_hit_duration_per_model", books.cache_hit.ns // MICRO)
            put("nv_cache_miss_duration_per_model", books.cache_miss.ns // MICRO)
        if self._policy.counter_latencies:
            for part, of in _PARTS.items():
                put(f"nv_inference_{part}_duration_us", of(books).ns // MICRO)
        if self._policy.histogram_latencies and books.decoupled:
            _put_histogram(made["nv_inference_first_response_histogram_ms"], labels, [books.first_response])
        for part, latest in books.latencies.items():
            name = f"nv_inference_{part}_summary_us"
            quantiles = [quantile for quantile, _ in self._policy.summary_quantiles]
            for quantile, ns in zip(quantiles, latest.at(quantiles), strict=True):
                made[name].add_sample(name, {**labels, "quantile": f"{quantile:g}"}, ns / MICRO)
            made[name].add_sample(f"{name}_count", labels, latest.total.count)
            made[name].add_sample(f"{name}_sum", labels, latest.total.ns // MICRO)

    def _of_names(self, made: dict[str, Metric]) -> None:
        """What is counted for all versions of a model together."""
        cancelled: dict[tuple[str, Phase, CancelReason], int] = {
            ("", phase, reason): count for (phase, reason), count in self._models.nobodys.items()
        }
        by_name: dict[str, list[ModelBooks]] = {}
        for books in self._models:
            by_name.setdefault(books.model, []).append(books)
            for (phase, reason), count in books.cancelled.items():
                key = (books.model, phase, reason)
                cancelled[key] = cancelled.get(key, 0) + count
        for (model, phase, reason), count in cancelled.items():
            name = "trio_infer_cancelled_total"
            labels = {"model": model, "phase": phase.value, "reason": reason.value}
            made[name].add_sample(name, labels, count)
        for model, versions in by_name.items():
            name = "trio_infer_compute_seconds_total"
            for outcome in versions[0].compute_by_outcome:
                seconds = sum(books.compute_by_outcome[outcome] for books in versions) / 1e9
                made[name].add_sample(name, {"model": model, "outcome": outcome}, seconds)
            _put_histogram(made["trio_infer_stop_seconds"], {"model": model}, [books.stopping for books in versions])
        self._of_live(made, by_name)

    def _of_live(self, made: dict[str, Metric], known: Iterable[str]) -> None:
        """What is asked of the models themselves; two copies of one drain and serve side by side in a swap."""
        abandoned = Counter(dict.fromkeys(known, 0))
        promises: dict[tuple[str, str], str] = {}
        workers: Counter[tuple[str, str, str]] = Counter()
        exits: Counter[tuple[str, str, str]] = Counter()
        for one in self._live():
            abandoned[one.model] += one.abandoned
            promises[one.model, one.version] = one.stops
            workers.update({(one.model, one.version, state): count for state, count in one.workers.items()})
            if one.workers:
                exits.update({(one.model, one.version, cause): one.exits.get(cause, 0) for cause in _CAUSES})
        for model, count in abandoned.items():
            made["trio_infer_abandoned"].add_sample("trio_infer_abandoned", {"model": model}, count)
        for (model, version), stops in promises.items():
            labels = {"model": model, "version": version, "stops": stops}
            made["trio_infer_model_stops"].add_sample("trio_infer_model_stops", labels, 1)
        for name, label, counts in (
            ("trio_infer_worker_processes", "state", workers),
            ("trio_infer_worker_exits_total", "cause", exits),
        ):
            for (model, version, value), count in counts.items():
                made[name].add_sample(name, {"model": model, "version": version, label: value}, count)

    def _of_server(self, made: dict[str, Metric]) -> None:
        counted = self._requests.statistics()
        for outcome in Outcome:
            labels = {"outcome": outcome.value}
            name = "trio_infer_requests_total"
            made[name].add_sample(name, labels, counted.outcomes[outcome])
        for phase in Phase:
            name = "trio_infer_requests_in_flight"
            made[name].add_sample(name, {"phase": phase.value}, counted.in_flight[phase])
        for model, times, seconds in self._blocked():
            name = "trio_infer_loop_blocked"
            made[f"{name}_total"].add_sample(f"{name}_total", {"model": model}, times)
            made[f"{name}_seconds_total"].add_sample(f"{name}_seconds_total", {"model": model}, seconds)
        made["trio_infer_connections"].add_sample("trio_infer_connections", {}, self._connections())
        if self._machine is not None:
            for name, value in self._machine.look().items():
                made[name].add_sample(name, {}, value)


def _put_histogram(metric: Metric, labels: dict[str, str], histograms: list[Any]) -> None:
    """One histogram, or several of the same bounds added up."""
    columns = zip(*(histogram.cumulative() for histogram in histograms), strict=True)
    count = 0
    for column in columns:
        count = sum(seen for _, seen in column)
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": column[0][0]}, count)
    metric.add_sample(f"{metric.name}_sum", labels, sum(histogram.total for histogram in histograms))
    metric.add_sample(f"{metric.name}_count", labels, count)
