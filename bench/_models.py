"""Models for the benchmarks, and the stamps that they leave: which request, what happened, and when."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trio

from trio_infer import Active, Batching, Generation, InferRequest, Life, Model, Phase, Prompt, TensorSpec, TokenModel
from trio_infer.models.repository import load_model
from trio_infer.models.runner import Instance, Runner

MIB = 2**20
LARGE = 16 * MIB
"""Bytes of a large tensor."""

STAMPS: list[tuple[str, str, int]] = []
"""Request id, event, CLOCK_MONOTONIC in ns (one clock for all processes). Kept in memory and read when all is over."""

X = TensorSpec("x", "FP32", [-1])
WAITING = (TensorSpec("seconds", "FP32", [1]), TensorSpec("poll", "FP32", [1]))


def stamp(request_id: str, event: str) -> None:
    stamp_at(request_id, event, time.monotonic_ns())


def stamp_at(request_id: str, event: str, when: int) -> None:
    STAMPS.append((request_id, event, when))


class Echo(Model):
    """Gives back what it gets, and never sleeps."""

    name = "echo"
    inputs = outputs = (X,)

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        return {"x": request.inputs["x"]}


class Hop(Echo):
    """The same after one trip through trio's scheduler."""

    name = "hop"

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"x": request.inputs["x"]}


class Wait(Model):
    """Waits for as long as it is told, and stamps the moment in which it learns that it should not."""

    name = "wait"
    inputs = WAITING
    outputs = (TensorSpec("seconds", "FP32", [1]),)

    def __init__(self, instances: int) -> None:
        self.instances = instances

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        stamp(request.id, "started")
        try:
            await trio.sleep(float(request.inputs["seconds"][0]))
        except trio.Cancelled:
            stamp(request.id, "told")
            raise
        return {"seconds": request.inputs["seconds"]}


class Stream(Wait):
    """The same, in ten steps, each with an event."""

    name = "stream"

    async def infer(self, request: InferRequest) -> AsyncIterator[dict[str, Any]]:
        for _ in range(10):
            await trio.sleep(float(request.inputs["seconds"][0]) / 10)
            yield {"seconds": request.inputs["seconds"]}


POLLING = '''
import time

import triton_python_backend_utils as pb_utils
from _models import stamp


class TritonPythonModel:
    """What `Wait` is, as a Triton model: asks every `poll` seconds whether its client is still there."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        seconds = pb_utils.get_input_tensor_by_name(request, "seconds")
        poll = float(pb_utils.get_input_tensor_by_name(request, "poll").as_numpy()[0])
        ends = time.monotonic() + float(seconds.as_numpy()[0])
        stamp(request.request_id(), "started")
        while (left := ends - time.monotonic()) > 0:
            if request.is_cancelled():
                stamp(request.request_id(), "told")
                return pb_utils.InferenceResponse(error=pb_utils.TritonError("stopped", pb_utils.TritonError.CANCELLED))
            time.sleep(min(poll, left))
        return pb_utils.InferenceResponse([pb_utils.Tensor("seconds", seconds.as_numpy())])
'''

POLLING_CONFIG = """
input [{{ name: "seconds" data_type: TYPE_FP32 dims: [1] }}, {{ name: "poll" data_type: TYPE_FP32 dims: [1] }}]
output [{{ name: "seconds" data_type: TYPE_FP32 dims: [1] }}]
instance_group [{{ count: {instances} kind: KIND_CPU }}]
"""


def polling(repository: Path, instances: int) -> Runner:
    """The Triton model "poll", written to `repository` and read from there as any other."""
    version = repository / "poll" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(POLLING)
    (version.parent / "config.pbtxt").write_text(POLLING_CONFIG.format(instances=instances))
    (runner,) = load_model(version.parent, execution="thread")  # it stamps into this process
    return runner


COPYING = '''
import os
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Gives back what it gets; asked by "flag", what `is_cancelled()` costs; by "pid", the process that it is in."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if request.request_id() == "flag":
            is_cancelled = request.is_cancelled
            start = time.perf_counter_ns()
            for _ in range(10_000):
                is_cancelled()
            x[:1] = (time.perf_counter_ns() - start) / 10_000
        if request.request_id() == "pid":
            x[:2] = divmod(os.getpid(), 1 << 16)
        return pb_utils.InferenceResponse([pb_utils.Tensor("x", x)])
'''

COPYING_CONFIG = """
input [{{ name: "x" data_type: TYPE_FP32 dims: [-1] }}]
output [{{ name: "x" data_type: TYPE_FP32 dims: [-1] }}]
parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}
"""


def copying(repository: Path, execution: str) -> Runner:
    """A Triton model that copies, named after where it runs."""
    version = repository / execution / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(COPYING)
    (version.parent / "config.pbtxt").write_text(COPYING_CONFIG.format(execution=execution))
    (runner,) = load_model(version.parent)
    return runner


