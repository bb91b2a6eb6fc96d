"""Metrics of models' own: what `pb_utils.MetricFamily` declares and its metrics count.

They are kept here and not in the models' processes, so that they stand on one page with the server's own, and so that a
name means the same in every process. Models are the operator's own code, but a label made of a user's input is an easy
mistake, and it must not fill the memory: families, series and texts are bounded, and whoever reaches a bound is told.

A series lives as long as a metric of its labels does, in any model: "create" and "remove" are counted. A family lives
as long as one of its series; one without any is not shown, and its name may be declared anew, with another kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

import attrs

from trio_infer.errors import ErrorCode, InferError
from trio_infer.observe.model_statistics import Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["CustomMetrics"]

MOST_FAMILIES: Final = 1000
MOST_SERIES: Final = 10_000
"""Of all families together; some 5 MB, and 1 MB a scrape."""

MOST_LABELS: Final = 32
MOST_BUCKETS: Final = 128
LONGEST: Final = 1024
"""Characters of a name, a label's value or a description."""

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED: Final = ("nv_", "trio_infer_")
_SUFFIXES: Final = ("_bucket", "_sum", "_count")

_OPERATIONS: Final = {
    "counter": ("increment", "value"),
    "gauge": ("increment", "set", "value"),
    "histogram": ("observe",),
}

Kind = Literal["counter", "gauge", "histogram"]
Operation = Literal["create", "increment", "set", "observe", "value", "remove"]
_Labels = tuple[tuple[str, str], ...]


@attrs.define
class _Series:
    users: int = 0
    value: float = 0.0
    histogram: Histogram | None = None


@attrs.define
class _Family:
    kind: Kind
    about: str
    series: dict[_Labels, _Series] = attrs.field(factory=dict)


