"""In the worker process: `Bridge`, by messages to the server; `calls` is its counterpart there."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np

from trio_infer.errors import InferError
from trio_infer.models.host import MetricKind
from trio_infer.models.triton_current import current_jobs
from trio_infer.models.worker.codec import Kind, Message, read_error, unpack
from trio_infer.models.worker.jobs import RemoteJob, Up
from trio_infer.protocol.values import InferRequest, InferResponse

__all__ = ["RemoteBridge"]


class RemoteBridge:
    """This process's. `answer` and `reply` are called in the control thread.

    Args:
        up: the way to the server.
    """

    def __init__(self, up: Up) -> None:
        self._up = up
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[Any]] = {}
        self._asked: dict[int, _Replies] = {}

    def infer(self, request: InferRequest) -> _Replies:
        number = next(self._numbers)
        replies = _Replies(number, self._up)
        self._asked[number] = replies
        self._up.send(
            Kind.ASK,
            {
                "id": number,
                "jobs": [job.number for job in current_jobs() if isinstance(job, RemoteJob) and not job.over],
                "model": request.model_name,
                "version": request.model_version,
                "request": request.id,
                "parameters": dict(request.parameters),
                "outputs": list(request.requested_outputs),
            },
            request.inputs,
        )
        return replies

    def load_model(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        contents = {path: np.frombuffer(content, np.uint8) for path, content in files.items()}
        self._call("load_model", [name, config], contents)

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        self._call("unload_model", [name, unload_dependents])

    def is_model_ready(self, name: str, version: str) -> bool:
        return bool(self._call("is_model_ready", [name, version]))

    def register_metric(self, name: str, description: str, kind: MetricKind) -> None:
        self._call("register_metric", [name, description, kind])

    def change_metric(
        self,
        name: str,
        labels: Mapping[str, str],
        operation: Literal["create", "increment", "set", "observe", "value", "remove"],
        value: float = 0.0,
        buckets: Sequence[float] | None = None,
    ) -> float:
        arguments = [name, dict(labels), operation, float(value), None if buckets is None else list(buckets)]
        if operation in {"create", "value"}:
            return float(self._call("change_metric", arguments))
        self._up.later(Kind.TELL, {"arguments": arguments})
        return 0.0

    def log(self, level: int, message: str, file: str, line: int) -> None:
        self._up.send(Kind.LOG, {"logger": "", "level": level, "text": message, "file": file, "line": line})

    def _call(self, what: str, arguments: list[Any], arrays: Mapping[str, Any] | None = None) -> Any:
        number = next(self._numbers)
        future = self._calls[number] = Future[Any]()
        self._up.send(Kind.CALL, {"id": number, "what": what, "arguments": arguments}, arrays or {})
        return future.result()

    # ---- in the control thread

    def answer(self, message: Message) -> None:
        """A call has ended."""
        future = self._calls.pop(message.fields["id"])
        if message.fields.get("error") is not None:
            future.set_exception(read_error(message.fields["error"]))
        else:
            future.set_result(message.fields.get("value"))

    def reply(self, message: Message) -> None:
        """A response to a request that the model made, or its end."""
        fields = message.fields
        number, last = fields["id"], fields["last"]
        replies = self._asked.get(number)
        if last:
            self._asked.pop(number, None)
        reply: InferResponse | InferError | None = None
        if fields.get("error") is not None:
            reply = read_error(fields["error"])
        elif not last:
            arrays = unpack(fields["tensors"], message.tail, self._up.memory)
            reply = InferResponse(arrays, fields["parameters"])
        if replies is not None:
            replies.add(reply, last=last)


class _Replies:
    """Filled in the control thread, emptied in any."""

    def __init__(self, number: int, up: Up) -> None:
        self._number = number
        self._up = up
        self._lock = threading.Condition()
        self._waiting: deque[InferResponse | InferError] = deque()
        self._ended = self._cancelled = False
        self._callback: Callable[[], None] | None = None

    def add(self, reply: InferResponse | InferError | None, *, last: bool) -> None:
        """The control thread has one, or the end, or both."""
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
            ended = self._ended
        if not ended:
            self._up.send(Kind.ASK_CREDIT, {"id": self._number})
        return reply

    def when_ready(self, callback: Callable[[], None]) -> None:
        with self._lock:
            ready = bool(self._waiting) or self._ended
            if not ready:
                self._callback = callback
        if ready:
            callback()

    def cancel(self) -> None:
        if not (self._ended or self._cancelled):
            self._cancelled = True
            self._up.later(Kind.ASK_CANCEL, {"id": self._number})
