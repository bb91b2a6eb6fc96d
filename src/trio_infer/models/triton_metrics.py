"""Metrics of a model's own: they are kept by the server, and stand beside its own on its metrics page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal

from trio_infer.errors import InferError
from trio_infer.models.bridge import Bridge
from trio_infer.models.host import MetricKind
from trio_infer.models.triton_imports import calling_code
from trio_infer.models.triton_messages import bridge_of
from trio_infer.models.triton_tensors import TritonModelException

__all__ = ["Metric", "MetricFamily"]

_KINDS: Final[tuple[MetricKind, ...]] = ("counter", "gauge", "histogram")


class MetricFamily:
    """Metrics of one name and kind, told apart by their labels.

    Args:
        name: what they are called on the metrics page.
        description: one line, which stands there too.
        kind: `MetricFamily.COUNTER`, `GAUGE` or `HISTOGRAM`.

    Raises:
        TritonModelException: there is a family of that name and another kind, or the name can't be a metric's.
    """

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        if kind not in range(3):
            raise TritonModelException(
                f"the kind of metric '{name}' must be MetricFamily.COUNTER, GAUGE or HISTOGRAM, got {kind!r}"
            )
        self._name = str(name)
        self._kind = _KINDS[kind]
        self._bridge = bridge_of(calling_code(), "MetricFamily()")
        with _said_by_the_server():
            self._bridge.register_metric(self._name, str(description), self._kind)

    def Metric(  # noqa: N802 (Triton's name)
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """One metric of the family. It is on the metrics page as long as the model keeps it.

        Args:
            labels: text by text; the same labels give the same metric.
            buckets: upper bounds, ascending; for a histogram, which needs them, and for nothing else.

        Raises:
            TritonModelException: labels or buckets are none.
        """
        return Metric(self._bridge, self._name, self._kind, labels, buckets)


class Metric:
    """A value that the server keeps; made by `MetricFamily.Metric`. May be used from any thread."""

    def __init__(
        self,
        bridge: Bridge,
        name: str,
        kind: MetricKind,
        labels: Mapping[Any, Any] | None,
        buckets: Sequence[float] | None,
    ) -> None:
        self._made = False
        self._bridge = bridge
        self._name = name
        self._kind = kind
        self._labels = dict(labels or {})
        for key, value in self._labels.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TritonModelException(f"a label of metric '{name}' must be text by text, got {key!r}: {value!r}")
        if (kind == "histogram") != (buckets is not None):
            wants = "needs buckets" if kind == "histogram" else f"is a {kind}, which has no buckets"
            raise TritonModelException(f"metric '{name}' {wants}, got {buckets!r}")
        bounds = None
        if buckets is not None:
            bounds = [_number(name, bound) for bound in buckets]
            if any(low >= high for low, high in itertools.pairwise(bounds)):
                raise TritonModelException(f"the buckets of metric '{name}' must ascend, got {bounds}")
        with _said_by_the_server():
            bridge.change_metric(name, self._labels, "create", buckets=bounds)
        self._made = True

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge.

        Raises:
            TritonModelException: it is a histogram; or a counter, and the value is negative.
        """
        number = _number(self._name, value)
        if self._kind == "counter" and number < 0:
            raise TritonModelException(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values; "
                f"metric '{self._name}' got {value}"
            )
        self._change("increment", ("counter", "gauge"), number)

    def set(self, value: float) -> None:
        """Set a gauge.

        Raises:
            TritonModelException: it is no gauge.
        """
        self._change("set", ("gauge",), _number(self._name, value))

    def observe(self, value: float) -> None:
        """Count a value into a histogram.

        Raises:
            TritonModelException: it is no histogram.
        """
        self._change("observe", ("histogram",), _number(self._name, value))

    def value(self) -> float:
        """The value of a counter or a gauge.

        Raises:
            TritonModelException: it is a histogram, which has many.
        """
        return self._change("value", ("counter", "gauge"))

    def _change(
        self,
        operation: Literal["increment", "set", "observe", "value"],
        kinds: tuple[MetricKind, ...],
        value: float = 0.0,
    ) -> float:
        if self._kind not in kinds:
            raise TritonModelException(
                f"TRITONSERVER_METRIC_KIND_{self._kind.upper()} does not support {operation.capitalize()}: "
                f"metric '{self._name}' is a {self._kind}"
            )
        with _said_by_the_server():
            return self._bridge.change_metric(self._name, self._labels, operation, value)

    def __del__(self) -> None:
        if self._made:
            with suppress(InferError):
                self._bridge.change_metric(self._name, self._labels, "remove")


@contextmanager
def _said_by_the_server() -> Iterator[None]:
    try:
        yield
    except InferError as error:
        raise TritonModelException(error.message) from None


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise TritonModelException(f"metric '{name}' is a number, got {value!r}")
    return number
