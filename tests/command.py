"""`trio-infer serve` as a process whose lines can be awaited."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

import attrs

PATIENCE = 20.0
"""Seconds for what should take one; machines that run tests are busy."""


@attrs.define(eq=False)
class Command:
    """A running `trio-infer serve`."""

    process: subprocess.Popen[str]
    out: queue.Queue[str] = attrs.field(factory=queue.Queue)
    err: queue.Queue[str] = attrs.field(factory=queue.Queue)
    log: list[str] = attrs.field(factory=list)
    port: int = 0
    connections: list[http.client.HTTPConnection] = attrs.field(factory=list)

    @classmethod
    def start(cls, *words: str, environment: Mapping[str, str] | None = None) -> Command:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRIO_INFER_", "AIP_"))}
        ports = {"TRIO_INFER_HTTP_PORT": "0", "TRIO_INFER_METRICS_PORT": "0"}
        process = subprocess.Popen(
            [sys.executable, "-m", "trio_infer", "serve", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | ports | dict(environment or {}),
        )
        command = cls(process)
        for stream, lines in ((process.stdout, command.out), (process.stderr, command.err)):
            threading.Thread(target=_pump, args=(stream, lines), daemon=True).start()
        return command

    def ready(self) -> str:
        """The line that says so."""
        line = self.out.get(timeout=PATIENCE)
        match = re.search(r"://[^ ]*:(\d+) ", line)
        assert match, line
        self.port = int(match[1])
        return line

    def await_log(self, words: str) -> str:
        """The first line of the log, from here on, with these words in it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            line = self.err.get(timeout=max(0.0, deadline - time.monotonic()))
            self.log.append(line)
            if words in line:
                return line

    def end(self) -> int:
        """The exit code, after the process has ended by itself; there must be no traceback in its log."""
        code = self.process.wait(timeout=PATIENCE)
        with suppress(queue.Empty):
            while True:
                self.log.append(self.err.get(timeout=0.2))
        assert not any("Traceback" in line for line in self.log), self.log
        return code

    def clean_up(self) -> None:
        """Leave nothing, whatever a test has got to."""
        for connection in self.connections:
            connection.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def refuses(self) -> bool:
        """Whether there comes a time at which it runs and accepts no connection."""
        while self.process.poll() is None:
            try:
                self.connect().close()
            except ConnectionRefusedError:
                return self.process.poll() is None
            except ConnectionResetError:  # it was in the queue when the listener was closed
                continue
        return False

    def post_slow(self, steps: int) -> http.client.HTTPConnection:
        """A request that is on its way; `getresponse` reads the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        self.connections.append(connection)
        connection.request("POST", "/v2/models/slow/generate", json.dumps({"steps": steps}))
        return connection


def _pump(stream: IO[str] | None, lines: queue.Queue[str]) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            lines.put(line.rstrip("\n"))
