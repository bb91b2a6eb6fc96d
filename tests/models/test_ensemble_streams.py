"""Ensembles with decoupled steps: what holds up whom, in which order answers come, and what leaving stops."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from ensemble_stage import Add, Several, Stage, X, Y, ensemble
from hypothesis import given, settings
from hypothesis import strategies as st

from support import post, serving
from trio_infer import InferError, InferRequest, Life, Model
from trio_infer.lifecycle import CancelReason, Phase
from trio_infer.models.ensemble import EnsembleRunner
from trio_infer.models.host import NoHost
from trio_infer.models.runner import Instance
from trio_infer.protocol.values import InferResponse, Send, Signature


@attrs.define(eq=False)
class Spread(Model):
    """Gives `width` responses for each request, without taking any time; one request at a time."""

    name: str = "spread"
    width: int = 3
    given: int = 0
    instances: int | None = 1

    inputs = X
    outputs = Y

    async def infer(self, request: InferRequest) -> AsyncIterator[dict[str, Any]]:
        for number in range(self.width):
            self.given += 1
            yield {"y": request.inputs["x"] * 10 + number}


async def ask(served: Any, *values: float, model: str = "e") -> list[Any]:
    answer = await served.connect_in_memory().ask(post(model, "generate_stream", {"in": list(values)}))
    assert answer.status == 200, answer.body
    return [json.loads(event.removeprefix("data: "))["out"] for event in answer.body.decode().split("\n\n") if event]


async def test_a_decoupled_model_may_be_asked_by_two_steps_though_it_takes_one_request_at_a_time(
    autojump_clock: Any,
) -> None:
    steps = (("spread", {"x": "in"}, {"y": "one"}), ("spread", {"x": "one"}, {"y": "out"}))
    with trio.fail_after(5):
        async with serving(Spread(), ensemble(*steps), memory=True) as served:
            assert await ask(served, 1) == [100, 101, 102, 110, 111, 112, 120, 121, 122]


async def test_two_ensembles_may_use_two_models_in_opposite_order(autojump_clock: Any) -> None:
    there = (("spread", {"x": "in"}, {"y": "one"}), ("other", {"x": "one"}, {"y": "out"}))
    back = (("other", {"x": "in"}, {"y": "one"}), ("spread", {"x": "one"}, {"y": "out"}))
    both = (ensemble(*there), ensemble(*back, name="f"))
    got: list[Any] = []
    with trio.fail_after(5):
        async with serving(Spread(), Spread("other"), *both, memory=True) as served, trio.open_nursery() as nursery:
            for model in "ef" * 3:

                async def one(model: str = model) -> None:
                    got.append(await ask(served, 1, model=model))

                nursery.start_soon(one)
    assert got == [[100, 101, 102, 110, 111, 112, 120, 121, 122]] * 6


async def test_a_slow_response_holds_back_those_behind_it_so_that_they_come_in_order(autojump_clock: Any) -> None:
    @attrs.define(eq=False)
    class Late(Stage):
        """Takes the longer, the smaller its input is."""

        async def infer(self, request: InferRequest) -> dict[str, Any]:
            await trio.sleep(10 - float(request.inputs["x"][0]))
            return {"y": request.inputs["x"]}

    steps = (("spread", {"x": "in"}, {"y": "one"}), ("double", {"x": "one"}, {"y": "out"}))
    async with serving(Spread(), Late(), ensemble(*steps), memory=True) as served:
        assert await ask(served, 0) == [0, 1, 2]
        assert trio.current_time() == pytest.approx(10), "side by side"


async def test_a_decoupled_step_with_no_response_ends_what_depends_on_it(autojump_clock: Any) -> None:
    steps = (("spread", {"x": "in"}, {"y": "one"}), ("several", {"x": "one"}, {"y": "out"}))
    async with serving(Spread(width=0), Several(), ensemble(*steps), memory=True) as served:
        answer = await served.connect_in_memory().ask(post("e", "generate_stream", {"in": [1]}))
        assert (answer.status, answer.body) == (200, b"")


class OneByOne(NoHost):
    """A host of two models without a server: `spread` gives numbers for ever, `double` takes a second."""

    def __init__(self) -> None:
        self.given = self.running = self.most = 0

    def is_model_ready(self, name: str, version: str) -> bool:
        return True

    def signature(self, name: str, version: str) -> Signature | None:
        return Signature(name, "1", X, Y, decoupled=name == "spread")

    async def infer(self, parent: Life, request: InferRequest, send: Send) -> None:
        if request.model_name != "spread":
            self.running += 1
            self.most = max(self.most, self.running)
            await trio.sleep(1)
            self.running -= 1
            await send(InferResponse({"y": request.inputs["x"]}))
            return
        while self.given < 1000:
            self.given += 1
            await send(InferResponse({"y": np.array([self.given], np.float32)}))
            await trio.lowlevel.checkpoint()


async def run(runner: EnsembleRunner, host: OneByOne, send: Send) -> None:
    await runner.load(host)
    request = InferRequest("e", "1", {"in": np.ones(1, np.float32)})
    await runner.run(Instance(0, Life()), request, send)


STEPS = (("spread", {"x": "in"}, {"y": "one"}), ("double", {"x": "one"}, {"y": "out"}))


async def test_a_client_that_reads_slowly_slows_the_step_down(autojump_clock: Any) -> None:
    host, sent = OneByOne(), 0

    async def slow(response: InferResponse) -> None:
        nonlocal sent
        sent += 1
        assert float(response.outputs["out"][0]) == sent
        await trio.sleep(100)

    with trio.move_on_after(5050):
        await run(ensemble(("spread", {"x": "in"}, {"y": "out"})), host, slow)
    assert sent == 51
    assert host.given < 70, "no more is kept than came before the first was on its way"


@pytest.mark.parametrize(("bound", "most"), [(1, 1), (4, 4)])
async def test_max_inflight_requests_bounds_what_is_under_way(autojump_clock: Any, bound: int, most: int) -> None:
    host, got = OneByOne(), []

    async def keep(response: InferResponse) -> None:
        got.append(float(response.outputs["out"][0]))

    with trio.move_on_after(100.5):
        await run(ensemble(*STEPS, max_inflight_requests=bound), host, keep)
    assert host.most == most
    assert got == list(range(1, 100 * most + 1))


@attrs.define(eq=False)
class TwoStreams(NoHost):
    """A host of four models without a server: `first` gives rows, `second` the elements of a row.

    Args:
        widths: of the rows.
        delays: before each answer and at each request, over and over.
        fails_at: which request of all fails.
    """

    widths: list[int]
    delays: list[float]
    fails_at: int | None
    asked: int = 0
    running: int = 0

    def signature(self, name: str, version: str) -> Signature | None:
        if name == "add":
            return Signature("add", "1", Add.inputs, Y)
        return Signature(name, "1", X, Y, decoupled=name != "double")

    async def infer(self, parent: Life, request: InferRequest, send: Send) -> None:
        number = self.asked
        self.asked, self.running = number + 1, self.running + 1
        try:
            await trio.sleep(self.delays[number % 40])
            if number == self.fails_at:
                raise InferError("no")
            for answer in self.answers(request.model_name, [float(value[0]) for value in request.inputs.values()]):
                await trio.sleep(self.delays[(number * 7 + int(answer)) % 40])
                await send(InferResponse({"y": np.array([answer], np.float32)}))
        finally:
            self.running -= 1

    def answers(self, model: str, values: list[float]) -> list[float]:
        if model == "first":
            return [float(row) for row in range(len(self.widths))]
        if model == "second":
            return [values[0] * 10 + one for one in range(self.widths[int(values[0])])]
        return [sum(values)]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_two_streams_in_a_row_give_all_in_order_or_one_error_or_stop(data: Any) -> None:
    """Both take and give at random moments; one may fail, or the request be cancelled; nothing is left of it."""
    delay = st.sampled_from([0, 0.1, 1])
    widths = data.draw(st.lists(st.integers(0, 3), max_size=4))
    fails_at = data.draw(st.none() | st.integers(0, 12))
    cancelled_at = data.draw(st.none() | st.floats(0.01, 8))
    bound = data.draw(st.integers(0, 3))
    host = TwoStreams(widths, data.draw(st.lists(delay, min_size=40, max_size=40)), fails_at)
    runner = ensemble(
        ("double", {"x": "in"}, {"y": "aside"}),
        ("first", {"x": "in"}, {"y": "a"}),
        ("second", {"x": "a"}, {"y": "b"}),
        ("add", {"a": "aside", "b": "b"}, {"y": "out"}),
        max_inflight_requests=bound,
    )
    wanted = [1.0 + row * 10 + one for row, width in enumerate(widths) for one in range(width)]
    got: list[float] = []

    async def keep(response: InferResponse) -> None:
        got.append(float(response.outputs["out"][0]))
        await trio.sleep(host.delays[len(got) % 40])

    async def main() -> None:
        await runner.load(host)
        life = Life()
        life.advance(Phase.RUNNING)
        request = InferRequest("e", "1", {"in": np.ones(1, np.float32)})
        error: InferError | None = None
        with trio.fail_after(1000), trio.CancelScope() as scope:
            life.canceller = lambda reason: scope.cancel(reason=reason.value)
            async with trio.open_nursery() as nursery:

                async def leave() -> None:
                    if cancelled_at is not None:
                        await trio.sleep(cancelled_at)
                        life.cancel(CancelReason.DISCONNECTED)

                nursery.start_soon(leave)
                try:
                    await runner.run(Instance(0, life), request, keep)
                except InferError as caught:
                    error = caught
                nursery.cancel_scope.cancel()
        assert host.running == 0
        assert got == wanted[: len(got)]
        if error is not None:
            assert error.message.startswith("in ensemble 'e', step ")
            assert fails_at is not None
        elif not life.cancelled:
            assert got == wanted

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
