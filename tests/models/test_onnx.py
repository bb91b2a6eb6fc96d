"""ONNX models: what is taken from the file, the same bytes as ONNX Runtime alone gives, and runs that stop."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import trio
from onnx import TensorProto, helper
from triton_stage import Client, Repository

from onnx_models import constant, giant, info, loop, network, save
from support import post as request_of
from support import serving
from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.models.host import NoHost
from trio_infer.models.repository import find_models

pytestmark = pytest.mark.trio
CONFIG = 'backend: "onnxruntime"\n'
BATCHED = CONFIG + "max_batch_size: 8\n"
LONG = 2**40


def parameter(key: str, value: object) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


@asynccontextmanager
async def running(repository: Repository, config: str = "", **options: Any) -> AsyncIterator[Any]:
    if config:
        repository.write("m/config.pbtxt", config)
    with trio.fail_after(60):
        runner = repository.runner(**options)
        await runner.load(NoHost())
        try:
            yield runner
        finally:
            await runner.unload()


@pytest.fixture
def file(repository: Repository) -> Path:
    return repository.root / "m/1/model.onnx"


def bare(file: Path, **inputs: Any) -> Any:
    return ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, inputs)


def rows(count: int, seed: int = 0, width: int = 8) -> Any:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


# -- What is taken from the file -------------------------------------------------------------------------------------


async def test_a_model_needs_no_configuration(repository: Repository, file: Path) -> None:
    network(file)
    async with running(repository) as runner:
        assert runner.config.backend == "onnxruntime"
        assert runner.config.default_model_filename == "model.onnx"
        assert [(one.name, one.datatype.value, one.shape) for one in runner.signature.inputs] == [("x", "FP32", (8,))]
        assert [(one.name, one.datatype.value, one.shape) for one in runner.signature.outputs] == [("y", "FP32", (8,))]
        assert runner.signature.max_batch_size == 4
        assert runner.config.batching is not None
        assert runner.stops == "operator"
        answer = await Client(runner, inputs={"x": rows(3)}).ask()
        assert answer.outputs["y"].tobytes() == bare(file, x=rows(3))[0].tobytes()


async def test_a_model_with_rows_of_its_own_is_not_batched(repository: Repository, file: Path) -> None:
    network(file, rows=2)
    async with running(repository) as runner:
        assert (runner.signature.max_batch_size, runner.signature.inputs[0].shape) == (0, (2, 8))
        answer = await Client(runner, inputs={"x": rows(2)}).ask()
        assert answer.outputs["y"].tobytes() == bare(file, x=rows(2))[0].tobytes()


@pytest.mark.parametrize(
    ("config", "batch", "shape"),
    [
        (CONFIG + 'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 8 ] }', 0, (-1, 8)),
        (CONFIG + 'input { name: "x" data_type: TYPE_FP32 dims: [ 8 ] }', 4, (8,)),
        (CONFIG + 'max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: [ 8 ] }', 2, (8,)),
        ('platform: "onnxruntime_onnx" max_batch_size: 3', 3, (8,)),
    ],
)
async def test_what_a_configuration_says_counts_and_the_rest_is_taken_from_the_file(
    repository: Repository, file: Path, config: str, batch: int, shape: tuple[int, ...]
) -> None:
    network(file)
    async with running(repository, config) as runner:
        assert (runner.signature.max_batch_size, runner.signature.inputs[0].shape) == (batch, shape)
        assert runner.signature.outputs[0].name == "y"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            CONFIG + 'input { name: "z" data_type: TYPE_FP32 dims: [ 8 ] }',
            "the configuration has the input 'z', the model",
        ),
        (
            CONFIG + 'input { name: "x" data_type: TYPE_INT32 dims: [ 8 ] }',
            "auto_complete_config: ValueError: input 'x' has data_type TYPE_INT32 in config.pbtxt, the model wants ",
        ),
        (
            BATCHED + 'input { name: "x" data_type: TYPE_FP32 dims: [ 9 ] }',
            "input 'x' has the shape [-1, 9] (with the batch dimension) in the configuration and [-1, 8] in the model",
        ),
        (BATCHED + parameter("intra_op_thread_count", "many"), "parameter `intra_op_thread_count` must be a number of"),
        (BATCHED + parameter("execution_mode", "2"), "parameter `execution_mode` must be '0' or '1', got '2'"),
        (
            BATCHED + "optimization { graph { level: 7 } }",
            "the graph's optimization level must be one of [-1, 0, 1, 2]",
        ),
        (BATCHED + "instance_group { kind: KIND_GPU }", "its instance group is KIND_GPU, and the onnxruntime that is"),
    ],
)
async def test_a_configuration_that_the_file_contradicts_is_refused(
    repository: Repository, file: Path, config: str, reason: str
) -> None:
    network(file)
    with pytest.raises(ModelLoadError) as caught:
        async with running(repository, config):
            pass
    assert caught.value.reason.startswith(reason)


async def test_without_completion_the_configuration_must_be_whole(repository: Repository, file: Path) -> None:
    network(file)
    with pytest.raises(ModelLoadError, match=r"the configuration lacks the inputs \['x'\]"):
        async with running(repository, CONFIG, auto_complete=False):
            pass


async def test_a_file_that_is_no_model_is_refused_in_one_line(repository: Repository, file: Path) -> None:
    repository.write("m/1/model.onnx", "nonsense")
    with pytest.raises(ModelLoadError) as caught:
        async with running(repository):
            pass
    assert "ONNX Runtime can't load it" in caught.value.reason
    assert "\n" not in str(caught.value)
    assert caught.value.where == file


async def test_without_onnxruntime_it_says_what_to_install(
    repository: Repository, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network(file)
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else find(name))
    with pytest.raises(ModelLoadError, match=r"not installed: pip install 'trio-infer\[onnx\]'"):
        async with running(repository):
            pass


async def test_a_type_that_the_protocol_does_not_have_is_refused_unless_nobody_asks_for_it(
    repository: Repository, file: Path
) -> None:
    several = helper.make_tensor_sequence_value_info("z", TensorProto.FLOAT, None)
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("SequenceConstruct", ["x"], ["z"])]
    save(file, nodes, [info("x", [3])], [info("y", [3]), several])
    with pytest.raises(
        ModelLoadError, match=r"output 'z' is seq\(tensor\(float\)\), which has no place in the protocol"
    ):
        async with running(repository):
            pass
    async with running(repository, CONFIG + 'output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }') as runner:
        answer = await Client(runner, inputs={"x": np.ones(3, np.float32)}).ask()
        assert answer.outputs["y"].tolist() == [-1, -1, -1]


async def test_options_of_a_session_are_parameters(repository: Repository, file: Path) -> None:
    network(file)
    config = BATCHED + "optimization { graph { level: 1 } }\n"
    for key, value in {
        "intra_op_thread_count": 2,
        "inter_op_thread_count": 2,
        "execution_mode": 1,
        "enable_mem_arena": 0,
        "enable_mem_pattern": 0,
        "session.set_denormal_as_zero": 1,
    }.items():
        config += parameter(key, value)
    async with running(repository, config) as runner:
        options = runner._loaded[0].model._session.get_session_options()
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 2)
        assert options.execution_mode == ort.ExecutionMode.ORT_PARALLEL
        assert not options.enable_cpu_mem_arena
        assert not options.enable_mem_pattern
        assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        answer = await Client(runner, inputs={"x": rows(1)}).ask()
        assert np.allclose(answer.outputs["y"], bare(file, x=rows(1))[0])


# -- Values ----------------------------------------------------------------------------------------------------------


KINDS = {
    "bool": TensorProto.BOOL,
    "int8": TensorProto.INT8,
    "int64": TensorProto.INT64,
    "uint16": TensorProto.UINT16,
    "float16": TensorProto.FLOAT16,
    "float64": TensorProto.DOUBLE,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_each_datatype_goes_through(repository: Repository, file: Path, kind: str) -> None:
    save(
        file,
        [helper.make_node("Identity", ["x"], ["y"])],
        [info("x", ["n", 2], KINDS[kind])],
        [info("y", ["n", 2], KINDS[kind])],
    )
    array = np.array([[0, 1], [1, 1]]).astype(kind)
    async with running(repository) as runner:
        answer = await Client(runner, inputs={"x": array}).ask()
        assert answer.outputs["y"].dtype == array.dtype
        assert np.array_equal(answer.outputs["y"], array)


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_strings_are_text_in_the_model_and_bytes_outside(
    repository: Repository, file: Path, execution: str
) -> None:
    kind = TensorProto.STRING
    save(file, [helper.make_node("Identity", ["x"], ["y"])], [info("x", ["n", 1], kind)], [info("y", ["n", 1], kind)])
    words = np.array([[b"word"], ["\N{SNOWMAN}".encode()]], dtype=object)
    async with running(repository, CONFIG + parameter("execution", execution)) as runner:
        answer = await Client(runner, inputs={"x": words}).ask()
        assert answer.outputs["y"].tolist() == words.tolist()
        with pytest.raises(InferError, match="model 'm' can't take this: 'utf-8' codec can't decode") as caught:
            await Client(runner, inputs={"x": np.array([[b"\xff"]], dtype=object)}).ask()
        assert caught.value.code is ErrorCode.INVALID_ARG


async def test_a_scalar_for_each_row_is_one_element(repository: Repository, file: Path) -> None:
    save(file, [helper.make_node("Neg", ["x"], ["y"])], [info("x", ["n"])], [info("y", ["n"])])
    async with running(repository) as runner:
        assert runner.signature.inputs[0].shape == (1,)
        answer = await Client(runner, inputs={"x": np.array([[1], [2]], np.float32)}).ask()
        assert answer.outputs["y"].tolist() == [[-1], [-2]]


async def test_only_outputs_that_are_wanted_are_given(repository: Repository, file: Path) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["z"])]
    save(file, nodes, [info("x", ["n"])], [info("y", ["n"]), info("z", ["n"])])
    config = CONFIG + 'input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }'
    async with running(repository, config) as runner:
        asked = [
            Client(runner, inputs={"x": np.ones(2, np.float32)}, requested_outputs=names) for names in ((), ("y",))
        ]
        assert [list((await client.ask()).outputs) for client in asked] == [["y", "z"], ["y"]]


async def test_what_the_model_cannot_take_is_the_clients_fault(repository: Repository, file: Path) -> None:
    network(file)
    config = CONFIG + 'input { name: "x" data_type: TYPE_FP32 dims: [ -1, -1 ] }'
    async with running(repository, config) as runner:
        with pytest.raises(InferError) as caught:
            await Client(runner, inputs={"x": rows(2, width=5)}).ask()
        assert caught.value.code is ErrorCode.INVALID_ARG
        assert caught.value.message.startswith("model 'm' can't take this: ")
        assert "x" in caught.value.message
        assert "\n" not in caught.value.message
        assert (await Client(runner, inputs={"x": rows(2)}).ask()).outputs["y"].shape == (2, 8)


# -- Batches ---------------------------------------------------------------------------------------------------------


async def attend(client: Client, part: Any) -> None:
    with client.scope:
        await part(client.send)


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_requests_that_run_together_are_answered_as_onnxruntime_answers_their_rows(
    repository: Repository, file: Path, execution: str
) -> None:
    network(file)
    async with running(repository, BATCHED + parameter("execution", execution)) as runner:
        clients = [Client(runner, inputs={"x": rows(count, count)}) for count in (1, 3, 2)]
        batch = runner.begin_batch([(client.instance, client.request) for client in clients])
        async with trio.open_nursery() as nursery:
            for client, part in zip(clients, batch, strict=True):
                nursery.start_soon(attend, client, part)
        whole = bare(file, x=np.concatenate([rows(1, 1), rows(3, 3), rows(2, 2)]))[0]
        together = np.concatenate([client.responses[0].outputs["y"] for client in clients])
        assert together.tobytes() == whole.tobytes()


async def test_an_output_that_has_not_a_row_for_each_is_refused_in_a_batch(repository: Repository, file: Path) -> None:
    node, fours = helper.make_node("Reshape", ["x", "fours"], ["y"]), constant("fours", np.array([-1, 4], np.int64))
    save(file, [node], [info("x", ["n", 8])], [info("y", ["k", 4])], [fours])
    async with running(repository, BATCHED) as runner:
        clients = [Client(runner, inputs={"x": rows(1)}) for _ in range(2)]
        batch = runner.begin_batch([(client.instance, client.request) for client in clients])
        for client, part in zip(clients, batch, strict=True):
            with pytest.raises(InferError, match=r"output 'y' has the shape \[4, 4\] for 2 rows, so"):
                await part(client.send)


# -- Cancelling ------------------------------------------------------------------------------------------------------


def long_run(runner: Any, trips: int = LONG, **fields: Any) -> Client:
    inputs = {"x": np.eye(128, dtype=np.float32), "trips": np.array([trips])}
    return Client(runner, inputs=inputs, **fields)


async def busy(runner: Any, client: Client) -> None:
    """Wait until a run is in the library: it has been called, and a moment has passed."""
    while not client.instance.timing.infer_began:  # noqa: ASYNC110 - a thread sets no event of ours
        await trio.sleep(0.001)
    await trio.sleep(0.05)


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_a_run_stops_when_its_client_leaves_and_the_session_is_good_for_the_next(
    repository: Repository, file: Path, execution: str, capfd: pytest.CaptureFixture[str]
) -> None:
    loop(file)
    async with running(repository, CONFIG + parameter("execution", execution)) as runner:
        before = await long_run(runner, 7).ask()
        for _ in range(3):
            client = long_run(runner)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.stay)
                if execution == "thread":
                    await busy(runner, client)
                else:
                    await trio.sleep(0.1)
                client.leave()
            await client.idle.wait()
            assert client.responses == []
        after = await long_run(runner, 7).ask()
        assert before.outputs["y"].tobytes() == after.outputs["y"].tobytes()
        expected = bare(file, x=np.eye(128, dtype=np.float32), trips=np.array([7]))[0]
        assert after.outputs["y"].tobytes() == expected.tobytes()
        if execution == "process":
            assert runner.exits == {}, "it stopped by itself"
    assert "terminate" not in capfd.readouterr().err


async def test_a_request_that_was_given_up_before_is_not_begun(repository: Repository, file: Path) -> None:
    loop(file)
    async with running(repository, CONFIG) as runner:
        client = long_run(runner)
        client.leave()
        await client.stay()
        await client.idle.wait()
        assert client.instance.timing.infer_began == 0


async def test_a_cancel_stops_its_own_run_and_no_other_of_the_same_model(repository: Repository, file: Path) -> None:
    loop(file)
    async with running(repository, CONFIG + "instance_group { count: 2 }") as runner:
        leaves, stays = long_run(runner), long_run(runner, 3000, index=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leaves.stay)
            nursery.start_soon(stays.stay)
            await busy(runner, leaves)
            await busy(runner, stays)
            leaves.leave()
            await leaves.idle.wait()
        (answer,) = stays.responses
        expected = bare(file, x=np.eye(128, dtype=np.float32), trips=np.array([3000]))[0]
        assert answer.outputs["y"].tobytes() == expected.tobytes()


async def test_a_batch_stops_with_the_last_to_leave(repository: Repository, file: Path) -> None:
    network(file, layers=3000, width=256)
    async with running(repository, BATCHED) as runner:
        clients = [Client(runner, inputs={"x": np.repeat(rows(1, width=256), 256, 0)}) for _ in range(2)]
        batch = runner.begin_batch([(client.instance, client.request) for client in clients])
        async with trio.open_nursery() as nursery:
            for client, part in zip(clients, batch, strict=True):
                nursery.start_soon(attend, client, part)
            await busy(runner, clients[0])
            clients[0].leave()
            await trio.sleep(0.05)
            assert clients[0].instance.working, "the other one is there"
            clients[1].leave()
        for client in clients:
            await client.idle.wait()
            assert client.responses == []


async def test_unloading_waits_for_a_run_that_is_told_to_stop(repository: Repository, file: Path) -> None:
    loop(file)
    async with running(repository, CONFIG) as runner:
        client = long_run(runner)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stay)
            await busy(runner, client)
            client.leave()
        await runner.unload()
        assert not client.instance.working


@pytest.mark.skipif(sys.platform != "linux", reason="processes are measured on Linux")
async def test_one_giant_operator_is_killed_in_a_process(repository: Repository, file: Path) -> None:
    giant(file, size=9000)
    config = CONFIG + parameter("execution", "process") + parameter("cancel_grace_ms", 100)
    async with running(repository, config) as runner:
        assert runner.stops == "process"
        client = Client(runner, inputs={"x": np.ones((1, 1), np.float32)})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stay)
            await trio.sleep(0.3)
            client.leave()
        with trio.fail_after(5):  # alone it takes far longer
            await client.idle.wait()
        while not runner.exits:  # noqa: ASYNC110 - it is reaped behind us
            await trio.sleep(0.01)
        assert runner.exits == {"killed": 1}


async def test_a_client_that_leaves_a_server_stops_the_run(repository: Repository, file: Path) -> None:
    loop(file)
    document = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [128, 128], "data": [1.0] * 128 * 128},
            {"name": "trips", "datatype": "INT64", "shape": [1], "data": [LONG]},
        ]
    }
    async with serving(*find_models([repository.root])) as served:
        client = await served.connect()
        await client.send(request_of("m", "infer", document))
        while not served.server.statistics().models["m", "1"].running:  # noqa: ASYNC110 - no move of ours
            await trio.sleep(0.01)
        await trio.sleep(0.05)
        await client.close()
        await served.ended(1)
        with trio.fail_after(10):
            while served.server.statistics().models["m", "1"].abandoned:  # noqa: ASYNC110 - as above
                await trio.sleep(0.005)
        assert served.outcomes() == {"cancelled": 1}
