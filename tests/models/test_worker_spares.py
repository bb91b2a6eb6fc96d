"""The last rung of a cancel: a process is killed, a spare takes its place, and who works for somebody is left alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from test_worker_processes import STUNTS, asking, gone, noted, outs, running
from triton_stage import CONFIG, DECOUPLED, Client, Repository

from trio_infer.errors import InferError, ModelLoadError
from trio_infer.models.runner import Instance
from trio_infer.models.triton_work import Work
from trio_infer.models.warmup import warm_up
from trio_infer.models.worker.works import RemoteWork

pytestmark = [pytest.mark.trio, pytest.mark.skipif(sys.platform != "linux", reason="as it is measured on Linux")]


def parameters(**values: object) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in values.items()
    )


SOON = parameters(cancel_grace_ms=50)
WHO = STUNTS.replace(
    "    def count(self",
    """    def who(self, request):
        import resource
        return self.answer(os.getpid(), int(self.name.rpartition("_")[2]), len(os.sched_getaffinity(0)),
                           float(os.environ.get("NUMBER", 0)), resource.getrlimit(resource.RLIMIT_DATA)[0])

    def allocate(self, request):
        return self.answer(np.ones(2**27).sum())

    def count(self""",
)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - what another process does sets no event
            await trio.sleep(0.002)


def ready(runner: Any) -> int:
    """How many processes could take a request."""
    return sum(slot.free and slot.fit for slot in runner._slots)


async def leaves_deaf(runner: Any, repository: Repository, do: str = "hang") -> int:
    """Ask for what never ends, leave, and wait until the instance is free; the process's number."""
    client = asking(runner, do)
    notes = repository.root / "m/1/notes"
    notes.unlink(missing_ok=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        pid = int(await noted(repository))
        client.leave()
    assert client.instance.working, "no instance is given back before its work has ended"
    await client.idle.wait()
    assert client.responses == []
    return pid


async def test_a_model_that_never_asks_is_killed_and_a_spare_has_the_next_request_at_once(
    repository: Repository,
) -> None:
    slow = WHO.replace("def initialize(self, args):", "def initialize(self, args):\n        time.sleep(0.3)")
    async with running(repository, slow, CONFIG + SOON) as runner:
        first, name, *_ = await outs(runner, "who")
        assert name == 0
        runner_has_a_spare = lambda: ready(runner) == 2  # noqa: E731
        await until(runner_has_a_spare)
        for turn in range(1, 4):
            assert await leaves_deaf(runner, repository) == first
            assert ready(runner) == 1, "the one that was killed isn't started yet; nobody waits for it"
            second, name, *_ = await outs(runner, "who")
            assert (second != first, name) == (True, turn % 2)
            await until(lambda pid=int(first): gone(pid))
            await until(runner_has_a_spare)
            assert (await outs(runner, "who"))[0] == second, "what was replaced is the spare now"
            first = second
        await until(lambda: runner.exits == {"killed": 3})


async def test_without_a_word_of_it_the_grace_is_a_quarter_of_a_second(repository: Repository) -> None:
    async with running(repository, STUNTS, CONFIG) as runner:
        assert runner.config.worker.grace == 0.25
        started = trio.current_time()
        pid = await leaves_deaf(runner, repository)
        assert trio.current_time() - started >= 0.25
        await until(lambda: gone(pid))
        assert (await outs(runner, "count"))[0] == 1


async def test_the_grace_none_kills_nothing(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    async with running(repository, STUNTS, CONFIG + parameters(cancel_grace_ms="none"), spare_after=0) as runner:
        deaf = asking(runner, "hang")
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(deaf.stay)
                await noted(repository)
                deaf.leave()
                await trio.sleep(0.4)
                assert deaf.instance.working
                assert len(runner._slots) == 1, "nobody will need a spare"
                scope.cancel()
        runner.kill()
        await deaf.idle.wait()


class Elsewhere:
    """A worker that says nothing."""

    def __init__(self) -> None:
        self.memory = SimpleNamespace(cells=[0])

    def control(self, kind: Any, fields: Any) -> None: ...


@pytest.mark.parametrize("ends", [True, False])
async def test_a_request_that_ends_in_the_tick_in_which_its_grace_is_over_is_not_overdue(ends: bool) -> None:
    overdue: list[RemoteWork] = []
    worker: Any = Elsewhere()
    work = RemoteWork(
        "m_0",
        Instance(0),
        worker,
        1,
        0,
        decoupled=False,
        deaf_after=1,
        grace=0.0,
        on_overdue=overdue.append,
        on_over=lambda _: None,
    )
    work.start()
    work.leave()
    assert worker.memory.cells == [1], "it is told at once"
    if ends:
        work.finish(expect_more=False)
    await trio.testing.wait_all_tasks_blocked()
    assert overdue == ([] if ends else [work])
    work.finish(expect_more=False)


async def test_a_kill_is_no_alarm_and_costs_no_pause(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running(repository, STUNTS, CONFIG + SOON + parameters(spares=0)) as runner:
        for _ in range(5):
            await leaves_deaf(runner, repository)
            started = trio.current_time()
            assert (await outs(runner, "count"))[0] == 1
            assert trio.current_time() - started < 3, "each is started at once; crashes of that number wait for seconds"
    said = [record for record in caplog.records if "was killed" in record.message]
    assert {record.levelname for record in said} == {"INFO"}
    assert said[0].message == (
        "model instance 'm_0' was killed (a cancelled request was still running after cancel_grace_ms 50); "
        "it is being restarted"
    )


async def test_in_a_batch_the_grace_begins_with_the_last_to_leave(repository: Repository) -> None:
    config = CONFIG + SOON + "max_batch_size: 2\n"
    inputs = {"IN": np.array([[1]], np.float32)}
    code = STUNTS.replace(
        "    def execute(self, requests):\n", "    def execute(self, requests):\n        self.hang(requests[0])\n"
    )
    async with running(repository, code, config) as runner:
        clients = [Client(runner, inputs=inputs) for _ in range(2)]
        attends = runner.begin_batch([(client.instance, client.request) for client in clients])

        async def attend(client: Client, attend: Any) -> None:
            with client.scope:
                await attend(client.send)

        async with trio.open_nursery() as nursery:
            for client, part in zip(clients, attends, strict=True):
                nursery.start_soon(attend, client, part)
            pid = int(await noted(repository))
            clients[0].leave()
            await trio.sleep(0.2)
            assert not gone(pid), "the other one is there"
            assert all(client.instance.working for client in clients)
            left = trio.current_time()
            clients[1].leave()
        for client in clients:
            await client.idle.wait()
        assert trio.current_time() - left >= 0.05
        await until(lambda: gone(pid))


STREAMS = """
import os, threading, time
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request, request.get_response_sender())).start()
    def send(self, request, sender):
        pid = np.array([os.getpid()], np.float32)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pid)]))
        while not (request.request_id() == "polite" and sender.is_cancelled()):
            time.sleep(0.001)
            if os.path.exists(os.path.join(pb_utils.get_model_dir(), "over")) and request.request_id() == "stays":
                break
        sender.send(flags=FINAL)
"""


class Stream(Client):
    """One whose first response is waited for."""

    def __init__(self, runner: Any, name: str) -> None:
        super().__init__(runner, id=name)
        self.begun = trio.Event()

    async def send(self, response: Any) -> None:
        await super().send(response)
        self.begun.set()

    @property
    def pid(self) -> float:
        return float(self.responses[0].outputs["OUT"][0])


async def test_a_deaf_stream_is_killed_only_when_nobody_else_is_in_its_process_and_new_ones_go_to_the_spare(
    repository: Repository,
) -> None:
    async with running(repository, STREAMS, DECOUPLED + SOON, spare_after=0) as runner:
        await until(lambda: ready(runner) == 2)
        deaf, stays, comes = (Stream(runner, name) for name in ("deaf", "stays", "polite"))
        async with trio.open_nursery() as nursery:
            for client in (deaf, stays):
                nursery.start_soon(client.stay)
                await client.begun.wait()
                await client.idle.wait()  # `execute` has returned, and the stream goes on
            assert deaf.pid == stays.pid
            work = self_of(runner, deaf)
            deaf.leave()
            await until(lambda: work.overdue)
            nursery.start_soon(comes.stay)
            await comes.begun.wait()
            assert comes.pid != deaf.pid, "nobody new comes into a process that is to be killed"
            assert not gone(int(deaf.pid)), "one that stays is in it"
            (repository.root / "m/1/over").touch()
            await stays.gone.wait()
            assert len(stays.responses) == 1
            await until(lambda: gone(int(deaf.pid)))
            comes.leave()
        await comes.gone.wait()
        await until(lambda: not runner._works)
        await until(lambda: runner.exits == {"killed": 1})


def self_of(runner: Any, client: Client) -> Any:
    """The work of a client."""
    (work,) = [work for work in runner._works if work._instance is client.instance]
    assert isinstance(work, Work)
    return work


async def test_a_worn_process_is_let_go_of_politely_and_a_spare_goes_on(repository: Repository) -> None:
    async with running(repository, WHO, CONFIG + parameters(max_requests=3), spare_after=0) as runner:
        await until(lambda: ready(runner) == 2)
        pids = []
        for _ in range(3):
            pids += [(await outs(runner, "who"))[0] for _ in range(3)]
            await until(lambda: ready(runner) >= 1)
        assert pids[0] == pids[1] == pids[2] != pids[3] == pids[4] == pids[5] != pids[6]
        finalized = repository.root / "m/1/finalized"
        await until(lambda: finalized.exists() and len(finalized.read_text().split()) >= 2)
        assert finalized.read_text().split()[:2] == ["m_0", "m_1"]
        await until(lambda: runner.exits["worn"] >= 2)
        assert set(runner.exits) == {"worn"}


async def test_a_worn_process_without_a_spare_is_started_anew_when_nothing_is_in_hand(repository: Repository) -> None:
    async with running(repository, STUNTS, CONFIG + parameters(max_requests=2, spares=0)) as runner:
        counts = [(await outs(runner, "count"))[0] for _ in range(5)]
        assert counts == [1, 2, 1, 2, 1]


async def test_a_worn_process_that_does_not_end_is_killed(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trio_infer.models.worker.slot.FINALIZING", 0.05)
    code = STUNTS.replace(
        "    def finalize(self):\n", "    def finalize(self):\n        time.sleep(60 if len(served) else 0)\n"
    )
    async with running(repository, code, CONFIG + parameters(max_requests=1, spares=0)) as runner:
        assert [(await outs(runner, "count"))[0] for _ in range(2)] == [1, 1]
        await until(lambda: ready(runner) == 1)
    assert "'m_0' took more than 0.05 s to finalize, and was killed" in caplog.text


async def test_a_spare_that_dies_or_cannot_be_loaded_is_tried_again_and_disturbs_nobody(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    code = WHO.replace(
        "    def initialize(self, args):",
        "    def initialize(self, args):\n"
        "        if os.path.exists(pb_utils.get_model_dir() + '/broken'): raise ValueError('no memory left')",
    )
    async with running(repository, code, CONFIG + SOON, spare_after=0) as runner:
        await until(lambda: ready(runner) == 2)
        pid = (await outs(runner, "who"))[0]
        broken = repository.root / "m/1/broken"
        broken.touch()
        os.kill(runner._slots[1]._worker.pid, signal.SIGKILL)
        await until(lambda: "'m_1' can't be restarted: model 'm' can't be loaded: initialize: Va" in caplog.text)
        assert (await outs(runner, "who"))[0] == pid
        assert await runner.ready()
        broken.unlink()
        await until(lambda: ready(runner) == 2)
        assert (await outs(runner, "who"))[0] == pid


async def test_what_a_process_may_have_is_said_by_the_configuration(repository: Repository) -> None:
    cpu = min(os.sched_getaffinity(0))
    values = {"cpu_affinity": cpu, "env.NUMBER": 42, "memory_limit_mb": 800}
    async with running(repository, WHO, CONFIG + parameters(**values)) as runner:
        _, _, cpus, number, limit = await outs(runner, "who")
        assert (cpus, number, limit) == (1, 42, 800 * 2**20)
        with pytest.raises(InferError, match=r"Unable to allocate 1.00 GiB|MemoryError"):
            await outs(runner, "allocate")
        assert (await outs(runner, "count"))[0] == 1, "it is told, and lives on"
        assert runner.exits == {}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is but one CPU")
async def test_a_spare_that_takes_a_place_has_its_cpus(repository: Repository) -> None:
    one, other, *_ = sorted(os.sched_getaffinity(0))
    config = CONFIG + SOON + parameters(cpu_affinity=f"{one};{other}")
    async with running(repository, WHO, config, spare_after=0) as runner:
        await until(lambda: ready(runner) == 2)
        for _ in range(3):
            await leaves_deaf(runner, repository)
            pid = int((await outs(runner, "who"))[0])
            threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]
            assert threads == [{one}] * len(threads), "it serves in the first instance's place"
            await until(lambda: ready(runner) == 2)


async def test_cpus_that_there_are_not_are_refused_with_those_that_there_are(repository: Repository) -> None:
    repository.execution = "process"
    with pytest.raises(ModelLoadError, match=r"`cpu_affinity` names the CPUs \[4711\], but the server may use only \["):
        await repository.loaded(STUNTS, CONFIG + parameters(cpu_affinity="0,4711"))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"cpu_affinity": "3-1"}, "has the range 3-1, which ends before it begins"),
        ({"cpu_affinity": "all"}, "must be numbers of CPUs such as '0-3,8'"),
        ({"spares": "-1"}, "must be a whole number from 0 to 99, got '-1'"),
        ({"max_requests": "0"}, "must be a whole number of requests, 1 or more, got '0'"),
        ({"cancel_grace_ms": "soon"}, "a whole number of milliseconds, or 'none', got 'soon'"),
        ({"memory_limit_mb": "1GB"}, "must be a whole number of MiB, 1 or more, got '1GB'"),
        ({"env.A=B": "1"}, "parameter `env.A=B` must be `env.` and the name of an environment variable"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(repository: Repository, values: Any, reason: str) -> None:
    repository.model("m", STUNTS, CONFIG + parameters(**values))
    with pytest.raises(ModelLoadError) as caught:
        repository.runner()
    assert reason in str(caught.value)


async def test_a_model_with_sequences_is_not_killed_unless_that_is_asked_for(repository: Repository) -> None:
    repository.model("m", STUNTS, CONFIG + "sequence_batching {}\n")
    worker = repository.runner().config.worker
    assert (worker.grace, worker.spares) == (None, 0)
    repository.model("m", STUNTS, CONFIG + "sequence_batching {}\n" + SOON)
    worker = repository.runner().config.worker
    assert (worker.grace, worker.spares) == (0.05, 1)
    repository.model("m", STUNTS, CONFIG + "sequence_batching {}\n" + parameters(max_requests=9))
    with pytest.raises(ModelLoadError, match=r"`max_requests` ends a process with all that it knows"):
        repository.runner()


async def test_a_spare_and_a_process_that_is_started_again_are_warmed_up_before_they_serve(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    code = WHO.replace(
        "    def execute(self, requests):\n",
        "    def execute(self, requests):\n"
        "        for request in requests:\n"
        "            if len(request.inputs()[0].as_numpy()) == 5:\n"
        "                self.note(request)\n"
        "                if os.path.exists(pb_utils.get_model_dir() + '/broken'): raise ValueError('cold')\n",
    )
    sample = 'inputs { key: "IN" value { data_type: TYPE_FP32 dims: 5 zero_data: true } }'
    config = CONFIG + SOON + f'model_warmup {{ name: "s" count: 2 {sample} }}\n'
    notes, broken = repository.root / "m/1/notes", repository.root / "m/1/broken"

    async def killed(runner: Any, pid: float) -> float:
        os.kill(int(pid), signal.SIGKILL)
        await until(lambda: not runner._slots[0].alive)
        await until(lambda: ready(runner) == 1)
        return (await outs(runner, "who"))[0]

    async with running(repository, code, config + parameters(spares=0)) as runner:
        await warm_up(runner)
        first = (await outs(runner, "who"))[0]
        assert notes.read_text().split() == [str(int(first))] * 2
        again = await killed(runner, first)
        assert notes.read_text().split()[2:] == [str(int(again))] * 2, "each sample, as often as it says"
        broken.touch()
        assert await killed(runner, again) > 0
        assert "model instance 'm_0' fails on its warm-up: Failed to process" in caplog.text
    broken.unlink()
    notes.unlink()
    async with running(repository, code, config, spare_after=0.1) as runner:
        await warm_up(runner)
        await until(lambda: ready(runner) == 2)
        spare = str(runner._slots[1]._worker.pid)
        assert notes.read_text().split()[2:] == [spare] * 2


async def test_spares_are_for_each_kind_of_instance_and_named_after_them(repository: Repository) -> None:
    groups = """
    instance_group { name: "a" count: 2 }
    instance_group { name: "b" kind: KIND_GPU gpus: [ 0, 1 ] }
    """
    repository.model("m", STUNTS, CONFIG + groups + parameters(spares=2))
    assert repository.runner().config.spare_names == {0: ["a_2", "a_3"], 2: ["b_2", "b_3"], 3: ["b_4", "b_5"]}
    async with running(repository, WHO, CONFIG + groups + SOON, spare_after=0) as runner:
        await until(lambda: ready(runner) == 7)
        assert [slot.name for slot in runner._slots] == ["a_0", "a_1", "b_0", "b_1", "a_2", "b_2", "b_3"]


@pytest.mark.parametrize("wait", [0, 0.02, 0.2])
async def test_unloading_a_model_whose_spare_is_being_started_leaves_nothing(
    repository: Repository, wait: float
) -> None:
    async with running(repository, STUNTS, CONFIG, spare_after=0) as runner:
        await trio.sleep(wait)
        pids = [slot._worker.pid for slot in runner._slots if slot._worker is not None]
    assert pids
    assert all(gone(pid) for pid in pids)
