"""The books of models, fed by lives whose moves tests choose."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_infer.lifecycle import NEXT, OUTCOMES, CancelReason, Life, Outcome, Phase
from trio_infer.models.runner import Instance
from trio_infer.observe.model_statistics import (
    MOST_BATCH_SIZES,
    MOST_RESPONSES,
    FailureReason,
    Histogram,
    ModelBooks,
    ModelStatistics,
    Quantiles,
    failure_reason,
)


def born(statistics: ModelStatistics, *, model: str = "m", rows: int = 1) -> Life:
    life = Life([statistics])
    life.model, life.version, life.rows = model, "1", rows
    return life


def running(life: Life, *, queued: bool = False) -> Instance:
    if queued:
        life.advance(Phase.QUEUED)
    instance = Instance(0, life)
    life.advance(Phase.RUNNING)
    instance.begin()
    return instance


def answer(life: Life, status: int = 200) -> None:
    life.advance(Phase.SENDING)
    life.status = status
    life.end()


def opened(**options: Any) -> tuple[ModelStatistics, ModelBooks]:
    statistics = ModelStatistics()
    statistics.add("m", "1", **options)
    return statistics, statistics.find("m")[0]


class Fate:
    """One life, driven at random through whatever the table of phases allows."""

    def __init__(self, statistics: ModelStatistics, parent: Life | None) -> None:
        self.life = Life([statistics]) if parent is None else parent.child("inner")
        self.life.model, self.life.version = "m", "1"
        self.instance: Instance | None = None

    def step(self, choice: int) -> None:
        life = self.life
        if choice < 2 and self.instance is not None and self.instance.working:
            self.instance.end()
        elif life.outcome is not None:
            return
        elif choice < 8:
            nexts = sorted(NEXT[life.phase], key=lambda phase: phase.value)
            if not nexts:
                self.end(choice)
                return
            life.advance(nexts[choice % len(nexts)])
            if life.phase is Phase.RUNNING:
                self.instance = Instance(0, life)
                self.instance.begin()
        elif choice == 8:
            life.cancel(CancelReason.DISCONNECTED)
        else:
            self.end(choice)

    def end(self, choice: int) -> None:
        life = self.life
        life.status = (200, 400, 500, 503)[choice % 4]
        if OUTCOMES[life.phase] == {Outcome.CANCELLED}:
            life.cancel(CancelReason.DISCONNECTED)
        if life.phase is Phase.STREAMING:
            life.status = 200
        life.end(undelivered=choice % 5 == 0)

    def finish(self) -> None:
        while self.life.outcome is None:
            self.end(0)
        if self.instance is not None and self.instance.working:
            self.instance.end()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 11)), max_size=200))
def test_whatever_becomes_of_lives_the_books_add_up(moves: list[tuple[int, int]]) -> None:
    statistics, books = opened(decoupled=True)
    fates: dict[int, Fate] = {}
    done: list[Fate] = []
    for who, choice in moves:
        fate = fates.get(who)
        if fate is None or (fate.life.outcome is not None and (fate.instance is None or not fate.instance.working)):
            parent = fates.get(who - 1)
            alive = parent is not None and parent.life.outcome is None
            fate = fates[who] = Fate(statistics, parent.life if parent is not None and alive else None)
            done.append(fate)
        fate.step(choice)
        queued = sum(other.life.phase is Phase.QUEUED and other.life.outcome is None for other in done)
        assert books.pending == queued
        ended = [other.life for other in done if other.life.outcome is not None]
        assert books.success.count + books.fail.count == len(ended)
    for fate in done:
        fate.finish()
    lives = [fate.life for fate in done]
    works = [life.timing for life in lives if life.timing is not None]
    assert books.pending == 0
    assert books.success.count + books.fail.count == len(lives)
    assert sum(books.failures.values()) == books.fail.count
    assert books.failures[FailureReason.CANCELED] == sum(life.outcome is Outcome.CANCELLED for life in lives)
    assert sum(books.cancelled.values()) == sum(life.reason is not None for life in lives)
    assert books.executions == len(works) == sum(each.infer.count for each in books.batches.values())
    assert sum(books.compute_by_outcome.values()) == sum(timing.ended - timing.begun for timing in works)
    assert books.success.ns + books.fail.ns == sum(life.ended - life.entered[Phase.RECEIVING] for life in lives)
    assert not statistics._open  # nothing is kept of what is over


@pytest.mark.parametrize("work_first", [True, False])
def test_what_a_request_cost_is_split_at_the_moment_its_client_left(work_first: bool) -> None:
    statistics, books = opened()
    life = born(statistics)
    instance = running(life)
    time.sleep(0.002)
    life.cancel(CancelReason.DISCONNECTED)
    if work_first:
        instance.end()
        life.end()
    else:
        life.end()
        assert books.executions == 0
        assert books.failures[FailureReason.CANCELED] == 1
        instance.end()
    timing = instance.timing
    assert books.compute_by_outcome == dict.fromkeys(books.compute_by_outcome, 0) | {
        "cancelled": life.struck_at - timing.begun,
        "wasted": timing.ended - life.struck_at,
    }
    assert books.cancelled == {(Phase.RUNNING, CancelReason.DISCONNECTED): 1}
    assert sum(books.stopping.counts) == 1
    assert books.queue.count == books.compute.infer.count == 0


def test_the_parts_of_a_success_are_those_that_its_runner_tells() -> None:
    statistics, books = opened()
    life = born(statistics, rows=3)
    instance = running(life, queued=True)
    timing = instance.timing
    timing.begun, timing.infer_began, timing.infer_ended = 1_000, 1_010, 1_110
    instance.end()
    timing.ended = 1_115
    answer(life)
    entry = books.as_json()
    assert entry["inference_count"] == 3
    assert entry["execution_count"] == 1
    assert entry["inference_stats"]["queue"] == {
        "count": 1,
        "ns": life.entered[Phase.RUNNING] - life.entered[Phase.QUEUED],
    }
    parts = {
        "compute_input": {"count": 1, "ns": 10},
        "compute_infer": {"count": 1, "ns": 100},
        "compute_output": {"count": 1, "ns": 5},
    }
    assert {key: entry["inference_stats"][key] for key in parts} == parts
    assert entry["batch_stats"] == [{"batch_size": 3, **parts}]
    assert entry["response_stats"] == {}
    assert abs(entry["last_inference"] - time.time() * 1000) < 60_000


def test_each_failure_has_one_of_four_reasons() -> None:
    statistics, books = opened()

    def reason(status: int, *, run: bool = False, queue: bool = False, cancel: bool = False) -> FailureReason | None:
        life = born(statistics)
        if run:
            running(life, queued=queue).end()
        elif queue:
            life.advance(Phase.QUEUED)
        if cancel:
            life.cancel(CancelReason.DEADLINE)
            life.end()
        else:
            answer(life, status)
        return failure_reason(life)

    assert reason(200, run=True) is None
    assert reason(503, queue=True) is reason(503) is FailureReason.REJECTED
    assert reason(500, run=True) is reason(400, run=True, queue=True) is FailureReason.BACKEND
    assert reason(400) is reason(500) is reason(413) is FailureReason.OTHER
    assert reason(0, cancel=True) is reason(0, run=True, cancel=True) is FailureReason.CANCELED
    assert list(books.failures.values()) == [2, 2, 2, 3]


def test_the_responses_of_a_stream_are_counted_one_by_one() -> None:
    statistics, books = opened(decoupled=True)

    def stream(times: list[int], end: str) -> None:
        life = born(statistics)
        instance = running(life)
        timing = instance.timing
        timing.begun = 1_000
        timing.responses += times
        if end == "cancel":
            life.cancel(CancelReason.DISCONNECTED)
        else:
            life.advance(Phase.STREAMING)
            life.status = 200
        instance.end()
        timing.ended = 2_000
        life.struck_at = min(life.struck_at, 1_900)
        life.end(failed=end == "fail")

    stream([1_100, 1_300], "well")
    stream([1_050], "cancel")
    stream([], "fail")
    stream([], "well")
    shown = books.as_json()["response_stats"]
    assert list(shown) == ["0", "1"]
    assert shown["0"]["success"] == {"count": 2, "ns": 150}
    assert shown["0"]["fail"] == shown["0"]["empty_response"]
    assert shown["0"]["fail"]["count"] == 1
    assert shown["1"]["success"] == {"count": 1, "ns": 200}
    assert shown["1"]["cancel"]["count"] == 1
    assert sum(books.first_response.counts) == 2


def test_endless_streams_and_endless_sizes_take_bounded_room() -> None:
    statistics, books = opened(decoupled=True)
    for rows in range(1, MOST_BATCH_SIZES + 50):
        life = born(statistics, rows=rows)
        instance = running(life)
        instance.timing.responses += range(MOST_RESPONSES + 10 if rows == 1 else 0)
        instance.end()
        answer(life)
    assert len(books.responses) == MOST_RESPONSES
    assert books.responses[-1].success.count == 11
    assert len(books.batches) == MOST_BATCH_SIZES
    assert sum(each.infer.count for each in books.batches.values()) == books.executions


def test_unloading_closes_the_books_and_loading_opens_new_ones() -> None:
    statistics, books = opened()
    life = born(statistics)
    life.advance(Phase.QUEUED)
    statistics.remove("m", "1")
    statistics.remove("m", "1")
    assert list(statistics) == []
    statistics.add("m", "1")
    (fresh,) = statistics
    instance = Instance(0, life)
    life.advance(Phase.RUNNING)
    instance.begin()
    instance.end()
    answer(life)
    assert (books.pending, books.success.count) == (0, 1)
    assert (fresh.pending, fresh.success.count) == (0, 0)


def test_a_name_that_a_client_made_up_opens_no_books() -> None:
    statistics, _ = opened()
    for number in range(10):
        life = born(statistics, model=f"made-up-{number}")
        life.advance(Phase.QUEUED)
        life.cancel(CancelReason.DISCONNECTED)
        life.end()
    assert [books.model for books in statistics] == ["m"]
    assert statistics.nobodys == {(Phase.QUEUED, CancelReason.DISCONNECTED): 10}


def test_books_are_found_by_model_and_version_in_the_order_of_numbers() -> None:
    statistics = ModelStatistics()
    for model, version in (("b", "10"), ("b", "9"), ("a", "1")):
        statistics.add(model, version)
    assert [(books.model, books.version) for books in statistics] == [("a", "1"), ("b", "9"), ("b", "10")]
    assert [books.version for books in statistics.find("b")] == ["9", "10"]
    assert [books.version for books in statistics.find("b", "10")] == ["10"]
    assert statistics.find("c") == statistics.find("a", "2") == []


def test_a_histogram_counts_what_is_at_most_each_bound() -> None:
    histogram = Histogram((0.5, 100.0))
    for value in (0.1, 0.5, 3, 100, 1e9):
        histogram.observe(value)
    assert histogram.cumulative() == [("0.5", 2), ("100", 4), ("+Inf", 5)]


def test_quantiles_are_of_the_latest_and_nan_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    quantiles = Quantiles()
    assert [str(value) for value in quantiles.at([0.5])] == ["nan"]
    for value in range(5000):
        quantiles.add(value)
    assert list(quantiles.at([0.0, 0.5, 1.0])) == [5000 - 1024, 5000 - 512, 4999]
    assert quantiles.total.count == 5000
    now += Quantiles.WINDOW + 1
    quantiles.add(7)
    assert list(quantiles.at([0.01, 0.99])) == [7, 7]
