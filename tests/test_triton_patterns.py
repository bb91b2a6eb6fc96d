"""The patterns that Triton's Python models are written in, each as a small model, over HTTP.

Nothing here looks into a model's process: what a model knows it answers or logs.
"""

from __future__ import annotations

import json
import logging
import textwrap
from pathlib import Path
from typing import Any

import pytest

from support import get, post, serving
from test_triton_over_http import LogEvents
from trio_infer import MetricsPolicy
from trio_infer.models.repository import find_models

HEAD = """
import asyncio
import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils
"""


def config(*tensors: str, decoupled: bool = False, extra: str = "") -> str:
    """Of FP32 tensors: "<name" for an input, ">name" for an output."""
    text = 'backend: "python"\n'
    for tensor in tensors:
        kind = "input" if tensor[0] == "<" else "output"
        text += f'{kind} {{ name: "{tensor[1:]}" data_type: TYPE_FP32 dims: [ -1 ] }}\n'
    if decoupled:
        text += "model_transaction_policy { decoupled: true }\n"
    return text + extra


ADD_SUB = """
class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        kinds = [pb_utils.get_output_config_by_name(self.config, name)["data_type"] for name in ("SUM", "DIFFERENCE")]
        self.types = [pb_utils.triton_string_to_numpy(kind) for kind in kinds]

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("A", "B"))
            results = (a + b).astype(self.types[0]), (a - b).astype(self.types[1])
            tensors = [pb_utils.Tensor(name, value) for name, value in zip(("SUM", "DIFFERENCE"), results)]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
"""
AUTO_COMPLETE = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        assert config["name"] == "auto_complete"
        for name in ("A", "B"):
            auto_complete_model_config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [2]})
        auto_complete_model_config.add_output({"name": "SUM", "data_type": "TYPE_FP32", "dims": [2]})
        auto_complete_model_config.set_max_batch_size(0)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("SUM", sum(t.as_numpy() for t in r.inputs()))])
            for r in requests
        ]
"""
INSTANCE_KIND = """
class TritonPythonModel:
    def initialize(self, args):
        assert all(isinstance(value, str) for value in args.values())
        self.args = args

    def execute(self, requests):
        words = [self.args["model_instance_kind"], self.args["model_instance_name"], self.args["model_version"]]
        words.append("1" if pb_utils.get_model_dir().endswith("instance_kind/1") else pb_utils.get_model_dir())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("WORDS", np.array(words, dtype=object))]) for _ in requests]
"""
REPEAT = """
class TritonPythonModel:
    def initialize(self, args):
        assert pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.going = 0
        self.lock = threading.Lock()

    def execute(self, requests):
        for request in requests:
            with self.lock:
                self.going += 1
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            threading.Thread(target=self.repeat, args=(request.get_response_sender(), values), daemon=True).start()
        return None

    def repeat(self, sender, values):
        pb_utils.Logger.log_info(f"{len(values)} to repeat")
        for value in values:
            if sender.is_cancelled():
                pb_utils.Logger.log_info("nobody listens")
                break
            time.sleep(0.001)
            if value < 0:
                raise_it = pb_utils.TritonError("a negative value", pb_utils.TritonError.INVALID_ARG)
                sender.send(pb_utils.InferenceResponse(error=raise_it))
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))]))
        with self.lock:
            self.going -= 1
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)  # from then on it may be finalized

    def finalize(self):
        assert self.going == 0
        pb_utils.Logger.log_info("all threads are done")
"""
BLS_SYNC = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name=json.loads(request.parameters()).get("model", "add_sub"),
                requested_output_names=["SUM"],
                inputs=request.inputs(),
            )
            response = inner.exec()
            if response.has_error():
                responses.append(pb_utils.InferenceResponse(error=response.error()))
                continue
            responses.append(pb_utils.InferenceResponse(output_tensors=response.output_tensors()))
        return responses
"""
BLS_ASYNC = """
class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            waiting = [
                pb_utils.InferenceRequest(
                    model_name="add_sub", requested_output_names=[name], inputs=request.inputs()
                ).async_exec()
                for name in ("SUM", "DIFFERENCE")
            ]
            tensors = []
            for response in await asyncio.gather(*waiting):
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                tensors += response.output_tensors()
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
"""
BLS_DECOUPLED = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="repeat", requested_output_names=["OUT"], inputs=request.inputs()
            )
            total = 0.0
            for response in inner.exec(decoupled=True):
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                if len(response.output_tensors()) > 0:  # Triton's last one may be empty
                    total += pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()[0]
            pb_utils.Logger.log_info(f"the total is {total}")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", np.array([total], np.float32))]))
        return responses
"""
RELAY = """
class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="repeat", requested_output_names=["OUT"], inputs=request.inputs()
            )
            sender = request.get_response_sender()
            for_the_client = await inner.async_exec(decoupled=True)
            async for response in for_the_client:
                sender.send(response)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CUSTOM_METRICS = """
class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="requests_seen", description="Requests that came", kind=pb_utils.MetricFamily.COUNTER
        )
        self.metric = self.family.Metric(labels={"model": args["model_name"], "version": args["model_version"]})

    def execute(self, requests):
        self.metric.increment(len(requests))
        seen = np.array([self.metric.value()], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", seen)]) for _ in requests]
"""
REPOSITORY = {
    "add_sub": (ADD_SUB, config("<A", "<B", ">SUM", ">DIFFERENCE")),
    "auto_complete": (AUTO_COMPLETE, ""),
    "instance_kind": (
        INSTANCE_KIND,
        config("<A") + 'output { name: "WORDS" data_type: TYPE_STRING dims: [ 4 ] }',
    ),
    "repeat": (REPEAT, config("<IN", ">OUT", decoupled=True)),
    "bls_sync": (BLS_SYNC, config("<A", "<B", ">SUM")),
    "bls_async": (BLS_ASYNC, config("<A", "<B", ">SUM", ">DIFFERENCE")),
    "bls_decoupled": (BLS_DECOUPLED, config("<IN", ">TOTAL")),
    "relay": (RELAY, config("<IN", ">OUT", decoupled=True)),
    "custom_metrics": (CUSTOM_METRICS, config("<A", ">SEEN")),
}


