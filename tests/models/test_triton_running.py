from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock
from triton_stage import CONFIG, Client, Repository, happens

from trio_infer.errors import ErrorCode, InferError
from trio_infer.models.host import NoHost
from trio_infer.models.runner import Instance

pytestmark = pytest.mark.trio


def model(body: str) -> str:
    """A model whose execute has this body, with `request` and the stage at hand."""
    lines = "".join(f"        {line}\n" for line in body.strip("\n").split("\n"))
    head = (
        "import stage, trio\nclass TritonPythonModel:\n    def execute(self, requests):\n        request, = requests\n"
    )
    return head + lines


async def test_a_response_comes_back_with_the_outputs_that_were_asked_for(repository: Repository, stage: Any) -> None:
    runner = await repository.loaded(
        model("""
out = [pb_utils.Tensor(name, request.inputs()[0].as_numpy() * 2) for name in ("OUT", "MORE")]
return [pb_utils.InferenceResponse(out, parameters={"took": 3})]
""")
    )
    everything = await Client(runner).ask()
    assert list(everything.outputs) == ["OUT", "MORE"]
    assert np.array_equal(everything.outputs["OUT"], [2, 4])
    assert everything.parameters == {"took": 3}
    assert list((await Client(runner, requested_outputs=("MORE",)).ask()).outputs) == ["MORE"]


async def test_the_instance_is_free_before_the_response_is_sent(repository: Repository, stage: Any) -> None:
    runner = await repository.loaded(model("return [pb_utils.InferenceResponse([])]"))
    instance = Instance(0)

    async def send(_: object) -> None:
        assert not instance.working

    await runner.run(instance, Client(runner).request, send)


async def test_the_model_sees_the_reshaped_input_and_the_client_the_reshaped_output(
    repository: Repository, stage: Any
) -> None:
    config = """
    backend: "python" max_batch_size: 4
    input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
    """
    runner = await repository.loaded(
        model("""
stage.shape = request.inputs()[0].shape()
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])]
"""),
        config,
    )
    answer = await Client(runner, inputs={"IN": np.zeros((3, 1), dtype=np.float32)}).ask()
    assert stage.shape == [3]
    assert answer.outputs["OUT"].shape == (3, 1)


async def test_an_async_execute_runs_on_an_event_loop(repository: Repository, stage: Any) -> None:
    runner = await repository.loaded(
        """
        import asyncio
        class TritonPythonModel:
            async def execute(self, requests):
                await asyncio.sleep(0)
                return [pb_utils.InferenceResponse([])]
        """
    )
    assert (await Client(runner).ask()).outputs == {}


@pytest.mark.parametrize(
    ("body", "message", "at"),
    [
        ("None.x", "AttributeError: 'NoneType' object has no attribute 'x'", "({line}): execute"),
        ("raise SystemExit(2)", "SystemExit: 2", "({line}): execute"),
        ("return None", "Expected a list in the execute return, found type 'NoneType'.", ""),
        ("return []", "execute was given 1 request and returned 0 responses.", ""),
        ("return [None]", "found type 'NoneType'.", ""),
        ("return ['x']", "found type 'str'.", ""),
    ],
)
async def test_a_failing_model_is_an_internal_error_and_logged_once(
    repository: Repository, stage: Any, caplog: pytest.LogCaptureFixture, body: str, message: str, at: str
) -> None:
    runner = await repository.loaded(model(body))
    client = Client(runner)
    with pytest.raises(InferError) as caught:
        await client.ask()
    assert caught.value.code is ErrorCode.INTERNAL
    text = caught.value.message
    assert text.startswith("Failed to process the request(s) for model 'm_0', message: ")
    assert message in text
    file = repository.root / "m/1/model.py"
    assert text.endswith(f"\n\nAt:\n  {file}{at.format(line=7)}\n") if at else "At:" not in text
    assert isinstance(caught.value.__cause__, BaseException)
    assert not caplog.records, "whoever answers the request logs it, once"
    assert not client.instance.working


async def test_the_frames_of_helpers_are_listed_from_the_inside(repository: Repository) -> None:
    repository.write("m/1/helper.py", "def work():\n    raise ValueError('boom-42')\n")
    runner = await repository.loaded(
        "import helper\nclass TritonPythonModel:\n    def execute(self, requests):\n        helper.work()\n"
    )
    with pytest.raises(InferError) as caught:
        await Client(runner).ask()
    where = repository.root / "m/1"
    assert caught.value.message.endswith(
        f"message: ValueError: boom-42\n\nAt:\n  {where}/helper.py(2): work\n  {where}/model.py(6): execute\n"
    )


