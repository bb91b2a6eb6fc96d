"""The disconnect sentinel: it watches one connection, and cancels the request in hand when the client leaves.

Why it is needed. A server that has read a request and not yet begun to answer does nothing with the socket, and so
hears nothing from it. A client that hangs up is noticed at the first write, or rather at the second (the first one
after a FIN succeeds); for a non-streaming inference that is when the model has run to its end. So somebody has to
keep an ear on the connection meanwhile, and must do it without *reading*, since what arrives may be the next request.

How it works. `run` is a task that lives as long as its connection. Between requests it is parked. `guard` arms it for
one request: it looks, by the truth table in `sights.py`, and sleeps in `trio.lowlevel.wait_readable` between looks. Its
only power is `life.cancel(DISCONNECTED)`, which cancels that request's cancel scope. Leaving the guard disarms it,
synchronously: from then on nothing that it sees has a meaning, and the connection can be read again at once.

Two tasks must never wait on one descriptor. There are two ways to see to that, and each wait has the better one:

- A plain wait for a socket to become readable *outlasts* its guard. It is the very wait that the next read needs, too:
  if the reader must sleep meanwhile, it parks behind the sentinel, which wakes it when it wakes itself. That saves a
  cancel scope, a cancel, an exception and a registration with epoll, a request: with it the sentinel costs 5 to 8 %
  of the CPU of a small inference that sleeps once, and with a scope for each guard it cost 13 %.
- Any other wait sits in a cancel scope, which leaving the guard cancels: behind a hang-up there is nothing to read, and
  what is read ahead from a stream must be given up. `CancelScope.cancel` takes a task out of `wait_readable` before it
  returns.

Facts it rests on (Linux, Python 3.11, trio 0.35):

- A nursery with its tasks per request would cost 0.2 ms; a parked task that is woken costs some 10 us. A request that
  never sleeps is over before the sentinel has run at all.
- `wait_readable` is level-triggered: to go on waiting after having seen a byte would spin. Hence DISARM, or the nested
  epoll of the WATCH actions, which sleeps through bytes.
- A wake-up may be in the run queue already when the guard is left. So after each sleep the sentinel first asks whether
  it is still armed *for the same request*; a FIN seen late must not cancel the next one.
- Over TLS and other streams `wait` reads ahead (see `transport.py`); that is given up only when the sentinel's task has
  run once more, so whoever reads next must first await `aside`.

Rejected: a look before each request (a client leaves *during* it), polling with a timer (late, and costs when idle),
`EPOLLRDHUP` for everyone (one more descriptor per connection), reading ahead on plain sockets (unbounded, or blind
past the bound).
"""

from __future__ import annotations

from types import TracebackType

import trio

from trio_infer.lifecycle import CancelReason, Life
from trio_infer.limits import DisconnectPolicy
from trio_infer.wire.sights import Action, Sight, verdict
from trio_infer.wire.transport import Transport

__all__ = ["Guard", "Sentinel"]


class Guard:
    """A context manager: within it, the client's leaving cancels `life`. Made by `Sentinel.guard`."""

    __slots__ = ("_sentinel", "life", "sight")

    def __init__(self, sentinel: Sentinel, life: Life, sight: Sight) -> None:
        self._sentinel = sentinel
        self.life: Life = life
        self.sight: Sight = sight

    def __enter__(self) -> None:
        self._sentinel.arm(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sentinel.disarm()


class Sentinel:
    """Watches one connection.

    Args:
        transport: what it looks at.
        policy: how it judges what it sees.

    Attributes:
        saw_departure: whether the client has left; then `run` has returned, or is about to.
    """

    __slots__ = ("_aside", "_guard", "_parked", "_transport", "_watch", "policy", "saw_departure")

    def __init__(self, transport: Transport, policy: DisconnectPolicy) -> None:
        self._transport = transport
        self.policy: DisconnectPolicy = policy
        self.saw_departure: bool = False
        self._guard: Guard | None = None
        self._watch: trio.CancelScope | None = None
        self._parked = trio.lowlevel.ParkingLot()
        self._aside = trio.lowlevel.ParkingLot()

    def guard(self, life: Life, *, pipelined: bool = False) -> Guard:
        """`with sentinel.guard(life): ...` cancels `life` if the client leaves meanwhile.

        Args:
            life: its canceller is expected to cancel the scope that the block runs in.
            pipelined: bytes of a next request have been received already. They are out of reach of any look, but the
                outcome must not depend on how TCP cut the bytes: the sentinel starts as if it had just seen them.
        """
        return Guard(self, life, Sight.DATA if pipelined else Sight.QUIET)

    @property
    def armed(self) -> bool:
        """Whether a departure would be seen now."""
        return self._guard is not None

    def arm(self, guard: Guard) -> None:
        self._guard = guard
        self._parked.unpark()

    def disarm(self) -> None:
        self._guard = None
        if self._watch is not None:
            self._watch.cancel()

    async def aside(self) -> None:
        """Return when the sentinel has let go of the stream: at once if it is parked, or in a wait that may outlast."""
        while self._watch is not None:
            await self._aside.park()

    async def run(self) -> None:
        """Watch for as long as the connection lives; return when the client has left, which it does once.

        Cancellation: stops watching; nothing else holds the connection.
        """
        while True:
            guard = self._guard
            if guard is None:
                await self._parked.park()
            elif await self._watch_over(guard):
                self.saw_departure = True
                return
            elif self._guard is guard:
                self._guard = None  # nothing more to see during this request

    async def _watch_over(self, guard: Guard) -> bool:
        """Look, and sleep, until there is nothing more to see; whether the client has left."""
        sight = guard.sight
        while True:
            action = verdict(sight, self.policy)
            if action is Action.CANCEL:
                guard.life.cancel(CancelReason.DISCONNECTED)
                return True
            if action is Action.DISARM:
                return False
            if self._transport.may_outlast(action):
                await self._transport.wait(action)
            else:
                with trio.CancelScope() as self._watch:
                    await self._transport.wait(action)
                self._watch = None
                self._aside.unpark_all()
            if self._guard is not guard:
                return False
            sight = self._transport.look()
