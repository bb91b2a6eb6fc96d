"""Listening sockets, what is set on each accepted one, and the loop that accepts."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import trio

from trio_infer.errors import SetupError
from trio_infer.limits import Keepalive

__all__ = ["ListenError", "accept_forever", "cannot_listen", "open_listeners", "set_keepalive"]

logger: logging.Logger = logging.getLogger("trio_infer.wire")

BACKLOG: Final = 4096
"""Connections that wait to be accepted (Linux's own cap since 5.4; trio's default of 65,535 is cut to that)."""

OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
BACK_OFF: Final = 0.1
"""Seconds before accepting again when the process has no descriptor left (trio.serve_listeners: 0.1)."""


class ListenError(OSError):
    """A place can't be listened on.

    Attributes:
        kind: of front; its flags are `--KIND-port` and `--KIND-address`.
        host, port: the place.
    """

    kind: str = "http"
    host: str | None = None
    port: int = 0

    @classmethod
    def of(cls, error: OSError, kind: str, host: str | None, port: int) -> ListenError:
        """The same error, which knows its place."""
        self = cls(error.errno, error.strerror)
        self.kind, self.host, self.port = kind, host, port
        return self

    def __str__(self) -> str:
        return f"can't listen on {self.host or '*'}:{self.port}: {self.strerror or super().__str__()}"


async def open_listeners(host: str | None, port: int, *, reuse_port: bool = False) -> list[trio.SocketListener]:
    """Listen on `host` (all its addresses) and `port` (0: a free one, on the first of its addresses only).

    Args:
        reuse_port: other processes may do so, too; the kernel deals connections out among them.

    Raises:
        OSError: as the system says; `cannot_listen` words it for an operator.
    """
    if reuse_port:
        listeners = await _open_shared(host, port)
    else:
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    if port == 0 and len(listeners) > 1:  # each address family got a port of its own
        for listener in listeners[1:]:
            await listener.aclose()
        del listeners[1:]
    return listeners


async def _open_shared(host: str | None, port: int) -> list[trio.SocketListener]:
    """What `trio.open_tcp_listeners` does, with the option that must be set before binding."""
    listeners: list[trio.SocketListener] = []
    try:
        for family, kind, protocol, _, address in await trio.socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                sock = trio.socket.socket(family, kind, protocol)
            except OSError as error:
                if error.errno == errno.EAFNOSUPPORT:  # a kernel without IPv6
                    continue
                raise
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                await sock.bind(address)
                sock.listen(BACKLOG)
            except BaseException:
                sock.close()
                raise
            listeners.append(trio.SocketListener(sock))
        if not listeners:
            raise OSError(errno.EAFNOSUPPORT, f"no address of {host or '*'} is of a kind that this machine has")
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    return listeners


def cannot_listen(error: ListenError) -> SetupError:
    """What to tell the operator when `open_listeners` raised."""
    if error.errno == errno.EADDRINUSE:
        why = (
            f"port {error.port} is in use; stop what listens there, or choose another with --{error.kind}-port "
            "(0 picks a free one)"
        )
    else:
        why = error.strerror or OSError.__str__(error)
    what = "" if error.kind == "http" else f" for --{error.kind}-port"
    return SetupError(f"can't listen on {error.host or '*'}:{error.port}{what}: {why}")


def set_keepalive(sock: trio.socket.SocketType, keepalive: Keepalive) -> None:
    """Let TCP notice a peer that vanished without a FIN; what a platform doesn't know is left out."""
    options = (
        ("TCP_KEEPIDLE", keepalive.tcp_keepalive_idle),
        ("TCP_KEEPALIVE", keepalive.tcp_keepalive_idle),  # macOS's name for it
        ("TCP_KEEPINTVL", keepalive.tcp_keepalive_interval),
        ("TCP_KEEPCNT", keepalive.tcp_keepalive_count),
        ("TCP_USER_TIMEOUT", keepalive.tcp_user_timeout * 1000),  # milliseconds
    )
    with suppress(OSError):  # the peer may be gone already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def accept_forever(
    listener: trio.abc.Listener[trio.abc.Stream],
    handle: Callable[[trio.abc.Stream], Awaitable[None]],
    nursery: trio.Nursery,
    places: trio.Semaphore,
) -> None:
    """Accept connections, and start `handle` for each in `nursery`.

    Args:
        listener: closed by whoever cancels this.
        handle: must not raise; gives back its place in `places` when it ends.
        nursery: where connections live.
        places: one is taken per connection; with none left, clients wait in the listen queue.

    Cancellation: stops accepting; connections in `nursery` go on.
    """
    while True:
        await places.acquire()
        try:
            stream = await listener.accept()
        except OSError as error:
            places.release()
            if error.errno not in OUT_OF_RESOURCES:
                raise
            logger.error("can't accept connections: %s; trying again in %s s", error.strerror, BACK_OFF)
            await trio.sleep(BACK_OFF)
        except BaseException:
            places.release()
            raise
        else:
            nursery.start_soon(handle, stream)
