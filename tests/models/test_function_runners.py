"""Plain functions as models: found by name, called with arrays, stopped or killed, in processes and in threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import plain_functions
import pytest
import trio
from triton_stage import Client

from support import post, serving
from trio_infer import Batching, InferError, ModelLoadError, TensorSpec, check_cancelled, is_cancelled, runners
from trio_infer.models.host import NoHost

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as it is measured on Linux")

X = TensorSpec("x", "FP32", [-1])
FILE = TensorSpec("file", "BYTES", [1])
WAYS = {"process": runners.process, "thread": runners.thread}
Way = Callable[..., Any]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@asynccontextmanager
async def running(runner: Any) -> AsyncIterator[Any]:
    with trio.fail_after(30):
        await runner.load(NoHost())
        try:
            yield runner
        finally:
            await runner.unload()


def asking(runner: Any, *values: float, **inputs: Any) -> Client:
    return Client(runner, inputs={"x": np.array(values, np.float32), **inputs})


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


async def noted(file: Path, word: str = "") -> str:
    while not (read(file) if not word else read(file) == word):  # noqa: ASYNC110 - another process sets no event
        await trio.sleep(0.002)
    return read(file)


async def test_it_gives_the_bytes_that_the_function_gives(way: Way) -> None:
    async with running(way(plain_functions.double, inputs=[X], outputs=[TensorSpec("y", "FP32", [-1])])) as runner:
        assert (runner.signature.name, runner.signature.version) == ("double", "1")
        for size in (0, 1, 1000, 100_000):
            x = np.random.default_rng(size).normal(size=size).astype(np.float32)
            answer = await Client(runner, inputs={"x": x}).ask()
            assert answer.outputs["y"].tobytes() == plain_functions.double(x).tobytes()


async def test_several_outputs_are_a_mapping_and_an_optional_input_has_the_functions_default(way: Way) -> None:
    outputs = [TensorSpec("sum", "FP32", [-1]), TensorSpec("pid", "INT64", [1])]
    inputs = [X, TensorSpec("y", "FP32", [-1], optional=True)]
    async with running(way(plain_functions.both, name="b", version="3", inputs=inputs, outputs=outputs)) as runner:
        assert (runner.signature.name, runner.signature.version) == ("b", "3")
        one = (await asking(runner, 1, 2).ask()).outputs
        two = (await asking(runner, 1, 2, y=np.array([3, 4], np.float32)).ask()).outputs
        assert (one["sum"].tolist(), two["sum"].tolist()) == ([1, 2], [4, 6])
        assert bool(one["pid"][0] == os.getpid()) is (way is runners.thread)


async def test_one_that_yields_gives_any_number_of_responses(way: Way) -> None:
    async with running(way(plain_functions.count, inputs=[X], outputs=[TensorSpec("n", "INT32", [1])])) as runner:
        assert runner.signature.decoupled
        for number in (3, 0, 20):
            client = asking(runner, number)
            await client.stay()
            assert [int(response.outputs["n"][0]) for response in client.responses] == list(range(number))
            assert {response.outputs["n"].dtype for response in client.responses} <= {np.dtype(np.int32)}


@pytest.mark.parametrize("name", ["asks", "checks", "streams_and_asks"])
async def test_one_that_asks_stops_when_its_client_leaves(way: Way, name: str, tmp_path: Path) -> None:
    function = getattr(plain_functions, name)
    async with running(way(function, inputs=[X, FILE], outputs=[TensorSpec("y", "FP32", [-1])])) as runner:
        for turn in range(2):
            file = tmp_path / str(turn)
            client = asking(runner, 1, file=np.array([str(file).encode()], dtype=object))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.stay)
                await noted(file)
                client.leave()
            await client.idle.wait()
            await noted(file, "heard")
            assert not client.responses or name == "streams_and_asks"
        if way is runners.process:
            assert runner.exits == {}, "nothing was killed"


async def test_one_that_is_deaf_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = runners.process(
        plain_functions.deaf, inputs=[X, FILE], outputs=[TensorSpec("y", "FP32", [-1])], cancel_grace=0.05
    )
    assert runner.stops == "process"
    async with running(runner):
        file = tmp_path / "file"
        client = asking(runner, 1, file=np.array([str(file).encode()], dtype=object))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stay)
            pid = int(await noted(file))
            client.leave()
        await client.idle.wait()
        while not runner.exits:  # type: ignore[attr-defined]  # noqa: ASYNC110 - it is reaped behind us
            await trio.sleep(0.002)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert runner.exits == {"killed": 1}  # type: ignore[attr-defined]  # a process runner's
    assert "ERROR" not in {record.levelname for record in caplog.records}


async def test_rows_of_several_requests_are_computed_together(way: Way) -> None:
    runner = way(
        plain_functions.double,
        inputs=[TensorSpec("x", "FP32", [2])],
        outputs=[TensorSpec("y", "FP32", [2])],
        max_batch_size=8,
        batching=Batching(),
    )
    async with running(runner):
        assert runner.config.batching is not None
        arrays = [np.full((rows, 2), rows, np.float32) for rows in (1, 3)]
        clients = [Client(runner, inputs={"x": array}) for array in arrays]
        batch = runner.begin_batch([(client.instance, client.request) for client in clients])
        async with trio.open_nursery() as nursery:
            for client, part in zip(clients, batch, strict=True):
                nursery.start_soon(part, client.send)
        answers = [client.responses[0].outputs["y"] for client in clients]
        assert [answer.tolist() for answer in answers] == [(array * 2).tolist() for array in arrays]


async def test_what_it_raises_fails_its_request_with_its_own_lines(way: Way) -> None:
    async with running(way(plain_functions.raises, inputs=[X], outputs=[TensorSpec("y", "FP32", [-1])])) as runner:
        for _ in range(2):
            with pytest.raises(InferError, match="ValueError: boom-42") as caught:
                await asking(runner, 1).ask()
            assert caught.value.status == 500
            assert "plain_functions.py" in caught.value.message
            assert caught.value.__cause__ is not None


async def test_what_it_raises_in_mid_stream_comes_after_what_it_gave(way: Way) -> None:
    function = plain_functions.streams_and_raises
    async with running(way(function, inputs=[X], outputs=[TensorSpec("y", "FP32", [-1])])) as runner:
        client = asking(runner, 1)
        with pytest.raises(InferError, match="ValueError: boom-42"):
            await client.ask()
        assert len(client.responses) == 1


async def test_leaving_the_program_leaves_only_the_request(way: Way) -> None:
    async with running(way(plain_functions.leaves, inputs=[X], outputs=[TensorSpec("y", "FP32", [-1])])) as runner:
        for _ in range(2):
            with pytest.raises(InferError, match="SystemExit: 3"):
                await asking(runner, 1).ask()


@pytest.mark.parametrize(
    ("which", "outputs", "words"),
    [
        (1, ["y"], "output 'y' of model 'nonsense' must be FP32 (numpy float32), got numpy <U7"),
        (1, ["y", "z"], "function 'nonsense' must give a mapping of the outputs ['y', 'z'], got str"),
        (2, ["y"], "function 'nonsense' must give the outputs ['y'], got ['z']"),
        (3, ["y"], "output 'y' of model 'nonsense' must be FP32 (numpy float32), got numpy complex64"),
        (5, ["y"], "function 'nonsense' must give the output 'y', got None"),
        (5, ["y", "z"], "function 'nonsense' must give a mapping of the outputs ['y', 'z'], got NoneType"),
    ],
)
async def test_what_makes_no_sense_is_told(way: Way, which: int, outputs: list[str], words: str) -> None:
    specs = [TensorSpec(name, "FP32", [-1]) for name in outputs]
    async with running(way(plain_functions.nonsense, inputs=[X], outputs=specs)) as runner:
        with pytest.raises(InferError) as caught:
            await asking(runner, which).ask()
        assert caught.value.message.startswith(words)
        assert caught.value.status == 500


async def test_settings_of_a_process_are_arguments() -> None:
    cpu = min(os.sched_getaffinity(0))
    runner = runners.process(
        plain_functions.said,
        inputs=[X],
        outputs=[TensorSpec("y", "FP64", [2])],
        instances=2,
        cancel_grace=None,
        spares=3,
        max_requests=7,
        memory_limit=2**30 + 1,
        cpu_affinity=str(cpu),
        environment={"NUMBER": "42"},
        on_disconnect="finish",
    )
    worker = runner.config.worker
    assert (worker.grace, worker.spares, worker.max_requests, worker.memory_limit) == (None, 3, 7, 2**30 + 2**20)
    assert (runner.instances, runner.on_disconnect, runner.stops) == (2, "finish", "callback")
    async with running(runner):
        assert (await asking(runner, 1).ask()).outputs["y"].tolist() == [42, 1]


def nested() -> Callable[..., Any]:
    def inner(x: Any) -> Any:
        return x

    return inner


class Callable_:  # noqa: N801 - it is one
    def method(self, x: Any) -> Any:
        return x


shadowed = plain_functions.double


def make_shadow() -> Any:
    def double(x: Any) -> Any:
        return x

    double.__qualname__, double.__module__ = "double", "plain_functions"
    return double


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x, "it is a lambda, so no other process can import it; define it with `def` at the top of a module"),
        (nested(), "'nested.<locals>.inner' is defined within a function, so no other process"),
        (Callable_().method, "'Callable_.method' in the module test_function_runners is something else, so"),
        (partial(plain_functions.double), "functools.partial(<function double at"),
        (make_shadow(), "'double' in the module plain_functions is something else, so no other process can import it"),
    ],
)
def test_what_no_process_can_import_is_refused_at_once(function: Any, reason: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        runners.process(function, name="f", inputs=[X], outputs=[X])
    assert caught.value.reason.startswith(reason)
    runners.thread(function, name="f", inputs=[X], outputs=[X])  # that is as good as any


async def coroutine(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (coroutine, {}, "it is `async def`, which is for `trio_infer.Model`; here a plain `def` is called"),
        (
            plain_functions.double,
            {"inputs": [TensorSpec("z", "FP32", [1])]},
            "double(x: 'Any') -> 'Any' can't be called with the inputs ['z']: missing a required argument: 'x'",
        ),
        (
            plain_functions.double,
            {"inputs": [TensorSpec("x", "FP32", [1], optional=True)]},
            "double(x: 'Any') -> 'Any' can't be called with the inputs []: missing a required argument: 'x'",
        ),
        (plain_functions.double, {"instances": 0}, "`instances` must be at least 1, got 0"),
        (plain_functions.double, {"max_batch_size": -1}, "`max_batch_size` must be 0 or more, got -1"),
        (plain_functions.double, {"on_disconnect": "maybe"}, "parameter `on_disconnect` must be 'cancel' or 'finish'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(way: Way, function: Any, options: Any, reason: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        way(function, **{"inputs": [X], "outputs": [X], **options})
    assert caught.value.reason.startswith(reason)


def test_outside_of_a_run_nothing_is_cancelled() -> None:
    assert not is_cancelled()
    check_cancelled()


async def test_a_server_serves_functions_beside_models() -> None:
    y = [TensorSpec("y", "FP32", [-1])]
    models = [runners.process(plain_functions.double, inputs=[X], outputs=y)]
    models += [runners.thread(lambda x: x + 1, name="more", inputs=[X], outputs=y)]
    async with serving(*models, memory=True) as served:
        client = served.connect_in_memory()
        document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [20]}]}
        answers = [await client.ask(post(name, "infer", document)) for name in ("double", "more")]
        assert [answer.json["outputs"][0]["data"] for answer in answers] == [[40], [21]]


SCRIPT = """
import numpy as np
import trio
from trio_infer import InferRequest, TensorSpec, runners
from trio_infer.models.host import NoHost
from trio_infer.models.runner import Instance

