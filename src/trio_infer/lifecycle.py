"""A request's life: the phases it passes through, and the one outcome it ends with.

Everything that wants to know how a request is doing (statistics, the access log, a drain) watches its `Life`, and
nothing keeps a tally of its own. That is why a request can't be counted twice, or as a success in one place and as
cancelled in another: there are the tables below, and every move goes through them.

    RECEIVING ──┬── QUEUED ──┬── RUNNING ──┬── STREAMING ──┐
                ├────────────┘             │               ├── one Outcome
                └── (refused, or no model) ┴── SENDING ────┘

- RECEIVING: the head is read, the body is being read and decoded. Requests that no model answers (health, metadata, an
  unknown path) go straight on to SENDING, as does whatever is refused here.
- QUEUED: decoded, waiting for a model instance.
- RUNNING: an instance works on it, and nothing of the answer has been sent.
- STREAMING: the instance works on and parts of the answer are on their way.
- SENDING: the answer is complete and is being sent.

A life may be *cancelled* from any phase, once. The first cancel is remembered with its reason and the phase that it
struck; it calls the canceller that the connection has attached (which cancels the request's scope), and decides the
outcome whatever else the request still does. A cancel that comes after the end changes nothing: the last byte was
handed to the kernel.

Several clients may want the same, and one run may be for all of them (a response cache lets identical requests wait for
one answer). The run then has a life of its own, a `SharedLife`, that is cancelled when the last of theirs is.

A request that a model makes of another model while it runs (BLS) is a life of its own, a *child*: it has an outcome, is
cancelled with its parent, and knows it; watchers that count what clients ask leave children out. A model may
make it for several requests together, and may give it up alone: so there is a stand-in between it and them.

The work of a request may outlast its life: a thread goes on after its client has left. `Life.timing` follows the work,
and `work_over` tells the watchers of its end, before or after the life's own.

What this does not do: it knows no clock but `perf_counter_ns`, no trio, no HTTP beyond a status number.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

__all__ = [
    "STATUS",
    "CacheLook",
    "CancelReason",
    "Life",
    "LifeWatcher",
    "LifecycleError",
    "Outcome",
    "Phase",
    "SharedLife",
    "StandIn",
    "Timing",
]


class Phase(enum.Enum):
    """Where a request is."""

    if not TYPE_CHECKING:  # as good for single values, and not in Python: a request hashes some 25 of these
        __hash__ = object.__hash__

    RECEIVING = "receiving"
    QUEUED = "queued"
    RUNNING = "running"
    STREAMING = "streaming"
    SENDING = "sending"


class Outcome(enum.Enum):
    """How a request ended."""

    if not TYPE_CHECKING:  # as for `Phase`
        __hash__ = object.__hash__

    COMPLETED = "completed"
    """Answered with a 2xx, to the last byte."""
    REJECTED = "rejected"
    """Answered with a 4xx: the request was at fault."""
    FAILED = "failed"
    """Answered with a 5xx, or told of an error under a 200: the model or the server was at fault."""
    CANCELLED = "cancelled"
    """Stopped; the reason and the phase say why and when."""
    UNDELIVERED = "undelivered"
    """The work was finished, by policy, for a client that had left."""


class CancelReason(enum.Enum):
    """Why a request was stopped."""

    DISCONNECTED = "client disconnected"
    STALLED = "client stalled"
    SHUTDOWN = "shutdown"
    DEADLINE = "deadline passed"
    REQUESTED = "cancel requested"
    UNLOADED = "model unloaded"
    SEQUENCE = "sequence cancelled"


class LifecycleError(Exception):
    """A move that the table below doesn't have: a bug in the server."""


NEXT: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.RECEIVING: frozenset({Phase.QUEUED, Phase.RUNNING, Phase.SENDING}),
    Phase.QUEUED: frozenset({Phase.RUNNING, Phase.SENDING}),
    Phase.RUNNING: frozenset({Phase.STREAMING, Phase.SENDING}),
    Phase.STREAMING: frozenset(),
    Phase.SENDING: frozenset(),
}

