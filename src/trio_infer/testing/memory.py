"""Connections without a network: deterministic, and at home under `trio.testing.MockClock`."""

from __future__ import annotations

import math

import trio
import trio.testing

__all__ = ["MemoryListener"]


class MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    """A listener that accepts memory streams: `server.serve(listeners=[MemoryListener()])`."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](math.inf)

    def connect(self) -> trio.abc.HalfCloseableStream:
        """A new connection; the client's end of it.

        Raises:
            trio.BrokenResourceError: the listener is closed.
        """
        client, server = trio.testing.memory_stream_pair()
        self._send.send_nowait(server)
        return client

    async def accept(self) -> trio.abc.Stream:
        """Wait for the next `connect`."""
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise trio.ClosedResourceError from None

    async def aclose(self) -> None:
        """Refuse further connections."""
        self._receive.close()
        self._send.close()
