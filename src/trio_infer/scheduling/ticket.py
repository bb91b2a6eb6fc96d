"""Tickets: a request's place in the queue of a model's instances, given up by itself when the request is cancelled.

The decisions are synchronous and know no clock (`InstanceQueue.draw`, `.give_up`); the waiting is one `trio.Event` a
ticket, in `InstanceQueue.wait_turn`. So the rules can be tested without a task, and no state is ever half changed at an
`await`:

- First come, first served. A free instance goes to the ticket that has waited longest, at the moment it is free.
- A ticket leaves the queue in the instant its request is cancelled, in constant time however long the queue is (the
  queue is a dict, which keeps its order). It never gets to run, and who stood behind it moves up.
- A ticket that was granted an instance in the same tick in which its request was cancelled hands the instance on.
- An instance is free when the *work* in it has ended, not when the task that waited for the work has left. A thread
  that ignores its cancellation keeps its instance until it is done; meanwhile it counts as *abandoned*. And the other
  way round: a decoupled model whose `execute` has returned takes the next request while the responses of the last are
  still on their way; such a request counts as *running* until its ticket is given up.
"""

from __future__ import annotations

from collections import deque

import attrs
import trio

from trio_infer.lifecycle import Life
from trio_infer.models.runner import Instance

__all__ = ["InstanceQueue", "QueueStatistics", "Ticket"]


@attrs.frozen
class QueueStatistics:
    """How a model's queue stands, now.

    Attributes:
        instances: how many there are; None if any number may run.
        running: requests that hold an instance.
        waiting: requests that wait for one.
        abandoned: instances in which work goes on although its request has left.
    """

    instances: int | None
    running: int
    waiting: int
    abandoned: int


@attrs.define(eq=False)
class Ticket:
    """A place in the queue.

    Attributes:
        life: of the request, if it has one.
        instance: granted, or None while waiting.
        granted: set when `instance` is; None if that was at once.
    """

    life: Life | None = None
    instance: Instance | None = None
    granted: trio.Event | None = None


class InstanceQueue:
    """The instances of one model, and who waits for them.

    Args:
        instances: how many runs may go on at once; None for any number, and then nobody ever waits.
    """

    def __init__(self, instances: int | None) -> None:
        self._limit = instances
        self._free = deque(range(instances or 0))
        self._waiting: dict[Ticket, None] = {}
        self._running = 0
        self._abandoned = 0
        self._settled = trio.lowlevel.ParkingLot()

    def statistics(self) -> QueueStatistics:
        """How it stands, now."""
        return QueueStatistics(self._limit, self._running, len(self._waiting), self._abandoned)

    def draw(self, life: Life | None = None) -> Ticket:
        """Enter the queue; the ticket has its instance already if one was free.

        Args:
            life: of the request; its instance is told of it.
        """
        ticket = Ticket(life)
        if self._limit is None:
            self._grant(ticket, 0)  # nothing tells unlimited instances apart
        elif self._free:
            self._grant(ticket, self._free.popleft())
        else:
            ticket.granted = trio.Event()
            self._waiting[ticket] = None
        return ticket

    async def wait_turn(self, ticket: Ticket) -> Instance:
        """Wait until the ticket has an instance. Whoever drew the ticket gives it up, in a `finally`.

        Cancellation: just stops waiting.
        """
        if ticket.granted is not None:
            await ticket.granted.wait()
        assert ticket.instance is not None
        return ticket.instance

    def give_up(self, ticket: Ticket) -> None:
        """Leave: the queue, if still waiting, or the instance."""
        instance, ticket.instance = ticket.instance, None
        if instance is None:
            self._waiting.pop(ticket, None)
            return
        self._running -= 1
        if instance.working:
            self._abandoned += 1
            instance.on_end = lambda: self._reclaim(instance)
        elif instance.on_end is not None:  # it never worked
            instance.on_end = None
            self._pass_on(instance.index)
        self._settle()

    async def settled(self) -> None:
        """Return when nothing runs, nobody waits and no work is abandoned.

        Cancellation: just stops waiting.
        """
        while self._running or self._waiting or self._abandoned:
            await self._settled.park()

    def _grant(self, ticket: Ticket, index: int) -> None:
        ticket.instance = Instance(index, ticket.life, on_end=lambda: self._pass_on(index))
        self._running += 1
        if ticket.granted is not None:
            ticket.granted.set()

    def _reclaim(self, instance: Instance) -> None:
        self._abandoned -= 1
        self._pass_on(instance.index)
        self._settle()

    def _pass_on(self, index: int) -> None:
        if self._limit is None:
            return
        if self._waiting:
            ticket = next(iter(self._waiting))
            del self._waiting[ticket]
            self._grant(ticket, index)
        else:
            self._free.append(index)

    def _settle(self) -> None:
        if not (self._running or self._waiting or self._abandoned):
            self._settled.unpark_all()
