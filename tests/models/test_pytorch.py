"""PyTorch models: the same bytes as the bare module gives, runs that stop between modules, or are killed."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from triton_stage import Client, Repository, happens

from support import post, serving
from trio_infer.errors import InferError, ModelLoadError
from trio_infer.models.host import NoHost
from trio_infer.models.repository import find_models

torch = pytest.importorskip("torch", reason="needs the extra `torch`")

TENSORS = """
backend: "pytorch"
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 16 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 16 ] }
"""
ROWS = """
backend: "pytorch"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 16 ] }
"""
NETWORK = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x):
        return self.blocks(x)

def load_model(directory):
    return Network()
"""
GATED = """
import stage
from torch import nn

class Step(nn.Module):
    def forward(self, x):
        stage.begin(float(x[0, 0]))
        return x + 1

def load_model(directory):
    return nn.Sequential(*(Step() for _ in range(5)))
"""
DEAF = """
import torch
from torch import nn

class Deaf(nn.Module):
    def forward(self, x):
        for _ in range(1_000_000_000):
            x = torch.tanh(x)
        return x
"""


def parameter(key: str, value: object) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


PROCESS = parameter("execution", "process")


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, 16)).astype(np.float32)


def bare(code: str = NETWORK) -> Any:
    names: dict[str, Any] = {}
    exec(code, names)
    return names["load_model"](None).eval()


def expected(x: Any) -> bytes:
    with torch.inference_mode():
        return bytes(bare()(torch.from_numpy(x)).numpy().tobytes())


@asynccontextmanager
async def running(repository: Repository, code: str = NETWORK, config: str = TENSORS) -> AsyncIterator[Any]:
    repository.write("m/config.pbtxt", config)
    if code:
        repository.write("m/1/model.py", code)
    with trio.fail_after(90):
        runner = repository.runner()
        await runner.load(NoHost())
        try:
            yield runner
        finally:
            await runner.unload()


# -- Answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grain", ["all", "parts", "blocks", "none"])
async def test_it_gives_the_bytes_that_the_bare_module_gives(repository: Repository, grain: str) -> None:
    async with running(repository, config=TENSORS + parameter("cancel_hooks", grain)) as runner:
        assert runner.stops == "operator"
        for count in (1, 5):
            answer = await Client(runner, inputs={"x": rows(count)}).ask()
            assert answer.outputs["y"].tobytes() == expected(rows(count))


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_requests_that_run_together_get_their_own_rows(repository: Repository, execution: str) -> None:
    async with running(repository, config=ROWS + parameter("execution", execution)) as runner:
        clients = [Client(runner, inputs={"x": rows(count, count)}) for count in (1, 3)]
        batch = runner.begin_batch([(client.instance, client.request) for client in clients])
        async with trio.open_nursery() as nursery:
            for client, part in zip(clients, batch, strict=True):
                nursery.start_soon(part, client.send)
        together = b"".join(client.responses[0].outputs["y"].tobytes() for client in clients)
        assert together == expected(np.concatenate([rows(1, 1), rows(3, 3)]))


async def test_inputs_that_may_not_be_written_to_are_copied_for_a_module_that_writes(repository: Repository) -> None:
    code = "from torch import nn\nclass Adds(nn.Module):\n    def forward(self, x):\n        return x.add_(1)\n"
    async with running(repository, code) as runner:
        array = rows(2)
        array.flags.writeable = False
        answer = await Client(runner, inputs={"x": array}).ask()
        assert np.array_equal(answer.outputs["y"], rows(2) + 1)
        assert np.array_equal(array, rows(2))


SEVERAL = """
backend: "pytorch"
input [ { name: "B" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "A" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "P" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "Q" data_type: TYPE_BF16 dims: [ 1 ] } ]
"""


@pytest.mark.parametrize(
    ("config", "forward"),
    [
        (SEVERAL, "def forward(self, first, second): return second - first, first.bfloat16()"),
        (SEVERAL, "def forward(self, A, B): return {'Q': B.bfloat16(), 'P': A - B}"),
        (
            SEVERAL.replace('"A"', '"IN__0"').replace('"B"', '"IN__1"'),
            "def forward(self, a, b): return [a - b, b.bfloat16()]",
        ),
    ],
)
async def test_tensors_go_by_order_by_name_or_by_number(repository: Repository, config: str, forward: str) -> None:
    code = f"from torch import nn\nclass Several(nn.Module):\n    {forward}\n"
    one, two = ("IN__0", "IN__1") if "IN__0" in config else ("A", "B")
    async with running(repository, code, config) as runner:
        inputs = {two: np.array([3], np.int32), one: np.array([10], np.int32)}
        outputs = (await Client(runner, inputs=inputs).ask()).outputs
        assert (outputs["P"].tolist(), outputs["Q"].tolist()) == ([7], [3])


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        ("return x, x", "model 'm' must give 1 tensors (['y']), got 2"),
        ("return 'text'", "model 'm' must give 1 tensors (['y']), got str"),
        ("return [1]", "model 'm' must give a tensor for output 'y', got int"),
        ("return {'z': x}", "model 'm' gave no output 'y'; it gave ['z']"),
        ("return x.to(torch.complex64)", "output 'y' of model 'm' must be FP32 (numpy float32), got numpy complex64"),
        ("return self.missing", "AttributeError: 'Wrong' object has no attribute 'missing'"),
    ],
)
async def test_what_a_module_gives_wrongly_is_told(repository: Repository, forward: str, words: str) -> None:
    code = f"import torch\nclass Wrong(torch.nn.Module):\n    def forward(self, x):\n        {forward}\n"
    async with running(repository, code) as runner:
        for _ in range(2):
            with pytest.raises(InferError) as caught:
                await Client(runner, inputs={"x": rows(1)}).ask()
            assert words in caught.value.message
            assert caught.value.status == 500


