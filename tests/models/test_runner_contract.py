"""All of our runners keep the contract, and the kit finds those that don't."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import plain_functions
import pytest
import trio
from triton_stage import Repository

from fake_host import FakeHost
from trio_infer import Batching, InferError, InferRequest, InferResponse, Model, TensorSpec, TokenModel, runners
from trio_infer.models.ensemble import EnsembleRunner
from trio_infer.models.native import NativeRunner
from trio_infer.models.native_loading import native_runner
from trio_infer.models.runner import Instance
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import Send
from trio_infer.scheduling.ticket import InstanceQueue
from trio_infer.testing import Check, Conduct, check_runner
from trio_infer.testing.contract import NAMES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left behind is counted on Linux")

# -- Ours --------------------------------------------------------------------------------------------------------------

DO, OUT = TensorSpec("do", "BYTES", [1]), TensorSpec("y", "FP32", [-1])
BATCHED = "max_batch_size: 4\n"


def asks(do: str, model: str = "m", **fields: Any) -> InferRequest:
    return InferRequest(model, "1", {"do": np.array([do.encode()], dtype=object)}, **fields)


class Native(Model):
    """Does as it is told."""

    name = "m"
    inputs = (DO,)
    outputs = (OUT,)

    async def infer(self, request: InferRequest) -> Any:
        do = request.inputs["do"].flat[0].decode()
        if do == "crash":
            raise ValueError("boom-42")
        if do == "slow":
            await trio.sleep_forever()
        return {"y": np.ones(4_000_000 if do == "huge" else 4, np.float32)}


class NativeRows(Native):
    """The same, in batches."""

    max_batch_size = 4
    instances = 2
    batching = Batching()

    async def infer(self, request: InferRequest) -> Any:
        answer = await super().infer(request)
        return {"y": np.repeat(answer["y"][None, :4], len(request.inputs["do"]), 0)}


class NativeStream(Native):
    """The same, as a stream."""

    async def infer(self, request: InferRequest) -> AsyncIterator[Any]:
        do = request.inputs["do"].flat[0].decode()
        for number in range(300 if do == "huge" else 2):
            yield {"y": np.full(1000, number, np.float32)}
        if do == "crash":
            raise ValueError("boom-42")
        if do == "slow":
            await trio.sleep_forever()


@attrs.define(eq=False)
class Tokens(TokenModel):
    """Counts, up to what it is told."""

    name: str = "m"
    inputs = (DO,)
    outputs = (OUT,)
    max_slots: int = 2

    def start(self, request: InferRequest) -> Any:
        from trio_infer import Prompt

        do = request.inputs["do"].flat[0].decode()
        return Prompt(np.array([len(do)]), max_tokens={"slow": 10**9, "huge": 400}.get(do, 3))

    def prefill(self, generations: Any) -> Any:
        return np.array([1 for _ in generations])

    def step(self, active: Any) -> Any:
        time.sleep(0.001)
        return active.tokens + 1

    def output(self, generation: Any, token: int) -> Any:
        return {"y": np.array([token], np.float32)}


TRITON = """
import os, time
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
class TritonPythonModel:
    def execute(self, requests):
        dos = [request.inputs()[0].as_numpy().flat[0].decode() for request in requests]
        if "crash" in dos:
            os._exit(3) if KILLS else self.fail()
        end = time.monotonic() + (1 if "deaf" in dos and not KILLS else 1e9)
        while "deaf" in dos and time.monotonic() < end:
            pass
        while "slow" in dos and not all(request.is_cancelled() for request in requests):
            time.sleep(0.001)
        shape = [4_000_000 if "huge" in dos else 4]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(ROWS + shape, np.float32))]) for _ in requests]
    def fail(self):
        raise ValueError("boom-42")
"""
TRITON_STREAM = """
import time
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            do, sender = request.inputs()[0].as_numpy()[0].decode(), request.get_response_sender()
            for number in range(300 if do == "huge" else 2):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full(1000, number, np.float32))]))
            if do == "crash":
                raise ValueError("boom-42")
            while do == "slow" and not sender.is_cancelled():
                time.sleep(0.001)
            sender.send(flags=FINAL)
