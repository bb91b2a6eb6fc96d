"""A model that blocks the event loop is named; one that takes turns isn't, however long the loop is busy."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import trio

from support import Client, Echo, get, infer_echo, post, serving
from trio_infer import InferRequest, Limits, MetricsPolicy, Model, TensorSpec
from trio_infer.models.blocking import BlockedLoop, Suspect

A, ANOTHER_RUN, B = Suspect("a", 1, ("infer (model.py:3)",)), Suspect("a", 2), Suspect("b", 3)


class Stage:
    """A loop that may take 0.125 s for a tick, on a clock that is set by hand; looks are due each 0.03125 s."""

    def __init__(self) -> None:
        self.now = 64.0
        self.watch = BlockedLoop(0.125, lambda: self.now)
        self.asked = 0

    def tick(self) -> None:
        self.watch.after_io_wait(0)

    def end(self) -> None:
        self.watch.before_io_wait(0)

    def look(self, after: float, suspect: Suspect | None) -> None:
        self.now += after

        def who() -> Suspect | None:
            self.asked += 1
            return suspect

        self.watch.look(who)

    @property
    def counted(self) -> dict[str, int]:
        return dict(self.watch.times)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_model_that_stays_on_the_stack_for_longer_than_allowed_is_named_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stage.tick()
    for _ in range(20):
        stage.look(0.03125, A)
    stage.end()
    assert warnings(caplog) == [
        "model 'a' has blocked the event loop for 0.16 s, and nobody else is served: infer (model.py:3); await "
        "something, or compute in a thread (trio.to_thread.run_sync) or a process (trio_infer.runners.process)"
    ]
    assert caplog.records[-1].getMessage() == "model 'a' has let go of the event loop after 0.62 s"
    assert stage.watch.counted() == [("a", 1, pytest.approx(0.625))]


def test_a_tick_within_what_is_allowed_is_nobodys_fault(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(10):
        stage.tick()
        for _ in range(4):
            stage.look(0.03, A)
        stage.end()
    assert (warnings(caplog), stage.counted) == ([], {})


def test_between_two_ticks_nobody_is_looked_at(stage: Stage) -> None:
    for _ in range(10):
        stage.look(1.0, A)
    assert stage.asked == 0


def test_a_long_tick_in_which_many_had_their_turn_is_nobodys_fault(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.tick()
    for suspect in (A, ANOTHER_RUN, B, None, A, B, None, ANOTHER_RUN, A, B):
        stage.look(0.03125, suspect)
    stage.end()
    assert warnings(caplog) == []
    assert stage.watch.counted() == [("", 1, pytest.approx(0.3125))], "but it is counted"


def test_who_comes_last_in_a_long_tick_answers_only_for_its_own_time(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.tick()
    for suspect in (None, None, None, None, None, B, B):
        stage.look(0.03125, suspect)
    assert warnings(caplog) == []
    stage.look(0.03125, B)
    assert warnings(caplog)[0].startswith("model 'b' has blocked")


def test_a_look_that_was_kept_off_counts_from_when_it_was_due(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.look(0.03125, None)
    stage.tick()
    stage.look(0.5, A)  # somebody held the GIL
    assert warnings(caplog)[0].startswith("model 'a' has blocked the event loop for 0.50 s")
    stage.end()
    assert stage.counted == {"a": 1}


def test_a_tick_that_nobody_looked_into_is_counted_for_no_model(stage: Stage) -> None:
    stage.tick()
    stage.now += 0.3
    stage.end()
    assert stage.watch.counted() == [("", 1, pytest.approx(0.3))]


def test_a_tick_that_ends_during_a_look_is_not_judged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.tick()
    stage.look(0.03125, A)

    def ends() -> Suspect:
        stage.end()
        return A

    stage.now += 0.5
    stage.watch.look(ends)
    assert warnings(caplog) == []


def test_the_same_model_is_warned_of_once_in_ten_seconds_and_counted_each_time(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    for pause in (0, 1, 1, 9):
        stage.now += pause
        stage.tick()
        for _ in range(6):
            stage.look(0.03125, A)
        stage.end()
    assert len(warnings(caplog)) == 2
    assert stage.counted == {"a": 4}


# -- Real loops ------------------------------------------------------------------------------------------------------


class Blocking(Model):
    """Blocks in a helper of its own, in the way that is asked for."""

    name = "blocking"
    inputs = (TensorSpec("way", "BYTES", [1]),)
    outputs = (TensorSpec("y", "INT32", [1]),)

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        getattr(self, request.inputs["way"][0].decode())()
        return {"y": np.zeros(1, "i4")}

    def sleeps(self) -> None:
        time.sleep(0.4)

    def holds_the_gil(self) -> None:
        # One call that backtracks, some 3 times as long for each further letter.
        length, took = 20, 0.0
        while took < 0.3:
            began = time.perf_counter()
            assert re.match("(a|a)*b", "a" * length) is None
            took, length = time.perf_counter() - began, length + 1

    def passes(self) -> None:
        pass


class Streaming(Blocking):
    """Blocks between two responses."""

    name = "streaming"

    async def infer(self, request: InferRequest) -> Any:
        yield {"y": np.zeros(1, "i4")}
        self.sleeps()


@pytest.mark.parametrize("way", ["sleeps", "holds_the_gil"])
async def test_a_server_names_the_model_its_functions_and_counts(way: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Blocking(), Echo(), memory=True, metrics=MetricsPolicy()) as served:
        client: Client = served.connect_in_memory()
        assert (await client.ask(post("blocking", "generate", {"way": way}))).status == 200
        await client.ask(infer_echo(1))
        lines = (await client.ask(get("/metrics"))).body.decode().splitlines()
    (warning,) = [warning for warning in warnings(caplog) if "blocked" in warning]
    assert warning.startswith("model 'blocking' has blocked the event loop for 0.")
    assert (
        f"infer (test_blocking.py:{Blocking.infer.__code__.co_firstlineno + 1}) -> {way} (test_blocking.py:" in warning
    )
    counts = dict(line.rsplit(" ", 1) for line in lines if line.startswith("trio_infer_loop_blocked"))
    assert float(counts['trio_infer_loop_blocked_total{model="blocking"}']) >= 1
    assert float(counts['trio_infer_loop_blocked_seconds_total{model="blocking"}']) > 0.1
    assert not [name for name in counts if "echo" in name]


async def test_a_stream_that_blocks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Streaming(), memory=True) as served:
        client: Client = served.connect_in_memory()
        await client.ask(post("streaming", "generate_stream", {"way": "sleeps"}))
    assert "infer (test_blocking.py:" in next(each for each in warnings(caplog) if "'streaming' has blocked" in each)


async def test_a_model_that_awaits_is_not_named_however_long_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    class Waits(Blocking):
        name = "waits"

        async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
            await trio.sleep(0.3)
            await trio.to_thread.run_sync(self.sleeps)
            return {"y": np.zeros(1, "i4")}

    async with serving(Waits(), memory=True) as served:
        client: Client = served.connect_in_memory()
        assert (await client.ask(post("waits", "generate", {"way": "passes"}))).status == 200
    assert not [warning for warning in warnings(caplog) if "blocked" in warning]


async def test_nothing_is_left_of_it_and_servers_do_not_share_it() -> None:
    def dogs() -> int:
        return sum(thread.name == "trio-infer watchdog" for thread in threading.enumerate())

    async with serving(Echo(), memory=True):
        assert dogs() == 1
        async with serving(Echo(), memory=True):
            assert dogs() == 2
        assert dogs() == 1
        async with serving(Echo(), memory=True, limits=Limits(loop_block_ms=0)):
            assert dogs() == 1
    assert dogs() == 0
    assert not [each for each in sys._current_frames().values() if "watchdog" in each.f_code.co_name]
