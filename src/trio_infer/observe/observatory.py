"""All that watches one server, put together: what the server tells of each request, and what can be asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from trio_infer.lifecycle import LifeWatcher
from trio_infer.observe.custom_metrics import CustomMetrics
from trio_infer.observe.live_models import LiveModel
from trio_infer.observe.log_settings import LogSettings
from trio_infer.observe.metrics_policy import MetricsPolicy
from trio_infer.observe.model_statistics import ModelStatistics
from trio_infer.observe.statistics import RequestCounters
from trio_infer.observe.trace_log import TraceLog
from trio_infer.observe.trace_settings import TraceSettings

if TYPE_CHECKING:  # prometheus-client takes a sixth of a second to import
    from trio_infer.observe.metrics import Collector

__all__ = ["Observatory"]


class Observatory:
    """What watches the lives of one server's requests.

    Args:
        metrics: what `/metrics` has; None for no metrics.
        live: gives each model that is loaded or drains.
        blocked: gives, for each model that has blocked the event loop, how often and for how many seconds.
        connections: how many are open.
        traces: what is traced; None for the defaults.
        logs: what is logged; None if that is for another program to say.

    Attributes:
        requests: counters of clients' requests.
        models: each model's books.
        custom: metrics that models keep.
        traces, logs: settings.
        collector: of all metrics, for `/metrics` or a registry of your own; None without metrics.
    """

    def __init__(
        self,
        metrics: MetricsPolicy | None = None,
        *,
        live: Callable[[], Iterable[LiveModel]] = tuple,
        blocked: Callable[[], Iterable[tuple[str, int, float]]] = tuple,
        connections: Callable[[], int] = int,
        traces: TraceSettings | None = None,
        logs: LogSettings | None = None,
    ) -> None:
        self.requests: RequestCounters = RequestCounters()
        self.models: ModelStatistics = ModelStatistics(quantiles=metrics is not None and metrics.summary_latencies)
        self.custom: CustomMetrics = CustomMetrics()
        self.traces: TraceSettings = traces or TraceSettings()
        self.logs: LogSettings | None = logs
        self._trace_log = TraceLog(self.traces)
        self.collector: Collector | None = None
        if metrics is not None:
            from trio_infer.observe.metrics import Collector

            self.collector = Collector(
                self.models,
                self.requests,
                metrics,
                live=live,
                blocked=blocked,
                connections=connections,
                others=[self.custom],
            )

    @property
    def watchers(self) -> Sequence[LifeWatcher]:
        """What must be told of each life."""
        if not self.traces.of()["trace_file"]:  # which is given at the start or never
            return (self.requests, self.models)
        return (self.requests, self.models, self._trace_log)

    def close(self) -> None:
        """No more will come."""
        self._trace_log.close()

    def model_loaded(self, name: str, version: str, *, decoupled: bool, cached: bool, seconds: float) -> None:
        """A version of a model is served: open its books, all zero."""
        self.models.add(name, version, decoupled=decoupled, cached=cached, load_seconds=seconds)

    def model_unloaded(self, name: str, version: str) -> None:
        """It is served no more: close its books."""
        self.models.remove(name, version)

    def exposition(self) -> tuple[str, bytes] | None:
        """The content type and the text of `/metrics`; None without metrics."""
        if self.collector is None:
            return None
        from trio_infer.observe.exposition import CONTENT_TYPE, write_text

        return CONTENT_TYPE, write_text(self.collector.collect())
