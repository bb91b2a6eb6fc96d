"""HTTP where the kernel matters: resets, full buffers, descriptors; and curl, once."""

from __future__ import annotations

import gc
import os
import socket
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from support import Client, Echo, Served, Streamer, Ticker, get, infer_echo, infer_ticks, needs, post, serving
from trio_infer import DisconnectPolicy, InferRequest, Limits, Model, TensorSpec
from trio_infer.wire.transport import SocketTransport

LIVE = get("/v2/health/live")


async def eventually(condition: Any) -> None:
    """The kernel takes its own time: look each millisecond, for five seconds at most."""
    with trio.fail_after(5):
        while not condition():  # noqa: ASYNC110  connections end without telling anyone
            await trio.sleep(0.001)


async def test_a_client_that_uploads_on_can_read_its_refusal() -> None:
    """A reset would have thrown it away."""
    async with serving(Echo()) as served:
        for request, status in (
            (b"POST /v2/models/nobody/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n", 404),
            (b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", 400),
            (b"POST /v2/models/nobody/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n989680\r\n", 404),
            (b"not http\r\n\r\n", 400),
        ):
            client = await served.connect()
            await client.send(request)
            for _ in range(100):
                await client.send(b"x" * 100_000)
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            await client.close()
        await eventually(lambda: served.server.statistics().connections == 0)


@pytest.mark.parametrize("way", ["receive", "receive_into", "send"])
async def test_a_peer_that_is_as_fast_as_we_are_does_not_keep_others_waiting(way: str) -> None:
    """A socket that is always ready never lets its task sleep: the task must give way of its own accord."""
    ours, theirs = trio.socket.socketpair()
    peer = socket.socket(fileno=theirs.detach())
    transport = SocketTransport(trio.SocketStream(ours))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    buffer = bytearray(65_536)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        await trio.lowlevel.checkpoint()
        before = turns
        for _ in range(100):
            if way == "send":
                await transport.send([buffer], pytest.fail)
                assert len(peer.recv(len(buffer), socket.MSG_WAITALL)) == len(buffer)
            else:
                peer.sendall(buffer)
                if way == "receive":
                    assert len(await transport.receive(pytest.fail)) == len(buffer)
                else:
                    assert await transport.receive_into(memoryview(buffer), pytest.fail) == len(buffer)
        assert 3 <= turns - before <= 20
        nursery.cancel_scope.cancel()
    peer.close()
    await transport.aclose()


@attrs.define(eq=False)
class Verbose(Model):
    """Gives a megabyte at a time, without end."""

    name: str = "verbose"
    stopped: trio.Event = attrs.field(factory=trio.Event)
    inputs = (TensorSpec("x", "FP32", [1], optional=True),)
    outputs = (TensorSpec("x", "FP32", [-1]),)

    async def infer(self, request: InferRequest) -> Any:
        try:
            while True:
                yield {"x": np.zeros(200_000, "f4")}
                await trio.lowlevel.checkpoint()
        finally:
            self.stopped.set()


async def test_a_stream_that_is_cut_in_full_buffers_is_not_ended_as_if_it_were_whole() -> None:
    async with serving(Verbose(), exit_timeout=0.05) as served:
        client = await served.connect()
        await client.send(post("verbose", "generate_stream", {}))
        assert (await client.head()).status == 200
        await trio.testing.wait_all_tasks_blocked(0.01)
        served.server.drain()
        await served.finished.wait()

        async def read_to_the_end() -> None:
            while await client.chunk():
                pass

        with pytest.raises(EOFError) as caught:
            await read_to_the_end()
        assert b"shutting down" not in caught.value.args[0]
        await client.close()


async def test_a_reader_that_stalls_on_a_socket_is_cut_off() -> None:
    model = Verbose()
    async with serving(model, limits=Limits(write_timeout=0.05)) as served:
        client = await served.connect()
        await client.send(post("verbose", "generate_stream", {}))
        await model.stopped.wait()
        await served.ended(1)
        assert served.cancelled() == {("client stalled", "streaming"): 1}
        await client.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def part_ways(client: Client, stage: int) -> None:
    """Go on with a conversation as far as `stage` says."""
    await client.send(LIVE[: (0, 1, 30)[stage] if stage < 3 else len(LIVE)])
    if stage < 3:
        return
    await client.answer()
    more = (
        b"",
        infer_ticks(5)[:-5],
        infer_ticks(1000),
        infer_ticks(1000) + LIVE[:5],
        post("streamer", "generate_stream", {"ticks": 1000}),
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n" + b"x" * 70_000,
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"POST /v2/models/nobody/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nabc",
        b"garbage\r\n\r\n" + b"x" * 1000,
    )[stage - 3]
    await client.send(more)


async def test_connections_that_end_at_any_stage_leave_nothing_behind() -> None:
    ticker, streamer = Ticker(), Streamer()
    async with serving(Echo(), ticker, streamer, disconnect=DisconnectPolicy(pipelined="watch")) as served:
        first = await served.connect()
        await first.ask(infer_echo(1))
        await first.close()
        await eventually(lambda: served.server.statistics().connections == 0)
        tasks, files, threads = trio.lowlevel.current_statistics().tasks_living, descriptors(), threading.active_count()
        for number in range(200):
            client = await served.connect()
            await part_ways(client, number % 12)
            if number % 7 == 3:
                await trio.testing.wait_all_tasks_blocked()
            await (client.reset() if number // 12 % 2 else client.close())
        await eventually(lambda: served.server.statistics().connections == 0)
        gc.collect()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert descriptors() == files
        assert threading.active_count() <= threads  # an idle one of trio's may have ended by itself
        assert ticker.ticks < 5000
        last = await served.connect()
        assert (await last.ask(LIVE)).status == 200
        await last.close()


async def curl(served: Served, path: str, *options: str) -> tuple[bytes, float]:
    """What curl prints, and the seconds that it says it took."""
    url = f"http://127.0.0.1:{served.port}{path}"
    command = ["curl", "-sS", "-m", "10", "-w", "\n%{http_code} %{time_total}", *options, url]
    done = await trio.run_process(command, capture_stdout=True)
    output, _, last = done.stdout.rpartition(b"\n")
    status, seconds = last.split()
    assert status == b"200", output
    return output, float(seconds)


@needs("curl")
async def test_curl_uploads_without_waiting_and_reads_what_was_compressed(tmp_path: Path) -> None:
    values = 2**19
    tensor = np.arange(values, dtype="<f4").tobytes()
    text = (
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%d],"parameters":{"binary_data_size":%d}}],'
        b'"parameters":{"binary_data_output":true}}' % (values, len(tensor))
    )
    (tmp_path / "body").write_bytes(text + tensor)
    length = ("-H", f"Inference-Header-Content-Length: {len(text)}")
    body = f"@{tmp_path / 'body'}"
    async with serving(Echo()) as served:
        for options in (
            ("--data-binary", body),
            ("--data-binary", body, "--compressed"),
            ("-T", str(tmp_path / "body"), "-X", "POST", "-H", "Transfer-Encoding: chunked"),
            ("--data-binary", body, "--http2"),
        ):
            output, seconds = await curl(served, "/v2/models/echo/infer", *length, *options)
            assert output.endswith(tensor)
            assert seconds < 0.5, f"{options}: as if it had waited for a permission that did not come"
