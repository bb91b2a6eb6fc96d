"""From the client's close() to the model's knowledge of it, and to the slot's being free for the next request.

Two models that would go on for a minute: `wait`, native, whose `await` is cancelled; and `poll`, a Triton Python model
in a worker thread, which asks `request.is_cancelled()` every 0.2 ms. Each through `infer`, `generate`, and
`generate_stream` before its first event; each left by a FIN (close) and by a reset.

- One at a time: the client waits until the model says that it runs, then 1 to 3 ms more so that the server
  sleeps, stamps the time, and closes.
- All at once: 200 requests run, and their connections are closed one after the other without a pause; five times, of
  which the medians are given. 200 threads that ask every 0.2 ms would be a million questions a second, and measure only
  the GIL: here they ask every 20 ms, so what `poll` takes to be *told* includes up to 20 ms of its own.

Client and server are two processes. Both stamp CLOCK_MONOTONIC, which is the same in all processes; the server keeps
its stamps in memory and gives them when a round is over. *Flag* is when `is_cancelled()` is true. *Told* is when the
model itself knows: in its `except trio.Cancelled`, or after the `is_cancelled()` that was true. *Free* is when the
work has ended and the request's ticket has been given up, whichever comes later. *CPU* is the server's for each of
the departures, from the first close until all is quiet, reading the stamps (some us) included: on a busy machine it
says more than the milliseconds.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from _harness import BenchServer, connect, percentile, post, report, reset_on_close, table, verdict

POLL = {"one": 0.0002, "all": 0.02}
MODELS = ("wait", "poll")
ACTIONS = ("infer", "generate", "generate_stream")
LEAVES = ("FIN", "RST")


def request(model: str, action: str, number: int, poll: float) -> bytes:
    values = {"seconds": 60.0, "poll": poll}
    if action != "infer":
        return post(model, action, {"id": str(number), **values})
    inputs = [{"name": name, "datatype": "FP32", "shape": [1], "data": [value]} for name, value in values.items()]
    return post(model, action, {"id": str(number), "inputs": inputs})


def until_started(server: BenchServer, requests: int) -> None:
    ends = time.monotonic() + 30
    while server.ask("started") != requests:
        if time.monotonic() > ends:
            raise SystemExit(f"there are not {requests} requests running: {server.ask('standing')}")
        time.sleep(0.0005)


def leave_together(
    server: BenchServer, model: str, action: str, leave: str, clients: int, poll: float
) -> tuple[list[int], int]:
    """Let so many requests run, and close their connections; returns when, and the server's CPU before, in ns."""
    socks = []
    for number in range(clients):
        sock = connect(server.port)
        if leave == "RST":
            reset_on_close(sock)
        sock.sendall(request(model, action, number, poll))
        socks.append(sock)
    until_started(server, clients)
    time.sleep(random.uniform(0.001, 0.003) + (clients - 1) / 1000)
    closed_at, cpu = [], server.cpu_ns()
    for sock in socks:
        closed_at.append(time.monotonic_ns())
        sock.close()
    return closed_at, cpu


def delays(server: BenchServer, closed_at: list[int]) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds from each close to its request's flag, to its model's knowledge, and to its slot's being free."""
    stamps: dict[str, dict[int, int]] = defaultdict(dict)
    ends = time.monotonic() + 30
    while any(len(stamps[event]) < len(closed_at) for event in ("flag", "told", "free", "ended")):
        if time.monotonic() > ends:
            raise SystemExit(f"not all were told: {server.ask('standing')}")
        time.sleep(0.001 + len(closed_at) / 1000)  # long enough not to ask in the middle of it
        for number, event, at in server.ask("stamps"):
            stamps[event][int(number)] = at
    flag = [(stamps["flag"][number] - at) / 1e6 for number, at in enumerate(closed_at)]
    told = [(stamps["told"][number] - at) / 1e6 for number, at in enumerate(closed_at)]
    free = [(max(stamps["free"][number], stamps["ended"][number]) - at) / 1e6 for number, at in enumerate(closed_at)]
    return flag, told, free


def measure(slots: int, rounds: int, poll: float) -> list[list[object]]:
    rows: list[list[object]] = []
    with BenchServer(models=MODELS, slots=slots, stamped=True) as server:
        for model in MODELS:
            for action in ACTIONS:
                for leave in LEAVES:
                    bursts, cpu = [], []
                    for _ in range(rounds):
                        closed_at, start = leave_together(server, model, action, leave, slots, poll)
                        bursts.append(delays(server, closed_at))
                        cpu.append((server.cpu_ns() - start) / slots / 1000)
                    columns = [column for event in zip(*bursts, strict=True) for column in spread(event, slots > 1)]
                    rows.append([model, action, leave, *columns] + [median(cpu)] * (slots > 1))
    return rows


def spread(rounds: Sequence[list[float]], bursts: bool) -> list[float]:
    """p50, p99 and maximum: of all values, or if each round is a burst, the median of each burst's p50 and p99."""
    values = [value for round_ in rounds for value in round_]
    if not bursts:
        return [percentile(values, 50), percentile(values, 99), max(values)]
    return [*(median(percentile(round_, share) for round_ in rounds) for share in (50, 99)), max(values)]


def worst(rows: list[list[object]], column: int) -> float:
    return max(row[column] for row in rows)  # type: ignore[type-var, return-value]  # these columns are numbers


def main(quick: bool) -> None:
    trials, together, bursts = (3, 10, 1) if quick else (200, 200, 5)
    heads = [
        "model",
        "action",
        "leaves by",
        "flag p50",
        "p99",
        "max",
        "told p50",
        "p99",
        "max",
        "free p50",
        "p99",
        "max",
    ]
    print(f"One at a time, {trials} trials each, ms:\n")
    rows = measure(1, trials, POLL["one"])
    table(heads, rows)
    verdict("told, p50, the worst row", worst(rows, 6), 1, "ms")
    verdict("told, p99, the worst row", worst(rows, 7), 5, "ms")
    print(f"\n{together} at once, {bursts} times, ms:\n")
    rows = measure(together, bursts, POLL["all"])
    table([*heads, "CPU us"], rows)
    verdict("flag, p99, the worst row", worst(rows, 4), 50, "ms")
    verdict("told, p99, the worst row of `wait`", worst([row for row in rows if row[0] == "wait"], 7), 50, "ms")


if __name__ == "__main__":
    with report(__doc__) as quick:
        main(quick)
