"""A client that leaves a real nginx in front of the server: nginx closes its connection to us, and the work stops."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from support import Client, Streamer, Ticker, infer_ticks, needs, post, serving

pytestmark = needs("nginx")

CONFIG = """
daemon off;
master_process off;
pid {folder}/pid;
error_log stderr crit;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream trio_infer {{ server 127.0.0.1:{upstream}; keepalive 8; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://trio_infer;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def nginx(folder: Path, upstream: int) -> AsyncIterator[int]:
    """nginx in front of `upstream`; the port it listens on."""
    port = free_port()
    file = folder / "nginx.conf"
    file.write_text(CONFIG.format(folder=folder, upstream=upstream, port=port))
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio.run_process, ["nginx", "-c", str(file), "-p", str(folder)], check=False))
        with trio.fail_after(10):
            while True:
                try:
                    await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                    break
                except OSError:
                    await trio.sleep(0.01)
        yield port
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("action", ["infer", "generate_stream"])
async def test_a_departure_from_the_proxy_is_a_departure_from_the_server(
    tmp_path: Path, leave: str, action: str
) -> None:
    model = Ticker() if action == "infer" else Streamer(name="ticker")
    async with serving(model) as served, nginx(tmp_path, served.port) as port:
        client = Client(await trio.open_tcp_stream("127.0.0.1", port))
        await client.send(infer_ticks(1000) if action == "infer" else post("ticker", action, {"ticks": 1000}))
        if action == "infer":
            await model.started.wait()
        else:
            assert (await client.head()).status == 200
            await client.chunk()
        with trio.fail_after(5):
            await getattr(client, leave)()
            await model.stopped.wait()
            await served.ended(1)
        phase = "running" if action == "infer" else "streaming"
        assert served.cancelled() == {("client disconnected", phase): 1}


async def test_requests_in_turn_through_the_proxy_share_a_connection_and_cancel_nothing(tmp_path: Path) -> None:
    async with serving(Ticker()) as served, nginx(tmp_path, served.port) as port:
        client = Client(await trio.open_tcp_stream("127.0.0.1", port))
        for _ in range(20):
            assert (await client.ask(infer_ticks(0))).status == 200
        await client.close()
        assert served.outcomes() == {"completed": 20}
        assert served.server.statistics().connections == 1