"""
TENSORS = """
backend: "python"
input { name: "do" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def triton(execution: str, *, batched: bool = False, stream: bool = False) -> Callable[[Path], tuple[Any, Conduct]]:
    def make(root: Path) -> tuple[Any, Conduct]:
        repository = Repository(root, execution)  # type: ignore[arg-type]  # it is one of the two
        code = TRITON_STREAM if stream else TRITON
        code = code.replace("KILLS", str(execution == "process")).replace("ROWS", "[1]" if batched else "[]")
        config = TENSORS + (BATCHED if batched else "")
        config += "model_transaction_policy { decoupled: true }\n" if stream else ""
        config += 'parameters { key: "cancel_grace_ms" value { string_value: "100" } }\n'
        repository.model("m", code, config)
        return repository.runner, conduct(deaf=not stream, batched=batched)

    return make


def conduct(*, deaf: bool = False, crash: bool = True, batched: bool = False) -> Conduct:
    def does(do: str) -> InferRequest:
        request = asks(do)
        return attrs.evolve(request, inputs={"do": request.inputs["do"].reshape(1, 1)}) if batched else request

    return Conduct(
        quick=does("quick"),
        slow=does("slow"),
        deaf=does("deaf") if deaf else None,
        crash=does("crash") if crash else None,
        huge=does("huge"),
    )


def native(model: Callable[[], Model], **options: Any) -> Callable[[Path], tuple[Any, Conduct]]:
    return lambda _: (lambda: native_runner(model()), conduct(**options))


def does(do: Any) -> Any:
    """A plain function that does as it is told."""
    word = do.flat[0].decode()
    if word == "crash":
        raise ValueError("boom-42")
    ends = time.monotonic() + 0.7
    while word == "deaf" and (plain_functions.in_a_worker() or time.monotonic() < ends):
        pass
    while word == "slow":
        time.sleep(0.001)
        plain_functions.trio_infer.check_cancelled()
    return np.ones(4_000_000 if word == "huge" else 4, np.float32)


def function(way: Callable[..., Any], **options: Any) -> Callable[[Path], tuple[Any, Conduct]]:
    return lambda _: (lambda: way(does, name="m", inputs=[DO], outputs=[OUT], **options), conduct(deaf=True))


def onnx(execution: str) -> Callable[[Path], tuple[Any, Conduct]]:
    def make(root: Path) -> tuple[Any, Conduct]:
        from onnx_models import loop

        loop(root / "m/1/model.onnx")
        parameter = f'parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}\n'
        (root / "m/config.pbtxt").write_text('backend: "onnxruntime"\n' + parameter)

        def does(trips: int) -> InferRequest:
            return InferRequest("m", "1", {"x": np.eye(128, dtype=np.float32), "trips": np.array([trips])})

        return Repository(root).runner, Conduct(quick=does(3), slow=does(2**40))

    return make


PYTORCH = """
import time
from torch import nn

class Step(nn.Module):
    def forward(self, x):
        time.sleep(0.001 * float(x[0]))
        return x

def load_model(directory):
    return nn.Sequential(*[Step()] * 5000)
"""


def pytorch(execution: str) -> Callable[[Path], tuple[Any, Conduct]]:
    def make(root: Path) -> tuple[Any, Conduct]:
        repository = Repository(root)
        tensors = (
            'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }'
        )
        parameter = f'parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}\n'
        repository.model("m", PYTORCH, f'backend: "pytorch"\n{tensors}\n{parameter}')

        def does(seconds: float) -> InferRequest:
            return InferRequest("m", "1", {"x": np.array([seconds], np.float32)})

        return repository.runner, Conduct(quick=does(0), slow=does(1))

    return make


def text(root: Path) -> tuple[Any, Conduct]:
    from text_models import edit_json, make_text_model

    make_text_model(root / "m/1", context=8192)
    for file in ("config.json", "generation_config.json"):
        edit_json(root / "m/1" / file, eos_token_id=None)  # so that no text ends by itself

    def does(tokens: int) -> InferRequest:
        given = {"text_input": np.array([b"The client left, "], dtype=object)}
        return InferRequest("m", "1", given, parameters={"max_tokens": tokens})

    return Repository(root).runner, Conduct(quick=does(3), slow=does(8000), huge=does(300))


class Inner(Native):
    """What an ensemble asks."""

    name = "inner"


class InnerHost(FakeHost):
    """Has that model, loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.runners["inner"] = NativeRunner(Inner())
        self.queues["inner"] = InstanceQueue(None)

    def signature(self, name: str, version: str) -> Any:
        return self.runners[name].signature


ENSEMBLE = """
platform: "ensemble"
input { name: "do" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "inner" model_version: -1
    input_map { key: "do" value: "do" } output_map { key: "y" value: "y" }
  }
}
"""


def ensemble(_: Path) -> tuple[Any, Conduct]:
    return lambda: EnsembleRunner(
        ModelConfig.parse(ENSEMBLE, name="m", where=Path("config.pbtxt")), version=1
    ), conduct()


OURS: dict[str, Callable[[Path], tuple[Any, Conduct]]] = {
    "ensemble": ensemble,
    "native": native(Native),
    "native in batches": native(NativeRows, batched=True),
    "native stream": native(NativeStream),
    "token loop": native(Tokens, crash=False),
    "Triton in threads": triton("thread"),
    "Triton in threads, batches": triton("thread", batched=True),
    "Triton in threads, streams": triton("thread", stream=True),
    "Triton in processes": triton("process"),
    "Triton in processes, batches": triton("process", batched=True),
    "Triton in processes, streams": triton("process", stream=True),
    "function in threads": function(runners.thread),
    "function in processes": function(runners.process, cancel_grace=0.1),
    "ONNX in threads": onnx("thread"),
    "ONNX in processes": onnx("process"),
    "PyTorch in threads": pytorch("thread"),
    "PyTorch in processes": pytorch("process"),
    "text generation": text,
}
NEEDS = {"ONNX": "onnxruntime", "PyTorch": "torch", "text": "transformers"}


@pytest.mark.parametrize("kind", OURS)
async def test_a_runner_of_ours_keeps_the_contract(kind: str, tmp_path: Path) -> None:
    package = next((package for name, package in NEEDS.items() if kind.startswith(name)), "trio")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    make, how = OURS[kind](tmp_path)
    report = await check_runner(make, how, host=InnerHost)
    assert sum(check.outcome == "passed" for check in report.checks) >= 10
    checked = {check.name: check.outcome for check in report.checks}
    joins = "a batch goes on for who stays and stops with the last to leave"
    assert (checked[joins] == "passed") is ("batches" in kind)


# -- Those that don't --------------------------------------------------------------------------------------------------


class Good(NativeRunner):
    """Keeps it; those below break one thing each."""

    def __init__(self) -> None:
        super().__init__(Native())


WORKING: list[int] = []


class EndsBeforeTheModel(Good):
    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        instance.begin()
        WORKING.append(1)
        try:
            response = await self._infer(request)
        finally:
            instance.end()
            WORKING.pop()
        await send(response)


class NeverEnds(Good):
    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        instance.begin()
        await send(await self._infer(request))


class BeginsTwice(Good):
    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        instance.begin()
        await super().run(instance, request, send)


class BeginsInAThread(Good):
    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        await trio.to_thread.run_sync(instance.begin)
        try:
            response = await self._infer(request)
        finally:
            instance.end()
        await send(response)


class SendsAfterTheCancel(Good):
    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        instance.begin()
        try:
            with trio.CancelScope(shield=True):
                await send(InferResponse({"y": np.ones(4, np.float32)}))
            await self._infer(request)
        finally:
            instance.end()


class SwallowsTheCancel(Good):
    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        instance.begin()
        try:
            with trio.CancelScope(shield=True), trio.move_on_after(1.5):
                response = await self._infer(request)
                await send(response)
        finally:
            instance.end()


class AnswersDifferently(Good):
    asked = 0.0

    async def _infer(self, request: InferRequest) -> InferResponse:
        await super()._infer(request)
        AnswersDifferently.asked += 1
        return InferResponse({"y": np.array([self.asked], np.float32)})


class LeavesAThread(Good):
    async def load(self, host: Any) -> None:
        await super().load(host)
        threading.Thread(target=STOP.wait, args=(20,), daemon=True, name="left").start()


STOP = threading.Event()


class LeavesATask(Good):
    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        trio.lowlevel.spawn_system_task(trio.sleep, 20)
        await super().run(instance, request, send)


class LeavesADescriptor(Good):
    async def unload(self) -> None:
        await super().unload()
        LEFT.append(open(__file__))  # noqa: SIM115, ASYNC230 - it is to be left


LEFT: list[Any] = []


class HangsInUnload(Good):
    async def unload(self) -> None:
        await trio.sleep(5)


class CannotBeLoadedAgain(Good):
    loads = 0

    async def load(self, host: Any) -> None:
        CannotBeLoadedAgain.loads += 1
        await trio.lowlevel.checkpoint()
        if self.loads > 3:
            raise RuntimeError("only three times")
        await super().load(host)


class HidesCrashes(Good):
    async def _infer(self, request: InferRequest) -> InferResponse:
        try:
            return await super()._infer(request)
        except ValueError:
            return InferResponse({"y": np.ones(4, np.float32)})


class DiesOfCrashes(Good):
    broken = False

    async def _infer(self, request: InferRequest) -> InferResponse:
        try:
            if self.broken:
                raise InferError("broken for good")
            return await super()._infer(request)
        except ValueError:
            self.broken = True
            raise


class SaysNothing(Good):
    async def _infer(self, request: InferRequest) -> InferResponse:
        try:
            return await super()._infer(request)
        except ValueError:
            raise ValueError from None


class IsNeverReady(Good):
    async def ready(self) -> bool:
        return False


class KillsNothing(Good):
    def kill(self) -> bool:
        return True


FAULTS: dict[type[Good], tuple[str, str]] = {
    EndsBeforeTheModel: ("a request is answered and", "ended while the model's code was still running"),
    NeverEnds: ("a request is answered and", "the instance is not free 1 s after the answer or the cancel"),
    BeginsTwice: ("a request is answered and", "the instance was begun twice for one request"),
    BeginsInAThread: ("a request is answered and", "the instance was begun in another thread than trio's"),
    SendsAfterTheCancel: ("a request that was cancelled before", "it was answered"),
    SwallowsTheCancel: ("a cancel in mid run is left", "still in `run` a second after its cancel"),
    AnswersDifferently: ("a request is answered and", "`quick` was answered in two ways"),
    LeavesAThread: ("it says that it is ready", "something is left behind: threads"),
    LeavesATask: ("a request is answered and", "something is left behind: tasks"),
    LeavesADescriptor: ("it says that it is ready", "something is left behind: descriptors"),
    HangsInUnload: ("it says that it is ready", "it has not ended after 3 s"),
    CannotBeLoadedAgain: ("a cancel during loading", "RuntimeError: only three times"),
    HidesCrashes: ("a crash fails its request", "`crash` did not fail"),
    DiesOfCrashes: ("a crash fails its request", "a request failed: InferError: broken for good"),
    SaysNothing: ("a crash fails its request", "its error says nothing: ValueError()"),
    IsNeverReady: ("it says that it is ready", "`ready` doesn't say True"),
    KillsNothing: ("killing ends what runs", "the instance is not free 5 s after the answer or the cancel"),
}


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
async def test_the_kit_says_what_a_runner_does_not_keep(kind: type[Good], caplog: pytest.LogCaptureFixture) -> None:
    beginning, fault = FAULTS[kind]
    (name,) = [name for name in NAMES if name.startswith(beginning)]
    STOP.clear()
    how = attrs.evolve(conduct(), working=lambda: bool(WORKING))
    try:
        with pytest.raises(AssertionError) as caught:
            await check_runner(kind, how, only=[name], patience=6 if kind is KillsNothing else 3)
    finally:
        STOP.set()
        while LEFT:
            LEFT.pop().close()
    assert str(caught.value).startswith("the runner does not keep its contract:\nfailed")
    assert fault in str(caught.value)


async def test_a_runner_that_keeps_it_passes_and_what_cannot_be_checked_is_told() -> None:
    how = Conduct(quick=asks("quick"), slow=asks("slow"))
    report = await check_runner(Good, how)
    told = {check.why for check in report.checks if check.outcome == "not applicable"}
    assert told == {
        "no `deaf` request is given",
        "no `crash` request is given",
        "no `huge` request is given",
        "the runner doesn't join requests",
    }
    assert "not applicable a crash fails its request with words and the next one is answered: no `crash`" in str(report)
    assert report.failures == ()
    assert str(Check("it works", "passed")) == "passed         it works"
