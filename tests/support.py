"""Models that note what happens to them, a server in a `with` block, and a client that speaks bytes."""

from __future__ import annotations

import json
import shutil
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from trio_infer import InferRequest, Life, Model, Phase, Server, TensorSpec
from trio_infer.testing import MemoryListener

TICK = 0.05


@attrs.define(eq=False)
class Ticker(Model):
    """Counts ticks of 50 ms of trio's clock; notes when it starts, how far it gets and how it ends."""

    name: str = "ticker"
    instances: int | None = None
    on_disconnect: Any = None
    ticks: int = 0
    started: trio.Event = attrs.field(factory=trio.Event)
    stopped: trio.Event = attrs.field(factory=trio.Event)
    runs: int = 0
    cancelled: int = 0
    saw_flag: list[bool] = attrs.field(factory=list)

    inputs = (TensorSpec("ticks", "INT32", [1]),)
    outputs = (TensorSpec("ticks", "INT32", [1]),)

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        self.runs += 1
        self.started.set()
        try:
            for _ in range(int(request.inputs["ticks"][0])):
                await trio.sleep(TICK)
                self.ticks += 1
        except trio.Cancelled:
            self.cancelled += 1
            self.saw_flag.append(request.is_cancelled())
            raise
        finally:
            self.stopped.set()
        return {"ticks": request.inputs["ticks"]}


@attrs.define(eq=False)
class Streamer(Ticker):
    """Gives a response at each tick."""

    name: str = "streamer"

    async def infer(self, request: InferRequest) -> AsyncIterator[dict[str, np.ndarray[Any, Any]]]:
        self.runs += 1
        self.started.set()
        try:
            for tick in range(int(request.inputs["ticks"][0])):
                await trio.sleep(TICK)
                self.ticks += 1
                yield {"ticks": np.array([tick], "i4")}
        except (trio.Cancelled, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.stopped.set()


class Echo(Model):
    """Gives back what it gets."""

    name = "echo"
    inputs = (TensorSpec("x", "FP32", [-1]),)
    outputs = (TensorSpec("x", "FP32", [-1]),)

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        return {"x": request.inputs["x"]}


class Failing(Model):
    """Raises."""

    name = "failing"
    inputs = (TensorSpec("x", "FP32", [-1], optional=True),)
    outputs = (TensorSpec("x", "FP32", [-1]),)

    async def infer(self, request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
        raise ValueError("boom-42")


def needs(program: str) -> pytest.MarkDecorator:
    """Skips a test where a program is missing that a fresh machine may not have."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def post(model: str, action: str, document: object, *headers: str, version: str = "1.1") -> bytes:
    """A whole POST request."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    lines = [
        f"POST /v2/models/{model}/{action} HTTP/{version}",
        "Host: test",
        f"Content-Length: {len(body)}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    """A whole request without a body."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()


def infer_ticks(ticks: int, *headers: str, model: str = "ticker") -> bytes:
    """An inference that takes so many ticks."""
    document = {"inputs": [{"name": "ticks", "datatype": "INT32", "shape": [1], "data": [ticks]}]}
    return post(model, "infer", document, *headers)


def infer_echo(*values: float) -> bytes:
    """An inference that is answered at once."""
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(values)], "data": list(values)}]}
    return post("echo", "infer", document)


