"""The way from model code in a thread of the server's process to the server: `Bridge`, on top of `Host`.

A call crosses to the trio thread by `TrioToken.run_sync_soon`, in the order in which calls are made, and what takes
time there runs in a system task: the model that asked may be gone before it is answered, and its thread is nobody's
child. A request that a model makes is cancelled by its life, which is a child of those of the requests that the model
is working on: if its thread belongs to none of them, of all.

Arrays are passed, not copied. At most `LIMIT` responses of a stream wait for the model that asked; then the model that
gives them waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Literal

import trio

from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import StandIn
from trio_infer.models.bridge import Replies
from trio_infer.models.host import Host, MetricKind
from trio_infer.models.inner import ask
from trio_infer.models.triton_current import current_jobs
from trio_infer.models.triton_log import log_as
from trio_infer.models.triton_work import Work
from trio_infer.protocol.values import InferRequest, InferResponse

__all__ = ["LocalBridge"]

LIMIT: Final = 8


class LocalBridge:
    """One instance's.

    Args:
        host: the server.
        token: of the trio thread that the server runs in.
        model: the model's name, for the log.
        in_hand: all that the instance works on; called in the trio thread.
    """

    def __init__(
        self, host: Host, token: trio.lowlevel.TrioToken, model: str, in_hand: Callable[[], Iterable[Work]]
    ) -> None:
        self._host = host
        self._model = model
        self._in_hand = in_hand
        self._token = token

    def infer(self, request: InferRequest) -> Replies:
        jobs = [job for job in current_jobs() if isinstance(job, Work) and not job.over]
        replies = _Replies(self._token)
        try:
            self._token.run_sync_soon(self._begin, replies, jobs, request)
        except trio.RunFinishedError:
            replies.end(_gone())
        return replies

    def _begin(self, replies: _Replies, jobs: Iterable[Work], request: InferRequest) -> None:
        lives = [job.life for job in jobs or self._in_hand() if job.life is not None]
        replies.parent = StandIn(lives)
        trio.lowlevel.spawn_system_task(replies.fill, self._host, request, name=f"<ask {request.model_name}>")

    def load_model(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        self._wait(lambda: self._host.load_model(name, config, files))

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        self._wait(lambda: self._host.unload_model(name, unload_dependents=unload_dependents))

    def is_model_ready(self, name: str, version: str) -> bool:
        return bool(self._wait_sync(lambda: self._host.is_model_ready(name, version)))

    def register_metric(self, name: str, description: str, kind: MetricKind) -> None:
        self._wait_sync(lambda: self._host.register_metric(name, description, kind))

    def change_metric(
        self,
        name: str,
        labels: Mapping[str, str],
        operation: Literal["create", "increment", "set", "observe", "value", "remove"],
        value: float = 0.0,
        buckets: Sequence[float] | None = None,
    ) -> float:
        def change() -> float:
            return self._host.change_metric(name, labels, operation, value, buckets)

        if operation in {"create", "value"}:
            return float(self._wait_sync(change))
        with suppress(trio.RunFinishedError):  # then nobody reads metrics any more
            self._token.run_sync_soon(self._quietly, change)
        return 0.0

    def _quietly(self, change: Callable[[], float]) -> None:
        try:
            change()
        except InferError as error:
            log_as(self._model, 30, error.message)

    def log(self, level: int, message: str, file: str, line: int) -> None:
        log_as(self._model, level, message, file, line)

    # ---- waiting in a thread

    def _wait(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of an async call in the trio thread."""
        future: Future[Any] = Future()

        async def work() -> None:
            try:
                result = await call()
            except Exception as error:
                future.set_exception(error)
            except BaseException:
                future.set_exception(_gone())
                raise
            else:
                future.set_result(result)

        return self._cross(future, lambda: trio.lowlevel.spawn_system_task(work))

    def _wait_sync(self, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        return self._cross(future, work)

    def _cross(self, future: Future[Any], work: Callable[[], object]) -> Any:
        try:
            self._token.run_sync_soon(work)
        except trio.RunFinishedError:
            raise _gone() from None
        return future.result()


class _Replies:
    """Filled in the trio thread, emptied in any."""

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._lock = threading.Condition()
        self._waiting: deque[InferResponse | InferError] = deque()
        self._ended = False
        self._callback: Callable[[], None] | None = None
        self._room = trio.Event()
        self.parent: StandIn | None = None

    # ---- in the trio thread

    async def fill(self, host: Host, request: InferRequest) -> None:
        """Ask, and end with whatever that gives. Raises nothing but `trio.Cancelled`, at the end of the run."""
        assert self.parent is not None
        end: InferError | None = _gone()
        try:
            end = await ask(host, self.parent, request, self._put)
        finally:
            self.end(end)

    async def _put(self, response: InferResponse) -> None:
        self._add(response)
        while len(self._waiting) >= LIMIT:
            self._room = trio.Event()
            await self._room.wait()

    def _make_room(self) -> None:
        self._room.set()

    def _cancel(self) -> None:
        if self.parent is not None:
            self.parent.stop()

    # ---- in any thread

    def end(self, error: InferError | None) -> None:
        """Nothing more comes."""
        self._add(error, last=True)

    def _add(self, reply: InferResponse | InferError | None, *, last: bool = False) -> None:
        with self._lock:
            if reply is not None:
                self._waiting.append(reply)
            self._ended = last
            self._lock.notify_all()
            callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def next(self) -> InferResponse | InferError | None:
        with self._lock:
            while not (self._waiting or self._ended):
                self._lock.wait()
            if not self._waiting:
                return None
            reply = self._waiting.popleft()
            was_full = len(self._waiting) == LIMIT - 1
        if was_full:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._make_room)
        return reply

    def when_ready(self, callback: Callable[[], None]) -> None:
        with self._lock:
            ready = bool(self._waiting) or self._ended
            if not ready:
                self._callback = callback
        if ready:
            callback()

    def cancel(self) -> None:
        if not self._ended:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._cancel)


def _gone() -> InferError:
    return InferError("the server is going down", ErrorCode.UNAVAILABLE)
