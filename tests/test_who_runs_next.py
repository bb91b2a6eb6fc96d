"""Who runs next, over real sockets: full queues, late requests, storms of impatient clients, and tritonclient."""

from __future__ import annotations

import gc
import os
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
import tritonclient.http

from effect_rows import Gate, InBatch, InEnsemble, InSequence, Stage, ask, said, staged
from support import Served, get, post, serving
from trio_infer import Active, Batching, Queueing, QueuePolicy
from trio_infer.models.packaged import Scribe
from trio_infer.models.repository import find_models
from trio_infer.protocol.values import Array

LINE = "And it came to pass"


# -- Full and late ---------------------------------------------------------------------------------------------------


async def test_a_full_queue_is_told_at_once_while_the_instance_is_busy() -> None:
    gate = Gate(queueing=Queueing(QueuePolicy(max_queue_size=1)))
    async with serving(gate) as served:
        gate.note = served.endings.note
        stage = Stage(served, memory=False)
        running = await stage.asking(ask("gate", 1))
        await stage.until(lambda: gate.runs == [[1]])
        waits = await stage.asking(ask("gate", 2))
        await stage.waiting(1)
        refused = await stage.connect()
        for _ in range(3):
            answer = await refused.ask(ask("gate", 3))
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.json == {"error": "Exceeds maximum queue size: 1 requests wait already"}
        assert gate.runs == [[1]]
        await waits.reset()
        await stage.waiting(0)
        await refused.send(ask("gate", 4))  # there is room again, and the connection is as good as new
        await stage.waiting(1)
        gate.go(1, 4)
        assert said(await running.answer()) == [2]
        assert said(await refused.answer()) == [8]
        assert gate.runs == [[1], [4]]
        assert served.outcomes() == {"completed": 2, "failed": 3, "cancelled": 1}
        await running.close()
        await refused.close()


@pytest.mark.parametrize("batching", [None, Batching()])
async def test_a_time_limit_in_the_queue_is_kept_although_a_thread_keeps_the_instance(batching: Any) -> None:
    release = threading.Event()

    class Deaf(Gate):
        async def infer(self, request: Any) -> Any:
            self.runs.append(request.inputs["x"].ravel().tolist())
            self.note()
            await trio.to_thread.run_sync(release.wait, 20)
            return {"y": request.inputs["x"]}

    gate = Deaf(max_batch_size=4, batching=batching)
    async with serving(gate) as served:
        gate.note = served.endings.note
        stage = Stage(served, memory=False)
        try:
            busy = await stage.asking(ask("gate", 1, batched=True))
            await stage.until(lambda: gate.runs == [[1]])
            late = await stage.connect()
            began = trio.current_time()
            answer = await late.ask(ask("gate", 2, batched=True, parameters={"timeout": 200_000}))
            assert 0.2 <= trio.current_time() - began < 1
            assert (answer.status, answer.json["error"]) == (503, "Request timeout expired")
            assert (await late.ask(get("/v2/health/live"))).status == 200
        finally:
            release.set()
        assert said(await busy.answer()) == [1]
        assert gate.runs == [[1]], "what is late never runs"
        await busy.close()
        await late.close()


# -- The language model ----------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Held(Scribe):
    """Prefills when it is told to; notes of whom it made tokens."""

    max_slots: int = 1
    entered: queue.Queue[str] = attrs.field(factory=queue.Queue)
    gate: queue.Queue[None] = attrs.field(factory=queue.Queue)
    steps: int = 0

    def prefill(self, generations: Any) -> Array:
        self.entered.put("prefill")
        self.gate.get(timeout=20)
        return super().prefill(generations)

    def step(self, active: Active) -> Array:
        self.steps += 1
        return super().step(active)

    async def prefilling(self) -> None:
        with trio.fail_after(20):
            await trio.to_thread.run_sync(self.entered.get, abandon_on_cancel=True)


def write_on(tokens: int, **fields: Any) -> bytes:
    return post("scribe", "generate_stream", {"text_input": LINE, "max_tokens": tokens, **fields})


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_a_client_that_leaves_before_the_first_token_costs_no_step(leave: str) -> None:
    model = Held()
    async with serving(model) as served:
        stage = Stage(served, memory=False)
        leaver = await stage.asking(write_on(40))
        await model.prefilling()
        await getattr(leaver, leave)()
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "running"): 1}
        assert stage.queue("scribe").abandoned == 1, "a call can't be interrupted, and that shows"
        model.gate.put(None)
        await stage.until(lambda: stage.queue("scribe").abandoned == 0)
        probe = await stage.asking(write_on(3))
        await model.prefilling()
        model.gate.put(None)
        assert (await probe.answer()).body.count(b"data: ") in (1, 2, 3)
        assert model.steps == 2, "the probe's"
        await probe.close()


