"""Triton's Python models behind real HTTP: what a poll of `is_cancelled()` sees, and slots that tell the truth."""

from __future__ import annotations

import logging
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from support import get, post, serving
from trio_infer import MetricsPolicy
from trio_infer.models.repository import find_models
from trio_infer.models.worker.codec import RemoteTraceback

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
REQUEST = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}

POLLING = """
import time
import triton_python_backend_utils as pb_utils

STEP = 0.002

class TritonPythonModel:
    def initialize(self, args):
        self.log = pb_utils.Logger

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            for step in range(int(10 / STEP)):
                if step == 5:
                    self.log.log_info("well under way")
                if request.is_cancelled():
                    self.log.log_info(f"cancelled at step {step}")
                    responses.append(
                        pb_utils.InferenceResponse(
                            error=pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED)
                        )
                    )
                    break
                if tensor.as_numpy()[0] == step:  # 0 and 1 end at once
                    responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())]))
                    break
                time.sleep(STEP)
        return responses
"""

LONG = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1e9]}]}


@pytest.fixture(params=["process", "thread"])
def execution(request: Any) -> Any:
    return request.param


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(name: str, code: str, extra: str = "") -> Path:
        version = tmp_path / name / "1"
        version.mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(CONFIG + extra)
        (version / "model.py").write_text(textwrap.dedent(code))
        return tmp_path

    return write


class LogEvents(logging.Handler):
    """Lets a test wait, in trio, for a model's words."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._changed = trio.Event()
        self._token = trio.lowlevel.current_trio_token()

    def emit(self, record: logging.LogRecord) -> None:
        self._token.run_sync_soon(self._note, record.getMessage())

    def _note(self, line: str) -> None:
        self.lines.append(line)
        self._changed.set()
        self._changed = trio.Event()

    async def wait_for(self, text: str) -> str:
        with trio.fail_after(5):
            while True:
                for line in self.lines:
                    if text in line:
                        return line
                await self._changed.wait()


@pytest.fixture
async def log() -> Any:
    handler = LogEvents()
    logger = logging.getLogger("trio_infer")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
async def test_is_cancelled_turns_true_when_the_client_leaves(
    write: Any, log: Any, leave: str, action: str, execution: Any
) -> None:
    async with serving(*find_models([write("polling", POLLING)], execution=execution)) as served:
        client = await served.connect()
        await client.send(post("polling", action, LONG if action == "infer" else {"IN": 1e9}))
        await log.wait_for("well under way")
        await getattr(client, leave)()
        line = await log.wait_for("cancelled at step")
        assert int(line.split()[-1]) < 2000
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "running"): 1}
        probe = await served.connect()
        with trio.fail_after(2):
            assert (await probe.ask(post("polling", "infer", REQUEST))).status == 200, "the slot is free"
        await probe.close()


async def test_a_client_that_stays_gets_its_answer(write: Any, execution: Any) -> None:
    async with serving(*find_models([write("polling", POLLING)], execution=execution)) as served:
        client = await served.connect()
        answer = await client.ask(post("polling", "infer", REQUEST))
        assert answer.json["outputs"] == [{"name": "OUT", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}]
        assert (await client.ask(post("polling", "generate", {"IN": [1, 5]}))).json["OUT"] == [1.0, 5.0]
        streamed = await client.ask(post("polling", "generate_stream", {"IN": [1, 5]}))
        assert streamed.body == b'data: {"model_name":"polling","model_version":"1","OUT":[1.0,5.0]}\n\n'
        await client.close()


DEAF = """
import time
import triton_python_backend_utils as pb_utils
import test_triton_over_http as stage

class TritonPythonModel:
    def execute(self, requests):
        stage.entered.set()
        stage.release.wait(10)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
            for r in requests
        ]
