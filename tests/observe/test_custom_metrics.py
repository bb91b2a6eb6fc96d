"""Metrics that models keep."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from trio_infer.errors import ErrorCode, InferError
from trio_infer.observe.custom_metrics import MOST_FAMILIES, MOST_SERIES, CustomMetrics
from trio_infer.observe.exposition import write_text


def text(metrics: CustomMetrics) -> list[str]:
    return write_text(metrics.collect()).decode().splitlines()


def kept(*families: tuple[str, Any]) -> CustomMetrics:
    metrics = CustomMetrics()
    for name, kind in families:
        metrics.register_metric(name, f"about {name}", kind)
    return metrics


def test_each_kind_has_its_operations_and_its_lines() -> None:
    metrics = kept(("requests", "counter"), ("level", "gauge"), ("took", "histogram"))
    assert metrics.change_metric("requests", {"b": "2", "a": "1"}, "create") == 0
    assert metrics.change_metric("requests", {"a": "1", "b": "2"}, "increment", 2) == 2
    assert metrics.change_metric("requests", {"a": "1", "b": "2"}, "value") == 2
    metrics.change_metric("level", {}, "create")
    metrics.change_metric("level", {}, "set", 1.5)
    assert metrics.change_metric("level", {}, "increment", -3) == -1.5
    metrics.change_metric("took", {"model": "m"}, "create", buckets=[0.5, 1])
    for value in (0.1, 0.7, 9):
        assert metrics.change_metric("took", {"model": "m"}, "observe", value) == 0
    assert text(metrics) == [
        "# HELP requests about requests",
        "# TYPE requests counter",
        'requests{a="1",b="2"} 2',
        "# HELP level about level",
        "# TYPE level gauge",
        "level -1.5",
        "# HELP took about took",
        "# TYPE took histogram",
        'took_bucket{model="m",le="0.5"} 1',
        'took_bucket{model="m",le="1"} 2',
        'took_bucket{model="m",le="+Inf"} 3',
        'took_sum{model="m"} 9.8',
        'took_count{model="m"} 3',
    ]


@pytest.mark.parametrize(
    ("name", "operation", "value", "code"),
    [
        ("c", "set", 1, ErrorCode.UNSUPPORTED),
        ("c", "observe", 1, ErrorCode.UNSUPPORTED),
        ("c", "increment", -1, ErrorCode.INVALID_ARG),
        ("c", "increment", float("nan"), ErrorCode.INVALID_ARG),
        ("g", "observe", 1, ErrorCode.UNSUPPORTED),
        ("h", "increment", 1, ErrorCode.UNSUPPORTED),
        ("h", "value", 0, ErrorCode.UNSUPPORTED),
        ("x", "value", 0, ErrorCode.NOT_FOUND),
    ],
)
def test_what_a_kind_can_not_do_is_refused(name: str, operation: Any, value: float, code: ErrorCode) -> None:
    metrics = kept(("c", "counter"), ("g", "gauge"), ("h", "histogram"))
    for family in "cg":
        metrics.change_metric(family, {}, "create")
    metrics.change_metric("h", {}, "create", buckets=[1])
    with pytest.raises(InferError) as refused:
        metrics.change_metric(name, {}, operation, value)
    assert refused.value.code is code


@pytest.mark.parametrize("name", ["nv_mine", "trio_infer_mine", "", "1st", "a-b", "a b", "ä", "x" * 2000, "h_sum", "n"])
def test_names_that_are_none_or_taken_are_refused(name: str) -> None:
    metrics = kept(("h", "histogram"), ("n_count", "counter"))
    with pytest.raises(InferError):
        metrics.register_metric(name, "", "histogram")


@pytest.mark.parametrize(
    "labels", [{"1": "x"}, {"__name": "x"}, {"le": "1"}, {"a": "x" * 2000}, {f"l{n}": "" for n in range(40)}]
)
def test_labels_that_are_none_are_refused(labels: dict[str, str]) -> None:
    metrics = kept(("h", "histogram"))
    with pytest.raises(InferError):
        metrics.change_metric("h", labels, "create", buckets=[1])


@pytest.mark.parametrize("buckets", [None, [], [2, 1], [1, 1], [1, float("inf")], list(range(200))])
def test_buckets_that_are_none_are_refused(buckets: Any) -> None:
    metrics = kept(("h", "histogram"))
    with pytest.raises(InferError):
        metrics.change_metric("h", {}, "create", buckets=buckets)
    assert text(metrics) == []


def test_a_series_lives_as_long_as_somebody_keeps_a_metric_of_its_labels() -> None:
    metrics = kept(("c", "counter"))
    for _ in range(2):
        metrics.change_metric("c", {}, "create")
    metrics.change_metric("c", {}, "increment", 5)
    metrics.change_metric("c", {}, "remove")
    assert text(metrics)[-1] == "c 5"
    with pytest.raises(InferError, match="registered as a counter"):
        metrics.register_metric("c", "", "gauge")
    metrics.register_metric("c", "again", "counter")
    metrics.change_metric("c", {}, "remove")
    assert text(metrics) == []
    with pytest.raises(InferError, match="no series"):
        metrics.change_metric("c", {}, "increment", 1)
    metrics.register_metric("c", "", "gauge")


def test_families_and_series_are_bounded_and_what_is_over_makes_room() -> None:
    metrics = CustomMetrics()
    for number in range(MOST_FAMILIES + 5):
        metrics.register_metric(f"f{number}", "", "gauge")
    assert len(metrics._families) == MOST_FAMILIES
    metrics.register_metric("big", "", "gauge")
    for number in range(MOST_SERIES):
        metrics.change_metric("big", {"n": str(number)}, "create")
    with pytest.raises(InferError, match="series already"):
        metrics.change_metric("big", {"n": "one more"}, "create")
    metrics.change_metric("big", {"n": "7"}, "remove")
    metrics.change_metric("big", {"n": "one more"}, "create")
    full = CustomMetrics()
    for number in range(MOST_FAMILIES):
        full.register_metric(f"f{number}", "", "gauge")
        full.change_metric(f"f{number}", {}, "create")
    with pytest.raises(InferError, match="families already"):
        full.register_metric("one_more", "", "gauge")


@given(st.text(max_size=20), st.text(max_size=20), st.floats())
def test_no_text_of_a_model_breaks_the_page(about: str, value: str, number: float) -> None:
    metrics = CustomMetrics()
    metrics.register_metric("g", about, "gauge")
    metrics.change_metric("g", {"label": value}, "create")
    metrics.change_metric("g", {"label": value}, "set", number)
    page = write_text(metrics.collect()).decode()
    assert page.count("\n") == 3
    (family,) = text_string_to_metric_families(page)
    (sample,) = family.samples
    assert sample.value == number or number != number
    assert sample.labels["label"] == value.encode("utf-8", "backslashreplace").decode()
