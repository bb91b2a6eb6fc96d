"""Functions that are run as models by the tests; at the top of a module, so that a worker process can import them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import trio_infer


def double(x: Any) -> Any:
    return x * 2


def both(x: Any, y: Any = None) -> dict[str, Any]:
    return {"sum": x + (0 if y is None else y), "pid": [os.getpid()]}


def count(x: Any) -> Iterator[Any]:
    for number in range(int(x[0])):
        yield [number]


def asks(x: Any, file: Any) -> Any:
    note = Path(file[0].decode())
    note.write_text(str(os.getpid()))
    while not trio_infer.is_cancelled():
        time.sleep(0.001)
    note.write_text("heard")
    return x


def checks(x: Any, file: Any) -> Any:
    note = Path(file[0].decode())
    note.write_text(str(os.getpid()))
    try:
        while True:
            trio_infer.check_cancelled()
            time.sleep(0.001)
    finally:
        note.write_text("heard")


def streams_and_asks(x: Any, file: Any) -> Iterator[Any]:
    note = Path(file[0].decode())
    try:
        while True:
            yield x
            note.write_text(str(os.getpid()))
            time.sleep(0.001)
    finally:
        note.write_text("heard")


def deaf(x: Any, file: Any) -> Any:
    Path(file[0].decode()).write_text(str(os.getpid()))
    while True:
        pass


def raises(x: Any) -> Any:
    raise ValueError("boom-42")


def streams_and_raises(x: Any) -> Iterator[Any]:
    yield x
    raise ValueError("boom-42")


def leaves(x: Any) -> Any:
    sys.exit(3)


def nonsense(x: Any) -> Any:
    return {1: "nothing", 2: {"z": x}, 3: x.astype(np.complex64), 4: x[:1], 5: None}[int(x.flat[0])]


def said(x: Any) -> Any:
    return [float(os.environ.get("NUMBER", 0)), len(os.sched_getaffinity(0))]


def in_a_worker() -> bool:
    return "trio_infer.models.worker.child" in sys.modules
