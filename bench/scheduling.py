"""What scheduling costs: from a request's arrival to the model's first instruction, in long queues, in batches.

No HTTP here: requests enter where decoded ones do. *CPU* is the thread's own clock, so that other processes don't
count. *To the model* is from the call of `ServedModel.infer` to the first line of the model's `infer`, with a free
instance: the median of many. *A request through a queue* is all that one costs when so many wait, from the moment in
which the instance becomes free until the answer is given, without Python's cycle collector: that goes through the
objects of all who wait, whatever the queue does.

The batches: a model that multiplies matrices in a thread (on as many cores as it likes), a full batch at a time. *By
hand* calls it in a loop with full batches; *served* has twice as many clients as a batch has rows, each with one row,
who ask again as soon as they are answered. Rows a second, in turns, and the median of the ratios.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import attrs
import numpy as np
import trio

from _harness import report, table, verdict
from trio_infer import Batching, InferRequest, InferResponse, Life, Model, Queueing, TensorSpec
from trio_infer.models.host import NoHost
from trio_infer.models.native import NativeRunner
from trio_infer.observe.model_statistics import ModelStatistics
from trio_infer.scheduling.served import ServedModel

ROW = np.zeros((1, 16), np.float32)
ROWS = 32
WIDTH = 1024


@attrs.define(eq=False)
class Entry(Model):
    """Notes when it is entered."""

    name: str = "entry"
    instances: int | None = None
    batching: Batching | None = None
    queueing: Queueing | None = None
    entered: int = 0
    gate: trio.Event = attrs.field(factory=trio.Event)

    max_batch_size = 8
    inputs = outputs = (TensorSpec("x", "FP32", [16]),)

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        self.entered = time.thread_time_ns()
        await self.gate.wait()
        return {"x": request.inputs["x"]}


@attrs.define(eq=False)
class Multiply(Model):
    """Some milliseconds of matrices for any batch, in a thread."""

    name: str = "multiply"
    depth: int = 24
    weights: Any = attrs.field(factory=lambda: np.random.default_rng(0).random((WIDTH, WIDTH), np.float32) / WIDTH)

    instances = 1
    batching = Batching(max_queue_delay=0.005)
    max_batch_size = ROWS
    inputs = outputs = (TensorSpec("x", "FP32", [WIDTH]),)

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        return {"x": await trio.to_thread.run_sync(self.multiply, request.inputs["x"])}

    def multiply(self, x: Any) -> Any:
        for _ in range(self.depth):
            x = x @ self.weights
        return x


async def serve(model: Model) -> ServedModel:
    served = ServedModel(NativeRunner(model))
    await served.load(NoHost())
    served.ready = True
    return served


async def drop(response: InferResponse) -> None: ...


async def ask(served: ServedModel, statistics: ModelStatistics, row: Any = ROW) -> None:
    life = Life((statistics,))
    await served.infer(life, InferRequest("m", "1", {"x": row}), drop)


async def to_the_model(model: Entry, count: int) -> float:
    """Median microseconds of CPU."""
    model.gate.set()
    served, statistics = await serve(model), ModelStatistics()
    taken = []
    for _ in range(count):
        life = Life((statistics,))
        request = InferRequest("m", "1", {"x": ROW})
        began = time.thread_time_ns()
        await served.infer(life, request, drop)
        taken.append(model.entered - began)
    return median(taken) / 1000


async def through_a_queue(length: int, rounds: int) -> float:
    """Mean microseconds of CPU for one of so many that wait; the median of the rounds."""
    taken = []
    for _ in range(rounds):
        model = Entry(instances=1)
        served, statistics = await serve(model), ModelStatistics()
        async with trio.open_nursery() as nursery:
            for _ in range(length + 1):
                nursery.start_soon(ask, served, statistics)
            while served.statistics().waiting < length:
                await trio.lowlevel.checkpoint()
            gc.collect()
            gc.disable()
            began = time.thread_time_ns()
            model.gate.set()
        gc.enable()
        taken.append((time.thread_time_ns() - began) / (length + 1))
    return median(taken) / 1000


async def batches(depth: int, seconds: float, rounds: int) -> tuple[float, float, float]:
    """Rows a second by hand and served, and the median ratio."""
    model = Multiply(depth=depth)
    served, statistics = await serve(model), ModelStatistics()
    batch = np.ones((ROWS, WIDTH), np.float32)
    done = 0

    async def by_hand() -> None:
        nonlocal done
        while True:
            await trio.to_thread.run_sync(model.multiply, batch)
            done += ROWS

    async def client() -> None:
        nonlocal done
        while True:
            await ask(served, statistics, batch[:1])
            done += 1

    async def rate(how: Callable[[], Awaitable[None]], count: int) -> float:
        nonlocal done
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(how)
            await trio.sleep(seconds / 5)
            done, began = 0, time.perf_counter()
            await trio.sleep(seconds)
            found = max(done, 1) / (time.perf_counter() - began)  # at least one, that a quick look has a ratio
            nursery.cancel_scope.cancel()
        await served.settled()
        return found

    rates = [(await rate(by_hand, 1), await rate(client, 2 * ROWS)) for _ in range(rounds)]
    return (
        median(hand for hand, _ in rates),
        median(at for _, at in rates),
        median(at / hand for hand, at in rates),
    )


async def main(quick: bool) -> None:
    count = 200 if quick else 20_000
    ways = {
        "any number of instances": Entry(),
        "4 instances": Entry(instances=4),
        "4 instances, 3 priority levels": Entry(instances=4, queueing=Queueing(priority_levels=3)),
        "4 instances, dynamic batching": Entry(instances=4, batching=Batching()),
    }
    entry = {way: await to_the_model(model, count) for way, model in ways.items()}
    table(["free instance", "to the model, us of CPU"], list(entry.items()))
    short, long = 10, 200 if quick else 10_000
    queues = {length: await through_a_queue(length, rounds) for length, rounds in ((short, 300), (long, 3))}
    table(["requests that wait", "a request through the queue, us of CPU"], list(queues.items()))
    rows = []
    for depth in (24, 96):
        hand, at, ratio = await batches(depth, 0.3 if quick else 3.0, 1 if quick else 5)
        rows.append([f"{1000 / hand:.2g} ms", hand, at, 100 * ratio])
    table(["a row takes", "rows a second by hand", "served", "of it, %"], rows)
    verdict("to the model, the worst row", max(entry.values()), 60, "us")
    verdict("a request in the long queue, against the short", queues[long] / queues[short], 1.1, "times")
    verdict("what batching loses of the throughput by hand, long rows", 100 - rows[-1][-1], 10, "%")


if __name__ == "__main__":
    with report(__doc__) as quick:
        trio.run(main, quick)
