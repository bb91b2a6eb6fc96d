"""Everything that can happen to requests of one model, in any order, under a clock that jumps.

Guests come, alone or in batches of rows, with priorities and time limits; they leave, or are cancelled by a deadline;
the model answers, raises, is slow, or is deaf (it goes on for a while when it is cancelled); in the end it is unloaded,
with or without patience. Whatever the order:

- each guest has one outcome, and each that stayed has its own rows back, or its own error
- nobody is disturbed by another's leaving
- no instance is idle while somebody waits who may run; no more run than there are instances
- a level of priority is first come, first served; bounds on the queue hold
- at the end nothing is left

`EXAMPLES=200000` in the environment makes a long run of it.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from desk import EXAMPLES, Desk, Guest
from trio_infer import CancelReason, InferError, InferRequest, Model, Outcome, TensorSpec
from trio_infer.models.host import NoHost
from trio_infer.models.native import NativeRunner
from trio_infer.protocol.queueing import Batching, Queueing, QueuePolicy
from trio_infer.scheduling.served import ServedModel

LEVELS = 3
BAD = -1.0


@attrs.define(eq=False)
class Busy(Model):
    """Works as long as the rows say; raises for one that is `BAD`; goes on for `deaf` seconds when it is cancelled."""

    name: str = "busy"
    instances: int | None = 1
    max_batch_size: int = 4
    batching: Batching | None = None
    queueing: Queueing | None = None
    deaf: float = 0.0
    running: int = 0
    most: int = 0
    entered: list[float] = attrs.field(factory=list)

    inputs = (TensorSpec("x", "FP32", [2]),)
    outputs = (TensorSpec("y", "FP32", [2]),)

    async def infer(self, request: InferRequest) -> Any:
        x = request.inputs["x"]
        self.entered += x[:, 0].tolist()
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await trio.sleep(float(x[:, 1].max()))
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.deaf)
            raise
        finally:
            self.running -= 1
        if (x[:, 1] == BAD).any():
            raise ValueError("bad")
        return {"y": x}


@attrs.frozen
class Arrival:
    rows: int
    seconds: float
    bad: bool
    priority: int
    timeout: float
    leaves: float | None
    reason: CancelReason
    after: float


TIMES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 3.0])
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        rows=st.integers(1, 4),
        seconds=TIMES,
        bad=st.sampled_from([False, False, False, True]),
        priority=st.integers(0, LEVELS + 1),
        timeout=st.sampled_from([0.0, 0.0, 0.5, 1.5]),
        leaves=st.none() | TIMES,
        reason=st.sampled_from([CancelReason.DISCONNECTED, CancelReason.DEADLINE, CancelReason.REQUESTED]),
        after=st.sampled_from([0.0, 0.0, 0.0, 0.25, 1.0]),
    ),
    max_size=10,
)
BATCHINGS = st.none() | st.builds(
    Batching,
    preferred=st.sampled_from([(), (2,), (2, 4)]),
    max_queue_delay=st.sampled_from([0.0, 0.0, 0.5]),
    preserve_ordering=st.booleans(),
)
QUEUEINGS = st.builds(
    Queueing,
    st.builds(
        QueuePolicy,
        st.sampled_from([0, 0, 2]),
        st.sampled_from([float("inf"), 1.0]),
        st.sampled_from(["reject", "delay"]),
        allow_timeout_override=st.booleans(),
    ),
    priority_levels=st.just(LEVELS),
    default_priority_level=st.just(2),
)


class World(Desk):
    """Guests by their number, which is in each of their rows."""

    def __init__(self, busy: Busy, model: ServedModel, nursery: trio.Nursery) -> None:
        super().__init__(model, nursery)
        self.busy = busy
        self.guests: list[Guest] = []

    def come(self, arrival: Arrival) -> None:
        row = [float(len(self.guests) + 1), BAD if arrival.bad else arrival.seconds]
        parameters = {"priority": arrival.priority}
        guest = self.ask(*[row] * arrival.rows, parameters=parameters, timeout=int(arrival.timeout * 1e6))
        self.guests.append(guest)
        if arrival.leaves is not None:
            self._nursery.start_soon(self.leave, guest, arrival.leaves, arrival.reason)

    async def leave(self, guest: Guest, after: float, reason: CancelReason) -> None:
        with trio.move_on_after(after):
            await guest.done.wait()
        guest.leave(reason)

    def look(self, instances: int, bound: int) -> None:
        """What must hold whenever nothing can be done without time passing."""
        queue = self.model.statistics()
        assert queue.entered == queue.left + queue.running + queue.waiting
        assert self.busy.most <= instances
        delays = self.busy.batching is not None and self.busy.batching.max_queue_delay
        if queue.waiting and not delays:
            assert self.busy.running == instances, "somebody waits, and an instance is idle"
        if bound:
            assert queue.waiting <= bound * LEVELS


async def play(
    arrivals: list[Arrival], batching: Any, queueing: Queueing, instances: int, deaf: float, end: Literal[0, 1, 2]
) -> None:
    model = Busy(instances=instances, batching=batching, queueing=queueing, deaf=deaf)
    served = ServedModel(NativeRunner(model))
    await served.load(NoHost())
    served.ready = True
    async with trio.open_nursery() as nursery:
        at = World(model, served, nursery)
        for arrival in arrivals:
            await trio.sleep(arrival.after)
            at.come(arrival)
            await trio.testing.wait_all_tasks_blocked()
            at.look(instances, queueing.default.max_queue_size)
        if end == 1:
            served.ready = False
            served.stop(CancelReason.UNLOADED)
        elif end == 2:
            for guest in at.guests:
                guest.leave()
    await served.settled()
    await served.unload()
    check(at, arrivals)


def check(at: World, arrivals: list[Arrival]) -> None:
    at.check_balance()
    assert at.busy.running == 0
    assert len(at.order) == len(arrivals), "one outcome each"
    assert at.books.success.count + at.books.fail.count == len(arrivals)
    for number, (guest, arrival) in enumerate(zip(at.guests, arrivals, strict=True), 1):
        entered = at.busy.entered.count(float(number))
        if guest.life.outcome is Outcome.CANCELLED:
            assert arrival.leaves is not None or guest.life.reason in (CancelReason.UNLOADED, CancelReason.DISCONNECTED)
        elif isinstance(guest.error, InferError):
            assert guest.error.message.startswith(("Exceeds maximum queue size", "Request timeout expired"))
            assert not entered, "refused, and yet it ran"
        elif guest.error is not None:
            assert arrival.bad
        else:
            assert not arrival.bad
            assert guest.values == [[float(number), arrival.seconds]] * arrival.rows
        if at.busy.batching is None:
            assert entered in (0, arrival.rows), "nobody runs twice"


@settings(
    max_examples=EXAMPLES or 2000,
    deadline=None,
    derandomize=not EXAMPLES,  # so that a long run finds what is new
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    arrivals=ARRIVALS,
    batching=BATCHINGS,
    queueing=QUEUEINGS,
    instances=st.integers(1, 3),
    deaf=st.sampled_from([0.0, 0.0, 0.75]),
    end=st.sampled_from([0, 0, 1, 2]),
)
def test_whatever_the_order_each_request_ends_once_and_nothing_is_left(**world: Any) -> None:
    trio.run(lambda: play(**world), clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("priority", range(1, LEVELS + 1))
async def test_a_level_is_first_come_first_served_among_those_who_stay(priority: int, autojump_clock: Any) -> None:
    queueing = Queueing(priority_levels=LEVELS, default_priority_level=1)
    model = Busy(queueing=queueing)
    served = ServedModel(NativeRunner(model))
    await served.load(NoHost())
    served.ready = True
    async with trio.open_nursery() as nursery:
        at = World(model, served, nursery)
        for number in range(12):
            leaves = 0.5 if number % 3 == 1 else None
            at.come(Arrival(1, 1.0, False, priority, 0.0, leaves, CancelReason.DISCONNECTED, 0.0))
            await trio.testing.wait_all_tasks_blocked()
    assert model.entered == [1, 3, 4, 6, 7, 9, 10, 12]
