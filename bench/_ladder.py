"""Models of every kind that the server runs, each with a request that goes on for long; for `stop_latency.py`.

Functions that run in worker processes are found here by name, so this is a module of its own.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np

import trio_infer
from _models import LifeWatching, Wait, stamp_at
from trio_infer import Life, TensorSpec, runners
from trio_infer.models.repository import load_model

X = TensorSpec("x", "FP32", [-1])
GRACE = 0.25


def asks(x: Any) -> Any:
    """Asks each millisecond, for as many seconds as it is told."""
    ends = time.monotonic() + float(x[0])
    while time.monotonic() < ends:
        trio_infer.check_cancelled()
        time.sleep(0.001)
    return x


def spins(x: Any) -> Any:
    """Asks nobody."""
    ends = time.monotonic() + float(x[0])
    while time.monotonic() < ends:
        pass
    return x


def multiplies(x: Any) -> Any:
    """One call of a library, of some seconds; next to nothing if it is told 0."""
    size = 7000 if x[0] else 2
    matrix = np.ones((size, size), np.float32)
    return (matrix @ matrix)[0, :1]


TORCH = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def forward(self, x):
        return x + self.inside(x)


class Long(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        h = torch.ones(128, 512)
        for _ in range(200 * int(x[0])):
            h = self.block(h)
        return h[0, :1]


def load_model(directory):
    torch.manual_seed(0)
    return Long()
"""


class Stops(LifeWatching):
    """Stamps when the work of a request has really ended: in the model's own thread or process, if that tells."""

    def work_ended(self, life: Life) -> None:
        assert life.timing is not None
        stamp_at(life.request_id, "stopped", life.timing.infer_ended or life.timing.ended)


def parameters(**values: object) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in values.items()
    )


def chain(file: Path, nodes: int, rows: int, width: int) -> None:
    """`nodes` products in a row, which depend on `x`, so that nothing is computed beforehand."""
    import onnx
    from onnx import TensorProto, helper

    weights = onnx.numpy_helper.from_array(np.eye(width, dtype=np.float32), "w")
    start = onnx.numpy_helper.from_array(np.ones((rows, width), np.float32), "h")
    made = [helper.make_node("Mul", ["h", "x"], ["m0"])]
    made += [helper.make_node("MatMul", [f"m{n}", "w"], [f"m{n + 1}"]) for n in range(nodes)]
    made += [
        helper.make_node("ReduceMax", [f"m{nodes}"], ["most"], axes=[0, 1], keepdims=0),
        helper.make_node("Mul", ["x", "most"], ["y"]),
    ]
    write(file, made, [weights, start], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])])


def loop(file: Path, width: int) -> None:
    """As many products as it is told, in the body of a Loop."""
    import onnx
    from onnx import TensorProto, helper

    def info(name: str, kind: int, shape: list[int]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    body = helper.make_graph(
        [helper.make_node("MatMul", ["a", "w"], ["b"]), helper.make_node("Identity", ["on"], ["goes"])],
        "body",
        [info("i", TensorProto.INT64, []), info("on", TensorProto.BOOL, []), info("a", TensorProto.FLOAT, [64, width])],
        [info("goes", TensorProto.BOOL, []), info("b", TensorProto.FLOAT, [64, width])],
    )
    numpy = onnx.numpy_helper.from_array
    constants = [
        numpy(np.eye(width, dtype=np.float32), "w"),
        numpy(np.ones((64, width), np.float32), "h"),
        numpy(np.array(True), "yes"),
        numpy(np.array([1e9], np.float32), "many"),
    ]
    nodes = [
        helper.make_node("Mul", ["x", "many"], ["trips"]),
        helper.make_node("Cast", ["trips"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Squeeze", ["whole"], ["count"]),
        helper.make_node("Loop", ["count", "yes", "h"], ["end"], body=body),
        helper.make_node("ReduceMax", ["end"], ["most"], axes=[0, 1], keepdims=0),
        helper.make_node("Mul", ["x", "most"], ["y"]),
    ]
    write(file, nodes, constants, [info("x", TensorProto.FLOAT, [1])])


def write(file: Path, nodes: list[Any], constants: list[Any], inputs: list[Any]) -> None:
    import onnx
    from onnx import TensorProto, helper

    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    file.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)


def deaf(cancel_grace: float) -> list[Any]:
    """Two models that never ask, and a native one."""
    y = [TensorSpec("y", "FP32", [-1])]
    options: dict[str, Any] = {"inputs": [X], "outputs": y, "instances": 2, "cancel_grace": cancel_grace}
    return [Wait(1), runners.process(spins, **options), runners.process(multiplies, **options)]


def models(repository: Path) -> list[Any]:
    """All that can be made here; what needs a library that isn't installed is left out."""
    y = [TensorSpec("y", "FP32", [-1])]
    made: list[Any] = [
        Wait(1),
        runners.thread(asks, name="thread", inputs=[X], outputs=y),
        runners.process(asks, name="process", inputs=[X], outputs=y, spares=0),
        runners.process(spins, name="spins", inputs=[X], outputs=y, cancel_grace=GRACE),
        runners.process(multiplies, name="multiplies", inputs=[X], outputs=y, cancel_grace=GRACE),
        runners.process(spins, name="spins_without_a_spare", inputs=[X], outputs=y, cancel_grace=GRACE, spares=0),
    ]
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        chain(repository / "onnx_small/1/model.onnx", 8_000, 64, 128)
        loop(repository / "onnx_loop/1/model.onnx", 128)
        chain(repository / "onnx_large/1/model.onnx", 300, 256, 1024)
        chain(repository / "onnx_process/1/model.onnx", 8_000, 64, 128)
        (repository / "onnx_process/config.pbtxt").write_text(parameters(execution="process", spares=0))
        made += [load_model(repository / f"onnx_{name}")[0] for name in ("small", "loop", "large", "process")]
    if importlib.util.find_spec("torch"):
        tensors = (
            'input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }\n'
        )
        for name, grain in (("torch_blocks", "blocks"), ("torch_all", "all")):
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "1/model.py").write_text(TORCH)
            (repository / name / "config.pbtxt").write_text(
                f'backend: "pytorch"\n{tensors}' + parameters(cancel_hooks=grain)
            )
            made.append(load_model(repository / name)[0])
    return made
