"""Models that call models: what comes back, and that none of it outlives whoever wanted it."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
import trio
from triton_stage import CONFIG, DECOUPLED, Client, Repository, happens

from fake_host import FakeHost
from trio_infer.lifecycle import CancelReason, Life, Phase
from trio_infer.models.runner import Instance

pytestmark = pytest.mark.trio

ADD = """
import stage
class TritonPythonModel:
    def execute(self, requests):
        stage.seen = requests[0]
        out = requests[0].inputs()[0].as_numpy()
        out += 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)], parameters={"by": "add"})]
"""
COUNT = """
import stage
class TritonPythonModel:
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        for n in range(int(requests[0].inputs()[0].as_numpy()[0])):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([n], np.float32))]))
            if sender.is_cancelled():
                break
        if n == 6:
            raise ValueError("six")
        sender.send(flags=1)
"""
POLL = """
import stage
class TritonPythonModel:
    def execute(self, requests):
        stage.started.set()
        while not requests[0].is_cancelled():
            stage.tick.wait(0.001)
        stage.turned.set()
        return [pb_utils.InferenceResponse([])]
"""
HEAD = """
import asyncio, stage, threading
class TritonPythonModel:
    def request(self, name, value=1.0, **fields):
        tensor = pb_utils.Tensor("IN", np.full(2, value, np.float32))
        return pb_utils.InferenceRequest(model_name=name, inputs=[tensor], requested_output_names=["OUT"], **fields)
"""


@pytest.fixture
def signals(stage: Any) -> Any:
    for name in ("started", "turned", "go_on", "tick"):
        setattr(stage, name, threading.Event())
    stage.seen = None
    return stage


class Outer(Client):
    """A client of a model that asks others, with a life."""

    def __init__(self, runner: Any, **fields: Any) -> None:
        super().__init__(runner, **fields)
        self.life = Life(label="outer")
        self.life.advance(Phase.RUNNING)
        self.life.canceller = lambda _: self.leave()
        self.instance = Instance(0, self.life, on_end=self.idle.set)


async def outer(repository: Repository, body: str, config: str = CONFIG) -> tuple[Any, FakeHost]:
    """A model `outer` with a method `body`, among models to ask; and the host of them all."""
    host = FakeHost()
    repository.model("add", ADD)
    repository.model("count", COUNT, DECOUPLED)
    repository.model("poll", POLL)
    repository.model("outer", HEAD + "".join(f"    {line}\n" for line in body.strip("\n").split("\n")), config)
    await host.load(*(repository.runner(name) for name in ("add", "count", "poll", "outer")))
    return host.runners["outer"], host


async def test_exec_gives_the_other_models_response(repository: Repository, signals: Any) -> None:
    runner, host = await outer(
        repository,
        """
def execute(self, requests):
    request = self.request("add", request_id="r", correlation_id=7, flags=1, timeout=9, parameters={"p": 1.5})
    response = request.exec()
    assert not response.has_error(), response.error().message()
    assert response.parameters() == '{"by": "add"}'
    array = pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
    array *= 10
    stage.given = request.inputs()[0].as_numpy()
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]
""",
    )
    client = Outer(runner)
    assert (await client.ask()).outputs["OUT"].tolist() == [20, 20]
    assert signals.given.tolist() == [1, 1], "the other model wrote into a copy"
    seen = signals.seen
    assert (seen.request_id(), seen.correlation_id(), seen.flags(), seen.timeout()) == ("r", 7, 1, 9)
    assert seen.parameters() == '{"p": 1.5}'
    assert seen.requested_output_names() == ["OUT"]
    (child,) = host.children
    assert child.parent is not None
    assert child.parent.parent is client.life
    assert child.outcome is not None
    assert child.outcome.value == "completed"


ERRORS = {
    "no such model": (
        'self.request("nobody").exec()',
        "Failed for execute the inference request. Model 'nobody' is not ready.",
        "UNAVAILABLE",
    ),
    "no such version": (
        'self.request("add", model_version=3).exec()',
        "Failed for execute the inference request. Model 'add' is not ready.",
        "UNAVAILABLE",
    ),
    "several responses": (
        'self.request("count", 3).exec()',
        "model 'count' gave more than one response: call it with exec(decoupled=True)",
        "UNSUPPORTED",
    ),
    "no response": ('self.request("count", 0).exec()', "UnboundLocalError", "INTERNAL"),
    "a failure in mid-stream": (
        'list(self.request("count", 7).exec(decoupled=True))[-1]',
        "ValueError: six",
        "INTERNAL",
    ),
    "a failure, awaited": ('asyncio.run(self.wait(self.request("nobody")))', "'nobody' is not ready", "UNAVAILABLE"),
}


@pytest.mark.parametrize("case", ERRORS)
async def test_what_goes_wrong_is_a_response_with_an_error(repository: Repository, signals: Any, case: str) -> None:
    call, message, code = ERRORS[case]
    runner, _ = await outer(
        repository,
        f"""
