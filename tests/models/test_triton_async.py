"""`async def execute`: an instance's event loop, many streams at a time, and cancelling by asyncio's own way."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import trio
from triton_stage import CONFIG, DECOUPLED, Client, Repository, happens

from trio_infer.errors import InferError, ModelLoadError

pytestmark = pytest.mark.trio

HEAD = """
import asyncio, stage
def number(n):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([n]))])
class TritonPythonModel:
"""
CANCEL_TASKS = 'parameters { key: "cancel_tasks" value { string_value: "true" } }\n'


@pytest.fixture
def signals(stage: Any) -> Any:
    for name in ("started", "turned", "go_on"):
        setattr(stage, name, threading.Event())
    stage.seen = []
    return stage


async def loaded(repository: Repository, methods: str, config: str = CONFIG) -> Any:
    lines = "".join(f"    {line}\n" for line in methods.strip("\n").split("\n"))
    return await repository.loaded(HEAD + lines, config)


async def test_an_instance_keeps_its_loop_so_what_belongs_to_it_is_good_in_the_next_request(
    repository: Repository, signals: Any
) -> None:
    runner = await loaded(
        repository,
        """
async def execute(self, requests):
    stage.seen.append(asyncio.get_running_loop())
    if not hasattr(self, "beat"):
        self.beat = asyncio.create_task(asyncio.sleep(3600))
    assert not self.beat.done()
    return [number(1)]
def finalize(self):
    stage.beat = self.beat
""",
    )
    await Client(runner).ask()
    await Client(runner).ask()
    first, second = signals.seen
    assert first is second
    with trio.fail_after(10):
        await runner.unload()
    assert signals.beat.cancelled()
    assert first.is_closed()


async def test_an_instance_of_a_decoupled_model_has_many_coroutines_under_way(
    repository: Repository, signals: Any
) -> None:
    signals.go = 0
    runner = await loaded(
        repository,
        """
def initialize(self, args):
    self.waiting = []
async def execute(self, requests):
    sender = requests[0].get_response_sender()
    self.waiting.append(asyncio.get_running_loop().create_future())
    if len(self.waiting) == 20:
        for future in self.waiting:
            future.set_result(None)
    await self.waiting[-1]
    sender.send(number(len(self.waiting)), 1)
""",
        DECOUPLED,
    )
    clients = [Client(runner) for _ in range(20)]
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.ask)
            with trio.fail_after(10):
                await client.idle.wait()  # as the queue does before it gives the instance to the next one
    assert [int(client.responses[0].outputs["OUT"][0]) for client in clients] == [20] * 20


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("raise ValueError('boom')", "message: ValueError: boom\n\nAt:\n"),
        ("return [number(1)]", "is using the decoupled mode and the execute function must return None and use senders"),
        ("raise SystemExit(3)", "message: SystemExit: 3"),
    ],
)
async def test_a_coroutine_that_fails_fails_its_own_request_only(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture, last: str, words: str
) -> None:
    runner = await loaded(
        repository,
        f"""
async def execute(self, requests):
    sender = requests[0].get_response_sender()
    sender.send(number(0))
    if requests[0].request_id() == "good":
        await asyncio.to_thread(stage.go_on.wait, 10)
        sender.send(number(1), 1)
        return
    {last}
""",
        DECOUPLED,
    )
    good, bad = Client(runner, id="good"), Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(good.ask)
        with pytest.raises(InferError) as caught:
            await bad.ask()
        assert words in caught.value.message
        assert len(bad.responses) == 1
        assert isinstance(caught.value.__cause__, BaseException)
        signals.go_on.set()
    assert len(good.responses) == 2
    assert not caplog.records


async def test_a_coroutine_that_fails_after_its_final_response_is_only_logged(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = await loaded(
        repository,
        """
async def execute(self, requests):
    requests[0].get_response_sender().send(number(0), 1)
    await asyncio.to_thread(stage.go_on.wait, 10)
    raise ValueError("late")
""",
        DECOUPLED,
    )
    client = Client(runner)
    await client.ask()
    signals.go_on.set()
    with trio.fail_after(10):
        await runner.unload()  # not before the coroutine has ended
    assert [record.message for record in caplog.records] == ["model instance 'm_0' failed after its final response"]


STAYING = """
async def execute(self, requests):
    stage.started.set()
    sender = requests[0].get_response_sender()
    try:
        await asyncio.wait_for(asyncio.Event().wait(), 0.05 if stage.short else 10)
    except asyncio.CancelledError:
        stage.seen.append("cancelled")
        raise
    except TimeoutError:
        stage.seen.append(f"is_cancelled: {sender.is_cancelled()}")
    finally:
        stage.turned.set()
"""


@pytest.mark.parametrize("config", [CONFIG, DECOUPLED])
async def test_with_cancel_tasks_a_coroutine_is_cancelled_when_its_client_leaves(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture, config: str
) -> None:
    caplog.set_level(logging.INFO)
    signals.short = False
    runner = await loaded(repository, STAYING, config + CANCEL_TASKS)
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        client.leave()
    await happens(signals.turned)
    with trio.fail_after(10):
        await runner.unload()
    assert signals.seen == ["cancelled"]
    assert caplog.records == []


async def test_without_it_nothing_interrupts_a_coroutine(repository: Repository, signals: Any) -> None:
    signals.short = True
    runner = await loaded(repository, STAYING)
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(signals.started)
        client.leave()
    with trio.fail_after(10):
        await client.idle.wait()
    assert signals.seen == ["is_cancelled: True"]


async def test_cancel_tasks_leaves_those_alone_whose_client_has_its_answer(
    repository: Repository, signals: Any
) -> None:
    runner = await loaded(
        repository,
        """
async def execute(self, requests):
    requests[0].get_response_sender().send(number(0), 1)
    await asyncio.to_thread(stage.go_on.wait, 10)
    stage.seen.append("done")
""",
        DECOUPLED + CANCEL_TASKS,
    )
    await Client(runner).ask()
    signals.go_on.set()
    with trio.fail_after(10):
        await runner.unload()
    assert signals.seen == ["done"]


async def test_cancel_tasks_is_true_or_false(repository: Repository) -> None:
    with pytest.raises(ModelLoadError, match=r"`cancel_tasks` must be 'true' or 'false', got 'yes'"):
        await repository.loaded("", CONFIG + CANCEL_TASKS.replace("true", "yes"))


READY = {
    "no hook": ("", True, ""),
    "true": ("def is_ready(self):\n    return True", True, ""),
    "false": ("def is_ready(self):\n    return False", False, ""),
    "async": ("async def is_ready(self):\n    await asyncio.sleep(0)\n    return True", True, ""),
    "no bool": ("def is_ready(self):\n    return 1", False, "is_ready must return a bool, got int"),
    "raises": ("def is_ready(self):\n    raise SystemExit", False, "is_ready failed"),
    "late": ("def is_ready(self):\n    stage.go_on.wait(10)", False, "is_ready has not answered within 0.05 s"),
}


@pytest.mark.parametrize("case", READY)
async def test_a_model_says_whether_it_is_ready(
    repository: Repository, signals: Any, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    hook, expected, words = READY[case]
    runner = await loaded(repository, hook + "\ndef execute(self, requests):\n    pass")
    (instance,) = runner._loaded
    within = 0.05 if case == "late" else 10.0
    assert await trio.to_thread.run_sync(instance.is_ready, within) is expected
    assert [record.message.partition(": ")[2] for record in caplog.records] == ([words] if words else [])
    if case == "late":
        assert not instance.is_ready(10), "it is at it still, and isn't asked again"
        signals.go_on.set()
    await runner.unload()
