"""What 10,000 idle connections cost in memory: opened and silent, and kept alive after one request each.

RSS of the server (smaps_rollup) before any connection; when all are accepted, none having sent a byte; and when each
has made one request (16 FP32, JSON) and waits. What the kernel holds for the sockets is not in it. The client's sockets
come from several loopback addresses, so that ports don't run out. Both processes raise their limit on open files to the
hard limit; if that is less than 10,000, fewer connections are made, and the total is projected.
"""

from __future__ import annotations

import time

from _harness import (
    BenchServer,
    allow_open_files,
    connect,
    receive_answer,
    report,
    request_of_16,
    reset_on_close,
    table,
    verdict,
)

MIB = 2**20
WANTED = 10_000
TARGET = 250


def main(quick: bool) -> None:
    count = min(300 if quick else WANTED, allow_open_files() - 200)
    pause = 0.1 if quick else 5
    request, answer = request_of_16("echo", binary=False), bytearray(65536)
    with BenchServer(models=["echo"]) as server:
        with connect(server.port) as sock:  # whatever is made once is made now
            sock.sendall(request)
            receive_answer(sock, answer)
        rss = [server.rss()]
        socks = []
        for number in range(count):
            socks.append(connect(server.port, source=2 + number % 4))
            reset_on_close(socks[-1])  # leaves no TIME_WAIT behind
        while server.ask("standing")["connections"] < count:
            time.sleep(0.05)
        rss.append(server.rss())
        cpu = server.cpu_ns()
        for sock in socks:
            sock.sendall(request)
            receive_answer(sock, answer)
        rss.append(server.rss())
        cpu = server.cpu_ns() - cpu
        time.sleep(pause)
        idle = server.cpu_ns()
        time.sleep(pause)
        idle = server.cpu_ns() - idle
        for sock in socks:
            sock.close()
        while server.ask("standing")["connections"]:
            time.sleep(0.05)
        rss.append(server.rss())
    names = ("before", f"{count:,} opened, silent", f"{count:,} kept alive after a request", "all closed")
    rows = [[name, size / MIB, (size - rss[0]) / count / 1024] for name, size in zip(names, rss, strict=True)]
    table(["", "RSS MiB", "KiB a connection"], rows)
    print(f"CPU a request: {cpu / count / 1000:.0f} us; CPU while all are idle: {idle / pause / 1e6:.1f} ms a second\n")
    verdict(f"RSS with {WANTED:,} connections", (rss[0] + (rss[2] - rss[0]) / count * WANTED) / MIB, TARGET, "MiB")


if __name__ == "__main__":
    with report(__doc__) as quick:
        main(quick)
