"""`execute` with several requests in its list: the rules of what it returns, and whose fault is whose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from triton_stage import CONFIG, PRELUDE, Repository

from desk import desk
from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import Life, Phase
from trio_infer.models.triton_current import Job, current_jobs
from trio_infer.models.triton_execute import Executor, Loaded
from trio_infer.models.triton_hooks import import_class
from trio_infer.models.triton_imports import ModelCode
from trio_infer.models.triton_loading import initialize, make_model
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferRequest, InferResponse


class Note:
    """A job that only notes what it is told; wanted or not."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self.promised = self.rescheduled = False
        self.error: InferError | None = None
        self.sent: list[Any] = []
        self.finished: list[bool] = []
        self.detached = False

    def start(self) -> bool:
        return self.wanted

    def detach(self) -> None:
        self.detached = True

    def finish(self, *, expect_more: bool, error: InferError | None = None) -> None:
        self.finished.append(expect_more)
        self.error = error

    def promise(self) -> None:
        self.promised = True

    def reschedule(self) -> None:
        self.rescheduled = True

    def put(self, response: Any, *, final: bool) -> None:
        self.sent.append((response, final))

    def drop(self) -> None: ...

    def when_left(self, callback: Any) -> None:
        callback()


def batch(tmp_path: Path, body: str, jobs: list[Note], config: str = CONFIG) -> list[Any]:
    file = tmp_path / "m/1/model.py"
    file.parent.mkdir(parents=True)
    lines = "".join(f"        {line}\n" for line in body.strip("\n").split("\n"))
    file.write_text(f"{PRELUDE}import stage\nclass TritonPythonModel:\n    def execute(self, requests):\n{lines}")
    parsed = ModelConfig.parse(config, name="m", where=file)
    code = ModelCode("m", file)
    model, parsed = make_model(import_class(code, {}), code, parsed, auto_complete=True)
    initialize(model, code, parsed, 0, 1)
    loaded = Loaded("m_0", code, model)
    requests = [InferRequest("m", "1", {"IN": np.array([n], np.float32)}) for n in range(len(jobs))]
    try:
        return Executor(parsed.signature("1"), {}).execute_batch(loaded, list(zip(jobs, requests, strict=True)))
    finally:
        loaded.finalize()


def value(result: Any) -> float:
    assert isinstance(result, InferResponse)
    return float(result.outputs["OUT"][0])


def test_each_request_gets_its_own_response_and_those_that_nobody_wants_are_left_out(
    tmp_path: Path, stage: Any
) -> None:
    stage.current = current_jobs
    jobs = [Note(), Note(wanted=False), Note()]
    results = batch(
        tmp_path,
        """
stage.seen = stage.current()
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() * 2)]) for r in requests]
""",
        jobs,
    )
    assert (value(results[0]), results[1], value(results[2])) == (0, None, 4)
    assert [job.finished for job in jobs] == [[False], [], [False]]
    assert stage.seen == (jobs[0], jobs[2])
    assert current_jobs() == ()
    check: Job = jobs[0]
    assert check.error is None


def test_an_error_in_one_response_is_that_requests_only(tmp_path: Path, stage: Any) -> None:
    first, second, third = batch(
        tmp_path,
        """
good = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([1]))])
sender = requests[2].get_response_sender()
sender.send(good, 1)
return [good, pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)), None]
""",
        jobs := [Note(), Note(), Note()],
    )
    assert value(first) == 1
    assert isinstance(second, InferError)
    assert (second.message, second.code) == ("no", ErrorCode.NOT_FOUND)
    assert third is None
    assert [job.finished for job in jobs] == [[False], [False], [True]]
    assert [final for _, final in jobs[2].sent] == [True]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('boom')", "message: ValueError: boom\n\nAt:\n  "),
        (
            "return []",
            "message: Number of InferenceResponse objects do not match number of InferenceRequest objects: "
            "execute was given 2 requests and returned 0 responses.",
        ),
        ("return 'ab'", "message: Expected a list in the execute return, found type 'str'."),
        (
            "return [None, None]",
            "message: Expected an 'InferenceResponse' object in the execute function return list, "
            "found type 'NoneType'.",
        ),
    ],
)
def test_what_execute_itself_does_wrong_fails_all(tmp_path: Path, stage: Any, body: str, words: str) -> None:
    results = batch(tmp_path, body, jobs := [Note(), Note()])
    assert results[0] is not results[1]
    for job, result in zip(jobs, results, strict=True):
        assert isinstance(result, InferError)
        assert result.message.startswith(f"Failed to process the request(s) for model 'm_0', {words}")
        assert result.code is ErrorCode.INTERNAL
        assert job.error is result
        assert job.finished == [False]


