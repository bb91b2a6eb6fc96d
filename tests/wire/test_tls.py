"""Over TLS a polite close looks like data to a raw peek; the sentinel must see it all the same."""

from __future__ import annotations

import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from support import Client, Served, Ticker, get, infer_ticks, needs, serving


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def contexts(authority: trustme.CA, version: ssl.TLSVersion) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("test.example").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    client.minimum_version = client.maximum_version = version
    return server, client


async def connect(served: Served, context: ssl.SSLContext) -> Client:
    tcp = await trio.open_tcp_stream("127.0.0.1", served.port)
    return Client(trio.SSLStream(tcp, context, server_hostname="test.example", https_compatible=True))


VERSIONS = pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])


async def close_politely(client: Client) -> None:
    """close_notify, and then the FIN."""
    client.stream._https_compatible = False
    with trio.move_on_after(0.1):
        await client.stream.aclose()


async def close_rudely(client: Client) -> None:
    """A FIN without a close_notify."""
    await client.stream.transport_stream.aclose()


@VERSIONS
@pytest.mark.parametrize("leave", [close_politely, close_rudely])
async def test_a_departure_is_seen(authority: trustme.CA, version: ssl.TLSVersion, leave: Any) -> None:
    server_context, client_context = contexts(authority, version)
    model = Ticker()
    async with serving(model, ssl_context=server_context) as served:
        client = await connect(served, client_context)
        await client.send(infer_ticks(200))
        await model.started.wait()
        with trio.fail_after(2):
            await leave(client)
            await model.stopped.wait()
            await served.ended(1)
        assert served.cancelled() == {("client disconnected", "running"): 1}


@VERSIONS
async def test_a_conversation_with_pipelining_and_a_large_body(authority: trustme.CA, version: ssl.TLSVersion) -> None:
    server_context, client_context = contexts(authority, version)
    async with serving(Ticker(), ssl_context=server_context) as served:
        client = await connect(served, client_context)
        await client.send(infer_ticks(2) + infer_ticks(1))
        assert (await client.answer()).json["outputs"][0]["data"] == [2]
        assert (await client.answer()).json["outputs"][0]["data"] == [1]
        await client.send(infer_ticks(1))
        await trio.sleep(0.01)
        await client.send(infer_ticks(3))  # read ahead while the first one runs
        assert (await client.answer()).json["outputs"][0]["data"] == [1]
        assert (await client.answer()).json["outputs"][0]["data"] == [3]
        padded = get("/v2/models/ticker", "Content-Length: 1000000") + b"x" * 1_000_000
        assert (await client.ask(padded)).status == 200
        await client.close()


async def test_the_server_closes_politely(authority: trustme.CA) -> None:
    server_context, client_context = contexts(authority, ssl.TLSVersion.TLSv1_3)
    async with serving(Ticker(), ssl_context=server_context) as served:
        tcp = await trio.open_tcp_stream("127.0.0.1", served.port)
        client = Client(trio.SSLStream(tcp, client_context, server_hostname="test.example"))
        assert (await client.ask(get("/v2/health/live", "Connection: close"))).status == 200
        assert await client.stream.receive_some(1) == b"", "a bare FIN would raise: it might be an attacker's"
        await client.close()


async def test_a_client_that_does_not_speak_tls_harms_nobody(authority: trustme.CA) -> None:
    server_context, client_context = contexts(authority, ssl.TLSVersion.TLSv1_3)
    async with serving(Ticker(), ssl_context=server_context) as served:
        plain = await served.connect()
        await plain.send(get("/v2"))
        with pytest.raises((EOFError, trio.BrokenResourceError, IndexError, ValueError)):
            await plain.answer()
        await plain.close()
        client = await connect(served, client_context)
        assert (await client.ask(get("/v2/health/live"))).status == 200
        await client.close()


@asynccontextmanager
async def openssl(served: Served, authority: trustme.CA) -> AsyncIterator[trio.Process]:
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "ca.pem")
        authority.cert_pem.write_to_path(str(bundle))
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{served.port}", "-CAfile", str(bundle), "-tls1_3"]
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                lambda **kwargs: trio.run_process(  # noqa: ASYNC105 - `nursery.start` awaits it
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    check=False,
                    **kwargs,
                )
            )
            yield process
            nursery.cancel_scope.cancel()


@needs("openssl")
async def test_a_key_update_while_waiting_is_no_departure(authority: trustme.CA) -> None:
    server_context, _ = contexts(authority, ssl.TLSVersion.TLSv1_3)
    model = Ticker()
    async with serving(model, ssl_context=server_context) as served, openssl(served, authority) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        output = b""
        with trio.fail_after(10):
            await process.stdin.send_all(infer_ticks(10))
            await model.started.wait()
            await process.stdin.send_all(b"K\n")
            while b'"data":[10]' not in output:
                output += await process.stdout.receive_some()
        assert b"KEYUPDATE" in output
        await served.ended(1)
        assert served.outcomes() == {"completed": 1}
