"""Notices a native model that blocks the event loop, and says which, and where.

While one task computes without an `await`, all others stand still, the sentinels among them: no departure is seen, no
answer sent. The loop itself can't notice that it stands. So a thread looks at it from outside:

- An instrument notes when each *tick* of the loop begins (`after_io_wait`), and that it has ended (`before_io_wait`).
  That costs 0.9 microseconds a tick (trio 0.35), and a request takes some four.
- A thread looks, four times within the time that is allowed. If a tick goes on, it takes the stack of the loop's thread
  and looks there for a frame of a `NativeRunner`, whose `self` says which model it is. A request costs nothing more.

What is held against a model: that its frame, the very same, was on the stack in looks that were half the allowed time
apart, in one tick. A tick that is long because hundreds of tasks had their turn shows another frame in each look, or
none. Code that holds the GIL (a regular expression, a sort) keeps the thread from looking, too; but the thread gets its
turn when that call returns, before the model goes on. So a look that comes late counts from when it was due.

What it can't see: whose a long tick was that nobody looked into, as when the machine stood still. Such ticks are
counted for no model.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import attrs
import trio

from trio_infer.models.native import NativeRunner

__all__ = ["BlockedLoop", "Suspect", "find_model"]

LOOKS: Final = 4
"""In the time that a tick may take."""

REPEAT: Final = 10.0
"""Seconds between two warnings of one model; all are counted."""

LINES: Final = 6
"""Of the model's own stack, in a warning."""

log: logging.Logger = logging.getLogger("trio_infer.models")
_RUNS: Final[frozenset[CodeType]] = frozenset(
    method.__code__ for method in (NativeRunner.run, NativeRunner._infer, NativeRunner._stream)
)


@attrs.frozen
class Suspect:
    """A model's code that was on the stack in a look.

    Args:
        model: its name.
        run: tells one run from another.
        stack: its own functions, the outermost first: name, file and line.
    """

    model: str
    run: int
    stack: tuple[str, ...] = ()


def find_model(frame: FrameType | None) -> Suspect | None:
    """Whose code runs in a frame, if it is a native model's.

    Args:
        frame: the innermost one of a thread.
    """
    inner: list[FrameType] = []
    while frame is not None:
        if frame.f_code in _RUNS:
            runner: Any = frame.f_locals.get("self")
            # No line is read from its file: that gives up the GIL, and the loop goes on before it is judged.
            stack = tuple(
                f"{each.f_code.co_name} ({Path(each.f_code.co_filename).name}:{each.f_lineno})"
                for each in reversed(inner)
            )
            return Suspect(runner.signature.name, id(frame), stack)
        inner.append(frame)
        frame = frame.f_back
    return None


class BlockedLoop(trio.abc.Instrument):
    """Watches one event loop; see `watching`.

    Args:
        allowed: seconds that a tick may take.
        clock: gives the time, in seconds.

    Attributes:
        times, seconds: how often and for how long it was blocked, by model; "" for what couldn't be told.
    """

    def __init__(self, allowed: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.times: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self._allowed = allowed
        self._clock = clock
        self._since = 0.0  # of the tick; 0 between two
        self._suspect: Suspect | None = None
        self._first = 0.0  # when it was seen first, in this tick
        self._guilty = ""
        self._warned: dict[str, float] = {}
        self._due = clock() + allowed / LOOKS
        self._over = threading.Event()

    # ---- in the loop's thread

    def after_io_wait(self, timeout: float) -> None:
        """A tick begins."""
        self._since = self._clock()

    def before_io_wait(self, timeout: float) -> None:
        """It has ended."""
        since, self._since = self._since, 0.0
        took = self._clock() - since
        if since and took > self._allowed:
            self._ended(took)

    def _ended(self, took: float) -> None:
        guilty, self._guilty = self._guilty, ""
        self.times[guilty] += 1
        self.seconds[guilty] = self.seconds.get(guilty, 0.0) + took
        if guilty:
            log.info("model '%s' has let go of the event loop after %.2f s", guilty, took)

    # ---- in the thread that looks

    def look(self, suspect: Callable[[], Suspect | None]) -> None:
        """See whether the loop stands, and by whom.

        Args:
            suspect: says whose code is running; called only if a tick goes on.
        """
        now = self._clock()
        since, due = self._since, self._due
        self._due = now + self._allowed / LOOKS
        if not since:
            self._suspect = None
            return
        seen = suspect()
        if since != self._since:
            self._suspect = None
            return  # it has ended meanwhile
        if seen is None or self._suspect is None or seen.run != self._suspect.run or self._first < since:
            # A look that is late was kept off by somebody who holds the GIL: by whom it sees now.
            self._first = max(since, min(due, now))
        self._suspect = seen
        if seen is None or self._guilty:
            return
        if now - since > self._allowed and now - self._first >= self._allowed / 2:
            self._guilty = seen.model
            self._warn(seen, now - since, now)

    def _warn(self, seen: Suspect, for_long: float, now: float) -> None:
        last = self._warned.get(seen.model)
        if last is not None and now - last < REPEAT:
            return
        self._warned[seen.model] = now
        log.warning(
            "model '%s' has blocked the event loop for %.2f s, and nobody else is served: %s; await something, or "
            "compute in a thread (trio.to_thread.run_sync) or a process (trio_infer.runners.process)",
            seen.model,
            for_long,
            " -> ".join(seen.stack[-LINES:]) or "in its infer",
        )

    def _keep_looking(self, loop: int) -> None:
        while not self._over.wait(self._allowed / LOOKS):
            self.look(lambda: find_model(sys._current_frames().get(loop)))

    def counted(self) -> Iterable[tuple[str, int, float]]:
        """For the metrics: model, times and seconds."""
        return [(model, self.times[model], seconds) for model, seconds in self.seconds.items()]

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the running loop within this.

        Cancellation: leaves at once.
        """
        self._due = self._clock() + self._allowed / LOOKS
        thread = threading.Thread(
            target=self._keep_looking, args=(threading.get_ident(),), name="trio-infer watchdog", daemon=True
        )
        trio.lowlevel.add_instrument(self)
        thread.start()
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)
            self._over.set()
            thread.join()  # some microseconds: it is waiting for this