@pytest.fixture(params=["process", "thread"])
def models(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Runners of the models of those names, or of all."""

    def write(*names: str) -> list[Any]:
        for name in names or REPOSITORY:
            code, text = REPOSITORY[name]
            (tmp_path / name / "1").mkdir(parents=True)
            (tmp_path / name / "config.pbtxt").write_text(text)
            (tmp_path / name / "1" / "model.py").write_text(HEAD + textwrap.dedent(code))
        return find_models([tmp_path], execution=request.param)

    return write


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


def infer(**tensors: list[float]) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [len(data)], "data": data} for name, data in tensors.items()
        ]
    }


def data(answer: Any) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    return {output["name"]: output["data"] for output in answer.json["outputs"]}


AB = infer(A=[3.0, 4.0], B=[1.0, 2.0])


async def test_the_patterns_answer_as_on_triton(models: Any) -> None:
    async with serving(*models(), metrics=MetricsPolicy()) as served:
        client = await served.connect()
        expected = {
            "add_sub": (AB, {"SUM": [4, 6], "DIFFERENCE": [2, 2]}),
            "auto_complete": (AB, {"SUM": [4, 6]}),
            "instance_kind": (infer(A=[1.0]), {"WORDS": ["CPU", "instance_kind_0", "1", "1"]}),
            "bls_sync": (AB, {"SUM": [4, 6]}),
            "bls_async": (AB, {"SUM": [4, 6], "DIFFERENCE": [2, 2]}),
            "bls_decoupled": (infer(IN=[1.0, 2.0, 4.0]), {"TOTAL": [7]}),
        }
        for name, (request, outputs) in expected.items():
            assert data(await client.ask(post(name, "infer", request))) == outputs
        for seen in (1, 2):
            assert data(await client.ask(post("custom_metrics", "infer", infer(A=[1.0])))) == {"SEEN": [seen]}
        page = (await client.ask(get("/metrics"))).body.decode()
        assert 'requests_seen{model="custom_metrics",version="1"} 2' in page
        assert 'nv_inference_request_success{model="add_sub",version="1"} 4' in page, "models ask as clients do"
        answer = await client.ask(post("bls_sync", "infer", {**AB, "parameters": {"model": "nobody"}}))
        assert (answer.status, answer.json["error"]) == (
            503,
            "Failed for execute the inference request. Model 'nobody' is not ready.",
        )
        answer = await client.ask(post("bls_decoupled", "infer", infer(IN=[1.0, -1.0])))
        assert answer.status == 500
        assert "TritonModelException: a negative value" in answer.json["error"]
        await client.close()


@pytest.mark.parametrize("model", ["repeat", "relay"])
async def test_one_instance_streams_to_many_clients_at_once(models: Any, model: str) -> None:
    async with serving(*models("repeat", *{model} - {"repeat"})) as served:
        clients = [await served.connect() for _ in range(4)]
        long = [float(n) for n in range(50)]
        for client in clients:
            await client.send(post(model, "generate_stream", {"IN": long}))
        for client in clients:  # each has its first event before any has its last
            await client.head()
            assert json.loads((await client.chunk()).decode().removeprefix("data: "))["OUT"] == 0
        for client in clients:
            events = []
            while chunk := await client.chunk():
                events.append(json.loads(chunk.decode().removeprefix("data: "))["OUT"])
            assert events == long[1:]
            await client.close()


@pytest.mark.parametrize("model", ["repeat", "relay"])
async def test_an_error_is_a_status_before_the_first_event_and_an_event_after_it(models: Any, model: str) -> None:
    async with serving(*models("repeat", *{model} - {"repeat"})) as served:
        client = await served.connect()
        answer = await client.ask(post(model, "generate_stream", {"IN": [-1, 1]}))
        assert (answer.status, answer.json) == (400, {"error": "a negative value"})
        answer = await client.ask(post(model, "generate_stream", {"IN": [1, 2, 3, -1, 4]}))
        *events, last = [json.loads(line.removeprefix("data: ")) for line in answer.body.decode().split("\n\n")[:-1]]
        assert [event["OUT"] for event in events] == [1, 2, 3]
        assert last == {"error": "a negative value"}
        await client.close()


@pytest.mark.parametrize("model", ["bls_decoupled", "relay"])
async def test_a_client_that_leaves_stops_the_model_behind_the_model(models: Any, model: str, log: Any) -> None:
    async with serving(*models("repeat", *{model} - {"repeat"})) as served:
        client = await served.connect()
        await client.send(post(model, "generate_stream", {"IN": [1.0] * 100_000}))
        await log.wait_for("100000 to repeat")
        await client.close()
        await log.wait_for("nobody listens")
        await served.ended(1)
    await log.wait_for("all threads are done")
