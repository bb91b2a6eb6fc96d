"""Who gets an instance, when, and what a ticket that leaves does to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_infer.lifecycle import CancelReason, Life
from trio_infer.models.runner import Attend, Instance
from trio_infer.protocol.queueing import Batching
from trio_infer.protocol.values import InferRequest, Send
from trio_infer.scheduling.ticket import InstanceQueue, QueueStatistics, Ticket

REQUEST = InferRequest("m", "1", {})


async def _attend(send: Send) -> None: ...


def test_a_free_instance_is_granted_at_once_and_the_rest_wait_in_order() -> None:
    queue = InstanceQueue(2)
    tickets = [queue.draw() for _ in range(5)]
    assert [ticket.instance is not None for ticket in tickets] == [True, True, False, False, False]
    queue.give_up(tickets[1])
    assert tickets[2].instance is not None
    assert tickets[3].instance is None


def test_a_ticket_that_leaves_the_queue_is_gone_at_once_and_never_granted() -> None:
    queue = InstanceQueue(1)
    first, second, third = (queue.draw() for _ in range(3))
    queue.give_up(second)
    assert queue.statistics().waiting == 1
    queue.give_up(first)
    assert second.instance is None
    assert third.instance is not None


def test_an_instance_granted_to_a_ticket_that_leaves_in_the_same_tick_goes_to_the_next() -> None:
    queue = InstanceQueue(1)
    first, second, third = (queue.draw() for _ in range(3))
    queue.give_up(first)
    assert second.instance is not None
    queue.give_up(second)
    assert third.instance is not None


def test_one_that_is_cancelled_has_left_the_queue_in_that_instant_though_its_task_does_not_know_yet() -> None:
    for batching in (None, Batching()):
        queue = InstanceQueue(1, batching=batching, max_batch_size=4, start=lambda batch: [_attend for _ in batch])
        life = Life()
        first, second, third, fourth = (queue.draw(life if n == 1 else None, REQUEST) for n in range(4))
        assert queue.statistics().waiting == 3
        life.cancel(CancelReason.DISCONNECTED)
        assert queue.statistics().waiting == 2
        queue.give_up(first)
        assert second.instance is None
        assert third.instance is not None
        assert (fourth.instance is None) is (batching is None)
        queue.give_up(second)


def test_an_instance_that_runs_a_batch_is_free_when_the_work_of_each_has_ended_and_abandoned_with_the_last() -> None:
    queue = InstanceQueue(1, batching=Batching(), max_batch_size=2, start=lambda batch: [_attend for _ in batch])
    first, second, third, fourth = (queue.draw(None, REQUEST) for _ in range(4))
    queue.give_up(first)
    instances = [second.instance, third.instance]
    assert fourth.instance is None
    for instance in instances:
        assert instance is not None
        instance.begin()
    queue.give_up(second)
    assert queue.statistics() == QueueStatistics(1, running=1, waiting=1, abandoned=0, entered=4, left=2)
    queue.give_up(third)
    assert queue.statistics() == QueueStatistics(1, running=0, waiting=1, abandoned=1, entered=4, left=3)
    for left, instance in zip((1, 0), instances, strict=True):
        assert instance is not None
        instance.end()
        assert queue.statistics().abandoned == left
    assert fourth.instance is not None


def test_batches_that_end_while_they_are_begun_do_not_pile_up() -> None:
    def start(batch: Sequence[tuple[Instance, InferRequest]]) -> Sequence[Attend]:
        for instance, _ in batch:
            instance.begin()
            instance.end()
        return [_attend for _ in batch]

    queue = InstanceQueue(1, batching=Batching(), max_batch_size=2, start=start)
    first, *rest = (queue.draw(None, REQUEST) for _ in range(2001))
    queue.give_up(first)
    for ticket in rest:
        assert ticket.attend is not None
        queue.give_up(ticket)
    statistics = queue.statistics()
    assert (statistics.running, statistics.waiting, statistics.abandoned) == (0, 0, 0)


def test_an_instance_is_kept_until_its_work_has_really_ended() -> None:
    queue = InstanceQueue(1)
    first, second = queue.draw(), queue.draw()
    assert first.instance is not None
    instance = first.instance
    instance.begin()
    queue.give_up(first)
    assert second.instance is None
    assert queue.statistics().abandoned == 1
    instance.end()
    assert queue.statistics().abandoned == 0
    assert second.instance is not None
    assert second.instance.index == instance.index


def test_an_instance_whose_work_has_ended_goes_on_while_its_responses_are_still_on_their_way() -> None:
    queue = InstanceQueue(1)
    first, second = queue.draw(), queue.draw()
    assert first.instance is not None
    first.instance.begin()
    first.instance.end()
    assert second.instance is not None
    assert queue.statistics().running == 2
    queue.give_up(first)
    queue.give_up(second)
    third, fourth = queue.draw(), queue.draw()
    assert third.instance is not None
    assert fourth.instance is None, "the index came back once"


def test_without_a_limit_nobody_waits() -> None:
    queue = InstanceQueue(None)
    tickets = [queue.draw() for _ in range(1000)]
    assert all(ticket.instance is not None for ticket in tickets)
    assert queue.statistics().running == 1000


async def test_a_turn_is_waited_for_and_given_back(autojump_clock: Any) -> None:
    queue = InstanceQueue(1)
    order = []

    async def run(name: str) -> None:
        ticket = queue.draw()
        await queue.wait_turn(ticket)
        order.append(name)
        await trio.sleep(1)
        queue.give_up(ticket)

    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(run, name)
            await trio.testing.wait_all_tasks_blocked()
    assert order == ["a", "b", "c"]
    assert trio.current_time() == pytest.approx(3)


@pytest.mark.parametrize("count", [10, 10_000])
async def test_leaving_from_the_middle_of_a_queue_of_any_length(count: int) -> None:
    queue = InstanceQueue(1)
    holder = queue.draw()
    tickets = [queue.draw() for _ in range(count)]
    for ticket in tickets[: count // 2]:
        queue.give_up(ticket)
    queue.give_up(holder)
    assert tickets[count // 2].instance is not None


async def test_settled_returns_when_nothing_runs_waits_or_is_abandoned() -> None:
    queue = InstanceQueue(1)
    ticket = queue.draw()
    assert ticket.instance is not None
    instance = ticket.instance
    instance.begin()
    settled = trio.Event()

    async def wait() -> None:
        await queue.settled()
        settled.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        queue.give_up(ticket)
        await trio.testing.wait_all_tasks_blocked()
        assert not settled.is_set(), "its work goes on"
        instance.end()
        await settled.wait()


class QueueMachine(RuleBasedStateMachine):
    """Arrivals, departures and stubborn work in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = InstanceQueue(3)
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []
        self.abandoned: list[Any] = []

    def settle(self) -> None:
        granted = [ticket for ticket in self.waiting if ticket.instance is not None]
        assert granted == self.waiting[: len(granted)], "first come, first served"
        self.waiting = self.waiting[len(granted) :]
        self.running += granted

    @rule()
    def arrive(self) -> None:
        self.waiting.append(self.queue.draw())
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave_the_queue(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ticket)
        self.queue.give_up(ticket)
        self.settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), stubborn=st.booleans())
    def leave_an_instance(self, data: st.DataObject, stubborn: bool) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        self.running.remove(ticket)
        if stubborn:
            assert ticket.instance is not None
            ticket.instance.begin()
            self.abandoned.append(ticket.instance)
        self.queue.give_up(ticket)
        self.settle()

    @precondition(lambda self: self.abandoned)
    @rule(data=st.data())
    def work_ends(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(self.abandoned))
        self.abandoned.remove(instance)
        instance.end()
        self.settle()

    @invariant()
    def it_balances(self) -> None:
        statistics = self.queue.statistics()
        assert statistics.running == len(self.running)
        assert statistics.waiting == len(self.waiting)
        assert statistics.abandoned == len(self.abandoned)
        busy = len(self.running) + len(self.abandoned)
        assert busy <= 3
        assert not self.waiting or busy == 3, "no instance idles while somebody waits"
        taken = [ticket.instance for ticket in self.running] + self.abandoned
        assert len({instance.index for instance in taken}) == len(taken), "never two runs in one instance"


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_the_queue_balances_whatever_happens = QueueMachine.TestCase
