"""The rows of the effect table: for each, models that note what happens to them, and a client that is brought there.

Nothing here takes time or waits for it: models go on when they are told to, and tests wait for what has been noted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import attrs
import numpy as np
import trio
import trio.testing

from support import Answer, Client, Served, get, post, serving
from trio_infer import (
    Active,
    Batching,
    Generation,
    InferRequest,
    MetricsPolicy,
    Model,
    Prompt,
    TensorSpec,
    TokenModel,
)
from trio_infer.models.ensemble import EnsembleRunner
from trio_infer.models.native import NativeRunner
from trio_infer.models.repository import find_models
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import Array

Disconnect = Literal["cancel", "finish"] | None


@attrs.define(eq=False)
class Gate(Model):
    """Multiplies; each run is held until its first number is let go, 0 being let go from the start."""

    name: str = "gate"
    factor: float = 2
    instances: int | None = 1
    max_batch_size: int = 0
    batching: Batching | None = None
    queueing: Any = None
    on_disconnect: Disconnect = None
    note: Callable[[], None] = lambda: None
    runs: list[list[float]] = attrs.field(factory=list)
    requests: list[InferRequest] = attrs.field(factory=list)
    stopped: list[list[float]] = attrs.field(factory=list)
    _gates: defaultdict[float, trio.Event] = attrs.field(factory=lambda: defaultdict(trio.Event))

    inputs = (TensorSpec("x", "FP32", [-1]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)

    async def infer(self, request: InferRequest) -> Any:
        await self.hold(request)
        return {"y": request.inputs["x"] * self.factor}

    async def hold(self, request: InferRequest) -> None:
        values = request.inputs["x"].ravel().tolist()
        self.runs.append(values)
        self.requests.append(request)
        self.note()
        try:
            if values[0]:
                await self._gates[values[0]].wait()
        except trio.Cancelled:
            self.stopped.append(values)
            self.note()
            raise

    def go(self, *values: float) -> None:
        for value in values:
            self._gates[value].set()


class StreamGate(Gate):
    """Gives its number at once, and twice that when it is let go."""

    async def infer(self, request: InferRequest) -> Any:
        yield {"y": request.inputs["x"]}
        await self.hold(request)
        yield {"y": request.inputs["x"] * self.factor}


class Large(Gate):
    """Gives more than a connection takes at once."""

    async def infer(self, request: InferRequest) -> Any:
        self.runs.append(request.inputs["x"].tolist())
        return {"y": np.zeros(2**22 if request.inputs["x"][0] else 1, "f4")}


@attrs.define(eq=False)
class Loop(TokenModel):
    """Counts on from its prompt, `[tokens, first]`, until `enough`; notes whose prompts it has read."""

    name: str = "gate"
    max_slots: int = 2
    threaded: bool = False
    end_token: int | None = -1
    on_disconnect: Disconnect = None
    note: Callable[[], None] = lambda: None
    enough: bool = False
    begun: list[int] = attrs.field(factory=list)
    active: list[int] = attrs.field(factory=list)

    inputs = (TensorSpec("x", "FP32", [-1]),)
    outputs = (TensorSpec("token", "INT32", [1]),)

    def start(self, request: InferRequest) -> Prompt:
        tokens, first = request.inputs["x"].astype(int).tolist()
        self.begun.append(first)
        self.note()
        return Prompt([first], max_tokens=tokens, state=first)

    def prefill(self, generations: Sequence[Generation]) -> Array:
        return np.array([generation.prompt[-1] + 1 for generation in generations])

    def step(self, active: Active) -> Array:
        self.active = [generation.state for generation in active.generations]
        return np.where(self.enough, -1, active.tokens + 1)


def ask(model: str, *values: float, batched: bool = False, **fields: Any) -> bytes:
    """An inference; fields are of the document, but for `headers`."""
    headers = fields.pop("headers", ())
    shape = [1, len(values)] if batched else [len(values)]
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": values}
    return post(model, "infer", {"inputs": [tensor], **fields}, *headers)


def stream(model: str, *values: float, headers: Sequence[str] = (), **fields: Any) -> bytes:
    return post(model, "generate_stream", {"x": values, **fields}, *headers)


def said(answer: Any) -> list[Any]:
    """The numbers of the only output."""
    assert answer.status == 200, answer.body
    (output,) = answer.json["outputs"]
    numbers: list[Any] = output["data"]
    return numbers


async def rest(client: Client) -> Answer:
    """Of a stream, from here on."""
    answer = Answer(200, {}, b"")
    while part := await client.chunk():
        answer.body += part
    return answer


def told(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, which is whole."""
    assert (answer.status, answer.body[-2:]) == (200, b"\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in answer.body.decode().split("\n\n")[:-1]]


@attrs.define(eq=False)
class Stage:
    """A server, its models, and ways to wait for what they note."""

    served: Served
    memory: bool
    clients: list[Client] = attrs.field(factory=list)

    async def connect(self) -> Client:
        """A new connection; in memory one that holds nothing, so that each send waits for its reader."""
        if self.served.listener is None:
            client = await self.served.connect()
        else:
            stream, server = trio.testing.lockstep_stream_pair()
            self.served.listener._send.send_nowait(server)
            client = Client(stream)
        self.clients.append(client)
        return client

    async def asking(self, request: bytes) -> Client:
        client = await self.connect()
        await client.send(request)
        return client

    async def let_go(self, client: Client) -> None:
        """Close a connection whose last answer has been read; the server should have noticed that it was."""
        if self.memory:
            await trio.testing.wait_all_tasks_blocked()
        await client.close()

    async def waiting(self, count: int, model: str = "gate") -> None:
        await self.until(lambda: self.queue(model).waiting == count)

    def queue(self, model: str = "gate") -> Any:
        return self.served.server.statistics().models[model, "1"]

    async def until(self, condition: Callable[[], object]) -> None:
        if self.memory:  # time stands still until everybody waits, so a limit would mean nothing
            await self.served.endings.until(condition)
            return
        with trio.fail_after(5):
            await self.served.endings.until(condition)

    async def metrics(self) -> list[str]:
        client = await self.asking(get("/metrics"))
        lines = (await client.answer()).body.decode().splitlines()
        await self.let_go(client)
        return lines


class Row:
    """A row: who is there, and what one of them leaving means. This one is *running*.

    Attributes:
        phase: in which the leaver is struck.
        model: that the leaver asks.
        known: whether the server knows the leaver's id there.
        cut: whether its answer can't be added to.
        also: who else is cancelled with it.
        held: how many requests end as undelivered, where the work is to be finished.
        real: whether it has threads or processes, which no clock but the real one governs.
    """

    phase = "running"
    model = "gate"
    known = True
    cut = False
    also: Mapping[tuple[str, str], int] = MappingProxyType({})
    held = 1
    real = False

    def __init__(self, disconnect: Disconnect, directory: Path, *, memory: bool = False) -> None:
        self.memory = memory
        self.others: list[tuple[Client, float]] = []
        self.gate = self.make(disconnect)
        self.directory = directory

    def make(self, disconnect: Disconnect) -> Any:
        return Gate(on_disconnect=disconnect)

    def models(self) -> list[Any]:
        return [self.gate]

    def probe(self) -> bytes:
        return ask(self.model, 0)

    async def other(self, stage: Stage, value: float, answer: float, **fields: Any) -> None:
        self.others.append((await stage.asking(ask(self.model, value, **fields)), answer))

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        """Bring everybody to their places; the leaver's connection."""
        leaver = await stage.asking(ask("gate", 1, id="leaver", headers=headers))
        await stage.until(lambda: self.gate.runs == [[1]])
        await self.other(stage, 2, 4, id="stays")
        await stage.waiting(1)
        return leaver

    def stopped(self) -> bool:
        """What is to stop has stopped, and what waited for it has begun."""
        return bool(self.gate.stopped == [[1]] and self.gate.runs == [[1], [2]])

    def go(self) -> None:
        """Let everybody who is still there have an answer."""
        self.gate.go(1, 2, 3, 4)

    async def check_others(self, stage: Stage) -> None:
        for client, answer in self.others:
            assert said(await client.answer()) == [answer]
            await stage.let_go(client)


class Receiving(Row):
    phase = "receiving"
    known = False

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        leaver = await stage.asking(ask("gate", 1, id="leaver", headers=headers)[:-5])
        in_flight = stage.served.server.statistics
        await stage.until(lambda: any(in_flight().requests.in_flight.values()))
        return leaver

    def stopped(self) -> bool:
        return bool(self.gate.runs == [])


class Queued(Row):
    phase = "queued"

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        await self.other(stage, 2, 4, id="stays")
        await stage.until(lambda: self.gate.runs == [[2]])
        leaver = await stage.asking(ask("gate", 1, id="leaver", headers=headers))
        await stage.waiting(1)
        await self.other(stage, 3, 6, id="stays")
        await stage.waiting(2)
        self.queue = stage.queue
        return leaver

    def stopped(self) -> bool:
        return bool(self.queue().waiting == 1 and self.gate.runs == [[2]] and self.gate.stopped == [])

    async def check_others(self, stage: Stage) -> None:
        await super().check_others(stage)
        assert self.gate.runs == ([[2], [3]] if not self.gate.on_disconnect else [[2], [1], [3]])


class InBatch(Row):
    def make(self, disconnect: Disconnect) -> Any:
        return Gate(on_disconnect=disconnect, max_batch_size=4, batching=Batching())

    def probe(self) -> bytes:
        return ask("gate", 0, batched=True)

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        blocker = await stage.asking(ask("gate", 9, batched=True))
        await stage.until(lambda: self.gate.runs == [[9]])
        leaver = await stage.asking(ask("gate", 1, batched=True, id="leaver", headers=headers))
        await stage.waiting(1)
        await self.join(stage)
        self.gate.go(9)
        assert said(await blocker.answer()) == [18]
        await stage.let_go(blocker)
        await stage.until(lambda: len(self.gate.runs) == 2)
        return leaver

    async def join(self, stage: Stage) -> None:
        for number, value in enumerate((2, 3)):
            await self.other(stage, value, 2 * value, batched=True, id="stays")
            await stage.waiting(2 + number)

    def stopped(self) -> bool:
        (_, batch), runs = self.gate.requests, self.gate.runs
        gone = [part.is_cancelled() for part in batch.parts]
        return bool(gone == [True, False, False] and self.gate.stopped == [] and runs == [[9], [1, 2, 3]])


class LastOfBatch(InBatch):
    held = 2

    async def join(self, stage: Stage) -> None:
        self.early = await stage.asking(ask("gate", 2, batched=True))
        await stage.waiting(2)

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        leaver = await super().arrange(stage, headers)
        await self.early.close()
        if self.gate.on_disconnect is None:
            await stage.until(lambda: stage.served.cancelled() == {("client disconnected", "running"): 1})
        assert self.gate.stopped == []
        return leaver

    def stopped(self) -> bool:
        return bool(self.gate.stopped == [[1, 2]])


class InSequence(Row):
    also = MappingProxyType({("sequence cancelled", "queued"): 1})

    def make(self, disconnect: Disconnect) -> Any:
        return Gate(on_disconnect=disconnect, max_batch_size=1)

    def models(self) -> list[Any]:
        tensors = """
            input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
            max_batch_size: 1 sequence_batching { direct { } }
        """
        return [NativeRunner(self.gate, config=ModelConfig.parse(tensors, name="gate", where=Path("config.pbtxt")))]

    def say(self, key: int, value: float, *, start: bool = False, end: bool = False, **fields: Any) -> bytes:
        parameters = {"sequence_id": key, "sequence_start": start, "sequence_end": end}
        return ask("gate", value, batched=True, parameters=parameters, **fields)

    def probe(self) -> bytes:
        return self.say(1, 0, start=True, end=True)

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        leaver = await stage.asking(self.say(1, 1, start=True, id="leaver", headers=headers))
        await stage.until(lambda: self.gate.runs == [[1]])
        self.behind = await stage.asking(self.say(1, 2, end=True))
        await stage.waiting(1)
        self.others.append((await stage.asking(self.say(2, 3, start=True, end=True)), 6))
        await stage.waiting(2)
        return leaver

    def stopped(self) -> bool:
        return bool(self.gate.stopped == [[1]] and self.gate.runs == [[1], [3]])

    async def check_others(self, stage: Stage) -> None:
        answer = await self.behind.answer()
        if self.gate.on_disconnect == "finish":
            assert said(answer) == [4]
        else:
            assert answer.status == 499
            assert answer.json["error"].startswith("cancelled while queued: a request before it in its sequence")
            answer = await self.behind.ask(self.say(1, 2))
            assert (answer.status, "START" in answer.json["error"]) == (400, True), "it must start anew"
        await stage.let_go(self.behind)
        await super().check_others(stage)


class TokenLoop(Row):
    phase = "streaming"

    def make(self, disconnect: Disconnect) -> Any:
        self.cut = self.memory  # there it is in the middle of an event that nobody reads
        return Loop(on_disconnect=disconnect)

    def probe(self) -> bytes:
        return stream("gate", 1, 7)

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        self.stays = await stage.asking(stream("gate", 10**6, 2000))
        await self.stays.head()
        leaver = await stage.asking(stream("gate", 10**6, 1000, id="leaver", headers=headers))
        await leaver.head()
        for number in (1001, 1002):
            assert f'"token":{number}'.encode() in await leaver.chunk()
        self.heir = await stage.asking(stream("gate", 3, 3000))
        await stage.waiting(1)
        assert self.gate.begun == [2000, 1000]
        return leaver

    def stopped(self) -> bool:
        return bool(self.gate.begun == [2000, 1000, 3000])

    def go(self) -> None:
        self.gate.enough = True

    async def check_others(self, stage: Stage) -> None:
        numbers = [event["token"] for event in told(await rest(self.stays))]
        await stage.let_go(self.stays)
        assert numbers == [*range(2001, 2001 + len(numbers))]
        assert numbers
        heirs = [event["token"] for event in told(await self.heir.answer())]
        assert heirs == [*range(3001, 3001 + len(heirs))]
        assert 1000 not in self.gate.active
        await stage.let_go(self.heir)


class InEnsemble(Row):
    model = "e"

    def make(self, disconnect: Disconnect) -> Any:
        self.disconnect = disconnect
        self.triple = Gate("triple", factor=3)
        return Gate()

    def models(self) -> list[Any]:
        finish = 'parameters { key: "on_disconnect" value { string_value: "finish" } }' if self.disconnect else ""
        text = f"""
            platform: "ensemble"
            input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }}
            output {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }}
            ensemble_scheduling {{
                step {{ model_name: "gate" input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "m" }} }}
                step {{ model_name: "triple" input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "n" }} }}
                step {{ model_name: "add" input_map {{ key: "x" value: "m" }} input_map {{ key: "z" value: "n" }}
                        output_map {{ key: "y" value: "y" }} }}
            }}
            {finish}
        """
        config = ModelConfig.parse(text, name="e", where=Path("e/config.pbtxt"))
        return [self.gate, self.triple, Add(), EnsembleRunner(config, version=1)]

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        leaver = await stage.asking(ask("e", 1, id="leaver", headers=headers))
        await stage.until(lambda: self.gate.runs == self.triple.runs == [[1]])
        await self.other(stage, 2, 10, id="stays")
        await stage.waiting(1)
        await stage.waiting(1, "triple")
        return leaver

    def stopped(self) -> bool:
        return all(one.stopped == [[1]] and one.runs == [[1], [2]] for one in (self.gate, self.triple))

    def go(self) -> None:
        super().go()
        self.triple.go(1, 2)


class Add(Model):
    name = "add"
    inputs = (TensorSpec("x", "FP32", [-1]), TensorSpec("z", "FP32", [-1]))
    outputs = (TensorSpec("y", "FP32", [-1]),)

    async def infer(self, request: InferRequest) -> Any:
        return {"y": request.inputs["x"] + request.inputs["z"]}


OUTER = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            response = pb_utils.InferenceRequest(
                model_name="gate", requested_output_names=["y"], inputs=request.inputs()
            ).exec()
            responses.append(pb_utils.InferenceResponse(response.output_tensors(), response.error()))
        return responses
"""


class InBLS(Row):
    model = "outer"
    real = True

    def make(self, disconnect: Disconnect) -> Any:
        self.disconnect = disconnect
        return Gate()

    def models(self) -> list[Any]:
        finish = 'parameters { key: "on_disconnect" value { string_value: "finish" } }' if self.disconnect else ""
        (self.directory / "outer/1").mkdir(parents=True)
        (self.directory / "outer/1/model.py").write_text(OUTER)
        (self.directory / "outer/config.pbtxt").write_text(f"""
            backend: "python" {finish}
            input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }}
            output {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }}
        """)
        return [self.gate, *find_models([self.directory], execution="thread")]

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        leaver = await stage.asking(ask("outer", 1, id="leaver", headers=headers))
        await stage.until(lambda: self.gate.runs == [[1]])
        await self.other(stage, 2, 4, id="stays")
        await stage.waiting(1, "outer")
        return leaver


class Streaming(Row):
    phase = "streaming"

    def make(self, disconnect: Disconnect) -> Any:
        return StreamGate(on_disconnect=disconnect)

    def probe(self) -> bytes:
        return stream("gate", 0)

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        leaver = await stage.asking(stream("gate", 1, id="leaver", headers=headers))
        await leaver.head()
        await leaver.chunk()
        await stage.until(lambda: self.gate.runs == [[1]])
        self.stays = await stage.asking(stream("gate", 2))
        await stage.waiting(1)
        return leaver

    def stopped(self) -> bool:
        return bool(self.gate.stopped == [[1]])

    async def check_others(self, stage: Stage) -> None:
        assert [event["y"] for event in told(await self.stays.answer())] == [2, 4]
        await stage.let_go(self.stays)


class Sending(Row):
    phase = "sending"
    cut = True

    def make(self, disconnect: Disconnect) -> Any:
        return Large(on_disconnect=disconnect)

    async def arrange(self, stage: Stage, headers: Sequence[str]) -> Client:
        parameters = {"binary_data_output": True}
        leaver = await stage.asking(ask("gate", 1, id="leaver", headers=headers, parameters=parameters))
        assert (await leaver.head()).status == 200
        assert stage.queue().running == 0, "the instance is free while its answer is sent"
        return leaver

    def stopped(self) -> bool:
        return True


ROWS: list[type[Row]] = [
    Receiving,
    Queued,
    InBatch,
    LastOfBatch,
    InSequence,
    TokenLoop,
    InEnsemble,
    InBLS,
    Row,
    Streaming,
    Sending,
]


@asynccontextmanager
async def staged(row: Row, **options: Any) -> AsyncIterator[Stage]:
    """Serve a row's models."""
    async with serving(*row.models(), memory=row.memory, metrics=MetricsPolicy(), **options) as served:
        row.gate.note = served.endings.note
        if isinstance(row, InEnsemble):
            row.triple.note = served.endings.note
        stage = Stage(served, row.memory)
        try:
            yield stage
        finally:
            for client in stage.clients:
                await trio.aclose_forcefully(client.stream)
