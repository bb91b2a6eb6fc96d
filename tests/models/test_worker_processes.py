"""Real worker processes: what they do for a model, what they survive, and what is left when they go."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from triton_stage import CONFIG, DECOUPLED, Client, Repository

from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.models.host import NoHost
from trio_infer.models.triton_work import LIMIT
from trio_infer.protocol.values import InferResponse

pytestmark = [pytest.mark.trio, pytest.mark.skipif(sys.platform != "linux", reason="as it is measured on Linux")]

STUNTS = """
import ctypes, json, os, signal, sys, threading, time
served = []

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.directory = pb_utils.get_model_dir()

    def execute(self, requests):
        return [getattr(self, json.loads(request.parameters()).get("do", "echo"))(request) for request in requests]

    def answer(self, *values):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(values, np.float64))])

    def echo(self, request):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])

    def count(self, request):
        served.append(1)
        return self.answer(len(served), os.getpid(), threading.current_thread() is threading.main_thread())

    def note(self, request):
        with open(os.path.join(self.directory, "notes"), "a") as notes:
            notes.write(f"{os.getpid()}\\n")

    def segfault(self, request):
        self.note(request)
        ctypes.string_at(0)

    def quit(self, request):
        self.note(request)
        os._exit(3)

    def kill(self, request):
        self.note(request)
        os.kill(os.getpid(), signal.SIGKILL)

    def sysexit(self, request):
        sys.exit(2)

    def hang(self, request):
        self.note(request)
        while True:
            time.sleep(0.01)

    def child(self, request):
        pid = os.fork()  # a child without exec holds all descriptors
        if not pid:
            while True:
                time.sleep(1)
        with open(os.path.join(self.directory, "notes"), "a") as notes:
            notes.write(f"{pid}\\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def poll(self, request):
        self.note(request)
        while not request.is_cancelled():
            time.sleep(0.0005)
        turned = time.perf_counter()
        with open(os.path.join(self.directory, "turned"), "w") as file:
            file.write(str(turned))
        return self.answer()

    def keep(self, request):
        self.kept = getattr(self, "kept", [])
        self.kept.append(request.inputs()[0].as_numpy())
        for kept in self.kept:
            kept += 1
        return self.answer(*[float(kept[-1]) for kept in self.kept])

    def flag_price(self, request):
        start = time.perf_counter()
        for _ in range(10_000):
            request.is_cancelled()
        return self.answer((time.perf_counter() - start) / 10_000)

    def finalize(self):
        with open(os.path.join(self.directory, "finalized"), "a") as file:
            file.write(self.name + "\\n")
"""


@asynccontextmanager
async def running(
    repository: Repository, code: str = STUNTS, config: str = CONFIG, **options: Any
) -> AsyncIterator[Any]:
    repository.execution = "process"
    with trio.fail_after(30):
        runner = await repository.loaded(code, config, **options)
        try:
            yield runner
        finally:
            await runner.unload()
        assert not runner._works
        for slot in runner._slots:
            assert slot.done.is_set()
            assert not slot.works


def asking(runner: Any, do: str, **fields: Any) -> Client:
    return Client(runner, parameters={"do": do}, **fields)


async def outs(runner: Any, do: str, **fields: Any) -> list[float]:
    return list((await asking(runner, do, **fields).ask()).outputs["OUT"])


async def noted(repository: Repository, name: str = "notes") -> str:
    """What the model has written, as soon as it has."""
    file = repository.root / "m/1" / name
    with trio.fail_after(10):
        while not (file.exists() and file.read_text()):  # noqa: ASYNC110 - another process can't set our events
            await trio.sleep(0.002)
    return file.read_text()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_an_instance_has_a_process_and_globals_of_its_own_and_execute_its_main_thread(
    repository: Repository,
) -> None:
    async with running(repository, config=CONFIG + "instance_group { count: 2 }") as runner:
        first = [await outs(runner, "count", index=0) for _ in range(2)]
        other = await outs(runner, "count", index=1)
        assert [first[0][0], first[1][0], other[0]] == [1, 2, 1]
        assert len({os.getpid(), first[0][1], other[1]}) == 3
        assert first[0][2] == other[2] == 1
        assert await outs(runner, "flag_price") < [2e-6]
        assert await runner.ready()
        pids = [int(first[0][1]), int(other[1])]
    assert all(gone(pid) for pid in pids)
    assert sorted((repository.root / "m/1/finalized").read_text().split()) == ["m_0_0", "m_0_1"]


@pytest.mark.parametrize("size", [0, 3, 5_000, 500_000])
async def test_tensors_of_any_size_come_back_as_they_went(repository: Repository, size: int) -> None:
    async with running(repository) as runner:
        for _ in range(3):
            sent = np.random.default_rng(size).random(size, dtype=np.float32)
            answer = await Client(runner, inputs={"IN": sent}).ask()
            assert np.array_equal(answer.outputs["OUT"], sent)
        strings = np.array([b"x" * (size // 10), b"", "\N{SNOWMAN}".encode()], dtype=object)
        answer = await Client(runner, inputs={"IN": strings}).ask()
        assert answer.outputs["OUT"].tolist() == strings.tolist()


async def test_an_input_that_the_model_keeps_is_its_own_for_as_long(repository: Repository) -> None:
    async with running(repository) as runner:
        big = np.zeros(100_000, np.float32)
        assert await outs(runner, "keep", inputs={"IN": big}) == [1]
        assert await outs(runner, "keep", inputs={"IN": big + 10}) == [2, 11]
        assert await outs(runner, "keep", inputs={"IN": big + 20}) == [3, 12, 21]


@pytest.mark.parametrize(
    ("do", "words"), [("segfault", "SIGSEGV"), ("quit", "exit code 3"), ("kill", "SIGKILL"), ("child", "SIGKILL")]
)
async def test_a_crash_costs_its_own_request_and_nothing_else(
    repository: Repository, caplog: pytest.LogCaptureFixture, do: str, words: str
) -> None:
    async with running(repository, config=CONFIG + "instance_group { count: 2 }") as runner:
        victim, beside = asking(runner, do, index=0), asking(runner, "poll", index=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside.stay)
            with pytest.raises(InferError) as caught:
                await victim.ask()
            assert caught.value.message == (
                f"model instance 'm_0_0' died ({words}) while it ran this request; it is being restarted"
            )
            assert caught.value.code is ErrorCode.INTERNAL
            assert not victim.instance.working
            assert (await outs(runner, "count", index=0))[0] == 1, "what comes meanwhile waits for the new process"
            assert beside.instance.working
            beside.leave()
    assert [record.message for record in caplog.records if record.levelno > logging.WARNING] == [
        f"model instance 'm_0_0' died ({words}); it is being restarted"
    ]
    assert all(gone(int(pid)) for pid in (repository.root / "m/1/notes").read_text().split())


async def test_a_model_that_exits_politely_only_fails_its_request(repository: Repository) -> None:
    async with running(repository) as runner:
        (before, pid, _) = await outs(runner, "count")
        with pytest.raises(InferError, match="SystemExit: 2"):
            await asking(runner, "sysexit").ask()
        assert await outs(runner, "count") == [before + 1, pid, 1]


async def test_the_pause_before_a_restart_grows_while_nothing_is_finished(repository: Repository) -> None:
    async with running(repository) as runner:
        took = []
        for _ in range(4):
            start = trio.current_time()
            with pytest.raises(InferError, match="SIGKILL"):
                await asking(runner, "kill").ask()
            took.append(trio.current_time() - start)
        assert took[3] >= 0.4 > 0.1
        assert not await runner.ready()
        assert (await outs(runner, "count"))[0] == 1
        with pytest.raises(InferError, match="SIGKILL"):
            await asking(runner, "kill").ask()
        start = trio.current_time()
        await outs(runner, "count")
        assert trio.current_time() - start < 3, "after good work a crash costs no pause"


async def test_a_restart_that_fails_is_logged_and_tried_again(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    code = STUNTS.replace(
        "        self.name = ",
        "        if os.path.exists(pb_utils.get_model_dir() + '/broken'): raise ValueError('no weights')\n"
        "        self.name = ",
    )
    async with running(repository, code) as runner:
        (repository.root / "m/1/broken").touch()
        with pytest.raises(InferError, match="SIGKILL"):
            await asking(runner, "kill").ask()
        waiting = asking(runner, "count")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiting.stay)
            while "can't be restarted" not in caplog.text:  # noqa: ASYNC110 - a log sets no events
                await trio.sleep(0.01)
            assert "initialize: ValueError: no weights" in caplog.text
            assert not await runner.ready()
            (repository.root / "m/1/broken").unlink()
        assert len(waiting.responses) == 1


async def test_the_flag_turns_within_milliseconds_of_the_clients_leaving(repository: Repository) -> None:
    async with running(repository) as runner:
        client = asking(runner, "poll")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stay)
            await noted(repository)
            left = time.perf_counter()
            client.leave()
            await client.idle.wait()
        assert float(await noted(repository, "turned")) - left < 0.1
        assert client.responses == []
        assert client.instance.timing.infer_ended > client.instance.timing.infer_began > 0
        assert (await outs(runner, "count"))[0] == 1, "the process lives on"


async def test_a_request_that_ignores_its_cancel_is_killed_after_the_grace(repository: Repository) -> None:
    config = CONFIG + 'parameters { key: "cancel_grace_ms" value { string_value: "50" } }'
    async with running(repository, config=config) as runner:
        deaf = asking(runner, "hang")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deaf.stay)
            pid = int((await noted(repository)).split()[0])
            assert deaf.instance.working
            deaf.leave()
        await deaf.idle.wait()
        assert (await outs(runner, "count"))[0] == 1
        while not gone(pid):  # noqa: ASYNC110 - nobody is told; it is reaped behind the next request
            await trio.sleep(0.001)
        polite = asking(runner, "poll")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(polite.stay)
            while (repository.root / "m/1/notes").read_text().count("\n") < 2:  # noqa: ASYNC110 - another process
                await trio.sleep(0.002)
            polite.leave()
        await polite.idle.wait()
        await trio.sleep(0.1)
        assert (await outs(runner, "count"))[0] == 2, "one that heeds it isn't killed"


STREAM = """
import os, threading, time
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
def number(n):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([n], np.float32))])
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request, request.get_response_sender())).start()
    def send(self, request, sender):
        path = os.path.join(pb_utils.get_model_dir(), "sent")
        for n in range(int(request.inputs()[0].as_numpy()[0])):
            with open(path, "w") as file:
                file.write(str(n + 1))
            if n == 3 and request.request_id() == "crash":
                os.abort()
            sender.send(number(n))
            if sender.is_cancelled():
                break
        sender.send(flags=FINAL)
