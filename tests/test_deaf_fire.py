"""Models that never ask, left by a crowd: who stays gets the very bytes, slots are honest, nothing is left."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from support import Served, get, post, serving
from trio_infer import InferRequest, MetricsPolicy, Model, TensorSpec, runners
from trio_infer.models.repository import find_models

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are measured on Linux")

X, Y = TensorSpec("x", "FP32", [-1]), TensorSpec("y", "FP32", [-1])


def compute(x: Any) -> Any:
    """What everybody is asked for: floats that differ in the last bit if anything differs. Negative: for ever."""
    while x[0] < 0:
        pass
    side = np.sin(x) * np.float32(1.1)
    return np.tanh(np.outer(side, side) @ np.cos(x)).astype(np.float32)


class Native(Model):
    """The same in the event loop; for ever is until it is cancelled."""

    name = "native"
    inputs, outputs = (X,), (Y,)

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        x = request.inputs["x"]
        if x[0] < 0:
            await trio.sleep_forever()
        return {"y": compute(x)}


def ask(model: str, x: Any) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
    wanted = {"name": "y", "parameters": {"binary_data": True}}
    document = post(model, "infer", {"inputs": [tensor], "outputs": [wanted]})
    head, _, text = document.partition(b"\r\n\r\n")
    head = head.replace(b"Content-Length: %d" % len(text), b"Content-Length: %d" % (len(text) + x.nbytes))
    return head + b"\r\nInference-Header-Content-Length: %d\r\n\r\n" % len(text) + text + x.tobytes()


def children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()))


def held() -> tuple[int, set[str], int]:
    gc.collect()
    return (
        len(os.listdir("/proc/self/fd")),
        set(os.listdir("/dev/shm")),
        trio.lowlevel.current_statistics().tasks_living,
    )


async def until(condition: Any) -> None:
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await trio.sleep(0.005)


@pytest.mark.parametrize("kind", ["process", "native"])
async def test_who_stays_in_a_crowd_of_leavers_gets_the_very_bytes(kind: str) -> None:
    model: Any = Native()
    if kind == "process":
        model = runners.process(compute, name=kind, inputs=[X], outputs=[Y], instances=2, cancel_grace=0.05)
        model.spare_after = 0.0
    rng = random.Random(5)
    values = np.random.default_rng(5)
    async with serving(model) as served:

        def queue() -> Any:
            return served.server.statistics().models[kind, "1"]

        def whole() -> bool:
            return kind != "process" or model.workers == {"serving": 2, "spare": 1, "starting": 0}

        await until(whole)
        before, workers = held(), children()
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, sum(work.executing for work in getattr(model, "_works", ())))
                await trio.sleep(0.002)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            async with trio.open_nursery() as crowd:
                for number in range(60):
                    stays = number % 3 == 0
                    x = values.normal(size=rng.choice((3, 200, 2000))).astype(np.float32)
                    x[0] = abs(x[0]) if stays else -1
                    crowd.start_soon(stay if stays else leave, served, kind, x, rng.random())
            nursery.cancel_scope.cancel()
        assert most == (2 if kind == "process" else 0), "at each moment, and there are two instances"
        await until(lambda: whole() and queue().running == queue().waiting == queue().abandoned == 0)
        assert len(children()) == len(workers)
        await until(lambda: served.server.statistics().connections == 0)
        await until(lambda: held() <= before)
        assert served.outcomes() == {"completed": 20, "cancelled": 40}


async def stay(served: Served, model: str, x: Any, when: float) -> None:
    await trio.sleep(when)
    client = await served.connect()
    with trio.fail_after(60):
        answer = await client.ask(ask(model, x))
    assert answer.status == 200
    assert answer.body[int(answer.headers["inference-header-content-length"]) :] == compute(x).tobytes()
    await client.close()


async def leave(served: Served, model: str, x: Any, when: float) -> None:
    await trio.sleep(when)
    client = await served.connect()
    await client.send(ask(model, x))
    await trio.sleep(when / 3)
    await (client.close() if when < 0.5 else client.reset())


DEAF = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        here = pb_utils.get_model_dir()
        open(os.path.join(here, "entered"), "w").close()
        while not os.path.exists(os.path.join(here, "release")):
            time.sleep(0.002)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
parameters { key: "cancel_grace_ms" value { string_value: "none" } }
"""


async def test_one_deaf_request_in_a_process_that_is_not_killed_counts_once(tmp_path: Path) -> None:
    version = tmp_path / "deaf/1"
    version.mkdir(parents=True)
    (tmp_path / "deaf/config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(DEAF)
    async with serving(*find_models([tmp_path]), metrics=MetricsPolicy()) as served:

        async def gauge() -> str:
            scraper = await served.connect()
            lines = (await scraper.ask(get("/metrics"))).body.decode().split("\n")
            await scraper.close()
            return next(line for line in lines if line.startswith("trio_infer_abandoned{"))

        client = await served.connect()
        await client.send(ask("deaf", np.ones(3, np.float32)))
        await until((version / "entered").exists)
        await client.close()
        await served.ended(1)
        queue = served.server.statistics().models["deaf", "1"]
        assert (queue.running, queue.abandoned) == (0, 1)
        assert await gauge() == 'trio_infer_abandoned{model="deaf"} 1'
        (version / "release").touch()
        await until(lambda: served.server.statistics().models["deaf", "1"].abandoned == 0)
        assert await gauge() == 'trio_infer_abandoned{model="deaf"} 0'
