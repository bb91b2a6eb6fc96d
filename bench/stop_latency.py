"""From the client's close() to the end of the computation, for each way of running a model.

A request runs that would go on for seconds; some 60 ms after it was sent its client closes the connection. *Stopped* is
when the computation has really ended, not when somebody stopped waiting for it: the model's function has returned or
raised, by the clock of the thread or process that it is in; a native model's task has ended; or the kernel says that
the worker process is dead (its pidfd is readable). All clocks are CLOCK_MONOTONIC, which is the same in all processes.
*Burnt* is the CPU that the server and all its processes used from the close on, until 40 ms after the median stop, less
what they use in as much time when nothing runs.

Two models never ask, and are killed after `cancel_grace_ms` (250): a `while` loop, and one product of two matrices.
For the first the table says also how long after the kill the *next* request was answered, which waited in the queue:
with a spare, and without one.

What needs a library that isn't installed (onnxruntime, torch) is left out, and said so.
"""

from __future__ import annotations

import os
import random
import select
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _harness import BenchServer, connect, cpu_ns, percentile, plot_file, post, report, table, verdict

GRACE = 250.0
KINDS: dict[str, tuple[str, float | None]] = {
    "wait": ("native, at an `await`", 1),
    "thread": ("thread, asks each 1 ms", 2),
    "process": ("process, asks each 1 ms", 2),
    "onnx_small": ("ONNX, operators of 0.04 ms", 3),
    "onnx_loop": ("ONNX, the body of a `Loop`", 3),
    "onnx_large": ("ONNX, operators of 7 ms", None),
    "onnx_process": ("ONNX in a process, small operators", None),
    "torch_blocks": ("PyTorch, hooks on blocks", None),
    "torch_all": ("PyTorch, hooks on all modules", None),
    "spins": ("process, `while True`, killed", GRACE + 15),
    "multiplies": ("process, one giant product, killed", GRACE + 15),
}
"""By model: what the table calls it, and how many milliseconds the median may be."""

NEXT = {"spins": "with a spare", "spins_without_a_spare": "without one"}


def request(model: str, number: int, go_on: float) -> bytes:
    if model == "wait":
        return post(model, "generate", {"id": str(number), "seconds": go_on, "poll": 0.0})
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [go_on]}
    return post(model, "infer", {"id": str(number), "inputs": [tensor]})


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


class Processes:
    """The server's and its workers' CPU, those that end meanwhile included; and when they end."""

    def __init__(self, server: int) -> None:
        self.pids = [server, *children(server)]
        self.ended: dict[int, int] = {}
        self._last = dict.fromkeys(self.pids, 0)
        self._first = self._read()
        self._fds = {os.pidfd_open(pid): pid for pid in self.pids[1:]}

    def _read(self) -> dict[int, int]:
        for pid in self.pids:
            try:
                self._last[pid] = cpu_ns(pid)
            except OSError:  # it has ended: what it used up to the last look counts
                continue
        return dict(self._last)

    def watch(self, seconds: float) -> float:
        """Look on; the CPU used since the beginning, in ms."""
        ends = time.monotonic() + seconds
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        while (left := ends - time.monotonic()) > 0:
            for fd, _ in poll.poll(min(left * 1000, 2)):
                self.ended[self._fds[fd]] = time.monotonic_ns()
                poll.unregister(fd)
            self._read()
        used = sum(self._read().values()) - sum(self._first.values())
        for fd in self._fds:
            os.close(fd)
        return used / 1e6


def stop_once(server: BenchServer, model: str, number: int, *, killed: bool, watch: float) -> tuple[float, float]:
    """Milliseconds from the close to the stop; and the CPU burnt within `watch` seconds, in ms."""
    sock = connect(server.port)
    sock.sendall(request(model, number, 20.0 if model == "wait" else 1.0 if killed is False else 30.0))
    time.sleep(random.uniform(0.055, 0.065))
    processes = Processes(server.pid)
    closed = time.monotonic_ns()
    sock.close()
    burnt = processes.watch(watch)
    if killed:
        if not processes.ended:
            raise SystemExit(f"no process of '{model}' has ended {watch:.1f} s after the close")
        return (max(processes.ended.values()) - closed) / 1e6, burnt
    stopped = {name: when for name, event, when in server.ask("stamps") if event == "stopped"}
    if str(number) not in stopped:
        raise SystemExit(f"'{model}' has not stopped {watch:.1f} s after the close")
    if stopped[str(number)] < closed:
        raise SystemExit(f"'{model}' had ended before its client left")
    return (stopped[str(number)] - closed) / 1e6, burnt