def test_a_thread_of_its_own_knows_of_no_job(tmp_path: Path, stage: Any) -> None:
    stage.current = current_jobs
    stage.threading = threading
    batch(
        tmp_path,
        """
thread = stage.threading.Thread(target=lambda: setattr(stage, "seen", stage.current()))
thread.start()
thread.join()
return [pb_utils.InferenceResponse([])]
""",
        [Note()],
    )
    assert stage.seen == ()


BATCHED = (
    CONFIG
    + "max_batch_size: 8\ndynamic_batching { }\n"
    + 'parameters { key: "cancel_grace_ms" value { string_value: "100" } }\n'
)
GATED = """
    import pathlib, time
    class TritonPythonModel:
        def execute(self, requests):
            here = pathlib.Path(DIRECTORY)
            number = len(list(here.glob("run*")))
            (here / f"run{number}").write_text(" ".join(str(r.request_id()) for r in requests))
            while not (here / f"open{number}").exists() and not all(r.is_cancelled() for r in requests):
                (here / f"flags{number}").write_text("".join("01"[r.is_cancelled()] for r in requests))
                time.sleep(0.005)
            responses = []
            for request in requests:
                x = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                error = pb_utils.TritonError("no negative numbers") if x[0, 0] < 0 else None
                out = [] if error else [pb_utils.Tensor("OUT", x * 2)]
                responses.append(pb_utils.InferenceResponse(out, error))
            return responses
"""


async def see(path: Path, text: str) -> None:
    """Wait until a model, which may be in another process, has written this."""

    def look() -> None:
        while not path.exists() or path.read_text() != text:
            time.sleep(0.005)

    await in_time(look)


async def in_time(look: Callable[[], None]) -> None:
    with trio.fail_after(20):
        await trio.to_thread.run_sync(look, abandon_on_cancel=True)


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_a_model_gets_a_batch_in_one_call_and_each_client_its_own_part_of_it(
    tmp_path: Path, execution: Any
) -> None:
    repository = Repository(tmp_path / "models", execution)
    repository.model("m", GATED.replace("DIRECTORY", repr(str(tmp_path))), BATCHED)
    async with desk(repository.runner()) as at:
        alone = await at.asked([0], name="IN", id="a")
        await see(tmp_path / "run0", "a")
        stays, leaves, wrong, early = [
            await at.asked(*rows, name="IN", id=name)
            for name, rows in (("b", [[1], [2]]), ("c", [[3]]), ("d", [[-4]]), ("e", [[5]]))
        ]
        early.leave()
        await early.done.wait()
        (tmp_path / "open0").touch()
        await alone.done.wait()
        await see(tmp_path / "run1", "b c d")
        leaves.leave()
        await leaves.done.wait()
        await see(tmp_path / "flags1", "010")
        await trio.sleep(0.2)  # longer than the grace: a batch isn't killed for one of it
        (tmp_path / "open1").touch()
        await stays.done.wait()
        await wrong.done.wait()
        assert stays.values == [[2], [4]]
        assert str(wrong.error) == "no negative numbers"
        assert leaves.responses == []
        assert {size: each.infer.count for size, each in at.books.batches.items()} == {1: 1, 4: 1}


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_a_batch_is_over_as_soon_as_the_last_of_its_clients_has_left(tmp_path: Path, execution: Any) -> None:
    repository = Repository(tmp_path / "models", execution)
    repository.model("m", GATED.replace("DIRECTORY", repr(str(tmp_path))), BATCHED)
    async with desk(repository.runner()) as at:
        alone = await at.asked([0], name="IN", id="a")
        await see(tmp_path / "run0", "a")
        pair = [await at.asked([n], name="IN", id=name) for n, name in ((1, "b"), (2, "c"))]
        alone.leave()
        await see(tmp_path / "run1", "b c")
        pair[0].leave()
        await see(tmp_path / "flags1", "10")
        pair[1].leave()
        with trio.fail_after(20):
            await at.model.settled()
        (tmp_path / "open2").touch()
        probe = at.ask([5], name="IN", id="d")
    assert probe.values == [[10]]
    assert sum(at.books.cancelled.values()) == 3


