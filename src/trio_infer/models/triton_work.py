"""One request in a Triton Python model: what its thread is doing, the responses on their way, and when it is over.

The model runs in a thread and the request in a task, and each can end without the other:

    the task            begins ─────────── takes responses ─────────── leaves
    execute()                 starts ──────────────── returns
    senders                        promised ── put ── put ──── final

The work is over when nothing of the model's can act on the request any more: `execute` isn't running, and no sender is
still promised (decoupled models promise one from the start; a sender's `final` keeps the promise, so does dropping the
last reference to it). Then at the latest the instance becomes free, and that is told in the trio thread, by
`TrioToken.run_sync_soon` if the task has left. If the server has ended by then nobody is left to be told.

The instance is free as soon as `execute` has returned, or goes on as a coroutine, and only senders are left: Triton
gives it the next request then, and models that hand their requests to an engine of their own depend on it. The work
goes on, and the model isn't finalized before it is over.

A model that goes on after its client left is *deaf*; if it does so for longer than `deaf_after` seconds, one WARNING
says so, and whether its instance stays taken, and one INFO says when it was done. Only such a run costs more than a
flag: a system task waits for it, because the request's own task is gone.

Backpressure: at most `LIMIT` responses wait for a slow client. The next `put` blocks the model's thread until there is
room again or the task has left. One lock guards all of it and is never held while anything waits. It is re-entrant,
because a garbage collection under it may drop a sender.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import Life
from trio_infer.models.runner import Instance
from trio_infer.protocol.values import InferResponse, Send

__all__ = ["LIMIT", "Work", "attend", "only_response"]

LIMIT: Final = 8
log: logging.Logger = logging.getLogger("trio_infer.models")


class Work:
    """Made, entered and left in the trio thread.

    Args:
        label: what the log calls it: the instance's name.
        instance: taken from now until the work is over, or until `execute` has returned if only senders are left.
        decoupled: whether any number of responses come through senders.
        deaf_after: seconds after which the log mentions a model that goes on without its client.
        on_over: called in the trio thread when the work is over, before the instance is given back.

    Attributes:
        error: what `execute` failed with, if `next` raises it.
        rescheduled: the model wants the request again, in place of a response.
        returned: `execute` has returned, and the task may know; `response` is what it gave, if it gave one.
    """

    def __init__(
        self,
        label: str,
        instance: Instance,
        *,
        decoupled: bool,
        deaf_after: float,
        on_over: Callable[[Work], None] | None = None,
    ) -> None:
        self.label = label
        self._instance = instance
        self._decoupled = decoupled
        self._deaf_after = deaf_after
        self._on_over = on_over
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Condition()
        self._waiting: deque[InferResponse | InferError] = deque()
        self.error: InferError | None = None
        self.rescheduled: bool = False
        self.returned: trio.Event = trio.Event()
        self.response: InferResponse | None = None
        self._started = self._executing = False
        self._promised = decoupled
        self._put = 0
        self._free = False  # the instance
        self._returned = False  # from `execute`, with senders left
        self._left_callbacks: list[Callable[[], None]] = []
        self._final = self._said_final = self._dropped = self._left = self._over = False
        self._news = trio.Event()
        self._ended = trio.Event()
        instance.begin()

    @property
    def life(self) -> Life | None:
        """Of the request, if it has one."""
        return self._instance.life

    @property
    def decoupled(self) -> bool:
        """Whether any number of responses come through senders."""
        return self._decoupled

    @property
    def left(self) -> bool:
        """Whether the task needs nothing more."""
        return self._left

    def is_cancelled(self) -> bool:
        """Whether nobody wants it any more; in any thread."""
        return self._left or (self.life is not None and self.life.cancelled)

    @property
    def index(self) -> int:
        """Of the instance that this began in."""
        return self._instance.index

    @property
    def over(self) -> bool:
        """Whether nothing of the model's can act on the request any more."""
        return self._over

    @property
    def abandoned(self) -> bool:
        """Whether senders go on although the request has left, and the instance has been given back.

        Not while `execute` is running: then the instance itself is known to be taken for nobody.
        """
        return self._left and self._free and not self._over

    @property
    def promised(self) -> bool:
        """Whether a sender was handed out, so that responses may come without `execute` returning them."""
        return self._promised

    # ---- in the model's thread

    def start(self) -> bool:
        """`execute` is about to be called. False: the task has left, don't."""
        with self._lock:
            self._started = self._executing = not self._left
            if self._started:
                self._instance.timing.infer_began = time.perf_counter_ns()
            return self._started

    def detach(self) -> None:
        """`execute` goes on as a coroutine: the instance may take the next request."""
        with self._lock:
            self._returned = True
        self._tell()

    def finish(self, *, expect_more: bool, error: InferError | None = None, ended: int = 0) -> None:
        """`execute` isn't running any more.

        Args:
            expect_more: whether senders that were handed out are still good; not so after it raised.
            error: what `next` raises after the responses that were sent; too late after the final flag.
            ended: when it ended, in `perf_counter_ns`; 0 for now.
        """
        with self._lock:
            self._executing = False
            self._returned = self._decoupled or (expect_more and self._promised)
            self._instance.timing.infer_ended = ended or time.perf_counter_ns()
            if not self._final:
                self.error = error
            if not expect_more:
                self._final = True
            tell = self._left or self._promised
        if tell:
            self._tell()

    # ---- in any thread

    def reschedule(self) -> None:
        """The model wants the request again."""
        self.rescheduled = True

    def promise(self) -> None:
        """A sender is handed out."""
        with self._lock:
            self._promised = True

    def put(self, response: InferResponse | InferError | None, *, final: bool) -> None:
        """Pass a response on to the task; an error in place of a response ends the run.

        Blocks while `LIMIT` responses wait, and no longer than until the task leaves. Then responses go nowhere.

        Raises:
            ValueError: the model may not send this; says why.
        """
        with self._lock:
            if self._said_final:
                raise ValueError("The final flag was sent before.")
            if self._final and not self._left:
                raise ValueError("execute() has failed, or has given its response.")
            if not self._decoupled and response is not None and self._put:
                raise ValueError("A model that is not decoupled has one response a request.")
            if not self._decoupled and final and response is None and not self._put:
                raise ValueError("A model that is not decoupled must send its response before or with the final flag.")
            if response is not None:
                self._put += 1
                self._instance.timing.responses.append(time.perf_counter_ns())
                while len(self._waiting) >= LIMIT and not self._left:
                    self._lock.wait()
                if not self._left:
                    self._waiting.append(response)
            if final:
                self._final = self._said_final = True
        self._tell()

    def drop(self) -> None:
        """The last reference that a sender could come from is gone."""
        with self._lock:
            self._dropped = True
            tell = self._promised and not self._final
        if tell:
            self._tell()

    def when_left(self, callback: Callable[[], None]) -> None:
        """Call back, in the trio thread, if the task leaves while `execute` runs; at once, in this one, if it has."""
        with self._lock:
            left = self._left
            if not left:
                self._left_callbacks.append(callback)
        if left:
            callback()

    def _tell(self) -> None:
        with suppress(trio.RunFinishedError):  # then there is no task and no scheduler to tell
            self._token.run_sync_soon(self._notice, idempotent=True)

    # ---- in the trio thread

    def give(self, response: InferResponse | None) -> None:
        """`execute` has returned: the instance is free, before the task has taken what it gave. See to `returned` then.

        Args:
            response: what it gave for this one, if it gave one.
        """
        with self._lock:
            self.response = response
            self._returned = True
        self._notice()

    async def next(self) -> InferResponse | None:
        """The next response; None after the final one.

        Raises:
            InferError: the model sent an error, or failed; earlier responses were given before.
        """
        while True:
            with self._lock:
                if self._waiting:
                    self._lock.notify()
                    response = self._waiting.popleft()
                    if isinstance(response, InferError):
                        raise response
                    return response
                if self.error is not None:
                    raise self.error
                if self._final:
                    return None
                if self._dropped and not self._executing:
                    raise InferError(
                        f"model instance '{self.label}' ended without the final flag: it let go of its response sender",
                        ErrorCode.INTERNAL,
                    )
                self._news = trio.Event()
            await self._news.wait()

    def leave(self) -> None:
        """The task needs nothing more: it has its answer, has failed, or was cancelled. Only the first call counts."""
        with self._lock:
            if self._left:
                return
            self._left = True
            callbacks = self._left_callbacks if self._executing and not self._final else []
            self._left_callbacks = []
            if not self._started:
                self._final = True
            self._waiting.clear()
            self._lock.notify_all()
        for callback in callbacks:
            callback()
        self._notice()
        if not self._over and not (self._returned and self._said_final):  # else it bothers nobody
            trio.lowlevel.spawn_system_task(self._watch, trio.current_time(), name=f"<deaf {self.label}>")

    def _notice(self) -> None:
        self._news.set()
        with self._lock:
            promised = self._promised and not (self._final or self._dropped)
            over = self._left and not self._executing and not promised
            free = over or self._returned
        if over and not self._over:
            self._over = True
            self._ended.set()
            if self._on_over is not None:
                self._on_over(self)
        if free and not self._free:
            self._free = True
            self._instance.end()

    async def _watch(self, left_at: float) -> None:
        with trio.move_on_after(self._deaf_after):
            await self._ended.wait()
        if self._over:
            return
        taken = not self._free
        log.warning(
            "model instance '%s' goes on %.1f s after its request was given up; %s",
            self.label,
            trio.current_time() - left_at,
            "it stays taken until it is done" if taken else "meanwhile it takes other requests",
        )
        await self._ended.wait()
        done = "is free again" if taken else "is done with it"
        log.info("model instance '%s' %s, %.1f s late", self.label, done, trio.current_time() - left_at)


async def attend(work: Work, send: Send) -> None:
    """Take a request's responses as they come, in its task.

    Args:
        work: the request's, in which `returned` is set when `execute` has returned.
        send: takes each response in turn.

    Raises:
        InferError: the model's.

    Cancellation: leaves at once, and senders are no longer waited for.
    """
    try:
        if work.decoupled:
            while (response := await work.next()) is not None:
                await send(response)
            await work.returned.wait()
            return
        await work.returned.wait()
        if work.error is not None:
            raise work.error
        response = work.response if work.response is not None else await only_response(work)
        work.leave()
        await send(response)
    finally:
        work.leave()


async def only_response(work: Work) -> InferResponse:
    """The one response that a model that isn't decoupled gives by a sender, once it has said that it is final."""
    response = await work.next()
    if response is None:
        raise InferError(f"model instance '{work.label}' sent no response", ErrorCode.INTERNAL)
    await work.next()
    return response
