"""All that watches one server, put together: what the server tells of each request, and what can be asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from trio_infer.lifecycle import LifeWatcher
from trio_infer.observe.metrics_policy import MetricsPolicy
from trio_infer.observe.model_statistics import ModelStatistics
from trio_infer.observe.statistics import RequestCounters

if TYPE_CHECKING:  # prometheus-client takes a sixth of a second to import
    from trio_infer.observe.metrics import Collector

__all__ = ["Observatory"]


class Observatory:
    """What watches the lives of one server's requests.

    Args:
        metrics: what `/metrics` has; None for no metrics.
        abandoned: gives, for each model, its name and how many instances work on for nobody.
        connections: how many are open.

    Attributes:
        requests: counters of clients' requests.
        models: each model's books.
        collector: of all metrics, for `/metrics` or a registry of your own; None without metrics.
    """

    def __init__(
        self,
        metrics: MetricsPolicy | None = None,
        *,
        abandoned: Callable[[], Iterable[tuple[str, int]]] = tuple,
        connections: Callable[[], int] = int,
    ) -> None:
        self.requests: RequestCounters = RequestCounters()
        self.models: ModelStatistics = ModelStatistics(quantiles=metrics is not None and metrics.summary_latencies)
        self.collector: Collector | None = None
        if metrics is not None:
            from trio_infer.observe.metrics import Collector

            self.collector = Collector(
                self.models, self.requests, metrics, abandoned=abandoned, connections=connections
            )

    @property
    def watchers(self) -> Sequence[LifeWatcher]:
        """What must be told of each life."""
        return (self.requests, self.models)

    def exposition(self) -> tuple[str, bytes] | None:
        """The content type and the text of `/metrics`; None without metrics."""
        if self.collector is None:
            return None
        from trio_infer.observe.exposition import CONTENT_TYPE, write_text

        return CONTENT_TYPE, write_text(self.collector.collect())