async def wait(self, request):
    return await request.async_exec()
def execute(self, requests):
    response = {call}
    assert response.has_error()
    assert response.output_tensors() == []
    stage.error = response.error()
    return [pb_utils.InferenceResponse([])]
""",
    )
    await Outer(runner).ask()
    assert message in signals.error.message()
    assert signals.error.code().name == code


async def test_a_failure_of_the_other_model_is_logged_once_with_its_traceback(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner, _ = await outer(
        repository,
        """
def execute(self, requests):
    assert [*self.request("count", 7).exec(decoupled=True)][-1].has_error()
    return [pb_utils.InferenceResponse([])]
""",
    )
    await Outer(runner).ask()
    (record,) = caplog.records
    assert record.message == "model 'count' failed for another model"
    assert record.exc_info
    assert "six" in str(record.exc_info[1])


async def test_a_stream_comes_response_by_response_and_needs_no_end(repository: Repository, signals: Any) -> None:
    runner, host = await outer(
        repository,
        """
def execute(self, requests):
    responses = self.request("count", 50).exec(decoupled=True)
    everything = [response.output_tensors()[0].as_numpy()[0] for response in responses]
    assert next(responses, None) is None
    few = self.request("count", 1e6).exec(decoupled=True)
    assert [next(few).output_tensors()[0].as_numpy()[0] for _ in range(3)] == [0, 1, 2]
    few.cancel()
    *_, last = few
    assert last.error().code() == pb_utils.TritonError.CANCELLED
    del few
    next(self.request("count", 1e6).exec(decoupled=True))
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(everything))])]
""",
    )
    assert (await Outer(runner).ask()).outputs["OUT"].tolist() == [*range(50)]
    with trio.fail_after(10):
        await host.unload()  # which waits for the two that were not wanted
    assert len(host.children) == 3


async def test_several_are_awaited_together_and_streams_by_async_for(repository: Repository, signals: Any) -> None:
    runner, _ = await outer(
        repository,
        """
async def execute(self, requests):
    answers = await asyncio.gather(*(self.request("add", n).async_exec() for n in range(3)))
    sums = [answer.output_tensors()[0].as_numpy()[0] for answer in answers]
    async for response in await self.request("count", 12).async_exec(decoupled=True):
        sums.append(response.output_tensors()[0].as_numpy()[0])
    for response in await self.request("count", 2).async_exec(decoupled=True):
        sums.append(response.output_tensors()[0].as_numpy()[0])
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(sums))])]
""",
    )
    assert (await Outer(runner).ask()).outputs["OUT"].tolist() == [1, 2, 3, *range(12), 0, 1]


ASKING = {
    "exec": """
def execute(self, requests):
    return self.answer(self.request("poll").exec())
""",
    "async_exec": """
async def execute(self, requests):
    return self.answer(await self.request("poll").async_exec())
""",
    "an iterator": """
def execute(self, requests):
    return self.answer(*self.request("poll").exec(decoupled=True))
""",
    "a thread of the model's own": """
def execute(self, requests):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(self.request("poll").exec()))
    thread.start()
    thread.join()
    return self.answer(*answers)
""",
    "a library's thread": """
def execute(self, requests):
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as pool:
        return self.answer(pool.submit(self.request("poll").exec).result())
""",
}


@pytest.mark.parametrize("way", ASKING)
async def test_the_inner_request_is_cancelled_with_the_outer_one(
    repository: Repository, signals: Any, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner, host = await outer(
        repository,
        ASKING[way]
        + """
