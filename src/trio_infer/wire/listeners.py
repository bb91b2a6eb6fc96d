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

__all__ = ["accept_forever", "cannot_listen", "open_listeners", "set_keepalive"]

logger: logging.Logger = logging.getLogger("trio_infer.wire")

BACKLOG: Final = 4096
"""Connections that wait to be accepted (Linux's own cap since 5.4; trio's default of 65,535 is cut to that)."""

OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
BACK_OFF: Final = 0.1
"""Seconds before accepting again when the process has no descriptor left (trio.serve_listeners: 0.1)."""


async def open_listeners(host: str | None, port: int) -> list[trio.SocketListener]:
    """Listen on `host` (all its addresses) and `port` (0: a free one, on the first of its addresses only).

    Raises:
        OSError: as the system says; `cannot_listen` words it for an operator.
    """
    listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    if port == 0 and len(listeners) > 1:  # each address family got a port of its own
        for listener in listeners[1:]:
            await listener.aclose()
        del listeners[1:]
    return listeners


def cannot_listen(error: OSError, host: str | None, port: int) -> SetupError:
    """What to tell the operator when `open_listeners` raised."""
    if error.errno == errno.EADDRINUSE:
        why = f"port {port} is in use; stop what listens there, or choose another with --http-port (0 picks a free one)"
    else:
        why = error.strerror or str(error)
    return SetupError(f"can't listen on {host or '*'}:{port}: {why}")


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