OUTCOMES: Final[dict[Phase, frozenset[Outcome]]] = {
    Phase.RECEIVING: frozenset({Outcome.CANCELLED}),
    Phase.QUEUED: frozenset({Outcome.CANCELLED}),
    Phase.RUNNING: frozenset({Outcome.CANCELLED}),
    Phase.STREAMING: frozenset({Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED, Outcome.UNDELIVERED}),
    Phase.SENDING: frozenset(Outcome),
}


class Timing:
    """When the work of one request was where, in `perf_counter_ns`; 0 for what has not been reached.

    Attributes:
        begun: an instance started on it (on taking the inputs over, if the model is elsewhere).
        infer_began, infer_ended: around the model's own code; 0 to the end if the runner can't tell it from the rest.
        ended: the work was really over, whether or not anybody still waited for it.
        responses: of a decoupled model, when each response was given.
        batch_rows: of all requests that ran together; 0 for one that ran by itself.
        share: how much of the run was for this request, from 0 to 1.
        leads: false for all but the first of those that ran together: the run is counted with that one.
    """

    __slots__ = ("batch_rows", "begun", "ended", "infer_began", "infer_ended", "leads", "responses", "share")

    def __init__(self) -> None:
        self.begun: int = 0
        self.infer_began: int = 0
        self.infer_ended: int = 0
        self.ended: int = 0
        self.responses: list[int] = []
        self.batch_rows: int = 0
        self.share: float = 1.0
        self.leads: bool = True


class CacheLook:
    """What looking a request up in the response cache came to.

    Attributes:
        hit: the answer was there, or was being computed for somebody else already.
        ns: how long it took to look, and to put the answer there afterwards.
    """

    __slots__ = ("hit", "ns")

    def __init__(self, *, hit: bool, ns: int) -> None:
        self.hit: bool = hit
        self.ns: int = ns


class LifeWatcher(Protocol):
    """Something that is told of each move of each life. All methods must be quick and must not raise."""

    def life_moved(self, life: Life, left: Phase | None) -> None:
        """`life.phase` is new; `left` is the phase before, or None at birth."""

    def life_ended(self, life: Life) -> None:
        """`life.outcome` is set; `life.phase` is the phase it ended in."""

    def work_ended(self, life: Life) -> None:
        """`life.timing.ended` is set; the life itself may have ended before, or may go on."""


class Cancellable(Protocol):
    """Something that ends with a life: another life, a place in a queue."""

    def cancel(self, reason: CancelReason) -> object:
        """Be over, now; must be quick and must not raise."""