class CustomMetrics:
    """Keeps metrics for models; also a collector of them. Not for several threads at once."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._size = 0

    def register_metric(self, name: str, description: str, kind: Kind) -> None:
        """Declare a family; again is harmless if it says the same kind.

        Raises:
            InferError: there is one of that name and another kind, the name can't be a metric's, or there are too many.
        """
        if not _NAME.fullmatch(name) or len(name) > LONGEST:
            raise InferError(
                f"a metric's name must be letters, digits, '_' and ':', with no digit in front, got {_shown(name)}"
            )
        if name.startswith(_RESERVED):
            raise InferError(f"metric '{name}': names that begin with {' or '.join(_RESERVED)} are the server's own")
        family = self._families.get(name)
        if family is not None and family.series:
            if family.kind != kind:
                raise InferError(
                    f"metric '{name}' is registered as a {family.kind}, it can't be a {kind}", ErrorCode.ALREADY_EXISTS
                )
            return
        self._check_samples(name, kind)
        if name not in self._families and len(self._families) >= MOST_FAMILIES:
            self._forget_one(name)
        self._families[name] = _Family(kind, description[:LONGEST])

    def change_metric(
        self,
        name: str,
        labels: Mapping[str, str],
        operation: Operation,
        value: float = 0.0,
        buckets: Sequence[float] | None = None,
    ) -> float:
        """Create, change or read one metric of a registered family.

        Args:
            buckets: of a histogram, ascending; with "create".

        Returns:
            The value after the change; 0 for a histogram.

        Raises:
            InferError: no such family or metric, its kind has no such operation, or there are too many.
        """
        family = self._families.get(name)
        if family is None:
            raise InferError(f"metric {_shown(name)} is not registered", ErrorCode.NOT_FOUND)
        key = tuple(sorted(labels.items()))
        if operation == "create":
            return self._create(name, family, key, buckets)
        series = family.series.get(key)
        if series is None:
            raise InferError(f"metric '{name}' has no series with labels {_shown(str(dict(key)))}", ErrorCode.NOT_FOUND)
        if operation == "remove":
            series.users -= 1
            if not series.users:
                del family.series[key]
                self._size -= 1
        elif operation not in _OPERATIONS[family.kind]:
            raise InferError(
                f"TRITONSERVER_METRIC_KIND_{family.kind.upper()} does not support {operation.capitalize()}: "
                f"metric '{name}' is a {family.kind}",
                ErrorCode.UNSUPPORTED,
            )
        elif operation == "increment":
            if family.kind == "counter" and not value >= 0:
                raise InferError(
                    "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values; "
                    f"metric '{name}' got {value}"
                )
            series.value += value
        elif operation == "set":
            series.value = value
        elif operation == "observe":
            assert series.histogram is not None
            series.histogram.observe(value)
        return series.value

    def collect(self) -> Iterator[Metric]:
        """All families that have a series."""
        from prometheus_client.core import Metric

        for name, family in self._families.items():
            if not family.series:
                continue
            metric = Metric(name, family.about, family.kind)
            for key, series in family.series.items():
                labels = dict(key)
                if series.histogram is None:
                    metric.add_sample(name, labels, series.value)
                    continue
                cumulative = series.histogram.cumulative()
                for bound, count in cumulative:
                    metric.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
                metric.add_sample(f"{name}_sum", labels, series.histogram.total)
                metric.add_sample(f"{name}_count", labels, cumulative[-1][1])
            yield metric

    # -- Rules ------------------------------------------------------------------------------------------------------

    def _check_samples(self, name: str, kind: Kind) -> None:
        """No line may be of two families: a histogram `x` has lines `x_sum` and the like."""
        if kind == "histogram":
            for suffix in _SUFFIXES:
                if name + suffix in self._families:
                    raise InferError(
                        f"metric '{name}' can't be a histogram: '{name + suffix}' is registered already",
                        ErrorCode.ALREADY_EXISTS,
                    )
        for suffix in _SUFFIXES:
            owner = self._families.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if owner is not None and owner.kind == "histogram":
                raise InferError(
                    f"metric '{name}' is a part of the histogram '{name.removesuffix(suffix)}'",
                    ErrorCode.ALREADY_EXISTS,
                )

    def _forget_one(self, name: str) -> None:
        """Make room for a family, if one has no series any more."""
        empty = next((other for other, family in self._families.items() if not family.series), None)
        if empty is None:
            raise InferError(f"metric '{name}': there are {MOST_FAMILIES} families already", ErrorCode.UNAVAILABLE)
        del self._families[empty]

    def _create(self, name: str, family: _Family, key: _Labels, buckets: Sequence[float] | None) -> float:
        series = family.series.get(key)
        if series is None:
            self._check_labels(name, family, key)
            if self._size >= MOST_SERIES:
                raise InferError(
                    f"metric '{name}': there are {MOST_SERIES} series already, one for each set of labels",
                    ErrorCode.UNAVAILABLE,
                )
            series = _Series()
            if family.kind == "histogram":
                series.histogram = Histogram(_bounds(name, buckets))
            family.series[key] = series
            self._size += 1
        series.users += 1
        return series.value

    @staticmethod
    def _check_labels(name: str, family: _Family, key: _Labels) -> None:
        if len(key) > MOST_LABELS:
            raise InferError(f"metric '{name}' must have at most {MOST_LABELS} labels, got {len(key)}")
        for label, value in key:
            taken = label == "le" and family.kind == "histogram"
            if not _LABEL.fullmatch(label) or taken or len(label) > LONGEST:
                raise InferError(f"metric '{name}': {_shown(label)} can't be the name of a label")
            if len(value) > LONGEST:
                raise InferError(f"metric '{name}': label '{label}' must be at most {LONGEST} characters long")


def _bounds(name: str, buckets: Sequence[float] | None) -> tuple[float, ...]:
    bounds = tuple(buckets or ())
    if not 0 < len(bounds) <= MOST_BUCKETS:
        raise InferError(f"histogram '{name}' must have 1 to {MOST_BUCKETS} buckets, got {len(bounds)}")
    if not all(map(math.isfinite, bounds)) or any(low >= high for low, high in pairwise(bounds)):
        raise InferError(f"the buckets of histogram '{name}' must be finite and ascend")
    return bounds


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
