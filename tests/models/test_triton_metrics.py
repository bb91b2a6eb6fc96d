from __future__ import annotations

import gc
from typing import Any

import pytest
import trio
from triton_stage import CONFIG, Client, Repository

from fake_host import FakeHost

pytestmark = pytest.mark.trio


async def served(repository: Repository, methods: str) -> tuple[Any, FakeHost]:
    lines = "".join(f"    {line}\n" for line in methods.strip("\n").split("\n"))
    repository.model("m", "import stage\nclass TritonPythonModel:\n" + lines, CONFIG)
    host = FakeHost()
    await host.load(repository.runner())
    return host.runners["m"], host


async def test_metrics_are_changed_and_read_at_the_server(repository: Repository, stage: Any) -> None:
    runner, host = await served(
        repository,
        """
def initialize(self, args):
    family = pb_utils.MetricFamily(name="steps", description="Steps made", kind=pb_utils.MetricFamily.COUNTER)
    self.steps = family.Metric(labels={"model": "m", "version": "1"})
    self.level = pb_utils.MetricFamily("level", "Of the water", pb_utils.MetricFamily.GAUGE).Metric({})
    self.sizes = pb_utils.MetricFamily("sizes", "Of all", pb_utils.MetricFamily.HISTOGRAM).Metric(buckets=[1, 2.5])
def execute(self, requests):
    self.steps.increment(2)
    self.steps.increment(0.5)
    self.level.set(7)
    self.level.increment(-3)
    self.sizes.observe(2)
    stage.values = self.steps.value(), self.level.value()
    return [pb_utils.InferenceResponse([])]
def finalize(self):
    del self.steps, self.level, self.sizes
""",
    )
    await Client(runner).ask()
    assert stage.values == (2.5, 4)
    assert host.metrics == {("steps", (("model", "m"), ("version", "1"))): 2.5, ("level", ()): 4, ("sizes", ()): 2}
    assert ("register", "steps", "Steps made", "counter") in host.calls
    assert ("create", "sizes", 0.0, [1, 2.5]) in host.calls
    await host.unload()
    await trio.testing.wait_all_tasks_blocked()
    assert host.metrics == {}, "a metric that the model let go of is gone"


MISUSE = {
    "pb_utils.MetricFamily('a', '', 3)": (
        "the kind of metric 'a' must be MetricFamily.COUNTER, GAUGE or HISTOGRAM, got 3"
    ),
    "pb_utils.MetricFamily('a b', '', 0)": "'a b' can't be a metric's name",
    "counter.Metric({'a': 1})": "a label of metric 'c' must be text by text, got 'a': 1",
    "counter.Metric(buckets=[1])": "metric 'c' is a counter, which has no buckets, got [1]",
    "histogram.Metric()": "metric 'h' needs buckets, got None",
    "histogram.Metric(buckets=[2, 1])": "the buckets of metric 'h' must ascend, got [2.0, 1.0]",
    "histogram.Metric(buckets=['x'])": "metric 'h' is a number, got 'x'",
    "histogram.Metric(buckets=[1]).value()": (
        "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value: metric 'h' is a histogram"
    ),
    "histogram.Metric(buckets=[1]).increment(1)": (
        "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment: metric 'h' is a histogram"
    ),
    "counter.Metric().increment(-1)": (
        "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values; "
        "metric 'c' got -1"
    ),
    "counter.Metric().set(1)": "TRITONSERVER_METRIC_KIND_COUNTER does not support Set: metric 'c' is a counter",
    "counter.Metric().observe(1)": "TRITONSERVER_METRIC_KIND_COUNTER does not support Observe: metric 'c' is a counter",
    "counter.Metric().increment(float('nan'))": "metric 'c' is a number, got nan",
}


async def test_misuse_is_refused_where_it_happens(repository: Repository, stage: Any) -> None:
    stage.calls = [*MISUSE]
    stage.faults = []
    await served(
        repository,
        """
def initialize(self, args):
    counter = pb_utils.MetricFamily("c", "", pb_utils.MetricFamily.COUNTER)
    histogram = pb_utils.MetricFamily("h", "", pb_utils.MetricFamily.HISTOGRAM)
    for call in stage.calls:
        try:
            eval(call)
        except pb_utils.TritonModelException as error:
            stage.faults.append(str(error))
def execute(self, requests):
    pass
""",
    )
    assert stage.faults == [*MISUSE.values()]


async def test_what_the_server_refuses_afterwards_is_logged(
    repository: Repository, stage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner, host = await served(
        repository,
        """
def execute(self, requests):
    metric = pb_utils.MetricFamily("c", "", pb_utils.MetricFamily.COUNTER).Metric()
    metric.increment(1)
    metric.value()
    return [pb_utils.InferenceResponse([])]
""",
    )

    def refuse(name: str, labels: Any, operation: str, value: float = 0.0, buckets: Any = None) -> float:
        return FakeHost.change_metric(
            host, name if operation != "increment" else "d", labels, operation, value, buckets
        )

    host.change_metric = refuse  # type: ignore[method-assign]
    await Client(runner).ask()
    gc.collect()
    assert not caplog.records
    assert ("increment", "d", 1, None) in host.calls
