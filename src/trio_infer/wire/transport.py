"""A connection's bytes: received, sent, and looked at.

The sentinel needs a thing that trio's streams don't offer: to learn that a peer has gone *without taking what it sent*.
There are two ways to that, and so two transports.

`SocketTransport` works on a plain TCP (or Unix) socket. It keeps a second Python object for the same descriptor, calls
`recv(1, MSG_PEEK)` on it, and waits with `trio.lowlevel.wait_readable`. While at it, it also receives and sends through
that object: a call that need not wait then costs one system call and no trip through trio's scheduler (trio's own
`recv` and `send` are two checkpoints each, 6 us a piece), and a body goes by `recv_into` straight to where it is used.

`StreamTransport` works on any other trio stream: TLS, memory streams in tests. A raw peek would be blind there (a
polite TLS close looks like data, and a memory stream has no socket), so it looks by *reading ahead*: what arrives
while the sentinel watches is kept, at most `READ_AHEAD` bytes of it, and handed out by the next `receive`.

A peer that is as fast as we are would never let us sleep, and a task that never sleeps starves all others: so after
`STRETCH` bytes without a sleep comes a checkpoint.

Behind unread bytes a peek is blind to a later FIN or reset. The kernel is not: a nested epoll object that asks for
EPOLLRDHUP only (or for nothing, as EPOLLHUP and EPOLLERR are always reported) sleeps through data and wakes at the
hang-up, and its own descriptor can be waited on like any other. It is made when it is first needed, and Linux only.

A transport never lets trio's or the system's errors out for what a peer can cause: reset, broken pipe, time-out of the
network are all `Departed`.
"""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import trio

from trio_infer.wire.buffers import SEND_SLICE, Buffer, gather
from trio_infer.wire.sights import Action, Sight

__all__ = ["BeforeWait", "Departed", "SocketTransport", "StreamTransport", "Transport", "open_transport"]

BeforeWait: TypeAlias = Callable[[], None]

RECEIVE_SIZE: Final = 64 * 1024
READ_AHEAD: Final = 64 * 1024
STRETCH: Final = 1024 * 1024
"""Bytes that may be received and sent on a socket between two checkpoints: some 0.2 ms of copying."""

CLOSE_NOTIFY: Final = 1.0
"""Seconds for a TLS peer to take our polite close."""

_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError)

HAS_EPOLL: Final = sys.platform == "linux"


class Departed(Exception):
    """The peer has gone: end of stream in the middle of something, or a reset. Never leaves `wire`."""


class Transport(Protocol):
    """What a connection reads, writes and looks at.

    `before_wait` is called each time before the calling task is put to sleep: the caller moves its deadline there, so
    that a call which need not sleep costs no clock. `waited` is true once a call has slept; the caller may reset it.
    """

    waited: bool

    async def open(self, before_wait: BeforeWait) -> None:
        """Shake hands, if that is the custom (TLS)."""

    async def receive(self, before_wait: BeforeWait) -> bytes:
        """Up to 64 KiB; empty at the end of the stream."""

    async def receive_into(self, view: memoryview, before_wait: BeforeWait) -> int:
        """Bytes put into `view`; 0 at the end of the stream."""

    async def send(self, buffers: Sequence[Buffer], before_wait: BeforeWait) -> None:
        """Send all of `buffers`. Cancelled: an unknown part of them was sent."""

    async def send_eof(self) -> None:
        """Say that nothing more will be sent."""

    def look(self) -> Sight:
        """What the connection shows now, taking nothing, waiting for nothing."""

    def may_outlast(self, action: Action) -> bool:
        """Whether `wait(action)` may go on when its guard has been left: it keeps nobody from receiving."""

    async def wait(self, action: Action) -> None:
        """Sleep until another `look` is worth it; `action` says what to sleep through. Spurious wake-ups are fine."""

    def release(self) -> None:
        """Let go of the stream without closing it."""

    async def aclose(self) -> None:
        """Close; never raises but `Cancelled`, and then has closed all the same."""


def peek(sock: socket.socket) -> Sight:
    """One look at a socket, through `recv(1, MSG_PEEK)`; takes nothing."""
    try:
        data = sock.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return Sight.QUIET
    except OSError:
        return Sight.RESET
    return Sight.DATA if data else Sight.EOF


