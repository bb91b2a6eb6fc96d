"""Anything that can befall the processes of a model, in any order: who stays is answered, or told of a crash; no leaver
ever costs anybody an answer; and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import trio
from test_worker_processes import children
from triton_stage import CONFIG, Repository

from trio_infer.errors import InferError
from trio_infer.lifecycle import CancelReason, Life
from trio_infer.models.host import NoHost
from trio_infer.protocol.queueing import Batching
from trio_infer.protocol.values import InferRequest, InferResponse
from trio_infer.scheduling.ticket import InstanceQueue

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as it is measured on Linux")

SEEDS = range(int(os.environ.get("EXAMPLES", 4)))
REQUESTS = 80

ALONE = """
import time

class TritonPythonModel:
    def execute(self, requests):
        dos = [request.request_id() for request in requests]
        while all(do == "deaf" for do in dos):
            pass
        while all(do in ("deaf", "asks") for do in dos) and not all(request.is_cancelled() for request in requests):
            time.sleep(0.001)
        if "slow" in dos:
            time.sleep(0.02)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy() + 1)])
            for request in requests
        ]
"""
STREAMS = """
import threading, time
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender()), daemon=True).start()

    def answer(self, request, sender):
        do, array = request.request_id(), request.inputs()[0].as_numpy()
        while do == "deaf" or (do == "asks" and not sender.is_cancelled()):
            time.sleep(0.001)
        if do == "slow":
            time.sleep(0.02)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + 1)]))
        sender.send(flags=FINAL)
"""


def parameter(key: str, value: int) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


class Storm:
    """One world: a model, its queue, and what becomes of those who ask."""

    def __init__(self, rng: random.Random, runner: Any, queue: InstanceQueue) -> None:
        self.rng = rng
        self.runner = runner
        self.queue = queue
        self.told: Counter[str] = Counter()
        self.answered = 0

    async def ask(self, number: int) -> None:
        rng = self.rng
        do = rng.choice(("deaf", "asks", "slow", "quick", "quick", "quick"))
        stays = do in {"slow", "quick"} and rng.random() < 0.8
        array = np.full((1, rng.choice((3, 50_000))), number, np.float32)
        life, answers = Life(), list[InferResponse]()
        request = InferRequest("m", "1", {"IN": array}, do, is_cancelled=lambda: life.cancelled)
        ticket = self.queue.draw(life, request, shapes=array.shape)
        scope = trio.CancelScope()
        life.canceller = lambda reason: scope.cancel(reason=reason.value)
        leaves_after = rng.random() / 10

        async def send(response: InferResponse) -> None:
            await trio.lowlevel.checkpoint()
            answers.append(response)

        async def go() -> None:
            try:
                with scope:
                    instance = await self.queue.wait_turn(ticket)
                    if ticket.attend is not None:
                        await ticket.attend(send)
                    else:
                        await self.runner.run(instance, request, send)
            except InferError as error:
                self.told[error.message] += stays
            else:
                if stays:
                    (answer,) = answers
                    assert np.array_equal(answer.outputs["OUT"], array + 1)
                    self.answered += 1
            finally:
                self.queue.give_up(ticket)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(go)
            if not stays:
                await trio.sleep(leaves_after)
                life.cancel(CancelReason.DISCONNECTED)

    async def crashes(self) -> None:
        """The kernel is short of memory, again and again."""
        while True:
            await trio.sleep(self.rng.random() * 0.3)
            workers = [slot._worker for slot in self.runner._slots if slot._worker is not None]
            if workers:
                os.kill(self.rng.choice(workers).pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["alone", "batch", "stream"])
async def test_no_leaver_ever_costs_anybody_an_answer(repository: Repository, kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    before = set(children())
    config = CONFIG + f"instance_group {{ count: {rng.choice((1, 2, 3))} }}\nmax_batch_size: 4\n"
    config += parameter("cancel_grace_ms", rng.choice((0, 5, 30))) + parameter("spares", rng.choice((0, 1, 2)))
    if rng.random() < 0.5:
        config += parameter("max_requests", rng.choice((1, 3, 10)))
    if kind == "stream":
        config += "model_transaction_policy { decoupled: true }\n"
    repository.execution = "process"
    repository.model("m", STREAMS if kind == "stream" else ALONE, config)
    runner = repository.runner()
    runner.spare_after = 0.05
    with trio.fail_after(100):
        await runner.load(NoHost())
        batching = Batching(max_queue_delay=0.002) if kind == "batch" else None
        queue = InstanceQueue(runner.instances, batching=batching, max_batch_size=4, start=runner.begin_batch)
        storm = Storm(rng, runner, queue)
        crashing = rng.random() < 0.4
        async with trio.open_nursery() as nursery:
            if crashing:
                nursery.start_soon(storm.crashes)
            async with trio.open_nursery() as crowd:
                for number in range(REQUESTS):
                    crowd.start_soon(storm.ask, number)
                    await trio.sleep(rng.random() * 0.02)
            nursery.cancel_scope.cancel()
        await queue.settled()
        statistics = queue.statistics()
        assert (statistics.running, statistics.waiting, statistics.abandoned) == (0, 0, 0)
        await runner.unload()
    assert all("died (SIGKILL) while it ran this request" in text for text in storm.told), storm.told
    assert crashing or not storm.told, "only a crash may cost somebody who stays an answer"
    assert storm.answered > 0
    assert not runner._works
    assert set(children()) == before