class Sink(Model):
    """Takes a tensor of any size; gives back one number."""

    name = "sink"
    inputs = outputs = (X,)

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        return {"x": request.inputs["x"][:1]}


class Source(Model):
    """Gives a large tensor, which it has ready."""

    name = "source"
    inputs = outputs = (X,)

    def __init__(self) -> None:
        self.large = np.arange(LARGE // 4, dtype=np.float32)

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        return {"x": self.large}


class Stamped:
    """A runner that also stamps when a slot is free again: when the work in it, not the task around it, has ended."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    async def run(self, instance: Instance, request: InferRequest, send: Any) -> None:
        await self._runner.run(StampedInstance(instance, request.id), request, send)


class StampedInstance(Instance):
    def __init__(self, instance: Instance, request_id: str) -> None:
        super().__init__(instance.index)
        self._instance = instance
        self._request_id = request_id

    def begin(self) -> None:
        self._instance.begin()

    def end(self) -> None:
        self._instance.end()
        stamp(self._request_id, "free")


class LifeWatching:
    """Watches lives, and does nothing about it."""

    def life_moved(self, life: Life, left: Phase | None) -> None:
        pass

    def work_ended(self, life: Life) -> None:
        pass

    def life_ended(self, life: Life) -> None:
        pass


class Endings(LifeWatching):
    """Stamps the cancel of each request (the flag is true from then on), and its end: its ticket has been given up."""

    def life_ended(self, life: Life) -> None:
        if life.cancelled:
            stamp_at(life.request_id, "flag", life.struck_at)  # perf_counter is CLOCK_MONOTONIC on Linux
            stamp(life.request_id, "ended")


# -- Models that make tokens ----------------------------------------------------------------------------------------

STEP: float = 0.005
"""Seconds that a step takes."""

COUNTS: Counter[str] = Counter()
"""By model: for how many requests a step was made, added up."""

TOKENS = (TensorSpec("seed", "INT32", [1]), TensorSpec("count", "INT32", [1]))


def following(token: int) -> int:
    """The token after this one."""
    return (token * 48271 + 11) % 1_000_003


class Chain(TokenModel):
    """Tokens that follow from the seed, with a cache in which another request's past would show; no time a step."""

    name = "chain"
    max_slots = 4
    inputs = TOKENS
    outputs = (TensorSpec("token", "INT32", [1]),)

    def __init__(self, slots: int = 4, seconds: float = 0.0) -> None:
        self.max_slots = slots
        self.seconds = seconds
        self.cache = np.zeros((slots, 4096), np.int64)

    def start(self, request: InferRequest) -> Prompt:
        return Prompt([int(request.inputs["seed"][0])], max_tokens=int(request.inputs["count"][0]))

    def prefill(self, generations: Sequence[Generation]) -> Any:
        for generation in generations:
            self.cache[generation.slot] = 0
            self.cache[generation.slot, 0] = generation.prompt[0]
        COUNTS[self.name] += len(generations)
        time.sleep(self.seconds)
        return np.array([following(int(generation.prompt[0])) for generation in generations])

    def step(self, active: Active) -> Any:
        self.cache[active.slots, active.positions] = active.tokens
        COUNTS[self.name] += len(active.slots)
        time.sleep(self.seconds)
        assert self.cache[active.slots, 0].tolist() == [each.prompt[0] for each in active.generations]
        return np.array([following(int(token)) for token in self.cache[active.slots, active.positions]])


class Direct(Model):
    """The same tokens, each request by itself."""

    name = "direct"
    inputs = TOKENS
    outputs = (TensorSpec("token", "INT32", [1]),)

    def __init__(self, instances: int) -> None:
        self.instances = instances

    async def infer(self, request: InferRequest) -> AsyncIterator[dict[str, Any]]:
        token = int(request.inputs["seed"][0])
        for _ in range(int(request.inputs["count"][0])):
            COUNTS[self.name] += 1
            await trio.sleep(STEP)
            token = following(token)
            yield {"token": np.array([token], np.int32)}


class Batched(Model):
    """The same for a batch, which makes all tokens of all of its requests before it answers."""

    name = "batched"
    inputs = TOKENS
    outputs = (TensorSpec("token", "INT32", [1]),)
    instances = 1
    batching = Batching(max_queue_delay=0.01)

    def __init__(self, rows: int) -> None:
        self.max_batch_size = rows

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        tokens, counts = request.inputs["seed"].copy(), request.inputs["count"]
        for step in range(int(counts.max())):
            there = [not part.is_cancelled() for part in request.parts] or [not request.is_cancelled()]
            COUNTS[self.name] += sum(
                here and step < int(count) for here, count in zip(there, counts[:, 0], strict=True)
            )
            await trio.sleep(STEP)
            tokens = (tokens.astype(np.int64) * 48271 + 11) % 1_000_003
        return {"token": tokens.astype(np.int32)}


def take_counts() -> dict[str, int]:
    counts = dict(COUNTS)
    COUNTS.clear()
    return counts
