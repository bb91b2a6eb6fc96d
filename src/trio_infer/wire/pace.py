"""How long a connection waits for what: one deadline, moved from limit to limit.

A cancel scope per phase would cost 11 us each, four a request. Instead the scope that wraps the whole conversation has
its deadline moved, and only when the task is about to sleep. `Pace` knows which limit is running, and so what its
expiry means (`Waiting`). A scope that was cancelled stays so: an expiry always ends the conversation.
"""

from __future__ import annotations

import enum
import math

import trio

from trio_infer.limits import Limits

__all__ = ["Pace", "Waiting"]


class Waiting(enum.Enum):
    """What a connection is waiting for, and so what it means if that takes too long."""

    NOTHING = "nothing"
    REQUEST = "the next request"
    HEAD = "the rest of the request's headers"
    BODY = "the rest of the request's body"
    READER = "the client to read its answer"


class Pace:
    """The connection's one deadline, moved from limit to limit.

    Args:
        scope: wraps the whole conversation; expiring, it ends that.
        limits: the seconds.
    """

    __slots__ = ("_limits", "_scope", "waiting")

    def __init__(self, scope: trio.CancelScope, limits: Limits) -> None:
        self._scope = scope
        self._limits = limits
        self.waiting: Waiting = Waiting.NOTHING

    def idle(self) -> None:
        """The next request may take `idle_timeout` to begin."""
        if self.waiting is not Waiting.REQUEST:  # blank lines do not start it anew
            self._start(Waiting.REQUEST, self._limits.idle_timeout)

    def head(self) -> None:
        """Its headers may take `header_timeout` in all."""
        if self.waiting is not Waiting.HEAD:  # counted from the first byte, not between two
            self._start(Waiting.HEAD, self._limits.header_timeout)

    def body(self) -> None:
        """More of its body may take `body_timeout` to come."""
        self._start(Waiting.BODY, self._limits.body_timeout)

    def reader(self) -> None:
        """The client may take `write_timeout` to read more of its answer."""
        self._start(Waiting.READER, self._limits.write_timeout)

    async def heed(self) -> None:
        """After a sleep: a limit that expired in the very tick in which the sleep ended, has expired.

        Cancellation: that is all it does. The scope is cancelled already, and can't be revived; without this the next
        checkpoint would tell, at which nobody knows any more what was being waited for.
        """
        if self.waiting is not Waiting.NOTHING and self._scope.cancel_called:
            await trio.lowlevel.checkpoint()

    @property
    def stalled(self) -> bool:
        """Whether the limit has expired for a client that does not read."""
        return self.waiting is Waiting.READER and self._scope.cancel_called

    def rest(self) -> None:
        """No limit runs."""
        if self.waiting is not Waiting.NOTHING:
            self.waiting = Waiting.NOTHING
            self._scope.deadline = math.inf

    def _start(self, waiting: Waiting, seconds: float) -> None:
        self.waiting = waiting
        self._scope.deadline = trio.current_time() + seconds
