"""Ensembles among other things that happen: drains, reloads, models that come and go, Python models that ask them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from ensemble_stage import CHAIN, FORK, STAGE, Add, Several, Stage, X, ensemble, infer, write

from support import post, serving
from trio_infer import (
    ErrorCode,
    InferError,
    InferRequest,
    Model,
    ModelLoadError,
    ModelRepository,
    Server,
    TensorSpec,
    find_models,
)
from trio_infer.limits import ControlPolicy
from trio_infer.models.ensemble import EnsembleRunner
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.testing import MemoryListener


async def test_a_step_that_fails_when_it_is_stopped_does_not_hide_why_it_was(autojump_clock: Any) -> None:
    @attrs.define(eq=False)
    class FailsOnCancel(Stage):
        async def infer(self, request: InferRequest) -> dict[str, Any]:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("boom in finally")

    triple = Stage("triple", 3, error=InferError("too hot", ErrorCode.UNAVAILABLE))
    async with serving(FailsOnCancel(), triple, Add(), ensemble(*FORK), memory=True) as served:
        answer = await served.connect_in_memory().ask(infer(1))
        assert (answer.status, answer.json["error"]) == (503, "in ensemble 'e', step 2 model 'triple': too hot")


async def test_finish_lets_all_steps_end_for_a_client_that_has_left(autojump_clock: Any) -> None:
    text = (
        f'{ensemble(*CHAIN).config.message}\nparameters {{ key: "on_disconnect" value {{ string_value: "finish" }} }}'
    )
    double, triple = Stage(), Stage("triple", 3)
    runner = EnsembleRunner(ModelConfig.parse(text, name="e", where=Path("e/config.pbtxt")), version=1)
    async with serving(double, triple, runner, memory=True) as served:
        client = served.connect_in_memory()
        await client.send(infer(1))
        await trio.sleep(0.5)
        await client.close()
        await served.ended(3)
        assert (double.log, triple.log) == (["begun 0"], ["begun 1"])
        assert served.outcomes() == {"undelivered": 1}


async def test_a_shutdown_stops_every_step_when_its_patience_is_over(autojump_clock: Any) -> None:
    double, triple = Stage(seconds=100), Stage("triple", 3, seconds=100)
    inner = ensemble(("double", {"x": "in"}, {"y": "out"}), name="inner")
    outer = ensemble(("inner", {"in": "in"}, {"out": "left"}), ("triple", {"x": "in"}, {"y": "right"}), FORK[2])
    async with serving(double, triple, Add(), inner, outer, memory=True, exit_timeout=2.0) as served:
        client = served.connect_in_memory()
        await client.send(infer(1))
        await trio.sleep(1)
        served.server.drain()
        answer = await client.answer()
        assert answer.status == 503
        assert served.cancelled() == {("shutdown", "running"): 1}
        assert double.log[1:] == triple.log[1:]
        assert double.log[1].startswith("stopped")


async def test_leaving_takes_one_out_of_a_step_that_others_use_and_they_get_their_answers(autojump_clock: Any) -> None:
    double = Stage(seconds=1)
    steps = (("several", {"x": "in"}, {"y": "one"}), ("double", {"x": "one"}, {"y": "out"}))
    async with serving(double, Several(), ensemble(*steps), memory=True) as served:
        leaver, stayer = served.connect_in_memory(), served.connect_in_memory()
        for client in (leaver, stayer):
            await client.send(post("e", "generate_stream", {"in": [1, 2, 3]}))
        await trio.sleep(1.5)
        await leaver.close()
        answer = await stayer.answer()
        assert answer.body.decode().count("data: ") == 3
        assert sum(entry.startswith("stopped") for entry in double.log) == 1


async def test_models_that_take_smaller_batches_than_their_ensemble_are_refused() -> None:
    class Four(Add):
        name = "four"
        inputs = X
        max_batch_size = 4

    batched = ensemble(("four", {"x": "in"}, {"y": "out"})).config.message
    batched.max_batch_size = 8
    runner = EnsembleRunner(ModelConfig.parse(str(batched), name="e", where=Path("e/config.pbtxt")), version=1)
    words = "'e' allows maximum batch size 8, but it contains model 'four' which only allows maximum batch size to be 4"
    with pytest.raises(ModelLoadError, match=words):
        await Server([Four(), runner]).serve(listeners=[MemoryListener()])


async def test_a_model_without_batches_in_a_batched_ensemble_takes_the_batch_as_a_dimension() -> None:
    class Matrix(Model):
        name = "matrix"
        inputs = (TensorSpec("x", "FP32", [-1, 2]),)
        outputs = (TensorSpec("y", "FP32", [-1, 2]),)

        async def infer(self, request: InferRequest) -> dict[str, Any]:
            return {"y": request.inputs["x"] + 1}

    message = ensemble(("matrix", {"x": "in"}, {"y": "out"})).config.message
    message.max_batch_size = 8
    runner = EnsembleRunner(ModelConfig.parse(str(message), name="e", where=Path("e/config.pbtxt")), version=1)
    async with serving(Matrix(), runner, memory=True) as served:
        tensor = {"name": "in", "datatype": "FP32", "shape": [3, 2], "data": [0, 1, 2, 3, 4, 5]}
        answer = await served.connect_in_memory().ask(post("e", "infer", {"inputs": [tensor]}))
        assert answer.json["outputs"][0]["data"] == [1, 2, 3, 4, 5, 6]
    message.input[0].dims[:] = [2, 2]
    runner = EnsembleRunner(ModelConfig.parse(str(message), name="e", where=Path("e/config.pbtxt")), version=1)
    with pytest.raises(ModelLoadError, match=r"dims \[-1, 2, 2\] from the ensemble, but \[-1, 2\] for step 1"):
        await Server([Matrix(), runner]).serve(listeners=[MemoryListener()])


async def test_classes_have_the_names_that_the_step_s_model_gives_them() -> None:
    class Labelled(Stage):
        outputs = (TensorSpec("y", "FP32", [-1], labels=("cat", "dog")),)

    asked = {"name": "out", "parameters": {"classification": 1}}
    tensor = {"name": "in", "datatype": "FP32", "shape": [2], "data": [1, 4]}
    inner = ensemble(("double", {"x": "in"}, {"y": "out"}), name="inner")
    outer = ensemble(("inner", {"in": "in"}, {"out": "out"}))
    async with serving(Labelled(seconds=0), inner, outer, memory=True) as served:
        answer = await served.connect_in_memory().ask(post("e", "infer", {"inputs": [tensor], "outputs": [asked]}))
        assert answer.json["outputs"][0]["data"] == ["8.000000:1:dog"]


@attrs.frozen
class Disk:
    """A repository, and a server that serves from it."""

    root: Path
    served: Any

    async def call(self, path: str, document: object = None) -> Any:
        body = json.dumps(document or {}).encode()
        head = f"POST /v2/repository/{path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self.served.connect_in_memory().ask(head.encode() + body)

    async def ask(self, model: str = "e") -> Any:
        return await self.served.connect_in_memory().ask(infer(1, model=model))


@asynccontextmanager
async def disk(root: Path, mode: Any = "explicit", **policy: Any) -> AsyncIterator[Disk]:
    control = ControlPolicy(model_control_mode=mode, **policy)
    async with serving(repository=ModelRepository([root]), control=control, memory=True) as served:
        yield Disk(root, served)


def one_step(model: str, inner: bool = False, name: str = "e") -> str:
    ins, outs = ({"in": "in"}, {"out": "out"}) if inner else ({"x": "in"}, {"y": "out"})
    return str(ensemble((model, ins, outs), name=name).config.message)


async def test_ensembles_that_are_served_can_not_be_replaced_so_that_they_ask_themselves(tmp_path: Path) -> None:
    write(tmp_path, "double", 'backend: "trio_infer"', STAGE.replace("FACTOR", "2"))
    write(tmp_path, "e", one_step("double"))
    write(tmp_path, "f", one_step("e", inner=True, name="f"))
    async with disk(tmp_path) as on:
        assert (await on.call("models/f/load")).status == 200
        for asked, further in (("e", ""), ("f", ", 1 ensembles further")):
            config = ModelConfig.parse(one_step(asked, inner=True), name="e", where=Path("e")).as_json()
            refused = await on.call("models/e/load", {"parameters": {"config": json.dumps(config)}})
            words = "circular dependency between ensembles: one of its steps asks the ensemble itself"
            assert words + further in refused.json["error"]
        assert (await on.ask("f")).json["outputs"][0]["data"] == [2], "what served before serves on"


async def test_a_step_s_model_that_comes_back_with_other_tensors_fails_requests_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = STAGE.replace("FACTOR", "2")
    write(tmp_path, "double", 'backend: "trio_infer"', code)
    write(tmp_path, "e", one_step("double"))
    file = tmp_path / "double/1/model.py"
    async with disk(tmp_path) as on:
        assert (await on.call("models/e/load")).status == 200
        changes: list[tuple[Callable[[str], str], int, str]] = [
            (lambda text: text.replace('"x"', '"z"'), 400, "input 'x'"),
            (lambda text: text.replace('"y"', '"z"'), 500, "'y'"),
            (lambda text: text.replace('"x", "FP32"', '"x", "INT32"'), 400, "INT32"),
            (lambda text: text.replace('"y", "FP32"', '"y", "BYTES"').replace("* 2", "* 0 == 'a'"), 500, "'double'"),
            (lambda text: text.replace("return", "yield"), 200, ""),
            (lambda text: text.replace("return", "for _ in range(2): yield"), 500, "gave 2 responses in place of one"),
            (lambda text: text.replace('"y", "FP32"', '"y", "INT64"').replace("* 2", ".astype(int)"), 500, "'out'"),
        ]
        for number, (change, status, words) in enumerate(changes):
            file.write_text(f"# {number}\n{change(code)}")
            assert (await on.call("models/double/load")).status == 200
            answer = await on.ask()
            assert answer.status == status, (number, answer.body)
            if status != 200:
                where = "output" if words == "'out'" else "in ensemble 'e', step 1 model 'double': "
                assert answer.json["error"].startswith(where), answer.body
                assert words in answer.json["error"], answer.body
        file.write_text(code)
        assert (await on.call("models/double/load")).status == 200
        assert (await on.ask()).json["outputs"][0]["data"] == [2]
    assert "Traceback" not in caplog.text


async def test_unloading_a_model_in_the_middle_of_a_step_fails_the_request_with_503(tmp_path: Path) -> None:
    code = STAGE.replace("return", "import trio; await trio.sleep(99); return").replace("FACTOR", "2")
    write(tmp_path, "double", 'backend: "trio_infer"', code)
    write(tmp_path, "e", one_step("double"))
    async with disk(tmp_path, unload_timeout_secs=0.05) as on:
        assert (await on.call("models/e/load")).status == 200
        client = on.served.connect_in_memory()
        await client.send(infer(1))
        while on.served.server.statistics().models["double", "1"].running == 0:
            await trio.testing.wait_all_tasks_blocked()
        assert (await on.call("models/double/unload")).status == 200
        answer = await client.answer()
        assert answer.status == 503
        assert answer.json["error"].startswith("in ensemble 'e', step 1 model 'double': ")
        assert "model unloaded" in answer.json["error"]


PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        tensor = pb_utils.Tensor("in", pb_utils.get_input_tensor_by_name(requests[0], "in").as_numpy())
        inner = pb_utils.InferenceRequest(model_name="e", inputs=[tensor], requested_output_names=["out"])
        response = inner.exec()
        if response.has_error():
            return [pb_utils.InferenceResponse([], response.error())]
        return [pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(response, "out")])]
"""


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_a_python_model_asks_an_ensemble_and_its_client_s_leaving_stops_the_steps(
    tmp_path: Path, execution: Any
) -> None:
    """Over real sockets."""
    config = """
        backend: "python"
        input { name: "in" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "out" data_type: TYPE_FP32 dims: [ -1 ] }
    """
    write(tmp_path, "asks", config, PYTHON)
    double, triple = Stage(seconds=0), Signalling()
    models = [double, triple, ensemble(*CHAIN), *find_models([tmp_path], execution=execution)]
    async with serving(*models) as served:
        client = await served.connect()
        assert (await client.ask(infer(1, model="asks"))).json["outputs"][0]["data"] == [6]
        triple.error = InferError("too hot", ErrorCode.UNAVAILABLE)
        answer = await client.ask(infer(1, model="asks"))
        assert "in ensemble 'e', step 2 model 'triple': too hot" in answer.json["error"]
        triple.seconds = 1000
        await client.send(infer(1, model="asks"))
        with trio.fail_after(10):
            await triple.entered.wait()
            await client.close()
            await triple.stopped.wait()
            await served.ended(9)
        assert served.outcomes() == {"completed": 1, "failed": 1, "cancelled": 1}


@attrs.define(eq=False)
class Signalling(Stage):
    """Says when it takes time, and when it is over."""

    name: str = "triple"
    factor: float = 3
    seconds: float = 0
    entered: trio.Event = attrs.field(factory=trio.Event)
    stopped: trio.Event = attrs.field(factory=trio.Event)

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        if self.seconds:
            self.entered.set()
        try:
            return await super().infer(request)
        finally:
            if self.seconds:
                self.stopped.set()