async def test_an_error_in_a_response_keeps_its_code_and_is_not_logged(
    repository: Repository, stage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = await repository.loaded(
        model("""
return [pb_utils.InferenceResponse(error=pb_utils.TritonError("busy", pb_utils.TritonError.UNAVAILABLE))]
""")
    )
    with pytest.raises(InferError, match=r"^busy$") as caught:
        await Client(runner).ask()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert not caplog.records


async def test_a_model_that_is_not_decoupled_may_answer_by_a_sender_after_execute(
    repository: Repository, stage: Any
) -> None:
    stage.go_on = threading.Event()
    runner = await repository.loaded(
        """
        import threading, stage
        class TritonPythonModel:
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                threading.Thread(target=self.later, args=(sender,)).start()
                return [None]
            def later(self, sender):
                stage.go_on.wait(10)
                stage.faults = []
                response = pb_utils.InferenceResponse([])
                for args in ((None, 1), (response, 0), (response, 1), (None, 1)):
                    try:
                        sender.send(*args)
                        stage.faults.append("")
                    except pb_utils.TritonModelException as error:
                        stage.faults.append(str(error))
                stage.done.set()
        """
    )
    stage.done = threading.Event()
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        stage.go_on.set()
    await happens(stage.done)
    assert len(client.responses) == 1
    prefix = "Unable to send response. "
    assert stage.faults[0].startswith(prefix + "A model that is not decoupled must send its response before")
    assert stage.faults[2].startswith(prefix + "A model that is not decoupled has one response")
    assert stage.faults[1] == stage.faults[3] == ""
    assert not client.instance.working


POLLING = """
stage.started.set()
while not request.is_cancelled():
    stage.tick.wait(0.001)
stage.turned.set()
"""
AFTERWARDS = {
    "returns None": "return None",
    "returns a response": "return [pb_utils.InferenceResponse([])]",
    "returns an error": "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('x'))]",
    "raises": "raise RuntimeError('too late')",
}


@pytest.fixture
def signals(stage: Any) -> Any:
    for name in ("started", "turned", "go_on", "tick"):
        setattr(stage, name, threading.Event())
    return stage


@pytest.mark.parametrize("afterwards", AFTERWARDS)
async def test_the_flag_turns_and_whatever_the_model_then_does_is_dropped_silently(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture, afterwards: str
) -> None:
    caplog.set_level(logging.INFO)
    runner = await repository.loaded(model(POLLING + AFTERWARDS[afterwards]))
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        assert client.instance.working
        client.leave()
    await happens(signals.turned)
    with trio.fail_after(10):
        await client.idle.wait()
    assert not client.instance.working
    assert client.responses == []
    assert caplog.records == []


async def test_check_cancelled_stops_a_model_and_is_no_model_error(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = await repository.loaded(
        model("""
stage.started.set()
try:
    while True:
        trio.from_thread.check_cancelled()
        stage.tick.wait(0.001)
except Exception:
    stage.wrong = True
finally:
    stage.turned.set()
""")
    )
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        client.leave()
    await happens(signals.turned)
    with trio.fail_after(10):
        await client.idle.wait()
    assert not hasattr(signals, "wrong")
    assert caplog.records == []


async def test_a_deaf_model_keeps_its_instance_until_its_thread_ends_and_the_log_says_so(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    # Threads run in real time: each wait for one is given real time by a clock that doesn't jump meanwhile.
    caplog.set_level(logging.INFO)
    autojump_clock.autojump_threshold = float("inf")
    runner = await repository.loaded(
        model("stage.started.set()\nstage.go_on.wait(10)\nreturn [pb_utils.InferenceResponse([])]")
    )
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await trio.to_thread.run_sync(signals.started.wait)
        client.leave()
        await client.gone.wait()
    assert client.instance.working
    autojump_clock.jump(0.9)
    await trio.testing.wait_all_tasks_blocked()
    assert caplog.records == []
    autojump_clock.jump(0.2)
    await trio.testing.wait_all_tasks_blocked()
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "WARNING",
            "model instance 'm_0' goes on 1.1 s after its request was given up; it stays taken until it is done",
        )
    ]
    assert client.instance.working
    autojump_clock.jump(2)
    await trio.testing.wait_all_tasks_blocked()
    signals.go_on.set()
    await client.idle.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert not client.instance.working
    assert [(record.levelname, record.message) for record in caplog.records[1:]] == [
        ("INFO", "model instance 'm_0' is free again, 3.1 s late")
    ]


async def test_a_request_cancelled_before_its_thread_begins_never_reaches_the_model(
    repository: Repository, stage: Any
) -> None:
    runner = await repository.loaded(model("stage.reached = True"))
    client = Client(runner)
    client.leave()
    await client.stay()
    assert not client.instance.working
    assert client.idle.is_set()
    assert not hasattr(stage, "reached")


async def test_two_instances_run_at_once(repository: Repository, stage: Any) -> None:
    stage.both = threading.Barrier(2, timeout=10)
    runner = await repository.loaded(
        model("stage.both.wait()\nreturn [pb_utils.InferenceResponse([])]"), CONFIG + "instance_group { count: 2 }"
    )
    clients = [Client(runner, index=index) for index in range(2)]
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.ask)
    assert [len(client.responses) for client in clients] == [1, 1]


async def test_the_server_may_end_while_a_model_is_still_at_it(repository: Repository, signals: Any) -> None:
    ended = threading.Event()
    signals.ended = ended
    repository.model("m", model("stage.started.set()\nstage.go_on.wait(10)\nstage.ended.set()"))

    async def serve() -> None:
        runner = repository.runner()
        await runner.load(NoHost())
        client = Client(runner)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stay)
            await happens(signals.started)
            client.leave()

    await trio.to_thread.run_sync(trio.run, serve)
    signals.go_on.set()
    await happens(ended)
