"""The sentinel by itself, for programs that have a connection and no use for the rest of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import trio

from trio_infer.errors import SetupError
from trio_infer.lifecycle import Life
from trio_infer.limits import DisconnectPolicy
from trio_infer.wire.sentinel import Sentinel
from trio_infer.wire.transport import HAS_EPOLL, SocketTransport, StreamTransport, open_transport

__all__ = ["DisconnectWatch", "cancel_on_disconnect"]


class DisconnectWatch:
    """What `cancel_on_disconnect` has seen; made by it."""

    def __init__(self, life: Life, transport: SocketTransport | StreamTransport) -> None:
        self._life = life
        self._transport = transport

    @property
    def departed(self) -> bool:
        """Whether the peer has left; true from the instant in which the block is cancelled, and afterwards."""
        return self._life.cancelled

    def take_received(self) -> bytes:
        """Bytes that had to be read from the stream to watch it, once: treat them as received before any others.

        Always empty for a `trio.SocketStream`, which is only peeked at. Call it after the block.
        """
        return self._transport.take_ahead()


@asynccontextmanager
async def cancel_on_disconnect(
    stream: trio.abc.Stream,
    *,
    half_close: Literal["gone", "wait"] = "gone",
    pipelined: Literal["disarm", "watch"] = "disarm",
) -> AsyncIterator[DisconnectWatch]:
    """`async with cancel_on_disconnect(stream) as watch: ...` cancels the block if the peer leaves meanwhile.

    Nobody else may receive from the stream in the block; sending is fine.

    Args:
        stream: a `trio.SocketStream` is peeked at, nothing is taken from it. Any other stream (TLS, memory, stapled) is
            read from, up to 64 KiB; see `DisconnectWatch.take_received`.
        half_close: whether an end of stream alone counts as leaving ("gone"), or only a reset ("wait").
        pipelined: whether bytes that arrive end the watching ("disarm"), or it goes on behind them ("watch"; on Linux).

    Yields:
        a watch: ask `watch.departed` after the block; the block itself ends quietly, as with `trio.move_on_after`.

    Raises:
        SetupError: `pipelined="watch"` on a platform that can't.
        Exception: whatever the block raises, as it is: no exception group is put round it.

    Cancellation: a departure cancels the block, at its next checkpoint. Cancelling from outside works as ever.
    """
    if pipelined == "watch" and not HAS_EPOLL:
        raise SetupError('pipelined="watch" needs Linux (epoll); use "disarm"')
    life = Life()
    transport = open_transport(stream)
    sentinel = Sentinel(transport, DisconnectPolicy(half_close=half_close, pipelined=pipelined))
    raised: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sentinel.run)
            try:
                with trio.CancelScope() as scope:
                    life.canceller = lambda reason: scope.cancel(reason=reason.value)
                    with sentinel.guard(life):
                        yield DisconnectWatch(life, transport)
            except BaseException as error:  # not the scope's; carried round the nursery, which would wrap it
                raised = error
            nursery.cancel_scope.cancel()
    finally:
        transport.release()
        if raised is not None:
            raise raised
