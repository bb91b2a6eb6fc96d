"""Hundreds of clients leave models that never ask; what the server itself feels of it, and what is left afterwards.

Two models in processes: one loops in Python for ever (its process holds its GIL throughout), the other is one product
of two matrices that takes longer than anybody stays. Each has two instances and a spare, and kills after 100 ms. 300
clients ask one or the other, leave after up to 0.4 s, half of them with a reset, and are replaced at once; some 16 are
there at any time, so most leave from the queue and some from the model.

Meanwhile another client asks `/v2/health/live` every 5 ms, and a third one reads the server's books: never may more
requests run than there are instances, an abandoned one included. Afterwards there must be the same worker processes as
before, by number, no zombie, nothing in /dev/shm, no thread and no descriptor more than before.

Then the other way round: while the loop runs in a process, once in one and once in both, clients leave a *native*
model; how soon it is told says whether a busy child slows the server's eyes. Beside it the same on an idle machine.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from _harness import BenchServer, connect, percentile, post, report, reset_on_close, table, verdict
from stop_latency import children, request

MODELS = ("spins", "multiplies")
INSTANCES = 2
HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: bench\r\n\r\n"


class Health:
    """Asks every 5 ms whether the server lives, in a thread; `times` are in ms."""

    def __init__(self, port: int) -> None:
        self.times: list[float] = []
        self._sock = connect(port)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        while not self._over.wait(0.005):
            began = time.perf_counter()
            self._sock.sendall(HEALTH)
            if not self._sock.recv(4096).startswith(b"HTTP/1.1 200"):
                raise SystemExit("the server says that it doesn't live")
            self.times.append(1000 * (time.perf_counter() - began))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._sock.close()


def leaver(port: int, numbers: Any, lock: threading.Lock) -> None:
    while True:
        with lock:
            number = next(numbers, None)
        if number is None:
            return
        sock = connect(port)
        if number % 2:
            reset_on_close(sock)
        sock.sendall(request(MODELS[number // 2 % 2], number, 30.0))
        time.sleep(random.uniform(0.01, 0.4))
        sock.close()


def zombies(pid: int) -> int:
    return sum(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z" for child in children(pid))


def at_rest(server: BenchServer, processes: int) -> dict[str, Any]:
    """The books when all is over and each worker is there again."""
    ends = time.monotonic() + 60
    while True:
        standing: dict[str, Any] = server.ask("standing")
        quiet = not (standing["running"] or standing["waiting"] or standing["abandoned"])
        if quiet and len(children(server.pid)) == processes:
            time.sleep(1.0)  # what a start holds for a moment
            if len(children(server.pid)) == processes:
                return dict(server.ask("standing"))
        if time.monotonic() > ends:
            raise SystemExit(
                f"it doesn't come to rest: {standing}, {len(children(server.pid))} of {processes} processes"
            )
        time.sleep(0.05)


def under_fire(server: BenchServer, clients: int, processes: int) -> None:
    before = at_rest(server, processes)
    shared = len(os.listdir("/dev/shm"))
    quiet = Health(server.port)
    time.sleep(2 if clients > 20 else 0.3)
    quiet.close()
    health = Health(server.port)
    lock, numbers = threading.Lock(), iter(range(1, clients + 1))
    crowd = [threading.Thread(target=leaver, args=(server.port, numbers, lock)) for _ in range(16)]
    for thread in crowd:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in crowd):
        standing = server.ask("standing")
        most = max(most, standing["running"] + standing["abandoned"])
        time.sleep(0.02)
    for thread in crowd:
        thread.join()
    health.close()
    after = at_rest(server, processes)
    cancelled = sum(after["cancelled"].values()) - sum(before["cancelled"].values())
    table(
        ["health, ms", "median", "p99", "max"],
        [
            [name, median(times), percentile(times, 99), max(times)]
            for name, times in (("nobody else", quiet.times), (f"{clients} clients leave", health.times))
        ],
    )
    print(f"Requests that were cancelled: {cancelled} of {clients}; most that ran at once: {most}.\n")
    verdict("health p99 under fire", percentile(health.times, 99), 20, "ms")
    verdict("requests in instances at once, of two models with two each", most, 2 * INSTANCES, "")
    for what in ("threads", "descriptors", "tasks"):
        verdict(f"{what} more than before", max(0, after[what] - before[what]), 0, "")
    verdict("worker processes more or fewer", abs(len(children(server.pid)) - processes), 0, "")
    verdict("zombies", zombies(server.pid), 0, "")
    verdict("objects in /dev/shm more than before", max(0, len(os.listdir("/dev/shm")) - shared), 0, "")
    print()


def departures(server: BenchServer, trials: int) -> list[float]:
    """Milliseconds from close() to the end of a native model's run."""
    server.ask("stamps")
    times = []
    for number in range(10_000, 10_000 + trials):
        sock = connect(server.port)
        sock.sendall(request("wait", number, 30.0))
        time.sleep(random.uniform(0.01, 0.02))
        closed = time.monotonic_ns()
        sock.close()
        time.sleep(0.03)
        stopped = {name: when for name, event, when in server.ask("stamps") if event == "stopped"}
        times.append((stopped[str(number)] - closed) / 1e6 if str(number) in stopped else 30.0)
    return times


def beside_busy_children(server: BenchServer, trials: int) -> None:
    rows: list[list[Any]] = []
    busy = []
    for count, name in enumerate(("no other work", "a loop in one process", "a loop in each of two processes")):
        if count:
            sock = connect(server.port)
            sock.sendall(request("spins", 20_000 + count, 600.0))
            busy.append(sock)
            time.sleep(0.2)
        times = departures(server, trials)
        rows.append([name, median(times), percentile(times, 99), max(times)])
    for sock in busy:
        sock.close()
    table(["a native model's client leaves; told after, ms", "median", "p99", "max"], rows)
    for name, middle, *_ in rows:
        verdict(f"{name}, median", middle, 2, "ms")


def main(quick: bool) -> None:
    with BenchServer(models=["fire"]) as server:
        processes = len(MODELS) * (INSTANCES + 1)
        sock = connect(server.port)
        sock.sendall(post("wait", "generate", {"seconds": 0.0, "poll": 0.0}))
        sock.recv(65536)
        sock.close()
        under_fire(server, 20 if quick else 300, processes)
        beside_busy_children(server, 5 if quick else 100)


if __name__ == "__main__":
    with report(__doc__) as quick:
        main(quick)