def answer(self, response):
    stage.error = response.error()
    stage.go_on.set()
    return [pb_utils.InferenceResponse([])]
""",
    )
    client = Outer(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        client.life.cancel(CancelReason.DISCONNECTED)
    await happens(signals.turned)
    await happens(signals.go_on)
    with trio.fail_after(10):
        await client.idle.wait()
        await host.unload()
    assert signals.error.code().name == "CANCELLED"
    assert signals.error.message() == "the request of model 'poll' was cancelled"
    (child,) = host.children
    assert child.reason is CancelReason.DISCONNECTED
    assert not caplog.records


async def test_what_is_asked_after_the_cancel_is_cancelled_at_once(repository: Repository, signals: Any) -> None:
    runner, _ = await outer(
        repository,
        """
def execute(self, requests):
    stage.started.set()
    stage.go_on.wait(10)
    stage.error = self.request("poll").exec().error()
    stage.turned.set()
    return [pb_utils.InferenceResponse([])]
""",
    )
    client = Outer(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        client.life.cancel(CancelReason.DISCONNECTED)
    signals.go_on.set()
    await happens(signals.turned)
    assert signals.error.code().name == "CANCELLED"


async def test_a_thread_that_works_for_several_loses_its_request_with_the_last_of_them(
    repository: Repository, signals: Any
) -> None:
    signals.senders = []
    runner, host = await outer(
        repository,
        """
def execute(self, requests):
    stage.senders.append(requests[0].get_response_sender())
    if len(stage.senders) == 2:
        threading.Thread(target=self.work).start()
def work(self):
    stage.error = self.request("poll").exec().error()
    while stage.senders:
        stage.senders.pop().send(flags=1)
""",
        DECOUPLED,
    )
    clients = [Outer(runner), Outer(runner)]
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.stay)
            await client.idle.wait()
        await happens(signals.started)
        clients[0].life.cancel(CancelReason.DISCONNECTED)
        await clients[0].gone.wait()
        assert not host.children[0].cancelled
        clients[1].life.cancel(CancelReason.DEADLINE)
    with trio.fail_after(10):
        await host.unload()
    assert host.children[0].reason is CancelReason.DEADLINE
    assert signals.error.code().name == "CANCELLED"


async def test_cancelling_the_task_that_awaits_it_cancels_the_inner_request(
    repository: Repository, signals: Any
) -> None:
    runner, _ = await outer(
        repository,
        """
async def execute(self, requests):
    waiting = asyncio.create_task(self.wait())
    await asyncio.to_thread(stage.started.wait, 10)
    waiting.cancel()
    await asyncio.to_thread(stage.turned.wait, 10)
    assert waiting.cancelled()
    return [pb_utils.InferenceResponse([])]
async def wait(self):
    await self.request("poll").async_exec()
""",
    )
    await Outer(runner).ask()
    assert signals.turned.is_set()


async def test_initialize_and_finalize_call_no_models(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture
) -> None:
    signals.faults = []
    _, host = await outer(
        repository,
        """
@staticmethod
def auto_complete_config(config):
    TritonPythonModel().fail()
    for call in (pb_utils.load_model, pb_utils.is_model_ready):
        try:
            call("add")
        except pb_utils.TritonModelException as error:
            stage.faults.append(str(error))
def fail(self):
    try:
        self.request("add").exec()
    except pb_utils.TritonModelException as error:
        stage.faults.append(str(error))
def initialize(self, args):
    self.fail()
    stage.ready = pb_utils.is_model_ready("add"), pb_utils.is_model_ready("add", "2"), pb_utils.is_model_ready("x")
def execute(self, requests):
    pass
def finalize(self):
    self.fail()
""",
    )
    await host.unload()
    text = "BLS is only supported during the 'execute' function: exec() was called during '{}'"
    assert signals.faults == [
        text.format("auto_complete_config"),
        "load_model() can't be called during 'auto_complete_config'",
        "is_model_ready() can't be called during 'auto_complete_config'",
        text.format("initialize"),
        text.format("finalize"),
    ]
    assert signals.ready == (True, False, False)


async def test_models_load_and_unload_models(repository: Repository, signals: Any) -> None:
    runner, host = await outer(
        repository,
        """
