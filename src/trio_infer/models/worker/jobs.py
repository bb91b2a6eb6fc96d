"""In the worker process: the way up to the server, and what the model's code knows of each request's work."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final
from weakref import WeakValueDictionary

from trio_infer.errors import InferError, Rescheduled
from trio_infer.models.worker.codec import Kind, encode, error_fields, pack
from trio_infer.models.worker.memory import Blocks, Memory
from trio_infer.protocol.values import Array, InferResponse

__all__ = ["LIMIT", "RemoteJob", "Up", "traced"]

LIMIT: Final = 8
"""Responses of a stream on their way between a sender and the server's task; see `triton_work`."""


def traced(error: BaseException) -> str:
    """An exception as the log will show it."""
    return "".join(traceback.format_exception(error)).rstrip()


class Up:
    """Sends messages to the server, from any thread; they arrive in the order in which they were sent.

    A finalizer may run at any moment in any thread, also in one that is sending just now. So what finalizers have to
    say waits in a queue (`later`), and whoever sends empties it.

    Args:
        sock: blocking; a server that doesn't read holds the sender back.
        memory: this side's.
    """

    def __init__(self, sock: socket.socket, memory: Memory) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._later: deque[bytes] = deque()
        self.memory = memory
        self.blocks: Blocks = Blocks(memory, upper=True)
        self._blocks_lock = threading.Lock()

    def send(self, kind: Kind, fields: dict[str, Any], arrays: Mapping[str, Array] | None = None) -> None:
        """Send a message, and with it tensors if there are any, and the news of blocks that were read.

        Raises:
            MemoryError: no room for the tensors.
        """
        tail = b""
        if arrays is not None:
            with self._blocks_lock:
                fields["tensors"], tail = pack(arrays, self.blocks)
        if self.memory.freed:
            fields["freed"] = self.memory.take_freed()
        with self._lock:
            self._write(encode(kind, fields, tail))
        self._flush()

    def later(self, kind: Kind, fields: dict[str, Any]) -> None:
        """Send a message soon; doesn't wait, and may be called by a finalizer."""
        self._later.append(encode(kind, fields))
        self._flush()

    def free(self, offsets: list[int]) -> None:
        """The server has read these blocks."""
        with self._blocks_lock:
            for offset in offsets:
                self.blocks.free(offset)

    def _flush(self) -> None:
        while self._later and self._lock.acquire(blocking=False):
            try:
                while self._later:
                    self._write(self._later.popleft())
            finally:
                self._lock.release()

    def _write(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError:  # the server is gone, and so is all sense in going on
            os._exit(1)


class RemoteJob:
    """One request's work; `triton_current.Job` for the code that runs the model.

    Args:
        up: the way to the server.
        number: of the request.
        cell: of its flag.
        decoupled: whether any number of responses come through senders.
    """

    known: Final[WeakValueDictionary[int, RemoteJob]] = WeakValueDictionary()
    """Those that something still holds on to, by number; for the control thread."""

    def __init__(self, up: Up, number: int, cell: int, *, decoupled: bool) -> None:
        self.number = number
        self._up = up
        self._decoupled = decoupled
        self._lock = threading.Condition()
        self._credit = LIMIT
        self._callbacks: list[Callable[[], None]] = []
        self._put = 0
        self._promised = decoupled
        self._executing = self._detached = self._final = self._said_final = self._left = False
        self.error: InferError | None = None
        self.rescheduled: bool = False
        self.times: list[int] = [0, 0]
        cells = up.memory.cells
        self.is_cancelled: Callable[[], bool] = lambda: cells[cell] == number
        RemoteJob.known[number] = self

    @property
    def promised(self) -> bool:
        return self._promised

    @property
    def over(self) -> bool:
        """Whether it has had its last response and `execute` has returned."""
        return self._final and not self._executing

    @property
    def started(self) -> bool:
        """Whether the model was called; it isn't if the request was cancelled on its way here."""
        return self.times[0] > 0

    @property
    def detached(self) -> bool:
        """Whether `execute` goes on as a coroutine."""
        return self._detached

    def start(self) -> bool:
        self._executing = not self.is_cancelled()
        if self._executing:
            self.times[0] = time.perf_counter_ns()
        return self._executing

    def detach(self) -> None:
        self._detached = True
        self._up.send(Kind.DETACHED, {"n": self.number})

    def finish(self, *, expect_more: bool, error: InferError | None = None) -> None:
        self.times[1] = time.perf_counter_ns()
        with self._lock:
            self._executing = False
            if not self._final:
                self.error = error
            if not expect_more:
                self._final = True
        if self._detached:  # if the client doesn't get to know an error, `Executor` logs it
            self.tell_finished(expect_more=expect_more, error=error if self.error is error else None)

    def tell_finished(
        self, *, expect_more: bool, error: InferError | None = None, response: InferResponse | None = None
    ) -> None:
        """Say that `execute` has returned, and what; `finish` does so itself for a coroutine."""
        fields = {"n": self.number, "more": expect_more, "promised": self._promised, "times": self.times}
        if error is not None:
            fields["error"] = error_fields(error, traced)
            fields["again"] = isinstance(error, Rescheduled)
        if response is None:
            self._up.send(Kind.FINISHED, fields)
        else:
            fields["parameters"] = dict(response.parameters)
            self._up.send(Kind.FINISHED, fields, response.outputs)

    def reschedule(self) -> None:
        """The model wants the request again."""
        self.rescheduled = True

    def promise(self) -> None:
        self._promised = True

    def put(self, response: InferResponse | InferError | None, *, final: bool) -> None:
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
                while self._credit <= 0 and not self._left:
                    self._lock.wait()
                self._credit -= 1
            fields: dict[str, Any] = {"n": self.number, "final": final}
            if self._left or response is None:
                if final:
                    self._up.send(Kind.RESPONSE, fields)
            elif isinstance(response, InferError):
                fields["error"] = error_fields(response)
                self._up.send(Kind.RESPONSE, fields)
            else:
                fields["parameters"] = dict(response.parameters)
                self._up.send(Kind.RESPONSE, fields, response.outputs)
            if final:
                self._final = self._said_final = True

    def drop(self) -> None:
        if self._promised and not self._final:
            self._up.later(Kind.DROPPED, {"n": self.number})

    def when_left(self, callback: Callable[[], None]) -> None:
        with self._lock:
            left = self._left
            if not left:
                self._callbacks.append(callback)
        if left:
            callback()

    # ---- in the control thread

    def leave(self) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._left = True
            callbacks = self._callbacks if self._executing and not self._final else []
            self._callbacks = []
            self._lock.notify_all()
        for callback in callbacks:
            callback()

    def credit(self, count: int) -> None:
        """So many responses were taken."""
        with self._lock:
            self._credit += count
            self._lock.notify_all()
