"""`cancel_on_disconnect`: the sentinel for anybody's connection."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
import trio
import trio.testing
import trustme

from trio_infer import cancel_on_disconnect


async def tcp_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with listener:
        client = await trio.open_tcp_stream(*listener.socket.getsockname()[:2])
        return client, await listener.accept()


async def memory_pair() -> tuple[Any, Any]:
    return trio.testing.memory_stream_pair()


async def tls_pair() -> tuple[Any, Any]:
    authority = trustme.CA()
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("test.example").configure_cert(server_context)
    client_context = ssl.create_default_context()
    authority.configure_trust(client_context)
    client, server = await tcp_pair()
    client_tls = trio.SSLStream(client, client_context, server_hostname="test.example")
    server_tls = trio.SSLStream(server, server_context, server_side=True, https_compatible=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client_tls.do_handshake)
        nursery.start_soon(server_tls.do_handshake)
    return client_tls, server_tls


@pytest.fixture(params=[tcp_pair, memory_pair, tls_pair])
async def pair(request: Any) -> Any:
    client, server = await request.param()
    yield client, server
    await trio.aclose_forcefully(client)
    await trio.aclose_forcefully(server)


async def test_the_peers_leaving_cancels_the_block_and_only_the_block(pair: Any) -> None:
    client, server = pair
    async with cancel_on_disconnect(server) as watch:
        assert not watch.departed
        await trio.aclose_forcefully(client)
        await trio.sleep_forever()
    assert watch.departed
    await trio.lowlevel.checkpoint()  # nothing is cancelled out here


async def test_a_block_that_ends_by_itself_leaves_the_stream_as_it_was(pair: Any) -> None:
    client, server = pair
    async with cancel_on_disconnect(server) as watch:
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert not watch.departed
    assert watch.take_received() == b""
    await client.send_all(b"hello")
    assert await server.receive_some(10) == b"hello"
    await server.send_all(b"world")
    assert await client.receive_some(10) == b"world"


async def test_bytes_of_the_peer_are_never_lost(pair: Any) -> None:
    client, server = pair
    async with cancel_on_disconnect(server) as watch:
        await client.send_all(b"early")
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert not watch.departed
    received = watch.take_received()
    if isinstance(server, trio.SocketStream):
        assert received == b""
    if not received:
        received = bytes(await server.receive_some(10))
    assert received == b"early"


async def test_sending_meanwhile_is_fine(pair: Any) -> None:
    client, server = pair
    async with cancel_on_disconnect(server):
        await server.send_all(b"progress")
        assert await client.receive_some(10) == b"progress"


async def test_an_exception_of_the_block_comes_out_as_it_is(pair: Any) -> None:
    _, server = pair
    with pytest.raises(ValueError, match=r"^boom$"):
        async with cancel_on_disconnect(server):
            raise ValueError("boom")
    with pytest.raises(KeyboardInterrupt):
        async with cancel_on_disconnect(server):
            raise KeyboardInterrupt


async def test_a_group_that_the_block_raises_stays_the_blocks_own_group(pair: Any) -> None:
    _, server = pair
    with pytest.raises(ExceptionGroup) as caught:
        async with cancel_on_disconnect(server):
            raise ExceptionGroup("mine", [ValueError("boom")])
    assert caught.value.message == "mine"


async def test_cancelling_from_outside_works_as_ever(pair: Any) -> None:
    _, server = pair
    with trio.move_on_after(0.01) as scope:
        async with cancel_on_disconnect(server) as watch:
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not watch.departed


async def test_a_nursery_in_the_block_is_cancelled_with_it_and_its_siblings_outside_are_not(pair: Any) -> None:
    client, server = pair
    survived = trio.Event()

    async def handle() -> None:
        async with cancel_on_disconnect(server) as watch, trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(trio.sleep_forever)
            await trio.aclose_forcefully(client)
        assert watch.departed

    async def sibling() -> None:
        await trio.testing.wait_all_tasks_blocked(0.01)
        survived.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(handle)
        nursery.start_soon(sibling)
    assert survived.is_set()


async def test_what_the_clean_up_raises_after_a_departure_comes_out(pair: Any) -> None:
    client, server = pair
    with pytest.raises(ValueError, match="in the clean-up"):
        async with cancel_on_disconnect(server):
            try:
                await trio.aclose_forcefully(client)
                await trio.sleep_forever()
            finally:
                raise ValueError("in the clean-up")


async def test_what_the_clean_up_raises_after_a_cancel_from_outside_comes_out(pair: Any) -> None:
    _, server = pair
    with pytest.raises(ValueError, match="in the clean-up"), trio.move_on_after(0.01):
        async with cancel_on_disconnect(server):
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("in the clean-up")


async def test_it_can_be_used_again_and_again_on_one_connection(pair: Any) -> None:
    client, server = pair
    for _ in range(20):
        async with cancel_on_disconnect(server) as watch:
            await trio.lowlevel.checkpoint()
        assert not watch.departed
    async with cancel_on_disconnect(server) as watch:
        await trio.aclose_forcefully(client)
        await trio.sleep_forever()
    assert watch.departed


async def test_half_close_wait_does_not_take_a_fin_for_a_departure() -> None:
    client, server = await tcp_pair()
    async with client, server:
        async with cancel_on_disconnect(server, half_close="wait") as watch:
            await client.send_eof()
            await trio.testing.wait_all_tasks_blocked(0.02)
        assert not watch.departed