def initialize(self, args):
    pb_utils.load_model("a")
    pb_utils.load_model(model_name="b", files={"file:1/model.py": b"code"}, config='{"backend": "python"}')
    try:
        pb_utils.load_model("broken")
    except pb_utils.TritonModelException as error:
        stage.fault = str(error)
def execute(self, requests):
    pb_utils.unload_model("a", unload_dependents=True)
    return [pb_utils.InferenceResponse([])]
""",
    )
    await Outer(runner).ask()
    assert host.calls == [
        ("load", "a", None, {}),
        ("load", "b", '{"backend": "python"}', {"1/model.py": b"code"}),
        ("load", "broken", None, {}),
        ("unload", "a", True),
    ]
    assert signals.fault == "failed to load 'broken'"


async def test_a_model_may_ask_of_its_own_accord(repository: Repository, signals: Any) -> None:
    runner, host = await outer(
        repository,
        """
def execute(self, requests):
    threading.Thread(target=self.later).start()
    return [pb_utils.InferenceResponse([])]
def later(self):
    stage.go_on.wait(10)
    stage.error = self.request("add").exec().error()
    stage.turned.set()
""",
    )
    await Outer(runner).ask()
    signals.go_on.set()
    await happens(signals.turned)
    assert signals.error is None
    assert len(host.children) == 1


async def test_a_model_that_asks_while_the_server_ends_is_told_so(repository: Repository, signals: Any) -> None:
    async def serve() -> None:
        runner, _ = await outer(
            repository,
            """
def execute(self, requests):
    first = self.request("poll").exec().error()
    stage.go_on.wait(10)
    stage.errors = first, self.request("add").exec().error()
    try:
        pb_utils.is_model_ready("add")
    except pb_utils.TritonModelException as error:
        stage.fault = str(error)
    stage.turned2.set()
    return [pb_utils.InferenceResponse([])]
""",
        )
        client = Outer(runner)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stay)
            await happens(signals.started)
            client.leave()

    signals.turned2 = threading.Event()
    await trio.to_thread.run_sync(trio.run, serve)
    signals.go_on.set()
    await happens(signals.turned2)
    assert [error.message() for error in signals.errors] == ["the server is going down"] * 2
    assert signals.fault == "the server is going down"


async def test_bad_requests_are_refused_where_they_are_made(repository: Repository, signals: Any) -> None:
    signals.faults = []
    runner, _ = await outer(
        repository,
        """
def execute(self, requests):
    for make in (
        lambda: pb_utils.InferenceRequest(model_name="add", inputs=[np.zeros(1)]),
        lambda: self.request("add", parameters={"p": []}),
    ):
        try:
            make()
        except pb_utils.TritonModelException as error:
            stage.faults.append(str(error))
    return [pb_utils.InferenceResponse([])]
""",
    )
    await Outer(runner).ask()
    assert signals.faults == [
        "inputs must hold pb_utils.Tensor, got ndarray",
        "parameter 'p' must be a str, int, float or bool by name, got list",
    ]


async def test_strings_come_back_as_bytes_and_unwanted_outputs_not_at_all(repository: Repository, signals: Any) -> None:
    repository.model(
        "words",
        """
        class TritonPythonModel:
            def execute(self, requests):
                words = np.array(["ä", b"b"], dtype=object)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", words), pb_utils.Tensor("MORE", words)])]
        """,
    )
    runner, host = await outer(
        repository,
        """
def execute(self, requests):
    stage.out = self.request("words").exec().output_tensors()
    return [pb_utils.InferenceResponse([])]
""",
    )
    await host.load(repository.runner("words"))
    await Outer(runner).ask()
    (tensor,) = signals.out
    assert tensor.as_numpy().tolist() == ["ä".encode(), b"b"]
    assert np.dtype(tensor.as_numpy().dtype) == object


async def test_the_log_is_quiet_about_models_that_stop(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runner, host = await outer(
        repository, 'def execute(self, requests):\n    self.request("poll").exec()\n    return []'
    )
    client = Outer(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        client.life.cancel(CancelReason.DISCONNECTED)
    with trio.fail_after(10):
        await host.unload()
    assert caplog.records == []
