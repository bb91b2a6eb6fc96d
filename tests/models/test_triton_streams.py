from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import trio
from triton_stage import DECOUPLED, Client, Repository, happens

from trio_infer.errors import ErrorCode, InferError
from trio_infer.models.triton_work import LIMIT
from trio_infer.protocol.values import InferResponse

pytestmark = pytest.mark.trio

HELP = """
import threading, stage
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
def number(n):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([n]))])
class TritonPythonModel:
"""


def numbers(client: Client) -> list[int]:
    return [int(response.outputs["OUT"][0]) for response in client.responses]


async def loaded(repository: Repository, methods: str) -> Any:
    lines = "".join(f"    {line}\n" for line in methods.strip("\n").split("\n"))
    return await repository.loaded(HELP + lines, DECOUPLED)


@pytest.fixture
def signals(stage: Any) -> Any:
    for name in ("started", "turned", "go_on", "tick"):
        setattr(stage, name, threading.Event())
    stage.sent = []
    return stage


async def test_responses_come_in_the_order_in_which_they_were_sent(repository: Repository, stage: Any) -> None:
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    sender = requests[0].get_response_sender()
    for n in range(50):
        sender.send(number(n))
    sender.send(flags=FINAL)
""",
    )
    assert runner.signature.decoupled
    client = Client(runner)
    await client.ask()
    assert numbers(client) == list(range(50))
    assert not client.instance.working


async def test_the_first_response_is_delivered_while_execute_still_runs(repository: Repository, signals: Any) -> None:
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    sender = requests[0].get_response_sender()
    sender.send(number(0))
    assert stage.go_on.wait(10)
    sender.send(number(1), FINAL)
""",
    )
    client = Client(runner)

    async def send(response: InferResponse) -> None:
        client.responses.append(response)
        signals.go_on.set()

    with trio.fail_after(10):
        await runner.run(client.instance, client.request, send)
    assert numbers(client) == [0, 1]


async def test_a_thread_may_go_on_sending_after_execute_has_returned(repository: Repository, signals: Any) -> None:
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    threading.Thread(target=self.later, args=(requests[0].get_response_sender(),)).start()
def later(self, sender):
    stage.started.set()
    stage.go_on.wait(10)
    sender.send(number(1))
    sender.send(number(2), FINAL)
    try:
        sender.send(number(3))
    except pb_utils.TritonModelException as error:
        stage.fault = str(error)
    stage.turned.set()
""",
    )
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        with trio.fail_after(10):
            await client.idle.wait()  # the next request may come
        assert not client.gone.is_set()
        signals.go_on.set()
    await happens(signals.turned)
    assert numbers(client) == [1, 2]
    assert signals.fault.startswith("Unable to send response. The final flag was sent before")


async def test_the_run_ends_only_when_execute_has_returned_too(repository: Repository, signals: Any) -> None:
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    requests[0].get_response_sender().send(number(0), FINAL)
    stage.started.set()
    stage.go_on.wait(10)
""",
    )
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        await trio.testing.wait_all_tasks_blocked()
        assert numbers(client) == [0]
        assert not client.gone.is_set()
        signals.go_on.set()
    assert not client.instance.working


async def test_no_response_at_all_is_a_valid_stream(repository: Repository, stage: Any) -> None:
    runner = await loaded(
        repository, "def execute(self, requests):\n    requests[0].get_response_sender().send(flags=FINAL)"
    )
    client = Client(runner)
    await runner.run(client.instance, client.request, client.send)
    assert client.responses == []


async def test_an_error_in_mid_stream_comes_after_the_responses_before_it(
    repository: Repository, stage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    sender = requests[0].get_response_sender()
    sender.send(number(0))
    sender.send(number(1))
    error = pb_utils.TritonError("no more", pb_utils.TritonError.NOT_FOUND)
    sender.send(pb_utils.InferenceResponse(error=error), FINAL)
""",
    )
    client = Client(runner)
    with pytest.raises(InferError, match=r"^no more$") as caught:
        await client.ask()
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert numbers(client) == [0, 1]
    assert caplog.records == []


async def test_execute_that_raises_in_mid_stream_fails_it_after_what_was_sent(
    repository: Repository, stage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    sender = requests[0].get_response_sender()
    for n in range(3):
        sender.send(number(n))
    raise ValueError("boom-42")
""",
    )
    client = Client(runner)
    with pytest.raises(InferError, match=r"ValueError: boom-42") as caught:
        await client.ask()
    assert caught.value.code is ErrorCode.INTERNAL
    assert numbers(client) == [0, 1, 2]
    assert not caplog.records, "whoever answers the request logs it, once"
    assert not client.instance.working


