"""The worker process: one instance of one model, from its import to its end.

The main thread reads the run socket, so that `execute` is called in the main thread, as by Triton's own worker, and
with no thread in between. The control thread reads the other socket: what it is told holds while `execute` runs. If
either socket ends, the server is gone, and the process ends with it at once; so it does, by the kernel, if the server's
thread that started it dies (`PR_SET_PDEATHSIG`).

What this imports is what a model waits for at each start, so there is no trio and no protobuf in it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from trio_infer.errors import InferError, ModelLoadError
from trio_infer.models.triton_execute import Executor, Loaded
from trio_infer.models.triton_hooks import auto_complete, import_class, initialize, make
from trio_infer.models.worker.code import WorkerCode
from trio_infer.models.worker.codec import Inbox, Kind, Message, unpack
from trio_infer.models.worker.jobs import RemoteJob, Up, traced
from trio_infer.models.worker.memory import Memory
from trio_infer.models.worker.remote_bridge import RemoteBridge
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.values import InferRequest, Signature, TensorSpec

__all__ = ["main"]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


def main() -> None:
    """What `process` has the interpreter call; ends the process."""
    name, parent, run_fd, control_fd, memory_fd, memory_limit = sys.argv[1:7]
    _tie_to(int(parent), name)
    if int(memory_limit):
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory_limit), int(memory_limit)))
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the server, which says what is to be done
        signal.signal(number, lambda *_: None)  # not SIG_IGN: programs that the model starts would inherit that
    with suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a replaced stdout may lack it
    memory = Memory(int(memory_fd))
    os.close(int(memory_fd))
    sys.argv[:] = [name]
    worker = _Worker(socket.socket(fileno=int(run_fd)), socket.socket(fileno=int(control_fd)), memory)
    worker.serve()


def _tie_to(parent: int, name: str) -> None:
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, f"trio-infer {name}".encode()[:15])
    except (AttributeError, OSError):  # not Linux: the sockets' end must do
        return
    if os.getppid() != parent:
        os._exit(1)


class _Worker:
    def __init__(self, run: socket.socket, control: socket.socket, memory: Memory) -> None:
        self._run = run
        self._control = control
        self._memory = memory
        self._up = Up(run, memory)
        self._bridge = RemoteBridge(self._up)
        self._code: WorkerCode
        self._class: type[Any]
        self._loaded: Loaded
        self._executor: Executor
        self._decoupled = False
        self._batch: list[tuple[RemoteJob, InferRequest]] = []  # taken, and not executed yet

    def serve(self) -> None:
        root = logging.getLogger()
        root.addHandler(_Forward(self._up))
        threading.Thread(target=self._listen, name="trio-infer control", daemon=True).start()
        do: dict[Kind, Callable[[Message], None]] = {
            Kind.IMPORT: self._import,
            Kind.INITIALIZE: self._initialize,
            Kind.RUN: self._take,
            Kind.EXECUTE: lambda _: self._execute(),
        }
        _each(self._run, lambda message: message.kind is Kind.FINALIZE or do[message.kind](message))
        # Only FINALIZE ends the above.
        self._loaded.finalize()
        for handler in root.handlers:
            handler.flush()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        self._up.send(Kind.FINALIZED, {})

    # ---- in the main thread

    def _import(self, message: Message) -> None:
        fields = message.fields
        sys.path[:] = fields["sys_path"]
        _set_levels(fields["levels"])
        self._code = WorkerCode(fields["model"], Path(fields["file"]), self._bridge)
        try:
            self._class = import_class(self._code, fields["program"])
            config = fields["config"]
            completed = None if config is None else auto_complete(self._class, self._code, config)
        except ModelLoadError as error:
            self._fault(error)
        else:
            self._up.send(Kind.IMPORTED, {"config": completed})

    def _initialize(self, message: Message) -> None:
        fields = message.fields
        inputs, outputs = (
            tuple(TensorSpec(name, Datatype[kind], shape) for name, kind, shape in fields[which])
            for which in ("inputs", "outputs")
        )
        signature = Signature(
            fields["model"],
            fields["version"],
            inputs,
            outputs,
            max_batch_size=fields["max_batch_size"],
            decoupled=fields["decoupled"],
        )
        reshapes = {name: (tuple(seen), tuple(wanted)) for name, (seen, wanted) in fields["reshapes"].items()}
        self._decoupled = signature.decoupled
        self._executor = Executor(signature, reshapes, cancel_tasks=fields["cancel_tasks"])
        try:
            model = make(self._class, self._code)
            initialize(model, self._code, fields["arguments"])
        except ModelLoadError as error:
            self._fault(error)
        else:
            self._loaded = Loaded(fields["instance"], self._code, model)
            self._up.send(Kind.READY, {"asks_ready": hasattr(model, "is_ready")})

    def _fault(self, error: ModelLoadError) -> None:
        where = None if error.where is None else str(error.where)
        trace = traced(error.__cause__) if error.__cause__ is not None else None
        self._up.send(Kind.FAULT, {"reason": error.reason, "where": where, "line": error.line, "trace": trace})

    def _take(self, message: Message) -> None:
        fields = message.fields
        if fields["freed"]:
            self._up.free(fields["freed"])
        job = RemoteJob(self._up, fields["n"], fields["cell"], decoupled=self._decoupled)
        request = InferRequest(
            fields["model"],
            fields["version"],
            unpack(fields["tensors"], message.tail, self._memory),
            fields["id"],
            fields["parameters"],
            tuple(fields["outputs"]),
            is_cancelled=job.is_cancelled,
        )
        self._batch.append((job, request))
        if fields["last"]:
            del job, request
            self._execute()

    def _execute(self) -> None:
        # Nothing here may hold on to a job or a request after it: that they are gone says that the work is over.
        batch, self._batch = self._batch, []
        for (job, _), result in zip(batch, self._executor.execute_batch(self._loaded, batch), strict=True):
            if isinstance(result, InferError):
                if not job.detached:
                    job.tell_finished(expect_more=False, error=result)
                if result.__cause__ is not None:  # frames that would keep the request until the next garbage collection
                    result.__cause__.__traceback__ = None
            elif not job.detached:
                try:
                    job.tell_finished(expect_more=job.started and result is None, response=result)
                except (MemoryError, InferError) as fault:
                    job.tell_finished(expect_more=False, error=InferError(str(fault), status=500))

    # ---- in the control thread

    def _listen(self) -> None:
        do: dict[Kind, Callable[[Message], None]] = {
            Kind.LEFT: self._left,
            Kind.CREDIT: self._credit,
            Kind.ANSWER: self._bridge.answer,
            Kind.REPLY: self._bridge.reply,
            Kind.IS_READY: self._is_ready,
            Kind.LEVELS: lambda message: _set_levels(message.fields["levels"]),
            Kind.FREED: lambda message: self._up.free(message.fields["freed"]),
        }
        try:
            _each(self._control, lambda message: do[message.kind](message))
        except BaseException:
            faulthandler.disable()
            logging.getLogger("trio_infer.models").exception("a worker process ends by a bug in the server")
            os._exit(70)

    def _left(self, message: Message) -> None:
        job = RemoteJob.known.get(message.fields["n"])
        if job is not None:
            job.leave()

    def _credit(self, message: Message) -> None:
        job = RemoteJob.known.get(message.fields["n"])
        if job is not None:
            job.credit(message.fields["count"])

    def _is_ready(self, message: Message) -> None:
        threading.Thread(target=self._answer_ready, args=(message.fields["id"],), daemon=True).start()

    def _answer_ready(self, number: int) -> None:
        self._up.send(Kind.READINESS, {"id": number, "ready": self._loaded.is_ready()})


def _each(sock: socket.socket, do: Callable[[Message], object]) -> None:
    """Handle messages until `do` says True; the other end's closing ends the process."""
    inbox = Inbox()
    while True:
        try:
            data = sock.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        inbox.feed(data)
        del data
        while True:
            message = inbox.next()
            if message is None:
                break
            if do(message) is True:
                return
            del message


class _Forward(logging.Handler):
    """Sends log records to the server, which logs them under the model's name."""

    def __init__(self, up: Up) -> None:
        super().__init__()
        self._up = up
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = {
                "logger": record.name,
                "level": record.levelno,
                "text": record.getMessage(),
                "file": record.pathname,
                "line": record.lineno,
            }
            if record.exc_info:
                fields["trace"] = self._formatter.formatException(record.exc_info)
            self._up.send(Kind.LOG, fields)
        except Exception:
            self.handleError(record)


def _set_levels(levels: dict[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
