"""The Triton Python model that cooperates, as its users write it, behind the real command: ten steps, and before each
it asks whether anybody still waits for the answer."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import Command

STEP = 0.25
CONFIG = f"""
backend: "python"
input {{ name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }}
instance_group {{ count: 3 }}
parameters {{ key: "step_seconds" value {{ string_value: "{STEP}" }} }}
"""
MODEL = """
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

STEPS = 10


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.step_seconds = float(parameters["step_seconds"]["string_value"])

    def execute(self, requests):
        return [self.work(request) for request in requests]

    def work(self, request):
        name = request.request_id()
        for step in range(STEPS):
            if request.is_cancelled():
                pb_utils.Logger.log_info(f"{name}: cancelled at step {step}")
                return pb_utils.InferenceResponse(
                    error=pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                )
            time.sleep(self.step_seconds)
        pb_utils.Logger.log_info(f"{name}: done after {STEPS} steps")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([STEPS], np.int32))])
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Command]:
    (tmp_path / "steps" / "1").mkdir(parents=True)
    (tmp_path / "steps" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "steps" / "1" / "model.py").write_text(MODEL)
    command = Command.start(str(tmp_path))
    try:
        command.ready()
        yield command
        command.process.terminate()
        assert command.end() == 0
    finally:
        command.clean_up()


def ask(server: Command, action: str, request_id: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    server.connections.append(connection)
    document: dict[str, object] = {"id": request_id, "IN": 1}
    if action == "infer":
        tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}
        document = {"id": request_id, "inputs": [tensor]}
    connection.request("POST", f"/v2/models/steps/{action}", json.dumps(document))
    return connection


def test_it_stops_at_the_step_after_its_client_left_and_ends_for_the_one_who_stayed(server: Command) -> None:
    staying = ask(server, "infer", "stays")
    leaving = [ask(server, action, f"left {action}") for action in ("infer", "generate")]
    time.sleep(2 * STEP)  # what a client with that much patience does
    for connection in leaving:
        connection.close()
    for _ in leaving:
        line = server.await_log(": cancelled at step")
        found = re.search(r"left (infer|generate): cancelled at step (\d+)", line)
        assert found, line
        assert int(found[2]) in (2, 3)
    answer = json.loads(staying.getresponse().read())
    assert answer["outputs"][0]["data"] == [10]
    server.await_log("stays: done after 10 steps")
