"""Traces in Triton's JSON, which its summary tools read: when a request was where, one record for each that is sampled.

A file is one JSON array of two objects a trace: what it is of, and its timestamps (ns of the monotonic clock). It is
valid JSON after each trace, because the closing bracket is written each time and written over the next. A trace is some
700 bytes, written when the request and its work have ended, in the loop: tracing all of many requests to a slow disk
costs what that disk takes.

What Triton doesn't have is the outcome, and the timestamp CANCELLED. What isn't here: the level TENSORS is accepted and
adds nothing, and OpenTelemetry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import SEEK_END
from typing import Any, BinaryIO, Final

from trio_infer.lifecycle import Life, Phase
from trio_infer.observe.trace_settings import TraceSettings

__all__ = ["TraceLog"]

logger: logging.Logger = logging.getLogger("trio_infer.trace")

OPENING: Final = b"[\n"
CLOSING: Final = b"\n]\n"


class TraceLog:
    """Writes traces of requests for models, as the settings say (a `LifeWatcher`). To be closed.

    Args:
        settings: asked for each request that has ended.
    """

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._file: BinaryIO | None = None
        self._traces = 0
        self._in_file = 0
        self._index = 0
        self._broken = False

    def life_moved(self, life: Life, left: Phase | None) -> None:
        pass

    def life_ended(self, life: Life) -> None:
        if self._settings.on and life.model and (life.timing is None or life.timing.ended):
            self._trace(life)

    def work_ended(self, life: Life) -> None:
        if self._settings.on and life.model and life.outcome is not None:
            self._trace(life)

    def close(self) -> None:
        """No more will come."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _trace(self, life: Life) -> None:
        settings = None if self._broken else self._settings.take(life.model)
        if settings is None:
            return
        self._traces += 1
        assert life.outcome is not None
        about = {
            "id": self._traces,
            "model_name": life.model,
            "model_version": int(life.version) if life.version.isdecimal() else life.version,
            **({"request_id": life.request_id} if life.request_id else {}),
            "outcome": life.outcome.value,
        }
        stamps = [{"name": name, "ns": ns} for name, ns in _timestamps(life)]
        try:
            self._write(
                _dumps(about) + b",\n" + _dumps({"id": self._traces, "timestamps": stamps}),
                settings["trace_file"],
                int(settings["log_frequency"]),
            )
        except OSError as error:
            self._broken = True
            self.close()
            logger.warning("traces can't be written to %s: %s; no more are", settings["trace_file"], error.strerror)

    def _write(self, text: bytes, path: str, frequency: int) -> None:
        if self._file is not None and frequency and self._in_file >= frequency:
            self.close()
        if self._file is None:
            self._file = open(f"{path}.{self._index}" if frequency else path, "wb")  # noqa: SIM115 - kept open
            self._index += 1
            self._in_file = 0
            self._file.write(OPENING)
        else:
            self._file.seek(-len(CLOSING), SEEK_END)
            self._file.write(b",\n")
        self._file.write(text + CLOSING)
        self._file.flush()
        self._in_file += 1


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _timestamps(life: Life) -> Iterator[tuple[str, int]]:
    """What has been reached, by Triton's names, in the order of time as far as that is one."""
    entered, timing = life.entered, life.timing
    later = [ns for phase, ns in entered.items() if phase is not Phase.RECEIVING]
    received = min(later, default=life.ended)
    sending = entered.get(Phase.SENDING) or entered.get(Phase.STREAMING)
    client = life.parent is None
    if client:
        yield "HTTP_RECV_START", entered[Phase.RECEIVING]
        yield "HTTP_RECV_END", received
    yield "REQUEST_START", received
    queued = entered.get(Phase.QUEUED) or entered.get(Phase.RUNNING)
    if queued:
        yield "QUEUE_START", queued
    if timing is not None:
        yield "COMPUTE_START", timing.begun
        yield "COMPUTE_INPUT_END", timing.infer_began or timing.begun
        yield "COMPUTE_OUTPUT_START", timing.infer_ended or timing.ended
        yield "COMPUTE_END", timing.ended
    if life.struck_at:
        yield "CANCELLED", life.struck_at
    yield "REQUEST_END", entered.get(Phase.SENDING) or life.ended
    if sending and client:
        yield "HTTP_SEND_START", sending
        yield "HTTP_SEND_END", life.ended
