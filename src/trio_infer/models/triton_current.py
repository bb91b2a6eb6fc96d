"""Which requests the running code works on, and what that code may know of each; free of trio, for worker processes
too.

Model code asks other models in the name of the requests that it is working on, and when those are cancelled, so is what
it asked for. Nobody passes that along by hand: `Executor` notes the jobs in a context variable around `execute`. So
they are known in the thread of `execute`, in the coroutine of an `async def execute`, in tasks that it makes, and in
`asyncio.to_thread`. A thread of the model's own has no context: what it asks counts for all that its instance has in
hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from trio_infer.errors import InferError, RunCancelled
from trio_infer.protocol.values import InferResponse

__all__ = [
    "Job",
    "check_cancelled",
    "current_jobs",
    "is_cancelled",
    "is_trio_cancelled",
    "request_flag",
    "when_all_left",
    "when_cancelled",
    "working_on",
]


class Job(Protocol):
    """One request's work, as the code knows it that runs the model. All calls may come from any thread."""

    @property
    def promised(self) -> bool:
        """Whether a sender was handed out, so that responses may come without `execute` returning them."""

    @property
    def rescheduled(self) -> bool:
        """Whether the model wants the request again, in place of a response."""

    def reschedule(self) -> None:
        """The model wants it again."""

    @property
    def error(self) -> InferError | None:
        """What `finish` was told, if the client gets to know it."""

    def is_cancelled(self) -> bool:
        """Whether nobody wants it any more; cheap enough for each step of a loop."""

    def start(self) -> bool:
        """`execute` is about to be called. False: nobody wants it any more, don't."""

    def detach(self) -> None:
        """`execute` goes on as a coroutine: the instance may take the next request. `finish` still comes."""

    def finish(self, *, expect_more: bool, error: InferError | None = None) -> None:
        """`execute` isn't running any more.

        Args:
            expect_more: whether senders that were handed out are still good; not so after it raised.
            error: what the client is told after the responses that were sent; too late after the final flag.
        """

    def promise(self) -> None:
        """A sender is handed out."""

    def put(self, response: InferResponse | InferError | None, *, final: bool) -> None:
        """Pass a response on. Blocks while too many are on their way, and no longer than anybody wants them.

        Raises:
            ValueError: the model may not send this; says why.
        """

    def drop(self) -> None:
        """The last reference that a sender could come from is gone."""

    def when_left(self, callback: Callable[[], None]) -> None:
        """Call back, in whatever thread, once, if the request is given up while `execute` is running; at once if it is.

        The callback must be quick and must not raise.
        """


request_flag: Final[ContextVar[Callable[[], bool] | None]] = ContextVar("trio_infer_request_flag", default=None)
"""In a native model's task, and in the threads that it starts by `trio.to_thread`: its request's `is_cancelled`."""

_jobs: Final[ContextVar[tuple[Job, ...]]] = ContextVar("trio_infer_jobs", default=())


def current_jobs() -> tuple[Job, ...]:
    """What the running thread or asyncio task works on, also if that is over by now; () if it isn't known."""
    return _jobs.get()


@contextmanager
def working_on(jobs: Sequence[Job]) -> Iterator[None]:
    """Within this, `current_jobs` gives `jobs`, and so it does in all that takes its context from here."""
    token = _jobs.set(tuple(jobs))
    try:
        yield
    finally:
        _jobs.reset(token)


def is_cancelled() -> bool:
    """Whether nobody wants any more what the calling code computes: all requests of its run have been given up.

    For code that runs in a thread or a process of the server's (Triton Python models, functions, modules of a backend),
    and for what a native model calls by `trio.to_thread.run_sync`. It costs less than a microsecond. Outside of a run
    it is always False, so the same code can be called by a test.
    """
    jobs = _jobs.get()
    if jobs:
        return all(job.is_cancelled() for job in jobs)
    flag = request_flag.get()
    return flag is not None and flag()


def check_cancelled() -> None:
    """Leave the run if `is_cancelled`.

    Raises:
        RunCancelled: nobody wants the result; let it out.
    """
    if is_cancelled():
        raise RunCancelled


def when_cancelled(callback: Callable[[], object]) -> None:
    """Call back when `is_cancelled` turns true for the calling code, while its `execute` runs.

    Args:
        callback: called at most once, at once if it is true already, in whatever thread; must be quick and not raise.
    """
    when_all_left(_jobs.get(), callback)


def when_all_left(jobs: Sequence[Job], callback: Callable[[], object]) -> None:
    """Call back, as `Job.when_left`, when the last of these requests is given up; never if there are none."""
    waiting = [None for _ in jobs]

    def left() -> None:
        waiting.pop()
        if not waiting:
            callback()

    for job in jobs:
        job.when_left(left)


def is_trio_cancelled(error: BaseException) -> bool:
    """Whether it is `trio.Cancelled`, as `trio.from_thread.check_cancelled()` raises it; doesn't import trio."""
    trio = sys.modules.get("trio")
    return trio is not None and isinstance(error, trio.Cancelled)