class Life:
    """One request from its first header byte to its outcome.

    Args:
        watchers: told of each move, in this order.
        label: what a log calls it: method and target.
        parent: the life of the request that a model is running while it makes this one; None for a client's.

    Attributes:
        phase, outcome: where it is; how it ended, None while it lives.
        reason, struck, struck_at: why it was cancelled, in which phase and when; None, None and 0 if it was not.
        status: the HTTP status that was, or would have been, answered; 499 for a client that left.
        model, version, request_id: what is asked of whom; "" until known.
        entered: `perf_counter_ns` at which each phase was entered; `struck_at` and `ended` are of that clock, too.
        rows: its batch size; 1 if the model has no batch dimension.
        timing: of its work, since an instance began on it; None before.
        look: into the response cache; None if its model isn't cached.
        canceller: called once by `cancel`, in whatever task calls that; set by the connection's guard.
    """

    __slots__ = (
        "_children",
        "_watchers",
        "canceller",
        "ended",
        "entered",
        "label",
        "look",
        "model",
        "outcome",
        "parent",
        "phase",
        "reason",
        "request_id",
        "rows",
        "status",
        "struck",
        "struck_at",
        "timing",
        "version",
    )

    def __init__(self, watchers: Sequence[LifeWatcher] = (), *, label: str = "", parent: Life | None = None) -> None:
        self._watchers = watchers
        self._children: set[Cancellable] = _NO_CHILDREN
        self.label: str = label
        self.parent: Life | None = parent
        self.phase: Phase = Phase.RECEIVING
        self.outcome: Outcome | None = None
        self.reason: CancelReason | None = None
        self.struck: Phase | None = None
        self.status: int = 0
        self.model: str = ""
        self.version: str = ""
        self.request_id: str = ""
        self.entered: dict[Phase, int] = {Phase.RECEIVING: time.perf_counter_ns()}
        self.struck_at: int = 0
        self.rows: int = 1
        self.timing: Timing | None = None
        self.look: CacheLook | None = None
        self.ended: int = 0
        self.canceller: Callable[[CancelReason], None] | None = None
        for watcher in watchers:
            watcher.life_moved(self, None)

    @property
    def cancelled(self) -> bool:
        """True from the moment of the cancel; cheap enough to poll in a loop, in any thread."""
        return self.reason is not None

    def child(self, label: str) -> Life:
        """The life of a request that this one's model makes; it is cancelled with this one, at once if that is already.

        Args:
            label: what a log calls it.
        """
        child = Life(self._watchers, label=label, parent=self)
        self.attach(child)
        return child

    def attach(self, what: Cancellable) -> None:
        """Cancel something together with this, in the same instant; at once if this is already."""
        if self._children is _NO_CHILDREN:
            self._children = set()
        self._children.add(what)
        if self.reason is not None:
            what.cancel(self.reason)

    def detach(self, what: Cancellable) -> None:
        """It is over, or no longer of this life; harmless if it never was."""
        self._children.discard(what)

    def work_over(self) -> None:
        """The work that `timing` is of has ended; called once, in the trio thread."""
        for watcher in self._watchers:
            watcher.work_ended(self)

    def advance(self, phase: Phase) -> None:
        """Go on to `phase`.

        Raises:
            LifecycleError: the table has no such move, or the life has ended.
        """
        left = self.phase
        if self.outcome is not None or phase not in NEXT[left]:
            raise LifecycleError(f"a request can't go from {left.value} to {phase.value}")
        self.phase = phase
        self.entered[phase] = time.perf_counter_ns()
        for watcher in self._watchers:
            watcher.life_moved(self, left)

    def cancel(self, reason: CancelReason) -> bool:
        """Stop the request: the first call counts, and only before the end.

        Returns:
            whether this call was the one that counted.
        """
        if self.reason is not None or self.outcome is not None:
            return False
        self.reason = reason
        self.struck = self.phase
        self.struck_at = time.perf_counter_ns()
        if self.canceller is not None:
            self.canceller(reason)
        for child in list(self._children):
            child.cancel(reason)
        return True

    def end(self, *, failed: bool = False, undelivered: bool = False) -> Outcome:
        """The last byte was handed over, or nothing more will be.

        Args:
            failed: an error was told under a status that says otherwise (in mid-stream, or where Triton does so).
            undelivered: the client had left, and the work was finished all the same.

        Raises:
            LifecycleError: it has ended before, or the phase can't end so.
        """
        if self.reason is not None:
            outcome = Outcome.CANCELLED
            self.status = STATUS[self.reason]
        elif undelivered:
            outcome = Outcome.UNDELIVERED
        elif 400 <= self.status < 500:
            outcome = Outcome.REJECTED
        elif failed or self.status >= 500:
            outcome = Outcome.FAILED
        else:
            outcome = Outcome.COMPLETED
        if self.outcome is not None or outcome not in OUTCOMES[self.phase]:
            raise LifecycleError(f"a request can't end as {outcome.value} while {self.phase.value}")
        self.outcome = outcome
        self.ended = time.perf_counter_ns()
        self.canceller = None
        if self.parent is not None:
            self.parent.detach(self)
        for watcher in self._watchers:
            watcher.life_ended(self)
        return outcome


