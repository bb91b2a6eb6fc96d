"""Ragged batches: requests of different sizes in one run, told apart by batch inputs, each with its own answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from desk import Desk, Guest, desk
from trio_infer import InferRequest
from trio_infer.errors import InferError, ModelLoadError
from trio_infer.models.joining import join, split
from trio_infer.models.ragged import batch_inputs, scatter
from trio_infer.models.repository import find_models
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.model_config import BatchInput, ModelConfig, Ragged
from trio_infer.protocol.values import InferResponse

SHAPES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=5)
RAGGED = Ragged(frozenset({"x"}), (), {"y": "x"})


def requests_of(shapes: list[tuple[int, ...]]) -> list[InferRequest]:
    start, requests = 0, []
    for shape in shapes:
        size = int(np.prod(shape))
        x = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        requests.append(InferRequest("m", "1", {"x": x, "scale": np.full((shape[0], 1), shape[0], np.float32)}))
        start += size
    return requests


@given(SHAPES)
def test_what_is_joined_and_taken_apart_again_is_what_it_was(shapes: list[tuple[int, int]]) -> None:
    requests = requests_of(shapes)
    joined = join(requests, RAGGED)
    assert joined.inputs["x"].tolist() == list(range(joined.inputs["x"].size))
    assert joined.inputs["scale"].shape == (sum(shape[0] for shape in shapes), 1)
    response = InferResponse({"y": joined.inputs["x"], "z": joined.inputs["scale"]})
    for request, part in zip(requests, split(response, requests, RAGGED), strict=True):
        np.testing.assert_array_equal(part.outputs["y"], request.inputs["x"])
        np.testing.assert_array_equal(part.outputs["z"], request.inputs["scale"])
        assert not part.outputs["y"].size or np.shares_memory(part.outputs["y"], joined.inputs["x"])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [3, 4]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [3, 7]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 3, 7]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0, 0, 0, 0]),
        ("BATCH_ITEM_SHAPE", [[3], [2], [2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 2, 2]),
    ],
)
def test_batch_inputs_tell_how_a_batch_is_made_up(kind: str, expected: Any) -> None:
    ragged = Ragged(frozenset({"x"}), (BatchInput(kind, ("a", "b"), Datatype.FP32, "x"),))
    told = batch_inputs(ragged, [request.inputs for request in requests_of([(1, 3), (2, 2)])])
    assert told["a"].tolist() == told["b"].tolist() == expected
    assert told["a"].dtype == np.float32


def test_an_output_with_another_number_of_elements_is_the_model_s_fault() -> None:
    with pytest.raises(ValueError, match="5 elements for an input of 4"):
        scatter(np.zeros(5), [np.zeros((2, 2))])
    with pytest.raises(InferError, match="output 'y' of a ragged batch has 5 elements for an input of 4"):
        split(InferResponse({"y": np.zeros(5)}), requests_of([(2, 2)]), RAGGED)


CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "sum" data_type: TYPE_FP32 dims: [ 1 ] }
dynamic_batching { max_queue_delay_microseconds: 100000 }
instance_group { count: 1 }
"""
BATCH = """
batch_input {
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "ends" data_type: TYPE_INT32 source_input: "x"
}
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }
"""
NATIVE = """
import numpy as np
from trio_infer import Model
RUNS = []
class M(Model):
    async def infer(self, request):
        x, ends = request.inputs["x"], request.inputs["ends"]
        RUNS.append((x.tolist(), ends.tolist()))
        sums = [[x[a:b].sum()] for a, b in zip(ends, ends[1:])]
        return {"y": x * 10, "sum": np.array(sums, np.float32)}
"""
TRITON = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        xs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        count = np.full((1, 1), len(requests), np.float32)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 10), pb_utils.Tensor("sum", count)]) for x in xs
        ]
"""


def model(tmp_path: Path, backend: str, config: str, code: str) -> Any:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").write_text(code)
    (tmp_path / "m/config.pbtxt").write_text(f'backend: "{backend}"\n{config}')
    (found,) = find_models([tmp_path], execution="thread")
    return found


async def together(at: Desk) -> list[Guest]:
    guests = []
    for row in ([1, 2, 3], [4, 5]):
        guests.append(at.ask(row))
        await trio.testing.wait_all_tasks_blocked()
    for guest in guests:
        await guest.done.wait()
    return guests


async def test_a_native_model_gets_the_elements_end_to_end_and_each_client_its_own(tmp_path: Path) -> None:
    runner = model(tmp_path, "trio_infer", CONFIG + BATCH, NATIVE)
    runs = runner.model.infer.__func__.__globals__["RUNS"]
    async with desk(runner) as at:
        joined = await together(at)
        alone = at.ask([6, 7, 8, 9])
    assert runs == [([1, 2, 3, 4, 5], [0, 3, 5]), ([6, 7, 8, 9], [0, 4])]
    given = [{name: array.tolist() for name, array in guest.responses[0].outputs.items()} for guest in (*joined, alone)]
    assert given == [
        {"y": [[10, 20, 30]], "sum": [[6]]},
        {"y": [[40, 50]], "sum": [[9]]},
        {"y": [[60, 70, 80, 90]], "sum": [[30]]},
    ]


async def test_a_triton_model_gets_requests_of_different_shapes_in_one_list(tmp_path: Path) -> None:
    async with desk(model(tmp_path, "python", CONFIG, TRITON)) as at:
        guests = await together(at)
    assert [guest.responses[0].outputs["y"].tolist() for guest in guests] == [[[10, 20, 30]], [[40, 50]]]
    assert [guest.responses[0].outputs["sum"].item() for guest in guests] == [2, 2], "both in one call"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('batch_input { target_name: "t" data_type: TYPE_FP32 source_input: "no" }', "must name one input as its `so"),
        ('batch_output { target_name: "t" }', "`batch_output` must name one input"),
        ('batch_input { target_name: "t" source_input: "x" }', "has no `data_type`"),
        ("max_batch_size: 0", "`allow_ragged_batch` of input 'x' needs a `max_batch_size` of 1 or more"),
    ],
)
def test_what_can_not_be_ragged_is_refused(config: str, reason: str) -> None:
    tensor = 'input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }'
    text = config if "max_batch_size" in config else f"max_batch_size: 4\n{config}"
    text += '\nbackend: "trio_infer"'
    with pytest.raises(ModelLoadError, match=reason):
        ModelConfig.parse(f"{tensor}\n{text}", name="m", where=Path("config.pbtxt"))
