"""Everything that a model's process can die of, at once, under a server with real sockets: who stays is answered."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio

from support import post, serving
from trio_infer.models.repository import find_models

REQUESTS, CLIENTS, INSTANCES = 200, 8, 3

MODEL = """
import ctypes, os, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        fate = request.request_id()
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        if fate == "segfault":
            ctypes.string_at(0)
        elif fate == "exit":
            os._exit(7)
        elif fate == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fate == "raise":
            raise ValueError("boom-42")
        elif fate == "wrong":
            return []
        elif fate in ("hang", "late"):
            while True:
                time.sleep(1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy() + 1)])]
"""
CONFIG = f"""
backend: "python"
input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
instance_group {{ count: {INSTANCES} }}
parameters {{ key: "cancel_grace_ms" value {{ string_value: "50" }} }}
"""
FATES = {"echo": 150, "raise": 14, "wrong": 14, "segfault": 5, "exit": 5, "kill": 4, "hang": 4, "late": 4}


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()]


def held() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_a_crash_storm_costs_no_client_that_stays_its_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text(CONFIG)
    (tmp_path / "m/1/model.py").write_text(MODEL)
    fates = [*Counter(FATES).elements()]
    random.Random(42).shuffle(fates)
    assert len(fates) == REQUESTS
    answers: dict[str, Counter[Any]] = {fate: Counter() for fate in FATES}
    texts: dict[str, set[str]] = {fate: set() for fate in FATES}

    async def client(served: Any) -> None:
        connection = await served.connect()
        while fates:
            fate = fates.pop()
            # A large tensor, so that blocks of shared memory are in hand when the process dies.
            values = [float(number) for number in range(3 if len(fates) % 2 else 6000)]
            tensor = {"name": "IN", "datatype": "FP32", "shape": [len(values)], "data": values}
            headers = ["Inference-Timeout-Ms: 300"] if fate == "late" else []
            request = post("m", "infer", {"id": fate, "inputs": [tensor]}, *headers)
            if fate == "hang":
                with trio.move_on_after(0.3):
                    await connection.ask(request)
                await connection.close()
                connection = await served.connect()
                continue
            answer = await connection.ask(request)
            answers[fate][answer.status] += 1
            if answer.status == 200:
                assert answer.json["outputs"][0]["data"] == [value + 1 for value in values]
            else:
                texts[fate].add(answer.json["error"])
        await connection.close()

    before, threads = held(), threading.active_count()
    with trio.fail_after(120):
        async with serving(*find_models([tmp_path], execution="process")) as served:
            async with trio.open_nursery() as nursery:
                for _ in range(CLIENTS):
                    nursery.start_soon(client, served)
            settled = await served.connect()
            tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
            for _ in range(INSTANCES):
                assert (await settled.ask(post("m", "infer", {"id": "echo", "inputs": [tensor]}))).status == 200
            await settled.close()
    assert answers["echo"] == {200: FATES["echo"]}
    for fate, words in {
        "raise": "ValueError: boom-42",
        "wrong": "returned 0 responses",
        "segfault": "died (SIGSEGV) while it ran this request",
        "exit": "died (exit code 7) while it ran this request",
        "kill": "died (SIGKILL) while it ran this request",
    }.items():
        assert answers[fate] == {500: FATES[fate]}, (fate, texts[fate])
        assert all(words in text for text in texts[fate]), texts[fate]
    assert answers["late"] == {504: FATES["late"]}
    assert "bug in the server" not in caplog.text
    assert not children()
    assert held() == before
    assert threading.active_count() <= threads  # idle ones of trio's may have ended by themselves