def settle(server: BenchServer, processes: int) -> None:
    """Wait until all workers are there, and everybody is at rest."""
    ends = time.monotonic() + 60
    while len(children(server.pid)) < processes:
        if time.monotonic() > ends:
            raise SystemExit("a worker process was not started again")
        time.sleep(0.01)
    before = used(server)
    while True:
        time.sleep(0.03)
        now = used(server)
        if now - before < 3e6:
            break
        before = now
    server.ask("stamps")


def used(server: BenchServer) -> int:
    return sum(map(cpu_ns, [server.pid, *children(server.pid)]))


def next_once(server: BenchServer, model: str, number: int) -> float:
    """Milliseconds from the kill to the answer of the request that waits behind the one that is killed."""
    leaver, waiter = connect(server.port), connect(server.port)
    leaver.sendall(request(model, number, 30.0))
    time.sleep(0.06)
    waiter.sendall(request(model, number + 1, 0.0))
    time.sleep(0.01)
    leaver.close()
    answer = waiter.recv(65536)
    answered = time.monotonic_ns()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(answer.decode())
    waiter.close()
    killed = {name: when for name, event, when in server.ask("stamps") if event == "stopped"}[str(number)]
    return (answered - killed) / 1e6


def idle_share(server: BenchServer, seconds: float) -> float:
    """The CPU that is used when nothing runs, in ms for each second."""
    return Processes(server.pid).watch(seconds) / seconds


def draw(rows: Sequence[Sequence[Any]], file: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 0.36 * len(rows) + 1.1))
    for at, (name, middle, high, *_) in enumerate(reversed(rows)):
        axes.plot([middle, high], [at, at], color="#b9bec7", linewidth=3, solid_capstyle="round", zorder=1)
        axes.scatter([middle], [at], color="#2f6fde", zorder=2, label="median" if not at else None)
        axes.scatter([high], [at], color="#1d3557", marker="|", zorder=2, label="99 %" if not at else None)
        axes.annotate(f"{middle:.3g}", (middle, at), xytext=(0, 5), textcoords="offset points", fontsize=7, ha="center")
        axes.text(0.115, at, str(name).replace("`", ""), fontsize=8, ha="right", va="center", clip_on=False)
    axes.set_xscale("log")
    axes.set_xlim(0.13, 1000)
    axes.set_ylim(-0.6, len(rows) - 0.3)
    axes.set_yticks([])
    axes.set_xlabel("ms from the client's close() to the end of the computation", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.subplots_adjust(left=0.34, right=0.97, bottom=0.14, top=0.97)
    figure.savefig(file, metadata={"Date": None})


def main(quick: bool, plot: str) -> None:
    trials, kills = (3, 2) if quick else (100, 40)
    rows: list[list[Any]] = []
    with BenchServer(models=["ladder"]) as server:
        served = server.ask("models")
        time.sleep(1.5)  # spares are first started when a model has been ready for a second
        processes = 0
        settled = time.monotonic() + 60
        while time.monotonic() < settled:
            time.sleep(0.5)
            if len(children(server.pid)) == processes and processes:
                break
            processes = len(children(server.pid))
        idle = idle_share(server, 0.5 if quick else 3)
        number = 1
        for model, (name, _) in KINDS.items():
            if model not in served:
                print(f"- {name}: left out, its library isn't installed\n")
                continue
            killed = model in {"spins", "multiplies"}
            times, burnt = [], []
            watch = 0.4 if killed else 0.15
            for _ in range(kills if killed else trials):
                settle(server, processes)
                stopped, cpu = stop_once(server, model, number, killed=killed, watch=watch)
                times.append(stopped)
                burnt.append(max(0.0, cpu - idle * watch))
                number += 1
            rows.append([name, median(times), percentile(times, 99), max(times), median(burnt)])
        waits: dict[str, list[float]] = {model: [] for model in NEXT}
        for _ in range(kills // 2):
            for model, times in waits.items():
                settle(server, processes)
                times.append(next_once(server, model, number))
                number += 2
    table(["", "stopped, median ms", "p99", "max", "CPU burnt, median ms"], rows)
    table(
        ["the next request is answered after the kill", "median ms", "max"],
        [[name, median(waits[model]), max(waits[model])] for model, name in NEXT.items()],
    )
    by_name = {row[0]: row for row in rows}
    for name, target in KINDS.values():
        if target is not None and name in by_name:
            verdict(f"{name}, median", by_name[name][1], target, "ms")
    verdict("the next request after a kill, with a spare, median", median(waits["spins"]), 10, "ms")
    if plot:
        draw(rows, plot)


if __name__ == "__main__":
    drawing = plot_file()
    with report(__doc__) as quick:
        main(quick, drawing)
