"""Requests that run together: who joins whom, and what each of them notices of the others."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import trio

from desk import desk
from trio_infer import ErrorCode, InferError, InferRequest, Model, TensorSpec
from trio_infer.lifecycle import Outcome
from trio_infer.models.joining import split
from trio_infer.models.native import NativeRunner
from trio_infer.protocol.queueing import Batching, Queueing, QueuePolicy
from trio_infer.protocol.values import InferResponse


@attrs.define(eq=False)
class Doubler(Model):
    """Takes a second for any batch; notes what it ran, and what became of it."""

    name: str = "doubler"
    instances: int | None = 1
    max_batch_size: int = 4
    batching: Batching | None = attrs.field(factory=Batching)
    queueing: Queueing | None = None
    runs: list[list[float]] = attrs.field(factory=list)
    requests: list[InferRequest] = attrs.field(factory=list)
    stopped: list[float] = attrs.field(factory=list)
    pace: float = 1.0

    inputs = (TensorSpec("x", "FP32", [-1]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    async def infer(self, request: InferRequest) -> Any:
        x = request.inputs["x"]
        self.runs.append(x[:, 0].tolist())
        self.requests.append(request)
        try:
            await trio.sleep(self.pace)
        except trio.Cancelled:
            self.stopped.append(trio.current_time())
            raise
        if (x < 0).any():
            raise ValueError("a negative number")
        return {"y": x * 2}


async def test_requests_that_wait_for_the_same_instance_run_together(autojump_clock: Any) -> None:
    model = Doubler()
    async with desk(NativeRunner(model)) as at:
        first = await at.asked([1])
        rest = [await at.asked([n]) for n in (2, 3, 4)]
    assert model.runs == [[1], [2, 3, 4]]
    assert [guest.values for guest in (first, *rest)] == [[[2]], [[4]], [[6]], [[8]]]
    assert trio.current_time() == pytest.approx(2)
    books = at.books
    assert (books.rows, books.executions, sorted(books.batches)) == (4, 2, [1, 3])
    assert books.batches[3].infer.count == 1, "a batch is one execution"


async def test_each_request_gets_its_own_rows_however_many_it_has(autojump_clock: Any) -> None:
    model = Doubler(max_batch_size=8)
    async with desk(NativeRunner(model)) as at:
        await at.asked([0])
        guests = [await at.asked(*rows) for rows in ([[1], [2]], [[3]], [[4], [5], [6]])]
    assert model.runs[1:] == [[1, 2, 3, 4, 5, 6]]
    assert [guest.values for guest in guests] == [[[2], [4]], [[6]], [[8], [10], [12]]]
    assert [len(part.inputs["x"]) for part in model.requests[1].parts] == [2, 1, 3]


async def test_a_batch_takes_no_more_rows_than_the_model_and_no_other_shapes(autojump_clock: Any) -> None:
    model = Doubler()
    async with desk(NativeRunner(model)) as at:
        await at.asked([0])
        for rows in ([[1]], [[2]], [[3], [3], [3]], [[4, 4]], [[5, 5]], [[6]]):
            await at.asked(*rows)
    assert model.runs[1:] == [[1, 2], [3, 3, 3], [4, 5], [6]]


async def test_a_free_instance_waits_for_a_batch_no_longer_than_the_delay(autojump_clock: Any) -> None:
    model = Doubler(batching=Batching(max_queue_delay=0.5))
    async with desk(NativeRunner(model)) as at:
        alone = await at.asked([1])
        assert model.runs == []
        await trio.sleep(0.2)
        joined = at.ask([2])
        await alone.done.wait()
        assert model.runs == [[1, 2]]
        assert joined.ended_at == pytest.approx(1.5)
        begun = trio.current_time()
        for n in range(4):
            await at.asked([n])
        assert model.runs[1:] == [[0, 1, 2, 3]], "full: nobody has to wait"
        assert trio.current_time() == begun


async def test_a_batch_of_a_preferred_size_runs_at_once(autojump_clock: Any) -> None:
    model = Doubler(batching=Batching(preferred=(2,), max_queue_delay=10))
    async with desk(NativeRunner(model)) as at:
        for n in range(5):
            await at.asked([n])
        await trio.sleep(2.5)
        assert model.runs == [[0, 1], [2, 3]]
        at.ask([5])
    assert model.runs[2:] == [[4, 5]]


async def test_one_that_leaves_before_the_batch_starts_is_not_in_it(autojump_clock: Any) -> None:
    model = Doubler()
    async with desk(NativeRunner(model)) as at:
        first = await at.asked([1])
        leaver, stayer = await at.asked([2]), await at.asked([3])
        leaver.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert at.model.statistics().waiting == 1
        await first.done.wait()
    assert model.runs == [[1], [3]]
    assert leaver.life.outcome is Outcome.CANCELLED
    assert stayer.values == [[6]]


async def test_one_that_leaves_a_running_batch_is_skipped_and_the_others_are_untouched(autojump_clock: Any) -> None:
    model = Doubler()
    async with desk(NativeRunner(model)) as at:
        await at.asked([0])
        leaver, *stayers = [await at.asked([n]) for n in (1, 2, 3)]
        await trio.sleep(1.5)
        assert model.runs[1:] == [[1, 2, 3]]
        leaver.leave()
        await leaver.done.wait()
        assert trio.current_time() == pytest.approx(1.5)
        assert not model.requests[1].is_cancelled()
        assert [part.is_cancelled() for part in model.requests[1].parts] == [True, False, False]
    assert [guest.values for guest in stayers] == [[[4]], [[6]]]
    assert all(guest.ended_at == pytest.approx(2) for guest in stayers)
    assert model.stopped == []
    assert at.books.compute_by_outcome["wasted"] > 0


async def test_the_last_one_to_leave_stops_the_batch(autojump_clock: Any) -> None:
    model = Doubler()
    async with desk(NativeRunner(model)) as at:
        await at.asked([0])
        guests = [await at.asked([n]) for n in (1, 2)]
        await trio.sleep(1.25)
        guests[0].leave()
        await trio.sleep(0.25)
        assert model.stopped == []
        guests[1].leave()
        await trio.testing.wait_all_tasks_blocked()
        assert model.stopped == [pytest.approx(1.5)]
        assert model.requests[1].is_cancelled()
        probe = await at.asked([9])
        assert model.runs[-1] == [9], "the instance was free at once"
    assert probe.values == [[18]]


async def test_a_request_that_makes_the_model_raise_fails_alone(autojump_clock: Any) -> None:
    model = Doubler()
    async with desk(NativeRunner(model)) as at:
        await at.asked([0])
        good, bad, leaver, better = [await at.asked([n]) for n in (1, -1, 2, 3)]
        await trio.sleep(1.5)
        leaver.leave()
    assert model.runs[1:] == [[1, -1, 2, 3], [1], [-1], [3]]
    assert good.values == [[2]]
    assert better.values == [[6]]
    assert isinstance(bad.error, ValueError)
    assert at.books.executions == 2, "a batch that is taken apart is still one"


def of_rows(*counts: int) -> list[InferRequest]:
    return [InferRequest("m", "1", {"x": np.zeros((count, 1))}) for count in counts]


async def test_outputs_with_another_number_of_rows_are_the_model_s_fault() -> None:
    whole = InferResponse({"y": np.zeros((3, 1))})
    assert [len(part.outputs["y"]) for part in split(whole, of_rows(1, 2))] == [1, 2]
    for bad in (np.zeros((2, 1)), np.float32(1)):
        with pytest.raises(InferError, match="must have 3 rows, as its inputs have") as caught:
            split(InferResponse({"y": bad}), of_rows(1, 2))
        assert caught.value.code is ErrorCode.INTERNAL


async def test_joined_rows_are_copied_once_and_the_parts_of_an_answer_not_at_all() -> None:
    whole = np.arange(4.0).reshape(4, 1)
    assert all(np.shares_memory(part.outputs["y"], whole) for part in split(InferResponse({"y": whole}), of_rows(1, 3)))


async def test_answers_come_in_the_order_of_the_requests_if_that_is_asked_for(autojump_clock: Any) -> None:
    class Uneven(Doubler):
        async def infer(self, request: InferRequest) -> Any:
            self.runs.append(request.inputs["x"][:, 0].tolist())
            await trio.sleep(float(request.inputs["x"][0, 0]))
            return {"y": request.inputs["x"]}

    async def order(*, preserve: bool) -> list[Any]:
        model = Uneven(instances=3, max_batch_size=1, batching=Batching(preserve_ordering=preserve))
        async with desk(NativeRunner(model)) as at:
            _, leaver, _ = await at.asked([3]), await at.asked([2]), await at.asked([1])
            await trio.sleep(0.5)
            leaver.leave()
            await trio.sleep(1)
            assert await at.asked([0.5]), "the instances are free while answers wait"
        return [(guest.life.outcome, guest.request.inputs["x"][0, 0]) for guest in at.order]

    done, gone = Outcome.COMPLETED, Outcome.CANCELLED
    assert await order(preserve=True) == [(gone, 2), (done, 3), (done, 1), (done, 0.5)]
    assert await order(preserve=False) == [(gone, 2), (done, 1), (done, 0.5), (done, 3)]


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(autojump_clock: Any) -> None:
    model = Doubler(queueing=Queueing(QueuePolicy(max_queue_size=2)), max_batch_size=1, batching=None)
    async with desk(NativeRunner(model)) as at:
        guests = [await at.asked([n]) for n in range(4)]
        refused = guests[3]
        assert isinstance(refused.error, InferError)
        assert refused.error.message == "Exceeds maximum queue size: 2 requests wait already"
        assert (refused.error.status, refused.error.retry_after) == (503, 1)
        guests[1].leave()
        late = await at.asked([4])
    assert late.values == [[8]]
    assert model.runs == [[0], [2], [4]]


async def test_a_request_that_has_waited_for_too_long_is_refused_on_time_or_lets_others_pass(
    autojump_clock: Any,
) -> None:
    for action, expected in (("reject", [[0], [2]]), ("delay", [[0], [2], [1]])):
        policy = QueuePolicy(0, 0.5, action, allow_timeout_override=True)  # type: ignore[arg-type]  # one of the two
        model = Doubler(queueing=Queueing(policy), max_batch_size=1, batching=None)
        begun = trio.current_time()
        async with desk(NativeRunner(model)) as at:
            await at.asked([0])
            impatient = await at.asked([1], timeout=300_000)
            await trio.sleep(0.75)
            at.ask([2], timeout=0)
        assert model.runs == expected
        if action == "reject":
            assert impatient.ended_at - begun == pytest.approx(0.3)
            assert isinstance(impatient.error, InferError)
            assert impatient.error.message == "Request timeout expired"


async def test_higher_priorities_go_first_and_each_level_has_its_own_bounds(autojump_clock: Any) -> None:
    levels = Queueing(priority_levels=3, default_priority_level=2, by_level={3: QueuePolicy(max_queue_size=1)})
    model = Doubler(queueing=levels, max_batch_size=1, batching=None)
    async with desk(NativeRunner(model)) as at:
        await at.asked([0])
        for n, priority in ((1, 3), (2, 2), (3, 1), (4, 0), (5, 7), (6, 1)):
            await at.asked([n], parameters={"priority": priority})
        refused = await at.asked([7], parameters={"priority": 3})
        assert isinstance(refused.error, InferError)
    assert model.runs == [[0], [3], [6], [2], [4], [5], [1]]


class Shapes(Doubler):
    async def infer(self, request: InferRequest) -> Any:
        await trio.sleep(1)
        self.runs.append(list(request.inputs["x"].shape))
        return {"y": request.inputs["x"] * 2}


async def test_requests_without_rows_are_joined_and_take_room_like_others(autojump_clock: Any) -> None:
    model = Shapes()
    async with desk(NativeRunner(model)) as at:
        first = await at.asked([1])
        empty = [at.ask() for _ in range(6)]
    assert all(guest.error is None for guest in (first, *empty))
    assert model.runs == [[1, 1], [0], [0]], "four, and two"
    assert trio.current_time() == pytest.approx(3)


class Leaver(Doubler):
    """Ends by what `except Exception` doesn't catch: with itself, or beside a `Cancelled` in its own nursery."""

    async def infer(self, request: InferRequest) -> Any:
        if (request.inputs["x"] == 13).any():
            raise SystemExit(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                answer = await super().infer(request)
            except trio.Cancelled:
                raise ValueError("an untidy end") from None
            nursery.cancel_scope.cancel()
        return answer


async def test_what_a_model_leaves_its_batch_by_ends_the_batch_and_not_the_server(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Leaver()
    async with desk(NativeRunner(model)) as at:
        guests = [await at.asked([n]) for n in (1, 13, 2)]
        await trio.sleep(1.5)
        exits = [guest.error for guest in guests[1:]]
        leaving = [await at.asked([n]) for n in (3, 4, 5)]
        await trio.sleep(1.5)
        for guest in leaving[1:]:
            guest.leave()
        last = await at.asked([6])
    assert [str(error) for error in exits] == ["the model left its batch by SystemExit: 3"] * 2
    assert last.values == [[12]]
    assert sum("an untidy end" in (record.exc_text or "") for record in caplog.records) == 1
