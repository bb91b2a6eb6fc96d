"""64 clients on a token model with 4 slots, each leaving at a random moment and coming back, again and again.

A client asks for a stream of up to 24 tokens. Three in five leave: while they wait for a slot, or after any event, 0 to
5 ms later, so before, in and after a step, half of them by a reset. The others read to the end, and compare each token
with those of a run alone.

If a slot were lost on the way, or given to two, it would show at the end: in tokens that are not the survivor's own, in
books that don't balance, or in a throughput of the last thousand requests that is lower than that of the first. Any
wrong token or book is exit code 1.
"""

from __future__ import annotations

import json
import random
import time
from statistics import median

import trio

from _harness import BenchServer, post, report, reset_on_close, table, verdict
from _models import following

CLIENTS = 64
SLOTS = 4
MOST = 24
JITTER = 0.005
BOOKS = ("running", "waiting", "abandoned", "in_flight")


class Storm:
    def __init__(self, port: int, requests: int) -> None:
        self.port = port
        self.left = requests
        self.ended: list[float] = []
        self.survivors = self.departed = self.tokens = 0
        self.wrong: list[str] = []

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(self.client, random.Random(number))

    async def client(self, rng: random.Random) -> None:
        stream: trio.SocketStream | None = None
        while self.left > 0:
            self.left -= 1
            if stream is None:
                stream = await trio.open_tcp_stream("127.0.0.1", self.port)
            seed, count = rng.randrange(1_000_000), rng.randint(1, MOST)
            leaves = rng.randint(0, count) if rng.random() < 0.6 else None
            document = {"seed": seed, "count": count}
            await stream.send_all(post("chain", "generate_stream", document))
            read = await self.read(stream, leaves, rng)
            self.check(seed, count, leaves, read)
            self.ended.append(time.perf_counter())
            if leaves is None:
                self.survivors += 1
                continue
            self.departed += 1
            await trio.sleep(rng.random() * JITTER)
            if rng.random() < 0.5:
                reset_on_close(stream.socket)  # type: ignore[arg-type]  # trio's socket has what it needs
            await stream.aclose()
            stream = None
        if stream is not None:
            await stream.aclose()

    async def read(self, stream: trio.SocketStream, events: int | None, rng: random.Random) -> list[int]:
        """The tokens of the whole stream, or of so many events."""
        data, tokens = b"", []
        if events == 0:
            await trio.sleep(rng.random() * JITTER)
            return []
        while True:
            end = data.find(b"\n\n")
            if end >= 0:
                event, data = data[:end], data[end + 2 :]
                tokens.append(json.loads(event[event.index(b"data: ") + 6 :])["token"])
                if len(tokens) == events:
                    return tokens
            elif b"\r\n0\r\n\r\n" in data:
                return tokens
            else:
                more = await stream.receive_some()
                if not more:
                    raise EOFError(data)
                data += more

    def check(self, seed: int, count: int, leaves: int | None, read: list[int]) -> None:
        expected, token = [], seed
        for _ in range(count if leaves is None else leaves):
            token = following(token)
            expected.append(token)
        self.tokens += len(read)
        if read != expected:
            self.wrong.append(f"seed {seed}, {count} tokens, leaves after {leaves}: {read} in place of {expected}")


def main(quick: bool) -> None:
    requests = 400 if quick else 20_000
    part = requests // 20
    with BenchServer(models=["chain"], slots=SLOTS) as server:
        storm = Storm(server.port, requests)
        trio.run(storm.run)
        for _ in range(100):
            standing = server.ask("standing")
            if not any(standing[name] for name in BOOKS):
                break
            time.sleep(0.05)
    ended = storm.ended

    def rate(begin: int, end: int) -> float:
        return (end - begin) / (ended[end - 1] - ended[begin])

    whole = len(ended) - CLIENTS  # at the very end there are fewer clients than slots
    parts = [rate(begin, begin + part) for begin in (*range(0, whole - part, part), whole - part)]
    table(
        [
            "requests",
            "survivors",
            "departed",
            "tokens read",
            "wrong",
            "requests/s",
            f"the first {part}",
            f"the last {part}",
        ],
        [
            [
                requests,
                storm.survivors,
                storm.departed,
                storm.tokens,
                len(storm.wrong),
                median(parts),
                parts[0],
                parts[-1],
            ]
        ],
    )
    taken = {name: standing[name] for name in BOOKS if standing[name]}
    verdict("throughput of the first requests against the last", parts[0] / parts[-1], 1.15, "times")
    print(f"- afterwards the server has nothing in hand: {taken or 'yes'}")
    if storm.wrong or taken:
        raise SystemExit("\n".join([*storm.wrong[:5], "a token or a book is wrong"]))


if __name__ == "__main__":
    with report(__doc__) as quick:
        main(quick)
