"""In the server: one worker process, from its start until it is reaped, and the messages to and from it.

How it starts: `subprocess.Popen`, called in the trio thread. It takes 1 to 2 ms (CPython uses `vfork`), and it must be
this thread: `PR_SET_PDEATHSIG` strikes when the *thread* that started the child ends, and trio's own `open_process`
starts it from a pooled thread, which ends when it has been idle for ten seconds.

How it ends: whatever it died of, its sockets close, and its `pidfd` becomes readable (Linux; it tells also where a
child of the model's, forked without `exec`, still holds the sockets). What it sent before is read to the end. It is
reaped at once: a process whose sockets are closed is all but gone, and one that closed them and lives on is killed. It
leads a process group of its own, and what is left of that is killed with it: no grandchild survives.

Nothing here waits for the worker to read: what its socket doesn't take is kept and sent when it does. That is bounded
by what is under way: a request or two, the credits of its streams, replies that it asked for.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs
import trio

from trio_infer.models.worker.codec import CodecError, Inbox, Kind, Message, encode, pack
from trio_infer.models.worker.memory import Blocks, Memory, create
from trio_infer.protocol.values import Array

__all__ = ["Launch", "Worker", "died_of"]

_HOME: Final = str(Path(__file__).resolve().parents[3])
_BOOT: Final = (
    "import os, sys; cpus = {cpus}; cpus and os.sched_setaffinity(0, cpus); sys.path.insert(0, {home!r}); "
    "from trio_infer.models.worker.child import main; main()"
)
"""The CPUs come first: numpy's import counts them, and starts a thread for each."""


@attrs.frozen
class Launch:
    """How a process is started.

    Args:
        environment: variables that it has besides the server's.
        cpus: that it runs on; none for all that the server may use.
        memory_limit: bytes of private, writable memory that it may have; 0 for any number.
    """

    environment: Mapping[str, str] = MappingProxyType({})
    cpus: frozenset[int] = frozenset()
    memory_limit: int = 0


