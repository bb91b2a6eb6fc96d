"""A worker process is killed at each step of what it says and does: who it was for is told, and the model goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from test_worker_processes import children, gone
from triton_stage import CONFIG, Client, Repository

from fake_host import FakeHost
from trio_infer.errors import InferError
from trio_infer.lifecycle import Life, Phase
from trio_infer.models.native import Model, NativeRunner
from trio_infer.protocol.values import InferRequest, TensorSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as it is measured on Linux")

MORTAL = """
import os, signal, threading, time
HERE = os.path.dirname(os.path.abspath(__file__))
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def die_if(step):
    try:
        with open(os.path.join(HERE, "die")) as file:
            wanted = file.read()
    except FileNotFoundError:
        return
    if wanted == step:
        os.kill(os.getpid(), signal.SIGKILL)

die_if("import")

class TritonPythonModel:
    def initialize(self, args):
        die_if("initialize")

    def execute(self, requests):
        die_if("execute")
        answers = []
        for request in requests:
            answers.append(self.answer(request))
            die_if("between two of a batch")
        die_if("return")
        return answers

    def answer(self, request):
        array = request.inputs()[0].as_numpy()
        if array.size and array[0] == 7:
            tensor = pb_utils.Tensor("IN", array)
            asked = pb_utils.InferenceRequest(model_name="other", requested_output_names=["OUT"], inputs=[tensor])
            threading.Timer(0.02, die_if, ["ask"]).start()
            answer = asked.exec()
            assert not answer.has_error(), answer.error().message()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + 1)])

    def finalize(self):
        die_if("finalize")
"""
STREAMING = """
import os, signal, time
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(20):
                big = np.full(50_000, number, np.float32)  # goes through shared memory
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", big)]))
                if number == 5 and request.request_id() == "mortal":
                    os.kill(os.getpid(), signal.SIGKILL)
            sender.send(flags=FINAL)
"""
BIG = np.arange(100_000, dtype=np.float32)


class Other(Model):
    """What the mortal model asks: it takes its time, and notes whether it was cancelled."""

    name = "other"
    inputs = (TensorSpec("IN", "FP32", [-1]),)
    outputs = (TensorSpec("OUT", "FP32", [-1]),)

    def __init__(self) -> None:
        self.cancelled = trio.Event()

    async def infer(self, request: InferRequest) -> Any:
        try:
            await trio.sleep(5)
        finally:
            self.cancelled.set()
        return {"OUT": request.inputs["IN"]}


def parameters(**values: object) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in values.items()
    )


@asynccontextmanager
async def running(repository: Repository, code: str, config: str, host: Any = None) -> AsyncIterator[Any]:
    before = set(children())
    repository.execution = "process"
    repository.model("m", code, config)
    runner = repository.runner()
    runner.spare_after = 0
    with trio.fail_after(60):
        await runner.load(host or FakeHost())
        try:
            yield runner
        finally:
            await runner.unload()
    assert not runner._works
    assert set(children()) == before


async def until(condition: Any) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - what another process does sets no event
            await trio.sleep(0.002)


def ready(runner: Any) -> int:
    return sum(slot.free and slot.fit for slot in runner._slots)


async def is_whole(runner: Any, spares: int) -> None:
    """All its processes are there again, it answers, and no memory is in hand."""
    await until(lambda: ready(runner) == 1 + spares)
    for _ in range(2):
        answer = await Client(runner, inputs={"IN": BIG}).ask()
        assert np.array_equal(answer.outputs["OUT"], BIG + 1)
        del answer
    for slot in runner._slots:
        assert not slot.works
        assert slot._worker.blocks.taken <= 1, "the last input's block comes back with the next message"


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("step", ["execute", "return", "between two of a batch", "idle", "import", "initialize"])
async def test_a_death_at_any_step_costs_what_is_in_hand_and_nothing_else(
    repository: Repository, step: str, spares: int
) -> None:
    async with running(repository, MORTAL, CONFIG + parameters(spares=spares)) as runner:
        await is_whole(runner, spares)
        die = repository.root / "m/1/die"
        (place,) = runner._places
        pid = place._worker.pid
        if step in {"idle", "import", "initialize"}:
            if step != "idle":
                die.write_text(step)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: gone(pid) and not place.alive)
            if spares:
                answer = await Client(runner, inputs={"IN": BIG}).ask()
                assert np.array_equal(answer.outputs["OUT"], BIG + 1), "the spare was not touched"
        else:
            die.write_text(step)
            clients = [Client(runner, inputs={"IN": BIG + number}) for number in range(2)]
            attends = runner.begin_batch([(client.instance, client.request) for client in clients])
            for client, attend in zip(clients, attends, strict=True):  # both were in that process
                with pytest.raises(InferError, match=r"died \(SIGKILL\) while it ran this request"):
                    await attend(client.send)
                assert not client.instance.working
        die.unlink(missing_ok=True)
        await is_whole(runner, spares)


async def test_a_death_while_it_asks_another_model_cancels_what_it_asked(repository: Repository) -> None:
    other, host = Other(), FakeHost()
    await host.load(NativeRunner(other))
    async with running(repository, MORTAL, CONFIG, host) as runner:
        (repository.root / "m/1/die").write_text("ask")
        client = Client(runner, inputs={"IN": np.array([7], np.float32)})
        client.instance.life = Life()
        client.instance.life.advance(Phase.RUNNING)
        with pytest.raises(InferError, match=r"died \(SIGKILL\)"):
            await client.ask()
        with trio.fail_after(2):
            await other.cancelled.wait()
        (repository.root / "m/1/die").unlink()
        await is_whole(runner, 1)
    await host.unload()


async def test_a_death_in_mid_stream_leaves_what_was_sent_and_gives_the_memory_back(repository: Repository) -> None:
    async with running(repository, STREAMING, CONFIG + "model_transaction_policy { decoupled: true }\n") as runner:
        mortal = Client(runner, id="mortal")
        with pytest.raises(InferError, match=r"died \(SIGKILL\)"):
            await mortal.ask()
        numbers = [int(response.outputs["OUT"][0]) for response in mortal.responses]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) <= 6
        assert all(np.all(response.outputs["OUT"] == response.outputs["OUT"][0]) for response in mortal.responses), (
            "arrays that are held outlive their process"
        )
        await until(lambda: ready(runner) == 2)
        lives = Client(runner)
        await lives.ask()
        assert [int(response.outputs["OUT"][0]) for response in lives.responses] == list(range(20))


async def test_a_death_while_it_finalizes_holds_nobody_up(repository: Repository) -> None:
    async with running(repository, MORTAL, CONFIG + parameters(max_requests=2)) as runner:
        await until(lambda: ready(runner) == 2)
        (repository.root / "m/1/die").write_text("finalize")
        for _ in range(5):
            await Client(runner, inputs={"IN": BIG}).ask()
            await until(lambda: ready(runner) >= 1)
        await until(lambda: runner.exits["crashed"] >= 2)
        (repository.root / "m/1/die").unlink()
        await until(lambda: ready(runner) == 2)


async def test_the_death_of_a_spare_is_nobodys_loss(repository: Repository) -> None:
    async with running(repository, MORTAL, CONFIG + parameters(spares=2)) as runner:
        await until(lambda: ready(runner) == 3)
        for spare in [slot for slot in runner._slots if slot not in runner._places]:
            os.kill(spare._worker.pid, signal.SIGKILL)
        for _ in range(3):
            await Client(runner, inputs={"IN": BIG}).ask()
        await until(lambda: ready(runner) == 3)
        assert runner.exits == {"crashed": 2}


SERVER = """
import sys, trio
from pathlib import Path
import numpy as np
from trio_infer.models.host import NoHost
from trio_infer.models.repository import find_models
from trio_infer.models.runner import Instance
from trio_infer.protocol.values import InferRequest

