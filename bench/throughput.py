"""How many small inferences a second, and what the disconnect sentinel costs.

16 FP32 in and out, as JSON and as binary tensors, over 1, 8 and 64 keep-alive connections with one request in hand on
each. Two models: `echo` answers without ever sleeping (the sentinel is armed and disarmed before it ever gets to run),
`hop` takes one trip through trio's scheduler (it gets to wait on the socket).

Two servers run side by side: one with the sentinel (`on_disconnect="cancel"`) and one without (`"finish"`). They are
measured in turns, A B B A, because what else the machine does then strikes both alike; the share is the median of the
ratios of neighbours, and IQR how far their quartiles are apart. It is taken of CPU a request, not of requests a second:
the client runs on the same machine, and CPU is what a server pays. Without the sentinel, a server looks once at the
connection before each answer, one `recv`; so the sentinel really costs about one system call more than shown.

The client is one process with epoll and plain sockets. It knows how long an answer is from the first one, and counts
bytes, so that most of the CPU goes to the server.
"""

from __future__ import annotations

import select
import socket
import time
from statistics import median

from _harness import BenchServer, connect, percentile, receive_answer, report, request_of_16, table, verdict

TARGET = 20.0


class Load:
    """So many connections to one server, each with one request in hand."""

    def __init__(self, port: int, request: bytes, connections: int) -> None:
        self._request = request
        self._epoll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        for _ in range(connections):
            sock = connect(port)
            sock.sendall(request)
            self._size = receive_answer(sock, bytearray(65536))
            self._sockets[sock.fileno()] = sock
            self._epoll.register(sock, select.EPOLLIN)

    def run(self, requests: int) -> list[int]:
        """Make so many requests; returns how long each took, in ns."""
        sent_at, got, took = {}, dict.fromkeys(self._sockets, 0), []
        for number, sock in self._sockets.items():
            sent_at[number] = time.monotonic_ns()
            sock.send(self._request)
        begun, ended = len(sent_at), 0
        while ended < begun:
            for number, _ in self._epoll.poll():
                sock = self._sockets[number]
                got[number] += len(sock.recv(65536))
                if got[number] < self._size:
                    continue
                now = time.monotonic_ns()
                took.append(now - sent_at[number])
                got[number] = 0
                ended += 1
                if begun < requests:
                    begun += 1
                    sent_at[number] = now
                    sock.send(self._request)
        return took

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._epoll.close()


class Side:
    """One of the two servers under one kind of load, and what was measured."""

    def __init__(self, server: BenchServer, request: bytes, connections: int) -> None:
        self._server = server
        self._load = Load(server.port, request, connections)
        self.rate: list[float] = []
        self.p50: list[float] = []
        self.cpu: list[float] = []

    def turn(self, requests: int) -> None:
        cpu, start = self._server.cpu_ns(), time.monotonic_ns()
        took = self._load.run(requests)
        cpu, seconds = self._server.cpu_ns() - cpu, (time.monotonic_ns() - start) / 1e9
        self.rate.append(len(took) / seconds)
        self.p50.append(percentile(took, 50) / 1e6)
        self.cpu.append(cpu / len(took) / 1e3)

    def close(self) -> None:
        self._load.close()


def compare(
    servers: list[BenchServer], request: bytes, connections: int, turns: int, requests: int
) -> tuple[list[float], list[float]]:
    """The figures of a row, and by how many per cent the first server took more CPU than the second, pair by pair."""
    sides = [Side(server, request, connections) for server in servers]
    for number in range(turns):
        for side in sides if number % 2 else reversed(sides):
            side.turn(requests)
    watched, alone = sides
    for side in sides:
        side.close()
    shares = [(with_it / without - 1) * 100 for with_it, without in zip(watched.cpu, alone.cpu, strict=True)]
    spread = percentile(shares, 75) - percentile(shares, 25)
    figures = [median(values) for values in (watched.rate, watched.p50, watched.cpu, alone.rate, alone.p50, alone.cpu)]
    return [*figures, median(shares), spread], shares


def main(quick: bool) -> None:
    turns, requests, counts = (2, 50, [1, 8]) if quick else (24, 500, [1, 8, 64])
    rows: list[list[object]] = []
    shares: dict[str, list[float]] = {"echo": [], "hop": []}
    with (
        BenchServer(models=["echo", "hop"], on_disconnect="cancel") as watched,
        BenchServer(models=["echo", "hop"], on_disconnect="finish") as alone,
    ):
        for form in ("JSON", "binary"):
            for model in ("echo", "hop"):
                request = request_of_16(model, binary=form == "binary")
                for count in counts:
                    figures, more = compare([watched, alone], request, count, turns, requests)
                    rows.append([form, model, count, *figures])
                    shares[model] += more
    without = ("req/s without", "p50 ms without", "CPU us without")
    table(["form", "model", "connections", "req/s", "p50 ms", "CPU us", *without, "sentinel %", "IQR"], rows)
    for model, values in shares.items():
        verdict(
            f"the sentinel's share of CPU for {model}, median of all {len(values)} pairs", median(values), TARGET, "%"
        )


if __name__ == "__main__":
    with report(__doc__) as quick:
        main(quick)