class Worker:
    """A process that has just been started. Used in the trio thread only.

    Args:
        name: of the instance; shown by `ps`.
        launch: how it is started.

    Attributes:
        ended: set when it is reaped.

    Raises:
        OSError: no process, no memory or no descriptor is to be had.
    """

    def __init__(self, name: str, launch: Launch) -> None:
        self.name = name
        self.ended: trio.Event = trio.Event()
        self.memory: Memory
        memory_fd, self.memory = create()
        theirs: list[socket.socket] = []
        ours: list[socket.socket] = []
        try:
            for _ in range(2):
                mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                ours.append(mine)
                theirs.append(other)
            fds = [theirs[0].fileno(), theirs[1].fileno(), memory_fd]
            boot = _BOOT.format(home=_HOME, cpus=sorted(launch.cpus))
            arguments = [name, str(os.getpid()), *map(str, fds), str(launch.memory_limit)]
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and nothing from outside
                [sys.executable, "-P", "-c", boot, *arguments],
                env={**os.environ, **launch.environment},
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                process_group=0,
            )
        except BaseException:
            for sock in ours:
                sock.close()
            raise
        finally:
            os.close(memory_fd)
            for sock in theirs:
                sock.close()
        self.blocks: Blocks = Blocks(self.memory, upper=False)
        self._run, self._control = (_Line(sock) for sock in ours)
        self._inbox = Inbox()

    @property
    def pid(self) -> int:
        return self._process.pid

    # ---- to the worker

    def run(self, kind: Kind, fields: dict[str, Any], arrays: Mapping[str, Array] | None = None) -> None:
        """Send to its main thread, which comes to it when `execute` isn't running.

        Raises:
            MemoryError: no room for the tensors.
        """
        tail = b""
        if arrays is not None:
            fields["tensors"], tail = pack(arrays, self.blocks)
        fields["freed"] = self.memory.take_freed()
        self._run.send(encode(kind, fields, tail))

    def control(self, kind: Kind, fields: dict[str, Any], arrays: Mapping[str, Array] | None = None) -> None:
        """Send to its control thread, which comes to it at once.

        Raises:
            MemoryError: no room for the tensors.
        """
        tail = b""
        if arrays is not None:
            fields["tensors"], tail = pack(arrays, self.blocks)
        if self.memory.freed:
            self._control.send(encode(Kind.FREED, {"freed": self.memory.take_freed()}))
        self._control.send(encode(kind, fields, tail))

    # ---- from the worker

    async def listen(self, handle: Callable[[Message], None]) -> str:
        """Handle each message; returns when the worker has closed its end, or has said what can't be.

        Args:
            handle: may raise CodecError.

        Returns:
            what it said that can't be; else "".

        Cancellation: just stops listening.
        """
        fault = ""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run.keep_sending)
            nursery.start_soon(self._control.keep_sending)
            nursery.start_soon(self._watch)
            try:
                await self._listen(handle)
            except CodecError as error:
                fault = str(error)
            nursery.cancel_scope.cancel()
        return fault

    async def gone(self) -> None:
        """Return when it has ended, whatever it still says.

        Cancellation: just stops waiting.
        """
        self._inbox = Inbox()
        with suppress(CodecError):
            await self._listen(lambda _: None)

    async def _watch(self) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        try:
            fd = os.pidfd_open(self._process.pid)
        except OSError:  # an old kernel, or a sandbox: the sockets must do
            return
        try:
            await trio.lowlevel.wait_readable(fd)
        finally:
            os.close(fd)
        with suppress(OSError):  # then what was sent is read, and after it the end
            self._run.sock.shutdown(socket.SHUT_RD)

    async def _listen(self, handle: Callable[[Message], None]) -> None:
        sock = self._run.sock
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                data = sock.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                return
            if not data:
                return
            self._inbox.feed(data)
            while (message := self._inbox.next()) is not None:
                freed = message.fields.get("freed")
                if freed is not None:
                    self._free(freed)
                handle(message)

    def _free(self, offsets: object) -> None:
        try:
            for offset in offsets:  # type: ignore[attr-defined]  # any other type is refused
                self.blocks.free(offset)
        except (TypeError, ValueError) as error:
            raise CodecError(str(error)) from None

    def pin(self, cpus: Iterable[int]) -> None:
        """Let it run on these CPUs from now on, with all threads that it has."""
        with suppress(OSError):  # it is about to be gone, or the CPUs are
            for thread in os.listdir(f"/proc/{self._process.pid}/task"):
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), cpus)

    # ---- its end

    def kill(self) -> None:
        """End it now, and all of its process group; `reap` still has to follow."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            self._process.kill()

    def reap(self) -> int:
        """Take leave of it: what is left of it is killed. Its exit code, negative for a signal.

        May be called again.
        """
        if self._process.returncode is None:
            # A process that is about to be gone by itself shall be, so that what it died of is known.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
            self.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        for line in (self._run, self._control):
            line.sock.close()
        self.ended.set()
        return -signal.SIGKILL if self._process.returncode is None else self._process.returncode


class _Line:
    """Our end of a socket: sends at once if it can, and keeps the rest."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._rest = bytearray()
        self._more = trio.Event()

    def send(self, data: bytes) -> None:
        """Send all of it, sooner or later; nothing is sent to a worker that is gone."""
        if not self._rest:
            sent = self._try(data)
            if sent == len(data):
                return
            data = data[sent:]
        self._rest += data
        self._more.set()

    def _try(self, data: bytes | bytearray) -> int:
        try:
            return self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)

    async def keep_sending(self) -> None:
        """Send what was kept, as it becomes possible."""
        while True:
            await self._more.wait()
            while self._rest:
                await trio.lowlevel.wait_writable(self.sock)
                del self._rest[: self._try(self._rest)]
            self._more = trio.Event()


def died_of(code: int) -> str:
    """An exit code in words: `SIGSEGV`, or `exit code 3`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