async def send(response): ...

async def main(moment):
    (runner,) = find_models([Path(sys.argv[1])])
    runner.spare_after = 0
    await runner.load(NoHost())
    async with trio.open_nursery() as nursery:
        if moment == "starting a spare":
            while len(runner._slots) < 2:
                await trio.sleep(0.0005)
        else:
            while sum(slot.alive for slot in runner._slots) < 2:
                await trio.sleep(0.005)
        if moment in ("running", "killing"):
            request = InferRequest("m", "1", {"IN": np.ones(100_000, np.float32)})
            with trio.move_on_after(0.1 if moment == "killing" else 3600) as scope:
                nursery.start_soon(say, runner, 0.1 if moment == "running" else 0.17)
                await runner.run(Instance(0), request, send)
        else:
            await say(runner, 0)
        await trio.sleep_forever()

async def say(runner, after):
    await trio.sleep(after)
    print(*(slot._worker.pid for slot in runner._slots if slot._worker is not None), flush=True)

trio.run(main, sys.argv[2])
"""
DEAF = "class TritonPythonModel:\n    def execute(self, requests):\n        while True: pass\n"


@pytest.mark.parametrize("moment", ["idle", "running", "starting a spare", "killing"])
async def test_nothing_outlives_a_server_that_is_killed_at_any_moment(repository: Repository, moment: str) -> None:
    repository.model("m", DEAF, CONFIG + parameters(cancel_grace_ms=70))
    shared = set(os.listdir("/dev/shm"))
    server = subprocess.Popen(  # noqa: ASYNC220 - not through a thread
        [sys.executable, "-c", SERVER, str(repository.root), moment], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    line = await trio.to_thread.run_sync(server.stdout.readline)
    pids = [int(pid) for pid in line.split()]
    server.kill()
    server.wait()
    server.stdout.close()
    assert len(pids) >= 1
    await until(lambda: all(gone(pid) for pid in pids))
    assert set(os.listdir("/dev/shm")) == shared
    assert not set(pids) & set(children())
