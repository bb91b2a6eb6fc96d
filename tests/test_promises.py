"""What each runner promises of its cancels is told: by the configuration, the metrics and the log."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from support import Client, Ticker, get, post, serving
from trio_infer import MetricsPolicy
from trio_infer.models.repository import find_models

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are measured on Linux")

PYTHON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("x", each.inputs()[0].as_numpy())]) for each in requests]
"""
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
"""
RENAMED = TENSORS.replace('"x"', '"in"', 1).replace('"x"', '"out"', 1)
NATIVE = """
import trio_infer

class Same(trio_infer.Model):
    async def infer(self, request):
        return {"x": request.inputs["x"]}
"""
ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling {
  step { model_name: "native" input_map { key: "x" value: "in" } output_map { key: "x" value: "y" } }
  step { model_name: "MODEL" input_map { key: "x" value: "y" } output_map { key: "x" value: "out" } }
}
"""


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


PROMISES = {
    "asks": "callback",
    "ensemble_of_a_process": "process",
    "ensemble_of_a_thread": "callback",
    "native": "checkpoint",
    "process": "process",
    "unkilled": "callback",
}


@pytest.fixture
def models(tmp_path: Path) -> list[Any]:
    def model(name: str, config: str, code: str = PYTHON) -> None:
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config + (TENSORS if code else RENAMED))
        if code:
            (tmp_path / name / "1/model.py").write_text(code)

    model("asks", parameter("execution", "thread"))
    model("process", parameter("stops", "checkpoint"))
    model("unkilled", parameter("cancel_grace_ms", "none"))
    model("native", 'backend: "trio_infer"', NATIVE)
    model("ensemble_of_a_process", ENSEMBLE.replace("MODEL", "process"), "")
    model("ensemble_of_a_thread", ENSEMBLE.replace("MODEL", "asks"), "")
    return find_models([tmp_path])


async def test_each_way_of_running_a_model_shows_its_promise(
    models: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(*models, memory=True, metrics=MetricsPolicy()) as served:
        client: Client = served.connect_in_memory()
        shown = {}
        for name in PROMISES:
            config = (await client.ask(get(f"/v2/models/{name}/config"))).json
            shown[name] = config["parameters"]["stops"]["string_value"]
        lines = (await client.ask(get("/metrics"))).body.decode().splitlines()
    assert shown == PROMISES, "a file that says otherwise is not believed"
    for name, promise in PROMISES.items():
        assert f'trio_infer_model_stops{{model="{name}",version="1",stops="{promise}"}} 1' in lines
    ready = {record.args[0]: record.getMessage() for record in caplog.records if "is ready after" in record.message}
    assert ready.keys() == PROMISES.keys()
    assert ready["native"].endswith("s; a cancelled run stops at trio's next checkpoint")
    assert ready["process"].endswith("or when its process is killed after cancel_grace_ms")
    assert 'trio_infer_worker_processes{model="process",version="1",state="serving"} 1' in lines
    assert 'trio_infer_worker_exits_total{model="process",version="1",cause="killed"} 0' in lines
    assert not [line for line in lines if line.startswith("trio_infer_worker") and "native" in line]


async def test_a_configuration_that_was_read_can_be_given_back_although_it_tells_the_promise(tmp_path: Path) -> None:
    from trio_infer import ControlPolicy, ModelRepository

    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").write_text(PYTHON)
    (tmp_path / "m/config.pbtxt").write_text(TENSORS)
    repository = ModelRepository([tmp_path], execution="thread")
    control = ControlPolicy(model_control_mode="explicit", load_model=["m"])
    async with serving(memory=True, repository=repository, control=control) as served:
        client: Client = served.connect_in_memory()
        config = (await client.ask(get("/v2/models/m/config"))).body.decode()
        load = post("x", "y", {"parameters": {"config": config}}).replace(
            b"/v2/models/x/y", b"/v2/repository/models/m/load"
        )
        assert (await client.ask(load)).status == 200
        assert (await client.ask(get("/v2/models/m/config"))).json["parameters"] == {
            "stops": {"string_value": "callback"}
        }


async def test_a_model_that_nothing_can_stop_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Unstoppable:
        """A runner as its author is honest about it."""

        stops = "never"

        def __init__(self) -> None:
            from trio_infer.models.native import NativeRunner

            self._runner = NativeRunner(Ticker())

        def __getattr__(self, name: str) -> Any:
            return getattr(self._runner, name)

    async with serving(Unstoppable(), memory=True):
        pass
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("nothing can stop a run of model 'ticker' in a thread")
