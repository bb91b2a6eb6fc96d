"""The sentinel by itself: what it does in time, over memory streams and over sockets."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from trio_infer.lifecycle import CancelReason, Life
from trio_infer.limits import DisconnectPolicy
from trio_infer.wire.sentinel import Sentinel
from trio_infer.wire.transport import READ_AHEAD, SocketTransport, StreamTransport, Transport

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the nested epoll is Linux's")


async def tcp_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    """A client's end and a server's end."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with listener:
        client = await trio.open_tcp_stream(*listener.socket.getsockname()[:2])
        return client, await listener.accept()


async def reset(client: trio.SocketStream) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await client.aclose()


@asynccontextmanager
async def watching(transport: Transport, **policy: Any) -> AsyncIterator[Sentinel]:
    sentinel = Sentinel(transport, DisconnectPolicy(**policy))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sentinel.run)
            yield sentinel
            nursery.cancel_scope.cancel()
    finally:
        await transport.aclose()


@asynccontextmanager
async def over_tcp(**policy: Any) -> AsyncIterator[tuple[trio.SocketStream, SocketTransport, Sentinel]]:
    client, server = await tcp_pair()
    transport = SocketTransport(server)
    async with watching(transport, **policy) as sentinel:
        yield client, transport, sentinel
    await client.aclose()


@asynccontextmanager
async def guarded(sentinel: Sentinel, *, pipelined: bool = False) -> AsyncIterator[Life]:
    """A request under guard; the life's canceller cancels the block."""
    life = Life()
    with trio.CancelScope() as scope:
        life.canceller = lambda reason: scope.cancel(reason=reason.value)
        with sentinel.guard(life, pipelined=pipelined):
            yield life


async def settle() -> None:
    """Let every task that can run do so, and the kernel's news of loopback arrive with them."""
    await trio.testing.wait_all_tasks_blocked(0.02)


# -- Departures ---


@pytest.mark.parametrize("leave", [trio.SocketStream.aclose, trio.SocketStream.send_eof, reset])
async def test_a_departure_cancels_the_request_under_guard(leave: Any) -> None:
    async with over_tcp() as (client, _, sentinel):
        async with guarded(sentinel) as life:
            await leave(client)
            await trio.sleep_forever()
        assert life.reason is CancelReason.DISCONNECTED


async def test_a_departure_before_the_guard_cancels_at_the_first_checkpoint_that_sleeps() -> None:
    async with over_tcp() as (client, _, sentinel):
        await client.aclose()
        async with guarded(sentinel) as life:
            await trio.sleep_forever()
        assert life.cancelled


async def test_nothing_is_cancelled_while_the_client_is_quiet() -> None:
    async with over_tcp() as (_, _, sentinel):
        async with guarded(sentinel) as life:
            await settle()
        assert not life.cancelled


async def test_a_departure_after_the_guard_cancels_nothing() -> None:
    async with over_tcp() as (client, transport, sentinel):
        async with guarded(sentinel) as first:
            await settle()
        await client.aclose()
        await settle()
        assert not first.cancelled
        assert await transport.receive(lambda: None) == b"", "the end of the stream is there to be read"


async def test_a_wake_up_that_is_late_does_not_cancel_the_next_request() -> None:
    """The FIN wakes the sentinel, but its request is over and the next is under guard before it gets to run."""

    class Deferred(SocketTransport):
        """Comes back from waiting one scheduler tick after the guard has changed, and looks at what was then."""

        async def wait(self, action: Any) -> None:
            await super().wait(action)
            with trio.CancelScope(shield=True):
                woken.set()
                await go_on.wait()

    woken, go_on = trio.Event(), trio.Event()
    client, server = await tcp_pair()
    transport = Deferred(server)
    async with watching(transport) as sentinel:
        first, second = Life(), Life()
        with sentinel.guard(first):
            await client.send_all(b"G")
            await woken.wait()
        assert server.socket is not None
        assert await transport.receive(lambda: None) == b"G"
        with sentinel.guard(second):
            go_on.set()
            await settle()
        assert not first.cancelled
        assert not second.cancelled
    await client.aclose()


async def test_taking_turns_never_makes_two_tasks_wait_on_one_descriptor() -> None:
    async with over_tcp() as (client, transport, sentinel):
        for round_ in range(200):
            async with guarded(sentinel) as life:
                await trio.lowlevel.checkpoint()
                if round_ % 3:
                    await trio.lowlevel.checkpoint()
            async with trio.open_nursery() as nursery:  # reads at once, before the sentinel has run again
                nursery.start_soon(transport.receive, lambda: None)
                nursery.start_soon(client.send_all, b"x")
            assert not life.cancelled