"""
entered, release = threading.Event(), threading.Event()


async def test_a_model_that_never_asks_keeps_its_slot_until_it_ends_and_that_shows(write: Any) -> None:
    entered.clear()
    release.clear()
    models = find_models([write("deaf", DEAF)], execution="thread")
    async with serving(*models, metrics=MetricsPolicy()) as served:

        def queue() -> Any:
            return served.server.statistics().models["deaf", "1"]

        async def gauge() -> str:
            scraper = await served.connect()
            lines = (await scraper.ask(get("/metrics"))).body.decode().split("\n")
            await scraper.close()
            return next(line for line in lines if line.startswith("trio_infer_abandoned{"))

        client = await served.connect()
        await client.send(post("deaf", "infer", REQUEST))
        await trio.to_thread.run_sync(entered.wait)
        await client.close()
        await served.ended(1)  # its client is let go at once
        assert (queue().running, queue().abandoned) == (0, 1)
        assert await gauge() == 'trio_infer_abandoned{model="deaf"} 1'
        probe = await served.connect()
        await probe.send(post("deaf", "infer", REQUEST))
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert (queue().running, queue().waiting, queue().abandoned) == (0, 1, 1), "never two runs at once"
        release.set()
        with trio.fail_after(5):
            assert (await probe.answer()).status == 200
        assert (queue().running, queue().waiting, queue().abandoned) == (0, 0, 0)
        assert await gauge() == 'trio_infer_abandoned{model="deaf"} 0'
        await probe.close()


async def test_shutdown_does_not_wait_for_a_model_that_never_asks(write: Any) -> None:
    entered.clear()
    release.clear()
    async with serving(*find_models([write("deaf", DEAF)], execution="thread"), exit_timeout=0.1) as served:
        client = await served.connect()
        await client.send(post("deaf", "infer", REQUEST))
        await trio.to_thread.run_sync(entered.wait)
        served.server.drain()
        with trio.fail_after(3):
            answer = await client.answer()
            await served.finished.wait()
        assert answer.status == 503
        assert answer.headers["connection"] == "close"
        assert served.cancelled() == {("shutdown", "running"): 1}
        await client.close()
    release.set()


TOKENS = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.speak, args=(request.get_response_sender(),)).start()
        return None

    def speak(self, sender):
        for token in range(100_000):
            if sender.is_cancelled():
                pb_utils.Logger.log_info(f"stopped at token {token}")
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([token], np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def test_an_exception_is_logged_once_with_the_models_traceback(
    write: Any,
    caplog: pytest.LogCaptureFixture,
    execution: Any,
) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            raise ValueError("boom-42")
    """
    async with serving(*find_models([write("raising", code)], execution=execution)) as served:
        client = await served.connect()
        answer = await client.ask(post("raising", "infer", REQUEST))
        assert answer.status == 500
        assert "ValueError: boom-42" in answer.json["error"]
        assert (await client.ask(post("raising", "infer", REQUEST))).status == 500, "the connection lives on"
        await client.close()
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    for record in errors:
        assert record.exc_info is not None
        kind = RemoteTraceback if execution == "process" else ValueError
        assert isinstance(record.exc_info[1], kind)
        assert 'raise ValueError("boom-42")' in logging.Formatter().format(record)


async def test_a_decoupled_stream_stops_when_its_reader_leaves(write: Any, log: Any, execution: Any) -> None:
    extra = "model_transaction_policy { decoupled: true }"
    async with serving(*find_models([write("tokens", TOKENS, extra)], execution=execution)) as served:
        client = await served.connect()
        await client.send(post("tokens", "generate_stream", {"IN": 1}))
        assert (await client.head()).status == 200
        for token in range(20):
            assert f'"OUT":{token}.0' in (await client.chunk()).decode()
        await client.close()
        await log.wait_for("stopped at token")
        await served.ended(1)
        assert served.cancelled() == {("client disconnected", "streaming"): 1}
        refused = await served.connect()
        answer = await refused.ask(post("tokens", "infer", REQUEST))
        assert answer.status == 501
        assert "generate_stream" in answer.json["error"]
        await refused.close()
