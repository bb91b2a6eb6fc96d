"""Threads of native models: the same two functions tell them that nobody wants the result as tell everybody else."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
from triton_stage import happens

from support import post, serving
from trio_infer import Batching, InferRequest, Model, TensorSpec, check_cancelled, is_cancelled


class Computes(Model):
    """Computes in a thread until it is told to stop; an answer is only given to who asks for 0."""

    name = "computes"
    inputs = outputs = (TensorSpec("x", "FP32", [1]),)

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.stopped = threading.Event()

    def compute(self, x: float) -> float:
        assert not is_cancelled()
        while x:
            self.begun.set()
            try:
                check_cancelled()
            except BaseException:
                self.stopped.set()
                raise
        return x

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        x = await trio.to_thread.run_sync(self.compute, float(request.inputs["x"].flat[0]))
        return {"x": np.full(request.inputs["x"].shape, x, np.float32)}


class Streams(Computes):
    name = "streams"

    async def infer(self, request: InferRequest) -> AsyncIterator[dict[str, Any]]:
        yield {"x": np.zeros(1, np.float32)}
        yield await super().infer(request)


class Batched(Computes):
    name = "batched"
    max_batch_size = 4
    batching = Batching(preferred=(2,), max_queue_delay=10)


@pytest.mark.parametrize("kind", [Computes, Streams, Batched])
async def test_a_thread_of_a_native_model_learns_that_nobody_wants_the_result(
    kind: type[Computes], caplog: pytest.LogCaptureFixture
) -> None:
    model = kind()
    action = "generate_stream" if kind is Streams else "generate"
    x = 1.0
    async with serving(model, memory=True) as served:
        clients = [served.connect_in_memory() for _ in range(2 if kind is Batched else 1)]
        for client in clients:
            await client.send(post(model.name, action, {"x": x}))
        await happens(model.begun)
        assert not model.stopped.is_set()
        for client in clients:
            await client.close()
        await happens(model.stopped)
        await served.ended(len(clients))
        for _ in range(2):  # and nothing of it is left in the task
            again = served.connect_in_memory()
            if kind is not Batched:
                assert (await again.ask(post(model.name, action, {"x": 0.0}))).status == 200
            await again.close()
    assert served.outcomes()["cancelled"] == len(clients)
    assert not [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]


def test_outside_of_a_run_the_code_is_what_it_is() -> None:
    assert Computes().compute(0.0) == 0