class SocketTransport:
    """A plain socket.

    Args:
        stream: owned by this transport from now on, and closed by it.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        theirs = stream.socket
        # A second object for one descriptor, for calls that trio doesn't offer; `aclose` detaches it first.
        self._sock = socket.socket(theirs.family, theirs.type, theirs.proto, fileno=theirs.fileno())
        self._sock.setblocking(False)
        self._epoll: select.epoll | None = None
        self._epoll_mask = -1
        self._watched = False
        self._readers = trio.lowlevel.ParkingLot()
        self._stretch = 0
        self.waited: bool = False

    async def open(self, before_wait: BeforeWait) -> None:
        pass

    async def receive(self, before_wait: BeforeWait) -> bytes:
        while True:
            await self._breathe()
            try:
                data = self._sock.recv(RECEIVE_SIZE)
                self._stretch += len(data)
                return data
            except (BlockingIOError, InterruptedError):
                await self._readable(before_wait)
            except OSError as error:
                raise Departed from error

    async def receive_into(self, view: memoryview, before_wait: BeforeWait) -> int:
        while True:
            await self._breathe()
            try:
                size = self._sock.recv_into(view, min(len(view), STRETCH))
                self._stretch += size
                return size
            except (BlockingIOError, InterruptedError):
                await self._readable(before_wait)
            except OSError as error:
                raise Departed from error

    async def _breathe(self) -> None:
        if self._stretch >= STRETCH:
            self._stretch = 0
            await trio.lowlevel.checkpoint()

    async def _readable(self, before_wait: BeforeWait) -> None:
        before_wait()
        self.waited = True
        self._stretch = 0
        if self._watched:  # one task may wait on a descriptor; the sentinel still does, and wakes this one
            await self._readers.park()
        else:
            await trio.lowlevel.wait_readable(self._sock)

    async def send(self, buffers: Sequence[Buffer], before_wait: BeforeWait) -> None:
        for buffer in gather(buffers):
            view = memoryview(buffer)
            while view:
                await self._breathe()
                try:
                    sent = self._sock.send(view[:STRETCH])
                    self._stretch += sent
                    view = view[sent:]
                except (BlockingIOError, InterruptedError):
                    before_wait()
                    self.waited = True
                    self._stretch = 0
                    await trio.lowlevel.wait_writable(self._sock)
                except OSError as error:
                    raise Departed from error

    async def send_eof(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise Departed from error

    def look(self) -> Sight:
        if self._epoll is not None:
            for _, events in self._epoll.poll(0):
                return Sight.RESET if events & (select.EPOLLHUP | select.EPOLLERR) else Sight.EOF
        return peek(self._sock)

    def may_outlast(self, action: Action) -> bool:
        return action is Action.WAIT

    async def wait(self, action: Action) -> None:
        if action is Action.WAIT:
            self._watched = True
            try:
                await trio.lowlevel.wait_readable(self._sock)
            finally:
                self._watched = False
                self._readers.unpark_all()
        elif HAS_EPOLL:
            await trio.lowlevel.wait_readable(self._hangup(action))
        else:
            await trio.sleep_forever()

    def _hangup(self, action: Action) -> int:
        """A descriptor that turns readable when the peer hangs up, and not for data."""
        mask = select.EPOLLRDHUP if action is Action.WATCH_HANGUP else 0
        if self._epoll is None:
            self._epoll = select.epoll(1)
            self._epoll.register(self._sock, mask)
        elif mask != self._epoll_mask:
            self._epoll.modify(self._sock, mask)
        self._epoll_mask = mask
        return self._epoll.fileno()

    def take_ahead(self) -> bytes:
        return b""

    def release(self) -> None:
        if self._epoll is not None:
            trio.lowlevel.notify_closing(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._sock.detach()

    async def aclose(self) -> None:
        self.release()
        self._stream.socket.close()  # wakes whoever waits on it; `trio.aclose_forcefully` would cost a scope besides


class StreamTransport:
    """Any other trio stream, looked at by reading ahead.

    Args:
        stream: owned by this transport from now on, and closed by it.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._ahead = bytearray()
        self._sight = Sight.QUIET
        self.waited: bool = False

    async def open(self, before_wait: BeforeWait) -> None:
        if isinstance(self._stream, trio.SSLStream):
            before_wait()
            try:
                await self._stream.do_handshake()
            except _GONE as error:
                raise Departed from error

    async def receive(self, before_wait: BeforeWait) -> bytes:
        if self._ahead:
            return self.take_ahead()
        if self._sight is Sight.EOF:
            return b""
        if self._sight is Sight.RESET:
            raise Departed
        before_wait()
        self.waited = True
        try:
            return bytes(await self._stream.receive_some(RECEIVE_SIZE))
        except _GONE as error:
            raise Departed from error

    async def receive_into(self, view: memoryview, before_wait: BeforeWait) -> int:
        data = await self.receive(before_wait)
        size = min(len(data), len(view))
        view[:size] = data[:size]
        if size < len(data):
            self._ahead += data[size:]
            if self._sight is Sight.QUIET:
                self._sight = Sight.DATA
        return size

    async def send(self, buffers: Sequence[Buffer], before_wait: BeforeWait) -> None:
        for buffer in gather(buffers):
            view = memoryview(buffer)
            for start in range(0, len(view), SEND_SLICE):
                before_wait()
                self.waited = True
                try:
                    await self._stream.send_all(view[start : start + SEND_SLICE])
                except _GONE as error:
                    raise Departed from error

    async def send_eof(self) -> None:
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            try:
                await self._stream.send_eof()
            except _GONE as error:
                raise Departed from error

    def look(self) -> Sight:
        return self._sight

    def may_outlast(self, action: Action) -> bool:
        return False  # what arrives would go to the sentinel

    async def wait(self, action: Action) -> None:
        if action is Action.WAIT and self._sight is not Sight.QUIET:
            return  # there is something to see already, as there would be on a socket
        room = READ_AHEAD - len(self._ahead)
        if room <= 0 or self._sight in (Sight.EOF, Sight.RESET):
            await trio.sleep_forever()  # nothing more can be learnt: as good as disarmed
        try:
            data = await self._stream.receive_some(room)
        except _GONE:
            self._sight = Sight.RESET
        else:
            self._ahead += data
            self._sight = Sight.DATA if data else Sight.EOF

    def take_ahead(self) -> bytes:
        """The bytes that were read ahead, which are then no longer here."""
        taken, self._ahead = bytes(self._ahead), bytearray()
        if self._sight is Sight.DATA:
            self._sight = Sight.QUIET
        return taken

    def release(self) -> None:
        pass

    async def aclose(self) -> None:
        try:
            if isinstance(self._stream, trio.SSLStream) and self._sight in (Sight.QUIET, Sight.DATA):
                with trio.move_on_after(CLOSE_NOTIFY):
                    await self._stream.aclose()
        except _GONE:
            pass
        finally:
            await trio.aclose_forcefully(self._stream)


def open_transport(stream: trio.abc.Stream) -> SocketTransport | StreamTransport:
    """The transport that fits `stream`."""
    return SocketTransport(stream) if isinstance(stream, trio.SocketStream) else StreamTransport(stream)