@attrs.define
class Answer:
    """An HTTP answer, taken apart."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Speaks bytes over any trio stream, and reads answers off it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._buffer = bytearray()

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def _more(self) -> None:
        data = await self.stream.receive_some(65536)
        if not data:
            raise EOFError(bytes(self._buffer))
        self._buffer += data

    async def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            await self._more()
        line, _, rest = bytes(self._buffer).partition(b"\r\n")
        self._buffer[:] = rest
        return line

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def head(self) -> Answer:
        """The next answer's status and headers."""
        status = int((await self._line()).split()[1])
        headers = {}
        while line := await self._line():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return Answer(status, headers, b"")

    async def chunk(self) -> bytes:
        """The next chunk of an answer; empty at its end."""
        data = await self._exactly(int(await self._line(), 16))
        await self._line()
        return data

    async def answer(self, *, to_head: bool = False) -> Answer:
        """The next answer, whole."""
        answer = await self.head()
        if answer.status == 100:
            return answer
        if "chunked" in answer.headers.get("transfer-encoding", ""):
            while data := await self.chunk():
                answer.body += data
        elif not to_head:
            answer.body = await self._exactly(int(answer.headers["content-length"]))
        return answer

    async def at_end(self) -> bool:
        """Whether the server closes without another byte."""
        assert not self._buffer, self._buffer
        try:
            return await self.stream.receive_some(1) == b""
        except trio.BrokenResourceError:
            return True

    async def ask(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.answer()

    async def close(self) -> None:
        await self.stream.aclose()

    async def reset(self) -> None:
        """Close by RST."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.stream.aclose()


class Endings:
    """Counts requests that ended, and lets tests wait for that, or for anything that comes of a move."""

    def __init__(self) -> None:
        self.count = 0
        self._lot = trio.lowlevel.ParkingLot()

    def life_moved(self, life: Life, left: Phase | None) -> None:
        self.note()

    def work_ended(self, life: Life) -> None:
        self.note()

    def life_ended(self, life: Life) -> None:
        self.count += 1
        self.note()

    def note(self) -> None:
        """Something has happened: whoever waits is to look again."""
        self._lot.unpark_all()

    async def wait(self, count: int) -> None:
        await self.until(lambda: self.count >= count)

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._lot.park()


@attrs.define(eq=False)
class Served:
    """A server that is running, and ways to reach it."""

    server: Server
    scope: trio.CancelScope
    listener: MemoryListener | None
    port: int
    finished: trio.Event
    endings: Endings

    def connect_in_memory(self) -> Client:
        assert self.listener is not None
        return Client(self.listener.connect())

    async def connect(self) -> Client:
        return Client(await trio.open_tcp_stream("127.0.0.1", self.port))

    def outcomes(self) -> dict[str, int]:
        """How requests ended so far, without the zeros."""
        counted = self.server.statistics().requests.outcomes
        return {outcome.value: count for outcome, count in counted.items() if count}

    def cancelled(self) -> dict[tuple[str, str], int]:
        """Why and where requests were cancelled so far."""
        counted = self.server.statistics().requests.cancelled
        return {(reason.value, phase.value): count for (reason, phase), count in counted.items()}

    async def ended(self, requests: int) -> None:
        """Return when so many requests have ended."""
        await self.endings.wait(requests)


@asynccontextmanager
async def serving(*models: Any, memory: bool = False, host: str = "127.0.0.1", **options: Any) -> AsyncIterator[Served]:
    """A server in a nursery, with the books checked at the end."""
    endings = Endings()
    server = Server(models, watchers=[endings], **options)
    listener = MemoryListener() if memory else None
    finished = trio.Event()
    async with trio.open_nursery() as nursery:

        async def serve(task_status: Any) -> None:
            if listener is None:
                await server.serve(host, 0, task_status=task_status)
            else:
                await server.serve(listeners=[listener], task_status=task_status)
            finished.set()

        addresses = await nursery.start(serve)
        served = Served(
            server, nursery.cancel_scope, listener, addresses[0].port if addresses else 0, finished, endings
        )
        yield served
        nursery.cancel_scope.cancel()
    check_books(server)


def check_books(server: Server) -> None:
    """Every request that came has ended once, and nothing is left."""
    statistics = server.statistics()
    requests = statistics.requests
    assert requests.received == sum(requests.outcomes.values()), statistics
    assert not any(requests.in_flight.values()), statistics
    for queue in statistics.models.values():
        assert queue.entered == queue.left + queue.running + queue.waiting, statistics
    assert sum(requests.cancelled.values()) == next(
        count for outcome, count in requests.outcomes.items() if outcome.value == "cancelled"
    )
    assert statistics.connections == 0
    for queue in statistics.models.values():
        assert (queue.running, queue.waiting) == (0, 0), statistics