print("imported as", __name__)

def triple(x):
    return x * 3

async def main():
    spec = TensorSpec("x", "FP32", [1])
    runner = runners.process(triple, inputs=[spec], outputs=[TensorSpec("y", "FP32", [1])])
    await runner.load(NoHost())

    async def send(response):
        print(response.outputs["y"].tolist())

    request = InferRequest("triple", "1", {"x": np.array([14], np.float32)})
    await runner.run(Instance(0), request, send)
    await runner.unload()

if __name__ == "__main__":
    trio.run(main)
"""


def test_a_scripts_function_is_found_in_its_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines() == ["imported as __main__", "imported as __mp_main__", "[42.0]"], done.stderr
    assert done.stderr == ""


def test_a_function_of_a_module_that_is_run_by_its_name_is_found_with_its_siblings(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sibling.py").write_text("factor = 3\n")
    script = SCRIPT.replace("import trio\n", "import trio\nfrom .sibling import factor\n").replace(
        "x * 3", "x * factor"
    )
    (package / "tool.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "package.tool"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines() == ["imported as __main__", "imported as package.tool", "[42.0]"], done.stderr


async def test_a_module_that_cannot_be_imported_there_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "once_only.py"
    here = f"import os\nif os.getpid() != {os.getpid()}: raise ValueError('not here')\n"
    module.write_text(here + "def f(x): return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import once_only  # type: ignore[import-not-found]  # it was written just now

    with pytest.raises(ModelLoadError) as caught:
        async with running(runners.process(once_only.f, inputs=[X], outputs=[X])):
            pass
    assert str(caught.value) == (
        f"model 'f' can't be loaded: importing f from once_only: ValueError: not here ({module}:2)"
    )