"""


def streaming(runner: Any, count: int, name: str = "") -> Client:
    return Client(runner, inputs={"IN": np.array([count], np.float32)}, id=name)


async def test_a_decoupled_model_takes_the_next_request_while_it_streams(repository: Repository) -> None:
    async with running(repository, STREAM, DECOUPLED) as runner:
        held, taken = streaming(runner, 1000), trio.Event()

        async def send(response: InferResponse) -> None:
            taken.set()
            await trio.sleep_forever()

        async def stay() -> None:
            with held.scope:
                await runner.run(held.instance, held.request, send)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stay)
            await taken.wait()
            await held.idle.wait()  # execute has returned: the instance is free
            await trio.sleep(0.2)
            sent = int(await noted(repository, "sent"))
            assert LIMIT <= sent <= LIMIT + 2, "the model is held back by a client that doesn't read"
            client = streaming(runner, 50)
            await client.ask()
            assert [int(response.outputs["OUT"][0]) for response in client.responses] == list(range(50))
            assert len(client.instance.timing.responses) == 50
            assert runner.abandoned == 0
            held.leave()
        await held.idle.wait()


async def test_a_crash_in_mid_stream_ends_all_streams_of_that_process(repository: Repository) -> None:
    async with running(repository, STREAM, DECOUPLED) as runner:
        failures: list[tuple[int, str]] = []

        async def ask(name: str, count: int) -> None:
            client = streaming(runner, count, name)
            try:
                await client.ask()
            except InferError as error:
                failures.append((len(client.responses), error.message))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "", 10**9)
            await noted(repository, "sent")
            nursery.start_soon(ask, "crash", 10)
        assert len(failures) == 2
        assert all("model instance 'm_0' died (SIGABRT)" in message for _, message in failures)
        assert any(count == 3 for count, _ in failures), "what was sent before comes first"
        assert len((await streaming_all(runner, 2)).responses) == 2


async def streaming_all(runner: Any, count: int) -> Client:
    client = streaming(runner, count)
    await client.ask()
    return client


async def test_what_a_model_logs_and_prints_comes_to_the_server(
    repository: Repository, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    code = """
    import logging, warnings
    class TritonPythonModel:
        def execute(self, requests):
            print("printed by the model")
            pb_utils.Logger.log_info("an info")
            pb_utils.Logger.log_verbose("too much")
            logging.getLogger("some.library").warning("a library's %s", "warning")
            try:
                1 / 0
            except ZeroDivisionError:
                logging.exception("went wrong")
            return [pb_utils.InferenceResponse([])]
        def finalize(self):
            raise ValueError("boom-42")
    """
    async with running(repository, code) as runner:
        await Client(runner).ask()
    records = [record for record in caplog.records if record.name == "trio_infer.model.m"]
    assert [record.message for record in records] == ["an info", "a library's warning", "went wrong"]
    assert records[0].pathname == str(repository.root / "m/1/model.py")
    assert records[0].lineno == 8
    assert "ZeroDivisionError" in (records[2].exc_text or "")
    assert "model instance 'm_0' failed to finalize" in caplog.text
    assert "ValueError: boom-42" in caplog.text
    assert "printed by the model" in capfd.readouterr().out


async def test_all_ways_of_importing_a_sibling_find_the_same_module(repository: Repository) -> None:
    repository.write("m/1/sibling.py", "class Thing:\n    pass\n")
    repository.write("m/shared.py", "name = __name__\n")
    code = """
    import importlib, pickle
    import shared
    from sibling import Thing
    class TritonPythonModel:
        def execute(self, requests):
            import sibling
            assert importlib.import_module("sibling") is sibling
            assert isinstance(pickle.loads(pickle.dumps(Thing())), sibling.Thing)
            assert (__name__, __package__) == ("1.model", "1")
            from .sibling import Thing as Relative
            return [pb_utils.InferenceResponse([])]
    """
    async with running(repository, code) as runner:
        await Client(runner).ask()
    assert not [*repository.root.rglob("*.pyc")]


async def test_a_death_while_loading_under_a_limit_of_memory_names_the_limit(repository: Repository) -> None:
    repository.execution = "process"
    code = """
    import os
    class TritonPythonModel:
        def initialize(self, args): os._exit(1)
        def execute(self, requests): ...
    """
    repository.model("m", code, CONFIG + 'parameters { key: "memory_limit_mb" value { string_value: "800" } }')
    with trio.fail_after(20), pytest.raises(ModelLoadError) as caught:
        await repository.runner().load(NoHost())
    died = "its process died (exit code 1) while the model was being initialized"
    assert caught.value.reason == f"{died}; perhaps for want of memory, as `memory_limit_mb` is 800"


@pytest.mark.parametrize(
    ("method", "reason", "line"),
    [
        ("def initialize(self, args): raise ValueError('no weights')", "initialize: ValueError: no weights", 4),
        (
            "def initialize(self, args): __import__('os')._exit(4)",
            "its process died (exit code 4) while the model was being initialized",
            None,
        ),
    ],
)
async def test_a_model_that_cannot_be_loaded_says_why_and_leaves_nothing(
    repository: Repository, method: str, reason: str, line: int | None
) -> None:
    repository.execution = "process"
    config = CONFIG + "instance_group { count: 2 }"
    file = repository.model(
        "m", f"class TritonPythonModel:\n    {method}\n    def execute(self, requests): ...\n", config
    )
    runner = repository.runner()
    with trio.fail_after(20), pytest.raises(ModelLoadError) as caught:
        await runner.load(NoHost())
    assert (caught.value.reason, caught.value.where, caught.value.line) == (reason, file, line)
    assert all(slot.done.is_set() for slot in runner._slots)


async def test_a_model_completes_its_configuration_in_its_first_process(repository: Repository) -> None:
    code = """
    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(auto_complete_model_config):
            auto_complete_model_config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
            auto_complete_model_config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
            auto_complete_model_config.set_max_batch_size(4)
            return auto_complete_model_config
        def initialize(self, args):
            assert '"max_batch_size":4' in args["model_config"]
        def execute(self, requests): ...
    """
    async with running(repository, code, "") as runner:
        assert [spec.name for spec in runner.signature.inputs] == ["IN"]
        assert runner.signature.max_batch_size == 4


@pytest.mark.parametrize(
    ("hook", "ready"),
    [("return True", True), ("return False", False), ("return 1", False), ("raise ValueError", False)],
)
async def test_a_model_says_whether_it_is_ready(repository: Repository, hook: str, ready: bool) -> None:
    code = f"""
    class TritonPythonModel:
        async def is_ready(self):
            {hook}
        def execute(self, requests): ...
    """
    async with running(repository, code) as runner:
        assert await runner.ready() is ready


async def test_unloading_kills_what_does_not_end(repository: Repository) -> None:
    repository.execution = "process"
    runner = await repository.loaded(STUNTS)
    client = asking(runner, "hang")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        pid = int(await noted(repository))
        client.leave()
    with trio.move_on_after(0.2) as limit:
        await runner.unload()
    assert limit.cancelled_caught
    assert gone(pid)
    assert not client.instance.working


async def test_fifty_loads_leave_nothing_behind(repository: Repository) -> None:
    repository.execution = "process"
    repository.model("m", STUNTS, CONFIG)

    def held() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/dev/shm"))

    async def cycle() -> None:
        runner = repository.runner()
        await runner.load(NoHost())
        await Client(runner, inputs={"IN": np.zeros(50_000, np.float32)}).ask()
        await runner.unload()

    await cycle()
    before = held()
    for _ in range(10):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(cycle)
    files, threads, shared = held()
    assert (files, shared) == (before[0], before[2])
    assert threads <= before[1], "trio's own that were idle for long may have ended"
    assert not [pid for pid in children() if not gone(pid)]


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()]


ORPHANS = """
import sys, trio
from pathlib import Path
from trio_infer.models.host import NoHost
from trio_infer.models.repository import find_models

async def main():
    (runner,) = find_models([Path(sys.argv[1])])
    await runner.load(NoHost())
    print(*(slot._worker.pid for slot in runner._slots), flush=True)
    await trio.sleep_forever()

trio.run(main)
"""


async def test_no_worker_outlives_a_server_that_is_killed(repository: Repository) -> None:
    repository.model("m", STUNTS, CONFIG + "instance_group { count: 2 }")
    server = subprocess.Popen(  # noqa: ASYNC220 - not through a thread
        [sys.executable, "-c", ORPHANS, str(repository.root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    line = await trio.to_thread.run_sync(server.stdout.readline)
    pids = [int(pid) for pid in line.split()]
    assert len(pids) == 2
    assert not any(gone(pid) for pid in pids)
    server.kill()
    server.wait()
    server.stdout.close()
    with trio.fail_after(1):
        while not all(gone(pid) for pid in pids):  # noqa: ASYNC110 - they are not our children
            await trio.sleep(0.01)
