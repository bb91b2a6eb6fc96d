"""`execute` with several requests in its list: the rules of what it returns, and whose fault is whose."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton_stage import CONFIG, PRELUDE

from trio_infer.errors import ErrorCode, InferError
from trio_infer.models.triton_current import Job, current_jobs
from trio_infer.models.triton_execute import Executor, Loaded
from trio_infer.models.triton_imports import ModelCode
from trio_infer.models.triton_loading import import_model, initialize
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferRequest, InferResponse


class Note:
    """A job that only notes what it is told; wanted or not."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self.promised = False
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
    model, parsed = import_model(code, parsed, auto_complete=True)
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