async def test_leaving_the_queue_of_a_language_model_stops_nobody_not_even_with_the_same_id() -> None:
    model = Held()
    async with serving(model) as served:
        stage = Stage(served, memory=False)
        alone = await stage.asking(write_on(30, id="same"))
        await model.prefilling()
        model.gate.put(None)
        expected = (await alone.answer()).body
        first = await stage.asking(write_on(30, id="same"))
        await model.prefilling()
        queued = await stage.asking(write_on(30, id="same"))
        await stage.waiting(1, "scribe")
        await queued.reset()
        await served.ended(2)
        assert served.cancelled() == {("client disconnected", "queued"): 1}
        model.gate.put(None)
        assert (await first.answer()).body == expected
        assert model.entered.empty(), "it never began"
        await alone.close()
        await first.close()


# -- Storms ----------------------------------------------------------------------------------------------------------

WORKER = """
import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        with open(HERE, "a") as file:
            file.write("initialized ")
    def execute(self, requests):
        end = time.monotonic() + 0.01
        while time.monotonic() < end and not all(request.is_cancelled() for request in requests):
            time.sleep(0.001)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy() * 2)]) for r in requests]
"""


def worker(directory: Path) -> list[Any]:
    """A Triton Python model in a process, with batches."""
    (directory / "gate/1").mkdir(parents=True)
    (directory / "gate/1/model.py").write_text(WORKER.replace("HERE", repr(str(directory / "log"))))
    (directory / "gate/config.pbtxt").write_text("""
        backend: "python" max_batch_size: 8 dynamic_batching { }
        input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
    """)
    return find_models([directory], execution="process")


def storm_models(kind: str, directory: Path) -> tuple[list[Any], Callable[[], bytes]]:
    """Models, and what is asked of them."""
    if kind == "scribe":
        return [Scribe()], lambda: write_on(6)
    if kind == "worker":
        return worker(directory), lambda: ask("gate", 1, batched=True)
    row: Any = {"batch": InBatch, "ensemble": InEnsemble, "sequence": InSequence}[kind](None, directory)
    row.gate.go(1)
    models = row.models()
    if kind == "ensemble":
        row.triple.go(1)
        return models, lambda: ask("e", 1)
    if kind == "sequence":
        numbers = random.Random(5)
        return models, lambda: row.say(numbers.randrange(1, 30), 1, start=True, end=numbers.random() < 0.7)
    return models, lambda: ask("gate", 1, batched=True)


def balanced(served: Served, *, connections: int) -> bool:
    """Whether nobody is left but those who keep their connections."""
    now = served.server.statistics()
    queues = [(queue.running, queue.waiting, queue.abandoned) for queue in now.models.values()]
    return now.connections == connections and all(queue == (0, 0, 0) for queue in queues)


@pytest.mark.parametrize("kind", ["batch", "sequence", "ensemble", "scribe", "worker"])
async def test_a_storm_of_impatient_clients_costs_nothing_later(kind: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    models, request = storm_models(kind, tmp_path)
    async with serving(*models) as served:
        stage = Stage(served, memory=False)
        patient = await stage.connect()
        assert (await patient.ask(request())).status == 200
        gc.collect()
        await trio.testing.wait_all_tasks_blocked(0.02)
        before = len(os.listdir("/proc/self/fd")), trio.lowlevel.current_statistics().tasks_living

        async def depart(limiter: trio.CapacityLimiter) -> None:
            async with limiter:
                client = await served.connect()
                what, way = request(), rng.choice(("close", "reset", "deadline", "part"))
                if way == "deadline":
                    what = what.replace(b"Host: test", b"Host: test\r\nInference-Timeout-Ms: %d" % rng.randrange(1, 5))
                await client.send(what[: rng.randrange(1, len(what))] if way == "part" else what)
                if way == "deadline":
                    assert (await client.answer()).status in (200, 504, 499, 400)
                else:
                    await trio.sleep(rng.uniform(0, 0.005))
                await (client.close() if way == "close" else client.reset())

        limiter = trio.CapacityLimiter(50)
        async with trio.open_nursery() as nursery:
            for _ in range(40 if kind == "scribe" else 250):
                nursery.start_soon(depart, limiter)
        with trio.fail_after(10):
            while not balanced(served, connections=1):  # threads and connections that end are no move of a life
                await trio.testing.wait_all_tasks_blocked(0.005)
        for _ in range(3):
            assert (await patient.ask(request())).status == 200
        await trio.testing.wait_all_tasks_blocked(0.02)
        gc.collect()
        after = len(os.listdir("/proc/self/fd")), trio.lowlevel.current_statistics().tasks_living
        assert after == before
        assert served.outcomes().get("failed", 0) == 0
        await patient.close()
    if kind == "worker":
        assert (tmp_path / "log").read_text() == "initialized "


# -- Triton's own client ---------------------------------------------------------------------------------------------


async def with_client(served: Served, talk: Callable[[Any], Any], **options: Any) -> Any:
    def run() -> Any:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.port}", **options) as client:
            return talk(client)

    return await trio.to_thread.run_sync(run)