async def test_the_sentinels_sleep_outlasts_its_guard_and_then_wakes_the_reader() -> None:
    async with over_tcp() as (client, transport, sentinel):
        async with guarded(sentinel) as life:
            await settle()
        received = []

        async def read() -> None:
            received.append(await transport.receive(lambda: None))

        with trio.fail_after(2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await settle()
                await client.send_all(b"GET /next")
        assert received == [b"GET /next"]
        assert not life.cancelled
        async with guarded(sentinel) as second:
            await client.aclose()
            await trio.sleep_forever()
        assert second.cancelled


async def test_a_sleep_that_outlasts_its_guard_judges_by_the_request_in_hand_when_it_ends() -> None:
    async with over_tcp() as (client, _, sentinel):
        async with guarded(sentinel):
            await settle()
        async with guarded(sentinel, pipelined=True) as second:  # has bytes behind it, so it is not watched
            await client.aclose()
            await settle()
        assert not second.cancelled
        async with guarded(sentinel) as third:
            await trio.sleep_forever()
        assert third.cancelled


# -- Pipelining ---


async def test_pipelined_bytes_disarm_and_stay_where_they_are() -> None:
    async with over_tcp() as (client, transport, sentinel):
        async with guarded(sentinel) as life:
            await client.send_all(b"GET /next")
            await settle()
            await client.aclose()
            await settle()
            assert not sentinel.armed
        assert not life.cancelled
        assert await transport.receive(lambda: None) == b"GET /next"


async def test_after_a_disarm_the_next_request_is_watched_again() -> None:
    async with over_tcp() as (client, transport, sentinel):
        async with guarded(sentinel):
            await client.send_all(b"x")
            await settle()
        await transport.receive(lambda: None)
        async with guarded(sentinel) as life:
            await client.aclose()
            await trio.sleep_forever()
        assert life.cancelled


async def test_bytes_that_were_received_with_the_request_disarm_it_from_the_start() -> None:
    async with over_tcp() as (client, _, sentinel):
        async with guarded(sentinel, pipelined=True) as life:
            await client.aclose()
            await settle()
        assert not life.cancelled


@linux_only
@pytest.mark.parametrize("leave", [trio.SocketStream.aclose, trio.SocketStream.send_eof, reset])
@pytest.mark.parametrize("where", ["in the kernel", "received already"])
async def test_watch_sees_a_hang_up_behind_pipelined_bytes(leave: Any, where: str) -> None:
    async with over_tcp(pipelined="watch") as (client, _, sentinel):
        async with guarded(sentinel, pipelined=where == "received already") as life:
            if where == "in the kernel":
                await client.send_all(b"GET /next")
            await settle()
            assert not life.cancelled
            await leave(client)
            await trio.sleep_forever()
        assert life.reason is CancelReason.DISCONNECTED


@pytest.mark.parametrize("policy", [{}, {"pipelined": "watch"}, {"half_close": "wait"}])
async def test_waiting_behind_unread_bytes_or_a_fin_costs_no_cpu(policy: dict[str, str]) -> None:
    """A level-triggered wait would come back some 16,000 times a second."""
    async with over_tcp(**policy) as (client, transport, sentinel):
        looks = 0
        look = transport.look

        def count() -> Any:
            nonlocal looks
            looks += 1
            return look()

        transport.look = count  # type: ignore[method-assign]
        async with guarded(sentinel):
            if policy.get("half_close") == "wait":
                await client.send_eof()
            else:
                await client.send_all(b"GET /next")
            deadline = time.monotonic() + 0.1
            while time.monotonic() < deadline:
                await trio.lowlevel.checkpoint()
        assert looks <= 2


# -- Half-close ---


@linux_only
async def test_half_close_wait_sits_out_a_fin_and_still_sees_the_reset() -> None:
    async with over_tcp(half_close="wait") as (client, transport, sentinel):
        async with guarded(sentinel) as life:
            await client.send_eof()
            await settle()
            assert not life.cancelled
            await transport.send([b"x"], lambda: None)  # unread at the client, so that its close is a reset
            await settle()
            await client.aclose()
            await trio.sleep_forever()
        assert life.reason is CancelReason.DISCONNECTED


# -- Streams that can't be peeked at ---


@asynccontextmanager
async def over_memory(**policy: Any) -> AsyncIterator[tuple[Any, StreamTransport, Sentinel]]:
    client, server = trio.testing.memory_stream_pair()
    transport = StreamTransport(server)
    async with watching(transport, **policy) as sentinel:
        yield client, transport, sentinel


async def test_over_a_stream_a_departure_cancels() -> None:
    async with over_memory() as (client, _, sentinel):
        async with guarded(sentinel) as life:
            await client.aclose()
            await trio.sleep_forever()
        assert life.reason is CancelReason.DISCONNECTED


async def test_over_a_stream_what_was_read_ahead_is_received_first() -> None:
    async with over_memory() as (client, transport, sentinel):
        async with guarded(sentinel) as life:
            await client.send_all(b"GET /next")
            await trio.testing.wait_all_tasks_blocked()
            assert not sentinel.armed
        assert not life.cancelled
        await sentinel.aside()
        await client.send_all(b" HTTP/1.1")
        assert await transport.receive(lambda: None) == b"GET /next"
        assert await transport.receive(lambda: None) == b" HTTP/1.1"


async def test_over_a_stream_watch_reads_ahead_to_a_bound_and_sees_the_end_behind_the_bytes() -> None:
    async with over_memory(pipelined="watch") as (client, _, sentinel):
        async with guarded(sentinel) as life:
            await client.send_all(b"x" * 100)
            await trio.testing.wait_all_tasks_blocked()
            assert not life.cancelled
            await client.send_eof()
            await trio.sleep_forever()
        assert life.cancelled


async def test_over_a_stream_the_bound_reached_is_as_good_as_disarmed() -> None:
    async with over_memory(pipelined="watch") as (client, transport, sentinel):
        async with guarded(sentinel) as life:
            await client.send_all(b"x" * (READ_AHEAD + 10))
            await trio.testing.wait_all_tasks_blocked()
            await client.send_eof()
            await trio.testing.wait_all_tasks_blocked()
            assert not life.cancelled
        await sentinel.aside()
        assert len(await transport.receive(lambda: None)) == READ_AHEAD
        assert len(await transport.receive(lambda: None)) == 10


async def test_aside_waits_until_the_stream_may_be_read() -> None:
    async with over_memory() as (client, transport, sentinel):
        async with guarded(sentinel):
            await trio.testing.wait_all_tasks_blocked()
        await sentinel.aside()
        async with trio.open_nursery() as nursery:  # would raise BusyResourceError were the sentinel still reading
            nursery.start_soon(transport.receive, lambda: None)
            await trio.testing.wait_all_tasks_blocked()
            await client.send_all(b"x")