# -- Loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "config", "reason"),
    [
        ("x = 1", TENSORS, "its code must define `load_model(directory)`, or one subclass of torch.nn.Module that is"),
        ("def load_model(directory): return 3", TENSORS, "`load_model` must give a torch.nn.Module, got int"),
        ("raise ValueError('boom')", TENSORS, "initialize: ValueError: boom"),
        (NETWORK, 'backend: "pytorch"', "PyTorch doesn't tell what a model takes and gives: its config.pbtxt must"),
        (NETWORK, TENSORS.replace("FP32", "STRING", 1), "tensor 'x' is TYPE_STRING, which PyTorch doesn't have"),
        (NETWORK, TENSORS + parameter("cancel_hooks", "some"), "parameter `cancel_hooks` must be one of all, parts,"),
        (
            NETWORK,
            TENSORS + parameter("INTRA_OP_THREAD_COUNT", 0),
            "parameter `INTRA_OP_THREAD_COUNT` must be a number",
        ),
        (
            NETWORK,
            TENSORS + "instance_group { kind: KIND_GPU gpus: [ 7 ] }",
            "its instance group is KIND_GPU, and PyTo",
        ),
    ],
)
async def test_a_model_that_cannot_be_served_says_why(
    repository: Repository, code: str, config: str, reason: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        async with running(repository, code, config):
            pass
    assert caught.value.reason.startswith(reason)


@pytest.mark.parametrize(("name", "writer"), [("model.pt", "torch.jit.save"), ("model.pt2", "torch.export.save")])
async def test_a_file_that_is_no_model_is_refused_in_one_line(repository: Repository, name: str, writer: str) -> None:
    repository.write(f"m/1/{name}", "nonsense")
    with pytest.raises(ModelLoadError, match=f"it isn't what `{writer}` writes .*; PyTorch says: ") as caught:
        async with running(repository, "", TENSORS + parameter("execution", "thread")):
            pass
    assert "\n" not in str(caught.value)


# -- Stopping ----------------------------------------------------------------------------------------------------------


class Gates:
    """What the modules of `GATED` wait for, by the first value that came in."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.begun = threading.Event()
        self.go = threading.Event()

    def begin(self, value: float) -> None:
        self.steps.append(value)
        if value % 10 == 2:
            self.begun.set()
            assert self.go.wait(30)


async def test_a_run_ends_with_the_module_that_it_is_in_and_the_modules_are_as_good_as_before(
    repository: Repository, stage: Any
) -> None:
    gates = Gates()
    stage.begin = gates.begin
    async with running(repository, GATED) as runner:
        client = Client(runner, inputs={"x": np.zeros((1, 16), np.float32)})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stay)
            await happens(gates.begun)
            client.leave()
        assert client.instance.working, "the module is still running"
        gates.go.set()
        await client.idle.wait()
        assert gates.steps == [0, 1, 2], "of five"
        assert client.responses == []
        answer = await Client(runner, inputs={"x": np.full((1, 16), 10, np.float32)}).ask()
        assert answer.outputs["y"][0, 0] == 15


async def test_a_cancel_stops_its_own_run_and_no_other(repository: Repository, stage: Any) -> None:
    gates = Gates()
    stage.begin = gates.begin
    async with running(repository, GATED, TENSORS + "instance_group { count: 2 }") as runner:
        leaves = Client(runner, inputs={"x": np.zeros((1, 16), np.float32)})
        stays = Client(runner, index=1, inputs={"x": np.full((1, 16), 10, np.float32)})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leaves.stay)
            await happens(gates.begun)
            gates.begun.clear()
            nursery.start_soon(stays.stay)
            await happens(gates.begun)
            leaves.leave()
            await leaves.gone.wait()
            gates.go.set()
        await leaves.idle.wait()
        assert sorted(gates.steps) == [0, 1, 2, 10, 11, 12, 13, 14]
        assert stays.responses[0].outputs["y"][0, 0] == 15


async def test_a_batch_stops_with_the_last_to_leave(repository: Repository, stage: Any) -> None:
    gates = Gates()
    stage.begin = gates.begin
    async with running(repository, GATED, ROWS) as runner:
        clients = [Client(runner, inputs={"x": np.zeros((1, 16), np.float32)}) for _ in range(2)]
        batch = runner.begin_batch([(client.instance, client.request) for client in clients])

        async def attend(client: Client, part: Any) -> None:
            with client.scope:
                await part(client.send)

        async with trio.open_nursery() as nursery:
            for client, part in zip(clients, batch, strict=True):
                nursery.start_soon(attend, client, part)
            await happens(gates.begun)
            for client in clients:
                client.leave()
        gates.go.set()
        for client in clients:
            await client.idle.wait()
        assert gates.steps == [0, 1, 2]


async def test_unloading_takes_the_hooks_away(repository: Repository) -> None:
    async with running(repository) as runner:
        module = runner._loaded[0].model._module
        assert all(each._forward_pre_hooks for each in module.modules())
    assert not any(each._forward_pre_hooks for each in module.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # it is on its way out; there are models made with it
@pytest.mark.parametrize("made", ["torch.jit.trace(Network(), torch.zeros(1, 16))", "compiled()"])
async def test_one_that_asks_nobody_between_its_modules_is_warned_of(
    repository: Repository, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = "def compiled():\n    network = Network()\n    network.compile(backend='eager')\n    return network\n"
    async with running(repository, NETWORK.replace("return Network()", f"return {made}") + compiled) as runner:
        answer = await Client(runner, inputs={"x": rows(2)}).ask()
        assert np.allclose(answer.outputs["y"].ravel(), np.frombuffer(expected(rows(2)), np.float32))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("nothing stops a run of model 'm' between its modules: it is a ")


# -- Files, in processes -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit")  # the test makes what a user has
async def test_a_script_runs_in_a_process_and_is_killed(repository: Repository) -> None:
    class Deaf(torch.nn.Module):  # type: ignore[misc]  # torch is Any where it isn't installed
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = int(x[0, 0])
            for _ in range(n):
                x = torch.tanh(x) + 1
            return x

    repository.execution = "process"
    repository.write("m/1/x", "")
    torch.jit.script(Deaf()).save(str(repository.root / "m/1/model.pt"))
    config = TENSORS.replace('"x"', '"x__0"') + parameter("cancel_grace_ms", 100)
    async with running(repository, "", config) as runner:
        assert runner.stops == "process"
        answer = await Client(runner, inputs={"x__0": np.zeros((1, 16), np.float32)}).ask()
        assert answer.outputs["y"].tolist() == [[0] * 16]
        client = Client(runner, inputs={"x__0": np.full((1, 16), 1e9, np.float32)})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stay)
            await trio.sleep(0.3)
            client.leave()
        with trio.fail_after(10):
            await client.idle.wait()
            while not runner.exits:  # noqa: ASYNC110 - it is reaped behind us
                await trio.sleep(0.01)
        assert runner.exits == {"killed": 1}


async def test_an_exported_program_says_itself_what_it_takes_and_gives(repository: Repository) -> None:
    repository.execution = "process"
    repository.write("m/1/x", "")
    rows_of_any = {"x": {0: torch.export.Dim("rows", min=1, max=1024)}}
    program = torch.export.export(bare(), (torch.zeros(3, 16),), dynamic_shapes=rows_of_any)
    torch.export.save(program, repository.root / "m/1/model.pt2")
    async with running(repository, "", 'backend: "pytorch"') as runner:
        assert runner.stops == "process"
        assert [(spec.name, spec.shape) for spec in runner.signature.inputs] == [("x", (-1, 16))]
        assert [(spec.name, spec.shape) for spec in runner.signature.outputs] == [("OUTPUT__0", (-1, 16))]
        answer = await Client(runner, inputs={"x": rows(5)}).ask()
        assert np.allclose(answer.outputs["OUTPUT__0"], np.frombuffer(expected(rows(5)), np.float32).reshape(5, 16))


async def test_an_eager_module_stops_in_a_process_too(repository: Repository) -> None:
    note = repository.root / "note"
    code = f"""
import pathlib, time
from torch import nn

class Step(nn.Module):
    def forward(self, x):
        pathlib.Path({str(note)!r}).write_text("running")
        time.sleep(0.01)
        return x

def load_model(directory):
    return nn.Sequential(*[Step()] * 100_000)
"""
    async with running(repository, code, TENSORS + PROCESS + parameter("cancel_grace_ms", 60_000)) as runner:
        client = Client(runner, inputs={"x": rows(1)})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stay)
            while not note.exists():  # noqa: ASYNC110 - another process can't set our events
                await trio.sleep(0.005)
            client.leave()
        with trio.fail_after(10):
            await client.idle.wait()
        assert runner.exits == {}, "it stopped by itself"


async def test_a_client_that_leaves_a_server_stops_the_run(repository: Repository, stage: Any) -> None:
    gates = Gates()
    stage.begin = gates.begin
    repository.write("m/config.pbtxt", TENSORS)
    repository.write("m/1/model.py", GATED)
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}]}
    async with serving(*find_models([repository.root])) as served:
        client = await served.connect()
        await client.send(post("m", "infer", document))
        await happens(gates.begun)
        await client.close()
        await served.ended(1)
        gates.go.set()
        with trio.fail_after(10):
            while served.server.statistics().models["m", "1"].abandoned:  # noqa: ASYNC110 - no event of ours
                await trio.sleep(0.005)
        assert gates.steps == [0, 1, 2]