class StandIn(Life):
    """Between a request that a model makes and those that it makes it for: it is the parent of the first.

    It is cancelled when the last of those that live on is, or by itself. No watcher is told of it, only of its child.

    Args:
        lives: those that it stands for; none for a request that a model makes of its own accord.
    """

    __slots__ = ("_lives",)

    def __init__(self, lives: Sequence[Life]) -> None:
        only = lives[0] if len(lives) == 1 else None
        super().__init__(label=" + ".join(life.label for life in lives), parent=only)
        self._lives = tuple(lives)
        for life in lives:
            self._watchers = life._watchers
            life.attach(self)

    def cancel(self, reason: CancelReason) -> bool:
        """One of them is cancelled; nothing comes of it while another one lives on."""
        if all(life.cancelled or life.outcome is not None for life in self._lives):
            return super().cancel(reason)
        return False

    def stop(self) -> None:
        """Whoever made the request doesn't want it any more."""
        super().cancel(CancelReason.REQUESTED)

    def leave(self) -> None:
        """It is needed no more."""
        for life in self._lives:
            life.detach(self)


class SharedLife(Life):
    """Of one run that several requests wait for. Those that it is for may come and go while it waits and runs.

    It is cancelled when the last of them has left. Each of them goes through its phases; no watcher is told of it. In
    the books the run is that of the one that came first and is still there, its *bearer*; for the others there was no
    run, so for them looking into the cache was a hit.

    Args:
        first: whose request made it necessary.

    Attributes:
        over: whether it has come to its end, so that it needs nobody any more.
    """

    __slots__ = ("_bearer", "_members", "over")

    def __init__(self, first: Life) -> None:
        self._bearer = first
        super().__init__(label=first.label)
        self._watchers = first._watchers  # for the requests that its model makes
        self._members: dict[Life, None] = {}
        self.over: bool = False
        self.rows: int = first.rows
        self.model: str = first.model
        self.version: str = first.version
        self.request_id: str = first.request_id
        self.join(first)

    def join(self, life: Life) -> None:
        """One more waits for it; it goes where the run is."""
        self._members[life] = None
        life.attach(self)
        if self.phase is not Phase.RECEIVING:
            life.advance(self.phase)

    def leave(self, life: Life) -> None:
        """One doesn't wait any more, whatever the reason; the last one to leave stops the run, if that isn't over."""
        life.detach(self)
        if life in self._members:
            del self._members[life]
            self._one_less(life, CancelReason.REQUESTED)

    def cancel(self, reason: CancelReason) -> bool:
        """Some of them have been cancelled; nothing comes of it while another one is there."""
        before = self.reason
        for life in [life for life in self._members if life.cancelled]:
            del self._members[life]
            self._one_less(life, reason)
        return before is None and self.reason is not None

    def _one_less(self, life: Life, reason: CancelReason) -> None:
        if self.over:
            return
        if not self._members:
            super().cancel(reason)
        elif life is self._bearer:
            heir = self._bearer = next(iter(self._members))
            heir.timing, life.timing = life.timing, None
            if heir.look is not None:
                heir.look.hit = False

    def kept(self, ns: int) -> None:
        """The answer was put into the cache, which took so long."""
        if self._bearer.look is not None:
            self._bearer.look.ns += ns

    def advance(self, phase: Phase) -> None:
        """All of them go on."""
        self.phase = phase
        for life in self._members:
            life.advance(phase)

    @property
    def timing(self) -> Timing | None:
        """The bearer's."""
        return self._bearer.timing

    @timing.setter
    def timing(self, timing: Timing | None) -> None:
        self._bearer.timing = timing

    def work_over(self) -> None:
        """The books are told by the bearer."""
        self._bearer.work_over()


_NO_CHILDREN: Final[set[Cancellable]] = set()

STATUS: Final = {
    # nginx's 499, "client closed request": only logged and counted, but for the one who is there and asked for it.
    CancelReason.DISCONNECTED: 499,
    CancelReason.STALLED: 499,
    CancelReason.REQUESTED: 499,
    CancelReason.SEQUENCE: 499,
    CancelReason.SHUTDOWN: 503,
    CancelReason.UNLOADED: 503,
    CancelReason.DEADLINE: 504,
}
"""What a cancelled request counts as, and what its client is told if it is still there."""
