"""Which of those who wait run together: the dynamic batcher's decision, without a clock or a task.

An instance is free and a line of requests waits. The batch is made from the head of the line, never by leaving somebody
out who stands before another: it ends where the next request doesn't fit any more, because the batch would have more
rows than its largest preferred size (the model's largest if none is preferred), or because its tensors have other
shapes (inputs that may be *ragged* excepted).

Then, as Triton does:

- Nobody is to wait (`max_queue_delay` 0), and it has reached a preferred size on its way: that much of it runs.
- It can't grow any more, by one of the rules above or because it has reached the largest preferred size: it runs.
- One of it has waited for `max_queue_delay`, or it has so many rows as are said to be enough: what is there runs.
- Otherwise it waits, at most until then, for others to join.

A request by itself runs whatever its size is.

What it costs doesn't depend on the line's length, only on the batch's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, Protocol, TypeVar

import attrs

from trio_infer.protocol.queueing import Batching

__all__ = ["Joinable", "Plan", "plan"]


class Joinable(Protocol):
    """A request that waits.

    Attributes:
        rows: of its tensors.
        shapes: equal for requests that can be joined.
        entered: when it came.
    """

    rows: int
    shapes: Hashable
    entered: float


T = TypeVar("T", bound=Joinable)


@attrs.frozen
class Plan(Generic[T]):
    """What to do.

    Attributes:
        batch: run these together, now; none to wait.
        until: wait at most so long; infinite if somebody has to come first.
    """

    batch: tuple[T, ...] = ()
    until: float = float("inf")


def plan(line: Iterable[T], batching: Batching, max_batch_size: int, now: float) -> Plan[T]:
    """What an instance that is free should do.

    Args:
        line: who waits, in the order in which they are to be served.
        batching: the model's.
        max_batch_size: rows that the model takes at most.
        now: on the clock of `entered`.
    """
    limit = batching.preferred[-1] if batching.preferred else max_batch_size
    batch: list[T] = []
    rows = best = 0  # `best`: so many of the batch make a preferred size
    closed = False
    for who in line:
        if batch and (rows + who.rows > limit or who.shapes != batch[0].shapes):
            closed = True
            break
        batch.append(who)
        rows += who.rows
        if rows in batching.preferred:
            best = len(batch)
        if rows >= limit:
            closed = True
            break
    if not batch:
        return Plan()
    if batching.max_queue_delay <= 0:  # `now` doesn't matter then
        return Plan(tuple(batch[: best or len(batch)]))
    until = min(who.entered for who in batch) + batching.max_queue_delay
    if closed or now >= until or 0 < batching.enough <= rows:
        return Plan(tuple(batch))
    return Plan(until=until)
