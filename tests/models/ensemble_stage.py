"""Models for ensembles: stages that take time and note it, and a client that leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio
import trio.testing

from support import post, serving
from trio_infer import InferRequest, Model, TensorSpec
from trio_infer.models.ensemble import EnsembleRunner
from trio_infer.protocol.model_config import ModelConfig

X = (TensorSpec("x", "FP32", [-1]),)
Y = (TensorSpec("y", "FP32", [-1]),)


@attrs.define(eq=False)
class Stage(Model):
    """Takes a second, and multiplies; notes when it began and how it ended."""

    name: str = "double"
    factor: float = 2
    seconds: float = 1.0
    error: Exception | None = None
    instances: int | None = None
    log: list[str] = attrs.field(factory=list)

    inputs = X
    outputs = Y

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        self.log.append(f"begun {trio.current_time():g}")
        try:
            await trio.sleep(self.seconds)
            if self.error is not None:
                raise self.error
        except trio.Cancelled:
            self.log.append(f"stopped {trio.current_time():g}")
            raise
        return {"y": request.inputs["x"] * self.factor}


class Add(Model):
    name = "add"
    inputs = (TensorSpec("a", "FP32", [-1]), TensorSpec("b", "FP32", [-1]))
    outputs = Y

    async def infer(self, request: InferRequest) -> dict[str, Any]:
        return {"y": request.inputs["a"] + request.inputs["b"]}


class Several(Model):
    """Gives as many responses as `x` has elements."""

    name = "several"
    inputs = X
    outputs = Y

    async def infer(self, request: InferRequest) -> AsyncIterator[dict[str, Any]]:
        for value in request.inputs["x"]:
            await trio.sleep(1)
            yield {"y": np.array([value], np.float32)}


def ensemble(
    *steps: tuple[str, dict[str, str], dict[str, str]], name: str = "e", out: str = "out", **options: object
) -> EnsembleRunner:
    def table(names: dict[str, str], which: str) -> str:
        return " ".join(f'{which} {{ key: "{key}" value: "{value}" }}' for key, value in names.items())

    text = "".join(
        f'step {{ model_name: "{model}" model_version: -1 {table(ins, "input_map")} {table(outs, "output_map")} }}\n'
        for model, ins, outs in steps
    )
    config = f"""
        platform: "ensemble"
        input {{ name: "in" data_type: TYPE_FP32 dims: [ -1 ] }}
        output {{ name: "{out}" data_type: TYPE_FP32 dims: [ -1 ] }}
        ensemble_scheduling {{ {text} {" ".join(f"{key}: {value}" for key, value in options.items())} }}
    """
    return EnsembleRunner(ModelConfig.parse(config, name=name, where=Path(f"{name}/config.pbtxt")), version=1)


CHAIN = (("double", {"x": "in"}, {"y": "mid"}), ("triple", {"x": "mid"}, {"y": "out"}))
FORK = (
    ("double", {"x": "in"}, {"y": "left"}),
    ("triple", {"x": "in"}, {"y": "right"}),
    ("add", {"a": "left", "b": "right"}, {"y": "out"}),
)


def infer(*values: float, model: str = "e", **parameters: Any) -> bytes:
    tensor = {"name": "in", "datatype": "FP32", "shape": [len(values)], "data": values}
    return post(model, "infer", {"inputs": [tensor], "parameters": parameters})


async def leave_at(moment: float, *models: Any, clients: int = 1) -> Any:
    """Serve, have clients ask, and the first of them leave."""
    async with serving(*models, memory=True) as served:
        asking = [served.connect_in_memory() for _ in range(clients)]
        for client in asking:
            await client.send(infer(1))
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(moment)
        await asking[0].close()
        answers = [await client.answer() for client in asking[1:]]
        await trio.testing.wait_all_tasks_blocked()
        assert served.cancelled() == {("client disconnected", "running"): 1}
        assert all(queue.running == 0 for queue in served.server.statistics().models.values())
        return answers


STAGE = """
from trio_infer import Model, TensorSpec
class Stage(Model):
    inputs = (TensorSpec("x", "FP32", [-1]),)
    outputs = (TensorSpec("y", "FP32", [-1]),)
    async def infer(self, request):
        return {"y": request.inputs["x"] * FACTOR}
"""


def write(root: Path, name: str, config: str, code: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    if code:
        (root / name / "1/model.py").write_text(code)