async def test_execute_that_raises_after_the_final_flag_is_only_logged(
    repository: Repository, stage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    requests[0].get_response_sender().send(number(0), FINAL)
    raise ValueError("late")
""",
    )
    client = Client(runner)
    await client.ask()
    assert [record.message for record in caplog.records] == ["model instance 'm_0' failed after its final response"]


async def test_returning_something_is_an_error(repository: Repository, stage: Any) -> None:
    runner = await loaded(repository, "def execute(self, requests):\n    return [number(0)]")
    with pytest.raises(InferError, match=r"must return None and use senders, got list"):
        await Client(runner).ask()


async def test_a_sender_that_is_dropped_without_the_final_flag_does_not_hang_the_stream(
    repository: Repository, stage: Any
) -> None:
    runner = await loaded(
        repository, "def execute(self, requests):\n    requests[0].get_response_sender().send(number(0))"
    )
    client = Client(runner)
    with pytest.raises(InferError, match=r"ended without the final flag"):
        await client.ask()
    assert numbers(client) == [0]


async def test_a_slow_client_holds_the_model_back_and_leaving_releases_it(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    sender = requests[0].get_response_sender()
    for n in range(100):
        stage.sent.append(n)
        if n == stage.limit:
            stage.started.set()
        sender.send(number(n))
    sender.send(flags=FINAL)
    stage.turned.set()
""",
    )
    signals.limit = LIMIT + 1  # one is with the client, LIMIT wait, and this one blocks
    client = Client(runner)
    taken = trio.Event()

    async def send(_: InferResponse) -> None:
        taken.set()
        await trio.sleep_forever()

    async def stay() -> None:
        with client.scope:
            await runner.run(client.instance, client.request, send)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stay)
        await taken.wait()
        await happens(signals.started)
        await trio.testing.wait_all_tasks_blocked()
        assert len(signals.sent) == LIMIT + 2
        client.leave()
    await happens(signals.turned)
    with trio.fail_after(10):
        await client.idle.wait()
    assert len(signals.sent) == 100
    assert caplog.records == []


async def test_a_stream_whose_client_left_keeps_the_model_from_being_finalized_until_the_final_flag(
    repository: Repository, signals: Any
) -> None:
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    threading.Thread(target=self.later, args=(requests[0].get_response_sender(),)).start()
def later(self, sender):
    sender.send(number(0))
    stage.started.set()
    while not sender.is_cancelled():
        stage.tick.wait(0.001)
    stage.turned.set()
    stage.go_on.wait(10)
    stage.sent.append("the last of it")
    sender.send(flags=FINAL)
def finalize(self):
    stage.sent.append("finalize")
""",
    )
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        with trio.fail_after(10):
            await client.idle.wait()  # `execute` has returned, which may take longer than its thread to get so far
        client.leave()
    assert not client.instance.working
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.unload)
        await happens(signals.turned)
        await trio.testing.wait_all_tasks_blocked()
        assert signals.sent == []
        signals.go_on.set()
    assert numbers(client) == [0]
    assert signals.sent == ["the last of it", "finalize"]


async def test_an_abandoned_stream_whose_sender_is_dropped_is_over(repository: Repository, signals: Any) -> None:
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    stage.kept = [requests[0].get_response_sender()]
    stage.started.set()
def finalize(self):
    stage.turned.set()
""",
    )
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        with trio.fail_after(10):
            await client.idle.wait()
        assert runner.abandoned == 0
        client.leave()
    assert runner.abandoned == 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.unload)
        await trio.testing.wait_all_tasks_blocked()
        assert not signals.turned.is_set()
        signals.kept.clear()
    assert signals.turned.is_set()
    assert runner.abandoned == 0


async def test_a_client_that_leaves_before_the_thread_begins_frees_the_instance(
    repository: Repository, stage: Any
) -> None:
    runner = await loaded(repository, "def execute(self, requests):\n    stage.reached = True")
    client = Client(runner)
    client.leave()
    await client.stay()
    assert not client.instance.working
    assert not hasattr(stage, "reached")


async def test_an_error_of_the_sending_side_comes_out_as_itself(repository: Repository, signals: Any) -> None:
    runner = await loaded(
        repository,
        """
def execute(self, requests):
    sender = requests[0].get_response_sender()
    sender.send(number(0))
    stage.go_on.wait(10)
    sender.send(flags=FINAL)
""",
    )
    client = Client(runner)

    async def send(_: InferResponse) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match=r"^gone$"):
        await runner.run(client.instance, client.request, send)
    assert client.instance.working
    signals.go_on.set()
    with trio.fail_after(10):
        await client.idle.wait()
