"""A client that vanishes without a FIN: a real one, in a network namespace whose cable is pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial

import pytest
import trio

from support import Ticker, serving
from trio_infer import Keepalive

NAME = f"ti{os.getpid() % 100_000}"
SERVER, CLIENT = "169.254.87.1", "169.254.87.2"

CLIENT_CODE = """
import socket, sys
client = socket.create_connection((sys.argv[1], int(sys.argv[2])))
client.sendall(sys.stdin.buffer.read())
client.recv(1)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[None]:
    """Another host, behind a cable of its own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making a network namespace takes root and iproute2")
    ip("netns", "add", NAME)
    try:
        ip("link", "add", f"{NAME}a", "type", "veth", "peer", "name", f"{NAME}b", "netns", NAME)
        ip("address", "add", f"{SERVER}/30", "dev", f"{NAME}a")
        ip("link", "set", f"{NAME}a", "up")
        ip("-n", NAME, "address", "add", f"{CLIENT}/30", "dev", f"{NAME}b")
        ip("-n", NAME, "link", "set", f"{NAME}b", "up")
        yield
    finally:  # the cable first: an orphaned connection may keep the namespace for minutes
        subprocess.run(["ip", "link", "del", f"{NAME}a"], check=False, capture_output=True)
        ip("netns", "del", NAME)


@pytest.mark.parametrize(
    ("idle", "interval", "count", "user_timeout", "seconds"),
    [(15, 15, 4, 75, 75), (2, 2, 3, 8, 8), (2, 2, 3, 5, 8), (2, 2, 3, 13, 14), (11, 7, 3, 40, 46)],
)
def test_the_worst_case(idle: int, interval: int, count: int, user_timeout: int, seconds: int) -> None:
    keepalive = Keepalive(
        tcp_keepalive_idle=idle,
        tcp_keepalive_interval=interval,
        tcp_keepalive_count=count,
        tcp_user_timeout=user_timeout,
    )
    assert keepalive.worst_case == seconds


async def test_a_client_whose_cable_was_pulled_is_noticed_within_the_worst_case(cable: None) -> None:
    keepalive = Keepalive(tcp_keepalive_idle=1, tcp_keepalive_interval=1, tcp_keepalive_count=2, tcp_user_timeout=2)
    request = textwrap.dedent(CLIENT_CODE)
    model = Ticker()
    body = b'{"inputs":[{"name":"ticks","datatype":"INT32","shape":[1],"data":[100000]}]}'
    head = f"POST /v2/models/ticker/infer HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
    async with serving(model, host=SERVER, keepalive=keepalive) as served:
        command = ["ip", "netns", "exec", NAME, sys.executable, "-c", request, SERVER, str(served.port)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.run_process, command, stdin=head.encode() + body, check=False))
            with trio.fail_after(10):
                await model.started.wait()
            before = trio.current_time()
            await trio.run_process(["ip", "-n", NAME, "link", "set", f"{NAME}b", "down"])
            with trio.fail_after(15):
                await model.stopped.wait()
            took = trio.current_time() - before
            nursery.cancel_scope.cancel()
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "running"): 1}
    assert took < keepalive.worst_case + 1, "the kernel's timers are coarse, but not so coarse"
