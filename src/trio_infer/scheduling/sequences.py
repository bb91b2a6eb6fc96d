"""Which request of which sequence is next: pure decisions, without a task; the clock is an argument.

A sequence has its requests served strictly in order, one at a time, and all by one instance, as the model keeps what it
knows of the sequence there. An instance has a number of *slots*, each for one sequence; sequences that have none wait
in the *backlog*, first come first served. A sequence begins with a request that says START, and its slot is free again

- when a request that says END has been answered (or has failed), and none waits behind it;
- when nobody has asked for it during the idle limit, and another sequence wants the slot or asks by its name;
- when one of its requests is cancelled. What the model knows of the sequence has a gap then, so what waits behind that
  request is cancelled, too, and so would be what comes later: it must START anew. What was in front of it goes on.

All of this happens in the instant of its cause, and a free slot goes to the backlog in the same instant. A slot is the
right to ask an instance, no more: that an instance never runs two things at once is the instance's queue's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import attrs
import trio

from trio_infer.errors import InferError
from trio_infer.lifecycle import CancelReason, Life
from trio_infer.protocol.values import Array

__all__ = ["Member", "SequenceTable"]


@attrs.define(eq=False)
class _Sequence:
    """One sequence.

    Attributes:
        key: its correlation id.
        instance: who serves it; None in the backlog.
        members: its requests, the one that is served or is to be served next in front.
        broken: one of them was cancelled, so it ends with those that are still here.
        states: what goes from one request to the next.
    """

    key: int | str
    instance: int | None = None
    members: deque[Member] = attrs.field(factory=deque)
    broken: bool = False
    states: Mapping[str, Array] | None = None


@attrs.define(eq=False)
class Member:
    """One request's place in its sequence.

    Attributes:
        start, end: what it said.
        turn: whether it may ask the instance; `news` is set when that changes, or when it is to look again.
    """

    life: Life
    start: bool
    end: bool
    sequence: _Sequence
    _table: SequenceTable
    turn: bool = False
    news: trio.Event = attrs.field(factory=trio.Event)

    @property
    def instance(self) -> int:
        """Who serves it; known when it has its turn."""
        assert self.sequence.instance is not None
        return self.sequence.instance

    def cancel(self, reason: CancelReason) -> None:
        """Its request is cancelled, by its client or with its sequence."""
        self._table.strike(self)


class SequenceTable:
    """All sequences of one model.

    Args:
        model: its name, for errors.
        instances: how many there are.
        slots: of each.
        idle: seconds.
        clock: gives the time.
    """

    def __init__(
        self, model: str, instances: int, slots: int, idle: float, clock: Callable[[], float] = trio.current_time
    ) -> None:
        self._model = model
        self._idle_limit = idle
        self._clock = clock
        self._sequences: dict[int | str, _Sequence] = {}
        self._backlog: dict[_Sequence, None] = {}
        self._idle: dict[_Sequence, float] = {}  # since when; the longest first
        self._instances = instances
        self._fresh = instances * slots  # that nobody has had yet: as many as a configuration says, which may be 2**31
        self._free: deque[int] = deque()
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Requests that don't have their turn yet."""
        return self._waiting

    @property
    def sequences(self) -> int:
        """Sequences that have begun and have not ended, those in the backlog included."""
        return len(self._sequences)

    @property
    def free_slots(self) -> int:
        return self._fresh + len(self._free)

    def enter(self, life: Life, key: int | str, *, start: bool, end: bool) -> Member:
        """A request comes.

        Raises:
            InferError: it is of no sequence, or of one that has not begun.
        """
        if key in (0, ""):
            raise InferError(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )
        self.reap(key)
        sequence = self._sequences.get(key)
        over = sequence is None or (bool(sequence.members) and sequence.members[-1].end)
        if over and not start:
            raise InferError(
                f"inference request for sequence {key} to model '{self._model}' must specify the START flag on the "
                "first request of the sequence"
            )
        if sequence is None:
            sequence = self._sequences[key] = _Sequence(key)
            self._backlog[sequence] = None
        self._idle.pop(sequence, None)
        member = Member(life, start, end, sequence, self)
        sequence.members.append(member)
        self._waiting += 1
        self.reap()
        self._advance(sequence)
        return member

    def leave(self, member: Member) -> None:
        """A request has been answered, has failed, or was cancelled."""
        sequence = member.sequence
        if member not in sequence.members:
            return  # it was struck
        sequence.members.remove(member)
        self._waiting -= not member.turn
        if not sequence.members and (member.end or sequence.broken):
            self._close(sequence)
        elif not sequence.members:
            self._idle[sequence] = self._clock()
            self._alert()
        else:
            self._advance(sequence)

    def strike(self, member: Member) -> None:
        """A request is cancelled: whoever waits behind it in its sequence is, too."""
        sequence = member.sequence
        if member not in sequence.members:
            return
        behind = list(sequence.members)[sequence.members.index(member) :]
        for each in behind:
            sequence.members.remove(each)
            self._waiting -= not each.turn
        sequence.broken = True
        if self._sequences.get(sequence.key) is sequence:
            del self._sequences[sequence.key]
        if not sequence.members:
            self._close(sequence)
        for each in behind[1:]:
            each.life.cancel(CancelReason.SEQUENCE)

    def next_look(self) -> float:
        """When a member of the backlog should look again, as a sequence may have been idle for too long by then."""
        return next(iter(self._idle.values())) + self._idle_limit if self._idle and self._backlog else float("inf")

    def reap(self, key: int | str | None = None) -> None:
        """End sequences that have been idle for too long: as many as are waited for, and that of this key."""
        if not self._idle:
            return
        now = self._clock()
        for sequence, since in list(self._idle.items()):
            if since + self._idle_limit > now:
                break
            if self.free_slots < len(self._backlog) or sequence.key == key:
                self._close(sequence)

    def _close(self, sequence: _Sequence) -> None:
        if self._sequences.get(sequence.key) is sequence:
            del self._sequences[sequence.key]
        self._backlog.pop(sequence, None)
        self._idle.pop(sequence, None)
        if sequence.instance is not None:
            self._free.append(sequence.instance)
            sequence.instance = None
        self._fill()
        self._alert()

    def _alert(self) -> None:
        """Have the first of the backlog look when its time may come: it is new there, or somebody has become idle."""
        if self._idle:
            for waits in self._backlog:
                waits.members[0].news.set()
                break

    def _fill(self) -> None:
        """Give free slots to the backlog."""
        while self._backlog and self.free_slots:
            sequence = next(iter(self._backlog))
            del self._backlog[sequence]
            sequence.instance = self._take()
            self._advance(sequence)

    def _take(self) -> int:
        if not self._fresh:
            return self._free.popleft()
        self._fresh -= 1
        return (-1 - self._fresh) % self._instances  # one of each in turn

    def _advance(self, sequence: _Sequence) -> None:
        """Give the turn to whoever is in front, if its sequence has a slot."""
        if sequence.instance is None:
            self._fill()
        elif sequence.members and not sequence.members[0].turn:
            member = sequence.members[0]
            member.turn = True
            self._waiting -= 1
            if member.start:
                sequence.states = None
            member.news.set()
