"""Tickets: a request's place in the queue of a model's instances, given up by itself when the request is cancelled.

The decisions are synchronous (`InstanceQueue.draw`, `.look`, `.give_up`); the waiting is one `trio.Event` a ticket, in
`InstanceQueue.wait_turn`. So the rules can be tested without a task, and no state is ever half changed at an `await`:

- The line is by priority level, and first come, first served within one. A free instance goes to the ticket in front,
  at the moment it is free; or to the batch that can be made from the front (`batches`), which then may also wait a
  little for others.
- A ticket leaves the queue in the instant its request is cancelled, before the request's own task knows of it, and in
  constant time however long the queue is. It never gets to run, and who stood behind it moves up.
- One that was granted an instance in the same tick, a moment before its request was cancelled, hands the instance on.
- A ticket's own time limit is a deadline of the task that waits, which nothing that runs can hold up. Then it is
  refused, or lets all others of its level pass.
- An instance is free when the *work* in it has ended, not when the task that waited for the work has left. A thread
  that ignores its cancellation keeps its instance until it is done; meanwhile it counts as *abandoned*. And the other
  way round: a decoupled model whose `execute` has returned takes the next request while the responses of the last are
  still on their way; such a request counts as *running* until its ticket is given up.
- Tickets that were granted one instance together are one *run* of it, which is over when the work of each has ended.
  It is abandoned when all of them have left.

A ticket that runs by itself does so in its request's task. A batch is begun here, at once and for all (`start`), and
each of its requests' tasks then only attends its own part.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final

import attrs
import trio

from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import CancelReason, Life
from trio_infer.models.joining import AT_ONCE
from trio_infer.models.runner import Attend, Instance
from trio_infer.protocol.queueing import Batching, Queueing
from trio_infer.protocol.values import InferRequest
from trio_infer.scheduling.batches import plan
from trio_infer.scheduling.line import Line
from trio_infer.scheduling.resources import Claims

__all__ = ["InstanceQueue", "QueueStatistics", "Ticket"]

LONGEST_RETRY: Final = 60
"""Seconds that a client is told to stay away at most."""

LINGER: Final = 5
"""Ticks from the end of a run until those who were in it have asked again, if they do so at once; a tick is some 10
microseconds."""

SMOOTHING: Final = 0.1
"""How much the latest run counts in the mean duration of a run."""


@attrs.frozen
class QueueStatistics:
    """How a model's queue stands, now.

    Attributes:
        instances: how many there are; None if any number may run.
        running: requests that hold an instance.
        waiting: requests that wait for one.
        abandoned: instances in which work goes on although all of its requests have left.
        entered, left: requests that have come so far, and that have gone; the difference is those who run or wait.
    """

    instances: int | None
    running: int
    waiting: int
    abandoned: int
    entered: int = 0
    left: int = 0


@attrs.define(eq=False)
class _Run:
    """What goes on in an instance, for one request or a batch of them.

    Attributes:
        index: the instance's.
        held: how many of its requests are still there.
        going: of how many the work goes on, or may still begin.
        size: how many there were.
        abandoned: whether nobody is there while it goes on.
    """

    index: int
    held: int
    going: int
    size: int
    abandoned: bool = False


@attrs.define(eq=False)
class Ticket:
    """A place in the queue.

    Attributes:
        life: of the request, if it has one.
        request: what it asks; needed where it may run in a batch.
        rows, shapes: its batch size, and what must be alike to be joined; see `batches`.
        level: of its priority.
        entered: when it was drawn.
        expires: when it has waited for too long.
        due: until when it may be made to wait for others to join.
        instance: granted, or None while waiting.
        granted: set when `instance` is; None if that was at once.
        attend: takes part in the batch that it runs in; None if it runs by itself.
    """

    life: Life | None = None
    request: InferRequest | None = None
    rows: int = 1
    shapes: Hashable = None
    level: int = 0
    entered: float = 0.0
    expires: float = math.inf
    due: float = math.inf
    instance: Instance | None = None
    granted: trio.Event | None = None
    attend: Attend | None = None
    _run: _Run | None = None
    _queue: InstanceQueue | None = None

    def cancel(self, reason: CancelReason) -> None:
        """Its request is cancelled: if it waits, it has left, before its task even knows."""
        if self._queue is not None and self.instance is None:
            self._queue.drop(self)


Start = Callable[[Sequence[tuple[Instance, InferRequest]]], Sequence[Attend]]


class InstanceQueue:
    """The instances of one model, and who waits for them.

    Args:
        instances: how many runs may go on at once; None for any number, and then nobody ever waits.
        queueing: who waits in front of whom, how long, and how many may.
        batching: how requests are joined; None if each runs by itself.
        max_batch_size: rows that the model takes at most.
        start: begins the run of a batch; see `Batches.begin_batch`.
        first: the index of the first instance.
        lingers: an instance that becomes free is granted only when those who were answered have had the time to ask
            again, some ticks of the loop later, so that who asks again and again is joined with others who do.
        claims: what its instances share with other models'; None if they share nothing.
        clock: gives the time, in seconds.
    """

    def __init__(
        self,
        instances: int | None,
        *,
        queueing: Queueing | None = None,
        batching: Batching | None = None,
        max_batch_size: int = 1,
        start: Start | None = None,
        first: int = 0,
        lingers: bool = False,
        claims: Claims | None = None,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self._limit = instances
        self._queueing = queueing or Queueing()
        self._batching = batching if start is not None else None
        self._delay = self._batching.max_queue_delay if self._batching is not None else 0.0
        self._max_batch_size = max_batch_size
        self._start = start
        self._lingers = lingers
        self._claims = claims
        if claims is not None:
            claims.listen(self._dispatch)
        self._direct = self._delay <= 0 and claims is None  # nothing but a free instance is waited for
        self._clock = clock
        self._free = deque(range(first, first + (instances or 0)))
        self._line: Line[Ticket] = Line()
        self._running = 0
        self._abandoned = 0
        self._dispatching = False
        self._entered = 0
        self._left = 0
        self._mean_run = 0.0
        self._settled = trio.lowlevel.ParkingLot()

    def statistics(self) -> QueueStatistics:
        """How it stands, now."""
        return QueueStatistics(self._limit, self._running, len(self._line), self._abandoned, self._entered, self._left)

    @property
    def joins(self) -> bool:
        """Whether requests may run in batches, so that their shapes matter."""
        return self._batching is not None

    def draw(
        self,
        life: Life | None = None,
        request: InferRequest | None = None,
        *,
        rows: int = 1,
        shapes: Hashable = None,
        priority: object = 0,
        timeout: int = 0,
    ) -> Ticket:
        """Enter the queue; the ticket has its instance already if one was free.

        Args:
            life, request, rows, shapes: see `Ticket`.
            priority: as the request names it.
            timeout: microseconds that the request itself is willing to wait; 0 for any time.

        Raises:
            InferError: UNAVAILABLE: the queue is full.
        """
        level = self._queueing.level(priority)
        ticket = Ticket(life, request, max(rows, 1), shapes, level)  # one without rows takes room, too
        if self._limit is None:
            self._entered += 1
            self._grant([ticket], 0)  # nothing tells unlimited instances apart
            return ticket
        if self._direct and self._free and not self._line:
            self._entered += 1
            self._grant([ticket], self._free.popleft())
            return ticket
        policy = self._queueing.policy(level)
        if 0 < policy.max_queue_size <= self._line.size(level):
            raise InferError(
                f"Exceeds maximum queue size: {self._line.size(level)} requests wait already",
                ErrorCode.UNAVAILABLE,
                retry_after=self._retry_after(),
            )
        self._entered += 1
        patience, delay = policy.timeout(timeout), self._delay
        if patience < math.inf or delay > 0:
            ticket.entered = self._clock()
            ticket.expires = ticket.entered + patience
            if delay > 0:
                ticket.due = ticket.entered + delay
        ticket.granted = trio.Event()
        self._line.enter(level, ticket)
        ticket._queue = self
        if life is not None:
            life.attach(ticket)
        self._dispatch()
        return ticket

    async def wait_turn(self, ticket: Ticket) -> Instance:
        """Wait until the ticket has an instance. Whoever drew the ticket gives it up, in a `finally`.

        Raises:
            InferError: UNAVAILABLE: it has waited for too long.

        Cancellation: just stops waiting.
        """
        while ticket.instance is None:
            assert ticket.granted is not None
            with trio.move_on_at(min(ticket.expires, ticket.due)):
                await ticket.granted.wait()
            if ticket.instance is None:  # one that was granted in the tick in which the time was over is kept
                self.look(ticket)
        return ticket.instance

    def share(self, ticket: Ticket, *, priority: object = 0, timeout: int = 0) -> float:
        """Let a ticket that waits stand for one more request: it has the best level of them, and the longest time.

        Args:
            priority, timeout: the request's, as for `draw`.

        Returns:
            when this request has waited for too long and leaves; infinite if it doesn't.
        """
        if ticket.instance is not None or ticket._queue is None:
            return math.inf
        level = self._queueing.level(priority)
        policy = self._queueing.policy(level)
        patience = policy.timeout(timeout)
        expires = self._clock() + patience if patience < math.inf else math.inf
        ticket.expires = max(ticket.expires, expires)
        if level < ticket.level and self._line.leave(ticket.level, ticket):
            ticket.level = level
            self._line.enter(level, ticket)
            self._dispatch()
        return expires if policy.timeout_action == "reject" else math.inf

    def patience(self, ticket: Ticket) -> float:
        """When the request that a ticket was drawn for has waited for too long and leaves; infinite if it doesn't."""
        rejects = self._queueing.policy(ticket.level).timeout_action == "reject"
        return ticket.expires if rejects and ticket.instance is None else math.inf

    def too_late(self) -> InferError:
        """What one is told that has waited for too long."""
        return InferError("Request timeout expired", ErrorCode.UNAVAILABLE, retry_after=self._retry_after())

    def look(self, ticket: Ticket) -> None:
        """Decide anew about a ticket that waits, as one of its times is over.

        Raises:
            InferError: UNAVAILABLE: it has waited for too long.
        """
        now = self._clock()
        if now >= ticket.due:
            ticket.due = math.inf
            self._dispatch()
        if ticket.instance is None and now >= ticket.expires:
            if self._queueing.policy(ticket.level).timeout_action == "reject":
                raise self.too_late()
            ticket.expires = math.inf
            self._line.delay(ticket.level, ticket)

    def give_up(self, ticket: Ticket) -> None:
        """Leave: the queue, if still waiting, or the instance."""
        instance, ticket.instance = ticket.instance, None
        if ticket._queue is not None and ticket.life is not None:
            ticket.life.detach(ticket)
        if instance is None:
            self.drop(ticket)
        else:
            run = ticket._run
            assert run is not None
            self._running -= 1
            self._left += 1
            run.held -= 1
            if instance.on_end is not None and not instance.working:  # it never worked
                instance.on_end = None
                self._ended(run)
            if run.held == 0 and run.going > 0:
                run.abandoned = True
                self._abandoned += 1
        self._settle()

    def drop(self, ticket: Ticket) -> None:
        """Take a ticket out of the line, if it waits there."""
        if self._line.leave(ticket.level, ticket):
            self._left += 1
            if self._claims is not None:
                self._dispatch()  # if it was the last, other models' instances have their turn

    async def settled(self) -> None:
        """Return when nothing runs, nobody waits and no work is abandoned.

        Cancellation: just stops waiting.
        """
        while self._running or self._line or self._abandoned:
            await self._settled.park()

    def _dispatch(self) -> None:
        """Give free instances to whoever is next."""
        if self._dispatching:
            return  # a batch has ended while it was begun: whoever is at it goes on
        self._dispatching = True
        try:
            while self._free and self._line:
                batch = self._next()
                if not batch:
                    break
                if self._claims is None:
                    index = self._free.popleft()
                else:
                    able = self._claims.take(self._free)
                    if able is None:
                        return
                    self._free.remove(index := able)
                for ticket in batch:
                    self._line.leave(ticket.level, ticket)
                self._grant(batch, index)
        finally:
            self._dispatching = False
        if self._claims is not None:
            self._claims.withdraw()

    def _next(self) -> Sequence[Ticket]:
        if self._batching is None:
            return (next(iter(self._line)),)
        return plan(self._line, self._batching, self._max_batch_size, self._clock() if self._delay > 0 else 0.0).batch

    def _grant(self, batch: Sequence[Ticket], index: int) -> None:
        run = _Run(index, len(batch), len(batch), len(batch))
        rows = sum(ticket.rows for ticket in batch)
        for ticket in batch:
            instance = ticket.instance = Instance(index, ticket.life)
            instance.on_end = partial(self._work_ended, run, instance)
            ticket._run = run
            if len(batch) > 1:
                timing = instance.timing
                timing.batch_rows, timing.share, timing.leads = rows, ticket.rows / rows, ticket is batch[0]
        self._running += len(batch)
        if len(batch) > 1:
            assert self._start is not None
            members = [(ticket.instance, ticket.request) for ticket in batch if ticket.instance and ticket.request]
            for ticket, attend in zip(batch, self._start(members), strict=True):
                ticket.attend = attend
        for ticket in batch:
            if ticket.granted is not None:
                ticket.granted.set()

    def _work_ended(self, run: _Run, instance: Instance) -> None:
        took = (instance.timing.ended - instance.timing.begun) / 1e9
        self._mean_run += (took - self._mean_run) * (SMOOTHING if self._mean_run else 1.0)
        self._ended(run)

    def _ended(self, run: _Run) -> None:
        run.going -= 1
        if run.going:
            return
        if run.abandoned:
            self._abandoned -= 1
        if self._lingers:
            trio.lowlevel.spawn_system_task(self._pass_on_later, run)
        elif self._limit is not None:
            self._pass_on(run)
        self._settle()

    async def _pass_on_later(self, run: _Run) -> None:
        for _ in range(LINGER + run.size // AT_ONCE):
            await trio.lowlevel.checkpoint()
        self._pass_on(run)

    def _pass_on(self, run: _Run) -> None:
        self._free.append(run.index)
        if self._claims is None:
            self._dispatch()
            return
        self._claims.give_back(run.index)
        self._dispatch()  # which may claim again before others are asked: it may be its turn
        self._claims.offer()

    def _retry_after(self) -> int:
        """Seconds in which about half of those who wait will have had their turn."""
        turns = (len(self._line) + 1) / (2 * (self._limit or 1))
        return max(1, min(math.ceil(turns * self._mean_run), LONGEST_RETRY))

    def _settle(self) -> None:
        if not (self._running or self._line or self._abandoned):
            self._settled.unpark_all()