async def test_a_deaf_batch_is_killed_only_when_all_of_its_clients_have_left(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "models", "process")
    deaf = GATED.replace("and not all(r.is_cancelled() for r in requests)", "")
    repository.model("m", deaf.replace("DIRECTORY", repr(str(tmp_path))), BATCHED)
    async with desk(repository.runner()) as at:
        alone = await at.asked([0], name="IN", id="a")
        await see(tmp_path / "run0", "a")
        pair = [await at.asked([n], name="IN", id=name) for n, name in ((1, "b"), (2, "c"))]
        alone.leave()  # it is killed after its grace, and the batch runs in the next process
        await see(tmp_path / "run1", "b c")
        for guest in pair:
            guest.leave()
        with trio.fail_after(20):
            await at.model.settled()
        (tmp_path / "open2").touch()
        probe = at.ask([5], name="IN", id="d")
    assert probe.values == [[10]]


async def test_those_who_leave_while_a_batch_waits_for_a_process_are_not_in_it(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "models", "process")
    deaf = GATED.replace("and not all(r.is_cancelled() for r in requests)", "")
    slow = deaf.replace(
        "class TritonPythonModel:", "class TritonPythonModel:\n        def initialize(self, args): time.sleep(0.3)"
    )
    repository.model("m", slow.replace("DIRECTORY", repr(str(tmp_path))), BATCHED)
    granted = trio.Event()

    class Watcher:
        def life_moved(self, life: Life, left: Phase | None) -> None:
            if life.label == "d" and life.phase is Phase.RUNNING:
                granted.set()

        def life_ended(self, life: Life) -> None: ...

        def work_ended(self, life: Life) -> None: ...

    async with desk(repository.runner(), Watcher()) as at:
        alone = await at.asked([0], name="IN", id="a")
        await see(tmp_path / "run0", "a")
        three = [await at.asked([n], name="IN", id=name) for n, name in ((1, "b"), (2, "c"), (3, "d"))]
        alone.leave()
        await granted.wait()  # together with the others, but there is no process yet
        three[1].leave()
        (tmp_path / "open1").touch()
        await three[0].done.wait()
    assert (tmp_path / "run1").read_text() == "b d"
    assert [guest.values for guest in (three[0], three[2])] == [[[2]], [[6]]]


SLOW = """
import time
class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        time.sleep(float(max(tensor.max() for tensor in tensors)))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor)]) for tensor in tensors]
"""


async def test_a_request_for_which_there_is_no_room_does_not_cost_its_process_the_others(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "models", "process")
    config = CONFIG + "max_batch_size: 4\ndynamic_batching { }\n"
    repository.model("m", SLOW, config)
    async with desk(repository.runner()) as at:
        nobody = np.broadcast_to(np.float32(0), (1, 2**36))  # 256 GiB that are nowhere
        first = await at.asked([0.5], name="IN")
        large = at.ask([0.0], name="IN")
        large.request = attrs.evolve(large.request, inputs={"IN": nobody})
        await trio.testing.wait_all_tasks_blocked()
        rest = [await at.asked([0.0], name="IN") for _ in range(2)]
        for guest in (first, large, *rest):
            await guest.done.wait()
        with trio.fail_after(10):
            last = at.ask([0.0], name="IN")
            await last.done.wait()
    assert isinstance(large.error, InferError)
    assert "no room for a tensor of" in large.error.message
    assert [guest.error for guest in (first, *rest, last)] == [None] * 4
