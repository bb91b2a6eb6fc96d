"""The asyncio event loop of an instance: one, in a thread of its own, from the first coroutine until the end.

Clients and locks that a model makes in one request (an `httpx.AsyncClient`, an `asyncio.Lock`) are good in the next
one, since all of an instance's coroutines share the loop, and so many requests of a decoupled model can be under way at
once. A loop for each request, as by `asyncio.run`, was rejected: it costs more than the change of thread (0.3 against
0.1 ms), and what belongs to a closed loop fails.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio  # 40 ms at the start of a worker process, for models that have no use for it

__all__ = ["InstanceLoop", "Running"]

CLOSING: Final = 5.0
"""Seconds that cancelled tasks have for their clean-up when the instance goes."""


class Running:
    """A coroutine under way in an instance's loop.

    Args:
        loop: the instance's.
        coroutine: started as soon as the loop comes to it, in the context of the caller.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.done: Future[tuple[Any, BaseException | None]] = Future()
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None
        loop.call_soon_threadsafe(self._begin)

    def result(self) -> Any:
        """Wait for the end. Raises what the coroutine raised."""
        value, error = self.done.result()
        if error is not None:
            raise error
        return value

    def cancel(self) -> None:
        """Have `asyncio.CancelledError` raised in it; doesn't wait for its end. May be called from any thread."""
        with suppress(RuntimeError):  # the loop is closed, so it has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        import asyncio

        self._task = asyncio.get_running_loop().create_task(_outcome(self._coroutine))
        self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        import asyncio

        self._task = None
        if task.cancelled():  # before its first step
            self._coroutine.close()
            self.done.set_result((None, asyncio.CancelledError()))
        else:
            self.done.set_result(task.result())


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    # As a value: asyncio lets a SystemExit that leaves a task end the loop.
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


class InstanceLoop:
    """Starts its thread when it is first used.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Running:
        """Run a coroutine in the loop.

        Raises:
            RuntimeError: the loop is closed.
        """
        import asyncio

        with self._lock:
            if self._closed:
                coroutine.close()
                raise RuntimeError(f"model instance '{self._name}' has been finalized")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
        return Running(self._loop, coroutine)

    def close(self) -> None:
        """Cancel what is still going on, and end the thread, which is waited for a few seconds."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(CLOSING + 1)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        asyncio.set_event_loop(loop)
        while not self._closed:
            with suppress(SystemExit, KeyboardInterrupt):  # a task's; the instance goes on, as after any other error
                loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            with suppress(SystemExit, KeyboardInterrupt):
                loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSING))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
