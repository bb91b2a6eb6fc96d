"""Small ONNX models, made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

FLOAT = TensorProto.FLOAT


def info(name: str, shape: list[int | str], kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def save(
    file: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any] | None = None
) -> Path:
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants or [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, file)
    return file


def constant(name: str, array: Any) -> Any:
    return onnx.numpy_helper.from_array(np.asarray(array), name)


def network(file: Path, *, layers: int = 3, width: int = 8, rows: int | str = "n") -> Path:
    """Layers of a product and a tanh, in a row: `y` has the shape of `x`."""
    weights = np.random.default_rng(0).normal(size=(width, width)).astype(np.float32) / np.sqrt(width)
    nodes = []
    for layer in range(layers):
        before = "x" if layer == 0 else f"h{layer}"
        after = "y" if layer == layers - 1 else f"h{layer + 1}"
        nodes += [
            helper.make_node("MatMul", [before, "w"], [f"m{layer}"]),
            helper.make_node("Tanh", [f"m{layer}"], [after]),
        ]
    tensors = [info("x", [rows, width])], [info("y", [rows, width])]
    return save(file, nodes, *tensors, [constant("w", weights.astype(np.float32))])


def loop(file: Path, *, width: int = 128) -> Path:
    """A Loop of `trips` products: long, and made of small operators."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["h", "w"], ["m"]),
            helper.make_node("Tanh", ["m"], ["next"]),
            helper.make_node("Identity", ["going"], ["goes"]),
        ],
        "body",
        [info("i", [], TensorProto.INT64), info("going", [], TensorProto.BOOL), info("h", [width, width])],
        [info("goes", [], TensorProto.BOOL), info("next", [width, width])],
    )
    nodes = [
        helper.make_node("Squeeze", ["trips"], ["count"]),
        helper.make_node("Loop", ["count", "yes", "x"], ["y"], body=body),
    ]
    weights = np.random.default_rng(0).normal(size=(width, width)).astype(np.float32) / np.float32(np.sqrt(width))
    return save(
        file,
        nodes,
        [info("x", [width, width]), info("trips", [1], TensorProto.INT64)],
        [info("y", [width, width])],
        [constant("w", weights), constant("yes", np.array(True))],
    )


def giant(file: Path, *, size: int) -> Path:
    """One product of two matrices of that size: a single operator."""
    nodes = [
        helper.make_node("Expand", ["x", "shape"], ["a"]),
        helper.make_node("MatMul", ["a", "a"], ["b"]),
        helper.make_node("ReduceMax", ["b"], ["y"], axes=[1], keepdims=1),
    ]
    shape = constant("shape", np.array([size, size], np.int64))
    return save(file, nodes, [info("x", [1, 1])], [info("y", [size, 1])], [shape])
