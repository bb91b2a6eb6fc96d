"""10,000 connections that leave at random points around their response, and nothing may be left of them.

Half of them close and half reset, 0 to 5 ms after sending; a fifth have sent only a part of their request, head or
body. They ask native models that answer at once, wait, or stream, and a polling Triton model in a thread; those that
take time have one slot each, so that some leave while they are queued. Among them keep-alive workers make one request
after the other, and pairs of requests are pipelined; both must get every answer, the right one, in order.

Then the books must balance: each request that came has ended in exactly one way, none failed, no connection, slot or
queue place is taken; and the process holds as many tasks, threads and descriptors as before. It goes in rounds: after
the first (which fills caches) memory must not grow from round to round. At the end the server must exit with 0. Any of
this failing is exit code 1. The threads are trio's workers; they linger for 10 s, and are waited for at the end.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import trio

from _harness import BenchServer, post, report, request_of_16, reset_on_close, table

SLOTS = 1
AT_ONCE = 200
FLAT = 4 * 2**20
"""Bytes by which memory may differ between rounds: an arena of an allocator here or there."""


class Storm:
    """One round."""

    def __init__(self, port: int, connections: int) -> None:
        self.rng = random.Random(connections)
        self._port = port
        self._connections = connections
        self._limiter = trio.CapacityLimiter(AT_ONCE)
        self._gone = trio.Event()
        self.answers = 0

    async def run(self) -> None:
        async with trio.open_nursery() as bystanders:
            for _ in range(8):
                bystanders.start_soon(self.work)
            bystanders.start_soon(self.pairs)
            async with trio.open_nursery() as nursery:
                for _ in range(self._connections):
                    await self._limiter.acquire_on_behalf_of(ticket := object())
                    nursery.start_soon(self.depart, ticket)
            self._gone.set()

    async def depart(self, ticket: object) -> None:
        rng = self.rng
        try:
            stream = await self.connect()
            request = self.request()
            if rng.random() < 0.2:
                request = request[: rng.randrange(1, len(request))]
            await stream.send_all(request)
            await trio.sleep(rng.uniform(0, 0.005))
            if rng.random() < 0.5:
                reset_on_close(stream.socket)  # type: ignore[arg-type]  # trio's has setsockopt, too
            await stream.aclose()
        finally:
            self._limiter.release_on_behalf_of(ticket)

    def request(self) -> bytes:
        model = self.rng.choice(["echo", "hop", "wait", "stream", "poll"])
        if model in ("echo", "hop"):
            return request_of_16(model, binary=self.rng.random() < 0.5)
        document = {"seconds": self.rng.uniform(0, 0.02), "poll": 0.0005}
        return post(model, "generate" if model == "wait" else "generate_stream", document)

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self._port, local_address="127.0.0.2")

    async def work(self) -> None:
        """Requests one after the other, for as long as the storm lasts."""
        async with Answers(await self.connect()) as answers:
            number = 0
            while not self._gone.is_set():
                number += 1
                await answers.ask(echo(number))
                assert await answers.next() == number
                self.answers += 1
                await trio.sleep(0.005)  # eight of them without a pause would be all that the server does

    async def pairs(self) -> None:
        """Two requests in one segment; a connection each."""
        while not self._gone.is_set():
            async with Answers(await self.connect()) as answers:
                await answers.ask(echo(1) + echo(2))
                assert [await answers.next(), await answers.next()] == [1, 2]
                self.answers += 2
            await trio.sleep(0.005)


def echo(number: int) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [number]}
    return post("echo", "infer", {"inputs": [tensor]})


class Answers:
    """The answers on one connection: the number that each gives back."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = b""

    async def ask(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def next(self) -> int:
        head = await self._until(lambda: self._buffer.find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in self._buffer else None)
        assert head.startswith(b"HTTP/1.1 200"), head
        size = int(head.lower().split(b"\ncontent-length:")[1].split(b"\r\n")[0])
        body = await self._until(lambda: size if len(self._buffer) >= size else None)
        return int(json.loads(body)["outputs"][0]["data"][0])

    async def _until(self, end: Any) -> bytes:
        while (size := end()) is None:
            data = await self._stream.receive_some()
            assert data, "the server closed a connection that had done nothing wrong"
            self._buffer += data
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.aclose()


HELD = ("in_flight", "connections", "running", "waiting", "abandoned", "tasks", "descriptors")


def settle(server: BenchServer, before: dict[str, Any], *held: str) -> dict[str, Any]:
    """How the server stands when it has come to rest, and by how much what it holds differs then from `before`."""
    ends = time.monotonic() + 15
    while True:
        standing = server.ask("standing")
        left = {name: standing[name] - before[name] for name in (*HELD, *held) if standing[name] != before[name]}
        if not left or time.monotonic() > ends:
            return {**standing, "left": left}
        time.sleep(0.1)


def faults(standing: dict[str, Any], answers: int) -> list[str]:
    outcomes = standing["outcomes"]
    checks = {
        f"left behind: {standing['left']}": not standing["left"],
        "requests don't add up": standing["received"] == sum(outcomes.values()),
        "cancelled ones don't add up": sum(standing["cancelled"].values()) == outcomes["cancelled"],
        "requests failed or were rejected": not outcomes["failed"] and not outcomes["rejected"],
        "fewer completed than were answered": outcomes["completed"] >= answers,
    }
    return [what for what, fine in checks.items() if not fine]


def main(quick: bool) -> int:
    rounds, each = (2, 100) if quick else (10, 1000)
    models = ["echo", "hop", "wait", "stream", "poll"]
    answers, rows, found, rss = 0, [], [], []
    with BenchServer(models=models, slots=SLOTS) as server:
        before = {**server.ask("standing"), "threads": 1}  # the worker that loaded the model may linger
        trio.run(Storm(server.port, each).run)  # whatever is made once is made now
        settle(server, before)
        for number in range(rounds):
            storm = Storm(server.port, each)
            storm.rng.seed(number)
            trio.run(storm.run)
            answers += storm.answers
            server.ask("stamps")  # the models' own, which are in the way here
            standing = settle(server, before, *["threads"] * (number == rounds - 1 and not quick))
            found += faults(standing, answers)
            rss.append(server.rss())
            outcomes = standing["outcomes"]
            rows.append(
                [
                    number + 1,
                    standing["received"],
                    outcomes["completed"],
                    outcomes["cancelled"],
                    storm.answers,
                    len(standing["left"]),
                    rss[-1] / 2**20,
                ]
            )
    table(["round", "received", "completed", "cancelled", "bystanders' answers", "left behind", "RSS MiB"], rows)
    for where, count in standing["cancelled"].items():
        print(f"- {where}: {count:,}")
    if not quick and max(rss[1:]) - rss[0] > FLAT:
        found.append(f"memory grew by {(max(rss[1:]) - rss[0]) / 2**20:.1f} MiB")
    print("\n" + ("; ".join(found) or "Every book balances, nothing is left, and the server exited with 0."))
    return 1 if found else 0


if __name__ == "__main__":
    with report(__doc__) as quick:
        code = main(quick)
    raise SystemExit(code)
