"""A Triton Python model in a process of its own, against the same in a thread of the server; in turns, over HTTP.

The model gives back what it gets. *Added* is the median of the differences between two requests, one to each, that
follow each other over one connection. GB/s counts a tensor's bytes twice, in and out, over the whole request, from its
first byte sent to the answer's last byte received (GB = 10^9 bytes); the client's own copying is in the time.

In the process way, each direction costs one copy more than in the thread way: the server writes the input into shared
memory, which the model reads in place; the worker writes the output there, and the server sends it from there. Page
faults are the worker's, per request: fresh memory would cost 4,096 for 16 MiB.

The flag's price is that of one `request.is_cancelled()` in a loop, in the model. Cold start is from the start of the
load to a model that is ready, imports of numpy included; the figure beside it is `python -c "import numpy"`.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import trio

from _harness import BenchServer, connect, post, receive_answer, report, table, verdict
from _models import copying
from trio_infer.models.host import NoHost

WAYS = ("thread", "process")
MIB = 2**20


def infer(model: str, payload: bytes, name: str = "") -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(payload) // 4]}
    document = {
        "id": name,
        "inputs": [{**tensor, "parameters": {"binary_data_size": len(payload)}}],
        "outputs": [{"name": "x", "parameters": {"binary_data": True}}],
    }
    return post(model, "infer", document, payload)


def faults(pid: int) -> int:
    """Minor page faults of a process so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def sizes(server: BenchServer, quick: bool) -> tuple[float, float, float]:
    """The table; the cost added to 64 bytes in microseconds, and GB/s by process of 16 MiB."""
    sock = connect(server.port)
    answer = bytearray(17 * MIB)

    def values(model: str, name: str) -> tuple[float, ...]:
        size = receive_answer(sock, answer) if sock.sendall(infer(model, bytes(8), name)) is None else 0
        return struct.unpack("<2f", answer[size - 8 : size])

    high, low = values("process", "pid")
    pid = int(high) * 65536 + int(low)
    rows: list[list[object]] = []
    added_small = rate = hop = 0.0
    for size, rounds in ((64, 1500), (4096, 800), (16384, 800), (65536, 400), (MIB, 100), (16 * MIB, 40)):
        payload = np.arange(size // 4, dtype=np.float32).tobytes()
        requests = {way: infer(way, payload) for way in WAYS}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        count = 3 if quick else rounds
        before = 0
        for number in range(count + 3):
            if number == 3:  # the first ones warm up
                before = faults(pid)
            for way in WAYS:
                start = time.perf_counter_ns()
                sock.sendall(requests[way])
                got = receive_answer(sock, answer)
                times[way].append((time.perf_counter_ns() - start) / 1e3)
                assert answer[got - size : got] == payload, "it came back changed"
        fresh = (faults(pid) - before) / count
        thread, process = (median(times[way][3:]) for way in WAYS)
        added = median(p - t for p, t in zip(times["process"][3:], times["thread"][3:], strict=True))
        gbs = [2 * size / us / 1e3 for us in (thread, process)]
        rows.append([f"{size:,} bytes", thread, process, added, *gbs, round(fresh)])
        added_small = added_small or added
        rate, hop = gbs[1], 2 * size / max(added, 1) / 1e3
    heads = ["tensor, in and out", "thread us", "process us", "added us", "thread GB/s", "process GB/s", "faults"]
    table(heads, rows)
    prices = [[way, values(way, "flag")[0]] for way in WAYS]
    table(["is_cancelled() in a", "ns"], prices)
    verdict("the flag's price in a process", float(prices[1][1]) / 1e3, 2, "us")
    sock.close()
    return added_small, rate, hop


async def cold_starts(quick: bool) -> list[float]:
    with tempfile.TemporaryDirectory() as root:
        took = []
        for number in range(1 if quick else 10):
            runner = copying(Path(root) / str(number), "process")
            start = time.perf_counter()
            await runner.load(NoHost())
            took.append((time.perf_counter() - start) * 1e3)
            await runner.unload()
    return took


def numpy_starts(quick: bool) -> list[float]:
    took = []
    for _ in range(1 if quick else 10):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import numpy"], check=True)
        took.append((time.perf_counter() - start) * 1e3)
    return took


def main(quick: bool) -> None:
    with BenchServer(models=[*WAYS]) as server:
        added, rate, hop = sizes(server, quick)
    started, bare = median(trio.run(cold_starts, quick)), median(numpy_starts(quick))
    verdict("added to 64 bytes", added, 150, "us")
    verdict("seconds a GB at 16 MiB, into the process and out of it", 1 / hop, 1 / 1.5, "s, both directions counted")
    verdict("seconds a GB at 16 MiB, all of HTTP included", 1 / rate, 1 / 1.5, "s, both directions counted")
    verdict("cold start beyond that of numpy", started - bare, 120, f"ms ({started:.0f} against {bare:.0f})")


if __name__ == "__main__":
    with report(__doc__) as quick:
        main(quick)
