"""Several ports of one server: one catalog, one set of books, one way down."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import trio

from support import Client, Echo, Endings, Ticker, check_books, get, infer_echo, infer_ticks
from trio_infer import Address, Front, Limits, ListenError, Server
from trio_infer.api.v2 import V2
from trio_infer.testing import MemoryListener
from trio_infer.wire.serve import Application, Exchange


def parrot(v2: V2) -> Application:
    """Answers with the name of the first model."""

    async def answer(exchange: Exchange) -> None:
        (model, *_) = v2.catalog
        await exchange.respond(200, [("content-type", "text/plain")], [model.signature.name.encode()])

    return answer


def as_it_is(v2: V2) -> Application:
    return v2


@attrs.define(eq=False)
class Slow(Echo):
    """Takes its time to load."""

    loading: trio.Event = attrs.field(factory=trio.Event)

    async def load(self) -> None:
        self.loading.set()
        await trio.sleep(1)


async def test_each_front_speaks_its_own_dialect_and_addresses_tell_them_apart() -> None:
    server = Server([Echo()], fronts=[Front("parrot", parrot), Front("second", as_it_is)])
    async with trio.open_nursery() as nursery:
        addresses: Sequence[Address] = await nursery.start(server.serve, "127.0.0.1", 0)
        assert [address.kind for address in addresses] == ["http", "parrot", "second"]
        main, other, second = [Client(await trio.open_tcp_stream(place.host, place.port)) for place in addresses]
        assert (await main.ask(infer_echo(1.0))).json["outputs"][0]["data"] == [1.0]
        assert (await other.ask(get("/anything"))).body == b"echo"
        assert (await second.ask(infer_echo(2.0))).json["outputs"][0]["data"] == [2.0]
        assert server.statistics().connections == 3
        assert server.statistics().requests.received == 3
        server.drain()
        for client in (main, other, second):
            assert await client.at_end()
            await client.close()
    check_books(server)


async def test_a_drain_stops_listening_everywhere_and_waits_for_every_front(autojump_clock: Any) -> None:
    ticker, endings = Ticker(), Endings()
    main, further = MemoryListener(), MemoryListener()
    server = Server([ticker], watchers=[endings], fronts=[Front("further", as_it_is, listeners=[further])])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: server.serve(listeners=[main]))
        client = Client(further.connect())
        await client.send(infer_ticks(40))
        await trio.sleep(1)
        server.drain()
        assert (await client.answer()).status == 200
        assert await client.at_end()
        assert trio.current_time() == pytest.approx(2)
        for listener in (main, further):
            with pytest.raises(trio.ClosedResourceError):
                listener.connect()
        await client.close()


async def test_a_full_port_leaves_the_others_their_places(autojump_clock: Any) -> None:
    main, further = MemoryListener(), MemoryListener()
    server = Server(
        [Echo()], limits=Limits(max_connections=1), fronts=[Front("further", as_it_is, listeners=[further])]
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: server.serve(listeners=[main]))
        first, second, third = Client(main.connect()), Client(main.connect()), Client(further.connect())
        assert (await first.ask(infer_echo(1.0))).status == 200
        await second.send(infer_echo(2.0))
        assert (await third.ask(infer_echo(3.0))).status == 200
        with trio.move_on_after(1) as waiting:
            await second.answer()
        assert waiting.cancelled_caught
        nursery.cancel_scope.cancel()


async def test_all_ports_are_taken_before_a_model_loads_and_one_in_use_is_named() -> None:
    slow, given = Slow(), MemoryListener()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server([slow], fronts=[Front("metrics", parrot, port=port), Front("x", parrot, listeners=[given])])
        with pytest.raises(ListenError) as raised:
            await server.serve(port=0)
    assert (raised.value.kind, raised.value.host, raised.value.port) == ("metrics", "127.0.0.1", port)
    assert isinstance(raised.value, OSError)
    assert str(raised.value) == f"can't listen on 127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE)}"
    assert not slow.loading.is_set()
    with pytest.raises(trio.ClosedResourceError):
        given.connect()


async def test_a_server_may_have_fronts_only() -> None:
    server = Server([Echo()], fronts=[Front("parrot", parrot)])
    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(lambda task_status: server.serve(listeners=[], task_status=task_status))
        client = Client(await trio.open_tcp_stream(address.host, address.port))
        assert (await client.ask(get("/"))).body == b"echo"
        await client.close()
        nursery.cancel_scope.cancel()


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="this system has no SO_REUSEPORT")
async def test_servers_may_share_a_port_if_both_say_so() -> None:
    async with trio.open_nursery() as nursery:
        start = lambda port: nursery.start(  # noqa: E731
            lambda task_status: Server([Echo()]).serve(port=port, reuse_port=True, task_status=task_status)
        )
        (address,) = await start(0)
        (same,) = await start(address.port)
        assert same == address
        with pytest.raises(ListenError):
            await Server([Echo()]).serve(port=address.port)
        client = Client(await trio.open_tcp_stream(address.host, address.port))
        assert (await client.ask(infer_echo(1.0))).status == 200
        await client.close()
        nursery.cancel_scope.cancel()
