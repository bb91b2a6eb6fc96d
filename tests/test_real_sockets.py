"""The promise over real sockets: departures in every way, at every moment, with all the books balanced afterwards."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
from typing import Any

import pytest
import trio
import trio.testing

from support import Echo, Streamer, Ticker, infer_echo, infer_ticks, post, serving
from trio_infer import Keepalive, Limits, Server
from trio_infer.testing import MemoryListener
from trio_infer.wire.listeners import set_keepalive


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
async def test_a_departure_before_anything_was_written_stops_the_model(leave: str, action: str) -> None:
    model = Ticker(instances=1)
    async with serving(model) as served:
        client = await served.connect()
        await client.send(infer_ticks(200) if action == "infer" else post("ticker", action, {"ticks": 200}))
        await model.started.wait()
        with trio.fail_after(2):
            await getattr(client, leave)()
            await model.stopped.wait()
            await served.ended(1)
        assert served.cancelled() == {("client disconnected", "running"): 1}
        assert served.server.statistics().models["ticker", "1"].running == 0


async def test_streams_of_others_are_untouched_when_half_of_the_clients_leave() -> None:
    model = Streamer()
    async with serving(model) as served:
        ended: list[list[bytes]] = []

        async def read(leaves_after: int | None, leave: str) -> None:
            client = await served.connect()
            await client.send(post("streamer", "generate_stream", {"ticks": 12}))
            assert (await client.head()).status == 200
            events = []
            while event := await client.chunk():
                events.append(event)
                if len(events) == leaves_after:
                    await getattr(client, leave)()
                    return
            ended.append(events)
            await client.close()

        async with trio.open_nursery() as nursery:
            for index in range(10):
                nursery.start_soon(read, None, "")
                nursery.start_soon(read, 1 + index, "reset" if index % 2 else "close")
        assert [len(events) for events in ended] == [12] * 10
        await served.ended(20)
        assert served.outcomes() == {"completed": 10, "cancelled": 10}


async def test_pipelined_pairs_are_both_answered_in_order_and_never_cancelled() -> None:
    async with serving(Ticker(), Echo()) as served:
        client = await served.connect()
        await client.send(infer_ticks(2) + infer_echo(1.5))
        assert (await client.answer()).json["model_name"] == "ticker"
        assert (await client.answer()).json["model_name"] == "echo"
        await client.send(infer_ticks(4))
        await trio.sleep(0.02)
        await client.send(infer_echo(2.5)[:40])  # half of the next one
        await trio.sleep(0.02)
        await client.send(infer_echo(2.5)[40:])
        assert (await client.answer()).json["model_name"] == "ticker"
        assert (await client.answer()).json["outputs"][0]["data"] == [2.5]
        await client.close()
        assert served.outcomes() == {"completed": 4}


async def test_the_storm_leaves_nothing_behind() -> None:
    """500 connections closed or reset around the response, keep-alive workers and pipelined pairs among them."""
    rng = random.Random(7)
    model, echo, streamer = Ticker(instances=8), Echo(), Streamer()
    gc.collect()
    before = descriptors(), threading.active_count()

    async def depart(served: Any, limiter: trio.CapacityLimiter) -> None:
        async with limiter:
            client = await served.connect()
            what = rng.choice(
                [
                    infer_ticks(rng.randrange(3)),
                    infer_echo(1.0),
                    post("streamer", "generate_stream", {"ticks": rng.randrange(1, 3)}),
                ]
            )
            if rng.random() < 0.2:
                what = what[: rng.randrange(1, len(what))]
            await client.send(what)
            await trio.sleep(rng.uniform(0, 0.005))
            if rng.random() < 0.5:
                await client.reset()
            else:
                await client.close()

    async def work(served: Any) -> None:
        client = await served.connect()
        for index in range(25):
            value = float(index)
            answer = await client.ask(infer_echo(value))
            assert answer.json["outputs"][0]["data"] == [value]
        await client.close()

    async def pair(served: Any) -> None:
        client = await served.connect()
        await client.send(infer_echo(1.0) + infer_echo(2.0))
        assert (await client.answer()).json["outputs"][0]["data"] == [1.0]
        assert (await client.answer()).json["outputs"][0]["data"] == [2.0]
        await client.close()

    async with serving(model, echo, streamer) as served:
        limiter = trio.CapacityLimiter(100)
        async with trio.open_nursery() as nursery:
            for _ in range(500):
                nursery.start_soon(depart, served, limiter)
            for _ in range(32):
                nursery.start_soon(work, served)
            for _ in range(50):
                nursery.start_soon(pair, served)
        probe = await served.connect()
        for _ in range(8):  # no slot is lost
            assert (await probe.ask(infer_ticks(0))).status == 200
        await probe.close()
        served.server.drain()
        with trio.fail_after(5):
            await served.finished.wait()
        assert served.outcomes().get("failed", 0) == 0
    gc.collect()
    assert (descriptors(), threading.active_count()) == before


async def test_cancelling_the_server_lets_no_peer_wait_and_frees_the_port() -> None:
    async with serving(Ticker()) as served:
        client = await served.connect()
        await client.send(infer_ticks(1000))
        await trio.sleep(0.02)
        served.scope.cancel()
        with trio.CancelScope(shield=True), trio.fail_after(1):
            assert await client.at_end()
            await client.close()
    listeners = await trio.open_tcp_listeners(served.port, host="127.0.0.1")
    for listener in listeners:
        await listener.aclose()


async def test_keepalive_and_user_timeout_are_set_on_accepted_sockets() -> None:
    keepalive = Keepalive(tcp_keepalive_idle=11, tcp_keepalive_interval=7, tcp_keepalive_count=3, tcp_user_timeout=40)
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    client = await trio.open_tcp_stream(*listener.socket.getsockname()[:2])
    server = await listener.accept()
    set_keepalive(server.socket, keepalive)
    assert server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert server.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 11
    assert server.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 7
    assert server.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
    assert server.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 40_000
    for stream in (client, server, listener):
        await stream.aclose()


async def test_a_thousand_requests_in_turn_never_make_two_tasks_wait_on_one_descriptor() -> None:
    async with serving(Echo()) as served:
        client = await served.connect()
        for _ in range(1000):
            assert (await client.ask(infer_echo(1.0))).status == 200
        await client.close()
        assert served.outcomes() == {"completed": 1000}


async def test_connections_beyond_the_limit_wait_in_the_listen_queue() -> None:
    async with serving(Echo(), limits=Limits(max_connections=2)) as served:
        first, second, third = [await served.connect() for _ in range(3)]
        for client in (first, second):
            assert (await client.ask(infer_echo(1.0))).status == 200
        await third.send(infer_echo(3.0))
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert served.server.statistics().connections == 2
        await first.close()
        with trio.fail_after(2):
            assert (await third.answer()).json["outputs"][0]["data"] == [3.0]
        await second.close()
        await third.close()


async def test_the_address_of_a_port_in_use_is_an_oserror_and_not_a_group() -> None:
    async with serving(Echo()) as served:
        with pytest.raises(OSError, match="in use"):
            await Server([Echo()]).serve("127.0.0.1", served.port)


def test_ctrl_c_reaches_the_embedder_as_it_is() -> None:
    class Interrupted(Echo):
        async def infer(self, request: Any) -> Any:
            raise KeyboardInterrupt

    async def ask(listener: MemoryListener) -> None:
        await listener.connect().send_all(infer_echo(1.0))

    async def main() -> None:
        listener = MemoryListener()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, listener)
            with pytest.raises(KeyboardInterrupt):
                await Server([Interrupted()]).serve(listeners=[listener])

    trio.run(main)
