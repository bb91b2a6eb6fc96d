"""What the benchmarks share: a server in another process, requests as bytes, medians and percentiles, Markdown tables.

CPU is read from the kernel's per-process clock (CLOCK_PROCESS_CPUTIME_ID of another process; nanoseconds, all threads),
which costs the process that is measured nothing. Memory is the resident set, from /proc/PID/smaps_rollup.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


# -- The server's process -------------------------------------------------------------------------------------------


class BenchServer:
    """`with BenchServer(models=["echo"]) as server: ...`; leaving the block drains it, and it must exit with 0.

    Args:
        config: what `_server.py` takes: models, slots, on_disconnect, stamped.
    """

    def __init__(self, **config: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, HERE / "_server.py", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.port = int(self._answer())
        self.last_standing: dict[str, Any] = {}

    def ask(self, command: str) -> Any:
        """What `_server.py` answers to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the server ended with exit code {self._process.wait()}")
        return json.loads(line)

    def cpu_ns(self) -> int:
        """CPU that it has used so far."""
        return cpu_ns(self.pid)

    def rss(self) -> int:
        """Bytes of memory that it has now."""
        for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
        raise AssertionError

    def __enter__(self) -> BenchServer:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            self._process.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if kind is None:
            self.last_standing = self._answer()
        self._process.stdout.close()
        code = self._process.wait(60)
        if kind is None and code:
            raise SystemExit(f"the server did not exit cleanly: {code}")


def cpu_ns(pid: int) -> int:
    """CPU that a process has used so far, in ns: the clock that `clock_getcpuclockid` names (see its manual page)."""
    return time.clock_gettime_ns((~pid << 3) | 2)


# -- The client -----------------------------------------------------------------------------------------------------


def connect(port: int, *, source: int = 1) -> socket.socket:
    """A connection from 127.0.0.`source`: each address has some 28,000 ports."""
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if source != 1:
        sock.bind((f"127.0.0.{source}", 0))
    sock.connect(("127.0.0.1", port))
    return sock


def reset_on_close(sock: socket.socket) -> None:
    """Let `close` send a reset in place of a FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def post(model: str, action: str, document: object, binary: bytes = b"") -> bytes:
    """A whole request."""
    text = json.dumps(document).encode()
    extra = f"Inference-Header-Content-Length: {len(text)}\r\n" if binary else ""
    head = (
        f"POST /v2/models/{model}/{action} HTTP/1.1\r\nHost: bench\r\n{extra}Content-Length: {len(text) + len(binary)}"
    )
    return head.encode() + b"\r\n\r\n" + text + binary


def request_of_16(model: str, *, binary: bool) -> bytes:
    """An inference of 16 FP32 in and out, as JSON or as bytes."""
    values = [index / 8 for index in range(16)]
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [16]}
    if not binary:
        return post(model, "infer", {"inputs": [{**tensor, "data": values}]})
    document = {
        "inputs": [{**tensor, "parameters": {"binary_data_size": 64}}],
        "outputs": [{"name": "x", "parameters": {"binary_data": True}}],
    }
    return post(model, "infer", document, struct.pack("<16f", *values))


def receive_answer(sock: socket.socket, into: bytearray) -> int:
    """Read one answer with a Content-Length into `into`, which is large enough; returns its size, head included."""
    view, got, whole = memoryview(into), 0, None
    while whole is None or got < whole:
        size = sock.recv_into(view[got:])
        if not size:
            raise EOFError(bytes(view[: min(got, 500)]))
        got += size
        if whole is None and (end := into.find(b"\r\n\r\n", 0, min(got, 4096))) >= 0:
            head = bytes(view[:end]).lower()
            if not head.startswith(b"http/1.1 200"):
                raise AssertionError(bytes(view[:got])[:500])
            whole = end + 4 + int(head.split(b"\ncontent-length:")[1].split(b"\r\n")[0])
    return got


def allow_open_files() -> int:
    """Raise the limit on open files as far as it goes, and say how far that is."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


# -- Figures --------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of them don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)]


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table; numbers are right-aligned and have three digits that matter."""
    cells = [[cell if isinstance(cell, str) else figure(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(heads), *cells]) for column in range(len(heads))]
    left = [isinstance(cell, str) for cell in rows[0]]
    rule = ["-" * width if flush else "-" * (width - 1) + ":" for width, flush in zip(widths, left, strict=True)]
    for row in [list(heads), rule, *cells]:
        padded = (
            cell.ljust(width) if flush else cell.rjust(width)
            for cell, width, flush in zip(row, widths, left, strict=True)
        )
        print("| " + " | ".join(padded) + " |")
    print(flush=True)


def figure(value: Any) -> str:
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def verdict(what: str, value: float, target: float, unit: str) -> None:
    """Print whether a target is met."""
    met = "met" if value <= target else "MISSED"
    print(f"- {what}: {figure(value)} {unit}, target {target:g}: {met}", flush=True)


def plot_file() -> str:
    """What `--plot` names, which is taken out of the command line; "" without it. For benchmarks that draw."""
    if "--plot" not in sys.argv:
        return ""
    at = sys.argv.index("--plot")
    file = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    return file


@contextmanager
def report(doc: str | None) -> Iterator[bool]:
    """`with report(__doc__) as quick: ...`: reads the command line, and says where and beside what it ran."""
    title, _, rest = (doc or "").partition("\n")
    parser = argparse.ArgumentParser(description=title, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs; figures mean little")
    quick: bool = parser.parse_args().quick
    names = ", ".join(f"{name} {version(name)}" for name in ("trio-infer", "trio", "h11", "numpy"))
    print(
        f"## {title.rstrip('.')}\n\n{names}, Python {platform.python_version()}, {os.cpu_count()} cores\n", flush=True
    )
    before, ours = busy_seconds(), own_seconds()
    started = time.monotonic()
    yield quick
    seconds = time.monotonic() - started
    others = max(0.0, busy_seconds() - before - (own_seconds() - ours))
    load = os.getloadavg()[0]
    print(f"\nTook {seconds:.0f} s; load {load:.1f}; meanwhile others used {others / seconds:.2f} cores.", flush=True)


def busy_seconds() -> float:
    """CPU that the whole machine has used, in all processes and in the kernel."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU that this process and those children of it have used that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