def tensors(value: float) -> list[Any]:
    tensor = tritonclient.http.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[value]], np.float32))
    return [tensor]


def number(result: Any) -> float:
    return float(result.as_numpy("y")[0, 0])


async def test_tritonclients_requests_run_in_batches_and_one_that_times_out_costs_the_others_nothing(
    tmp_path: Path,
) -> None:
    row = InBatch(None, tmp_path)
    async with staged(row) as stage:
        blocker = await stage.asking(ask("gate", 9, batched=True))
        await stage.until(lambda: row.gate.runs == [[9]])

        def impatient(client: Any) -> None:
            with pytest.raises((tritonclient.utils.InferenceServerException, OSError), match="timed out"):
                client.infer("gate", tensors(1))

        def patient(client: Any) -> list[float]:
            pending = [client.async_infer("gate", tensors(value)) for value in (2, 3)]
            return [number(each.get_result()) for each in pending]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: with_client(stage.served, impatient, network_timeout=0.3))
            await stage.waiting(1)
            answers: list[float] = []

            async def collect() -> None:
                answers.extend(await with_client(stage.served, patient, concurrency=2))

            nursery.start_soon(collect)
            await stage.waiting(3)
            row.gate.go(9)
            await stage.until(lambda: len(row.gate.runs) == 2)
            assert sorted(row.gate.runs[1]) == [1, 2, 3]
            await stage.until(lambda: stage.served.cancelled())
            row.gate.go(1, 2, 3)
        assert answers == [4, 6]
        assert said(await blocker.answer()) == [18]
        assert stage.served.cancelled() == {("client disconnected", "running"): 1}
        assert row.gate.stopped == []


async def test_tritonclients_sequences_are_served_in_order_and_end_with_a_request_that_times_out(
    tmp_path: Path,
) -> None:
    row = InSequence(None, tmp_path)
    row.gate.go(2, 3, 4)

    def talk(client: Any) -> None:
        answers = [
            number(client.infer("gate", tensors(2), sequence_id=7, sequence_start=True)),
            number(client.infer("gate", tensors(3), sequence_id=7)),
            number(client.infer("gate", tensors(4), sequence_id=7, sequence_end=True)),
        ]
        assert answers == [4, 6, 8]
        for key in (7, "text"):
            with pytest.raises(tritonclient.utils.InferenceServerException, match="must specify the START flag"):
                client.infer("gate", tensors(2), sequence_id=key)
        assert number(client.infer("gate", tensors(2), sequence_id="text", sequence_start=True)) == 4

    def impatient(client: Any) -> None:
        with pytest.raises((tritonclient.utils.InferenceServerException, OSError), match="timed out"):
            client.infer("gate", tensors(1), sequence_id="text")

    def again(client: Any) -> None:
        with pytest.raises(tritonclient.utils.InferenceServerException, match="must specify the START flag"):
            client.infer("gate", tensors(2), sequence_id="text")
        assert number(client.infer("gate", tensors(2), sequence_id=8, sequence_start=True, sequence_end=True)) == 4

    async with staged(row) as stage:
        await with_client(stage.served, talk)
        await with_client(stage.served, impatient, network_timeout=0.3)
        await stage.until(lambda: row.gate.stopped == [[1]])
        await with_client(stage.served, again)
        assert stage.served.cancelled() == {("client disconnected", "running"): 1}
