"""What a repository brings besides a model's code: labels, warm-up, and what a load request may put in its place."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support import Client, get, post, serving
from trio_infer import ControlPolicy, ModelLoadError, ModelRepository, Server
from trio_infer.models.overrides import check_path
from trio_infer.testing import MemoryListener

CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" }
parameters { key: "execution" value { string_value: "thread" } }
"""
ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    seen = []

    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            self.seen.append(array.shape)
            if array.sum() > 100:
                raise ValueError("too hot")
            answers.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", array)], parameters={"seen": str(self.seen)}
            ))
        return answers
"""
ASK = {
    "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 3], "data": [0.25, 4, 1]}],
    "outputs": [{"name": "OUT", "parameters": {"classification": 2}}],
}
PLAIN = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}


def write(root: Path, config: str = CONFIG, name: str = "m", **files: str) -> Path:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    (root / name / "1" / "model.py").write_text(ECHO)
    (root / name / "labels.txt").write_text("cat\ndog\n")
    return root


@asynccontextmanager
async def served(root: Path, mode: Any = "explicit", **policy: Any) -> AsyncIterator[Client]:
    control = ControlPolicy(model_control_mode=mode, load_model=("*",), **policy)
    async with serving(memory=True, repository=ModelRepository([root]), control=control) as server:
        yield server.connect_in_memory()


def repository(path: str, document: object = None) -> bytes:
    body = b"" if document is None else json.dumps(document).encode()
    return f"POST /v2/repository/{path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def override(config: Any, **files: str) -> dict[str, Any]:
    encoded = {f"file:{path}": base64.b64encode(content.encode()).decode() for path, content in files.items()}
    return {"parameters": {**({} if config is None else {"config": json.dumps(config)}), **encoded}}


async def test_classes_have_the_names_that_the_label_file_gives_them(tmp_path: Path) -> None:
    async with served(write(tmp_path)) as client:
        answer = await client.ask(post("m", "infer", ASK))
        assert answer.json["outputs"][0]["data"] == ["4.000000:1:dog", "1.000000:2"]


@pytest.mark.parametrize(
    ("filename", "content", "complaint"),
    [
        ("labels.txt", None, "the labels can't be read"),
        ("labels.txt", b"\xff", "the labels can't be read"),
        ("../secret", None, "`label_filename` must be in the model's directory, got '../secret'"),
    ],
)
async def test_labels_that_can_not_be_read_are_a_failure_to_load(
    tmp_path: Path, filename: str, content: bytes | None, complaint: str
) -> None:
    write(tmp_path / "r", CONFIG.replace("labels.txt", filename))
    (tmp_path / "r" / "secret").write_text("x")
    (tmp_path / "r" / "m" / "labels.txt").unlink()
    if content is not None:
        (tmp_path / "r" / "m" / "labels.txt").write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        ModelRepository([tmp_path / "r"]).prepare("m")
    assert complaint in str(caught.value)


WARM_UP = """
instance_group {{ count: 2 }}
model_warmup {{
  name: "once" batch_size: {batch} count: 2
  inputs {{ key: "IN" value {{ data_type: TYPE_FP32 dims: [ {dims} ] {data} }} }}
}}
"""


@pytest.mark.parametrize("execution", ["thread", "process"])
@pytest.mark.parametrize("data", ["zero_data: true", "random_data: true", 'input_data_file: "cold"'])
async def test_each_instance_has_run_each_sample_before_the_first_client(
    tmp_path: Path, execution: str, data: str
) -> None:
    config = CONFIG.replace('"thread"', f'"{execution}"') + WARM_UP.format(batch=2, dims=3, data=data)
    write(tmp_path, config)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "cold").write_bytes(bytes(2 * 3 * 4))
    async with served(tmp_path) as client:
        answer = await client.ask(post("m", "infer", PLAIN))
        assert answer.json["parameters"]["seen"] == "[(2, 3), (2, 3), (1, 3)]"
        answer = await client.ask(get("/v2/models/m/stats"))
        assert answer.json["model_stats"][0]["inference_count"] == 1, "nobody asked for the others"


@pytest.mark.parametrize(
    ("batch", "dims", "data", "complaint"),
    [
        (1, "3", 'input_data_file: "hot"', "too hot"),
        (1, "3", 'input_data_file: "missing"', "No such file"),
        (1, "3", 'input_data_file: "../1/model.py"', "must be in the model's directory 'warmup'"),
        (1, "3", 'input_data_file: "short"', "input byte size mismatch"),
        (1, "4", "zero_data: true", "unexpected shape for input 'IN' for model 'm'. Expected [-1,3], got [1,4]"),
        (9, "3", "zero_data: true", "batch-size must be <= 4"),
        (1, "-1", "zero_data: true", "each must be 0 or more"),
    ],
)
async def test_a_warm_up_that_fails_is_a_failure_to_load(
    tmp_path: Path, batch: int, dims: str, data: str, complaint: str
) -> None:
    write(tmp_path, CONFIG + WARM_UP.format(batch=batch, dims=dims, data=data))
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "hot").write_bytes(b"\x00\x00\xc8\x42" * 3)
    (tmp_path / "m" / "warmup" / "short").write_bytes(b"\x00")
    with pytest.raises(ModelLoadError) as caught:
        await Server(repository=ModelRepository([tmp_path])).serve(listeners=[MemoryListener()])
    assert "warm-up 'once': " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert complaint in str(caught.value)


async def test_a_configuration_in_the_request_replaces_the_files(tmp_path: Path) -> None:
    async with served(write(tmp_path)) as client:
        config = {
            "max_batch_size": "16",
            "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": ["3"]}],
            "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": ["3"]}],
            "parameters": {"execution": {"string_value": "thread"}},
        }
        answer = await client.ask(repository("models/m/load", override(config)))
        assert (answer.status, answer.body) == (200, b"")
        answer = await client.ask(get("/v2/models/m/config"))
        assert answer.json["max_batch_size"] == 16
        assert answer.json["backend"] == "python"
        answer = await client.ask(repository("models/m/load", {}))
        assert answer.status == 200
        answer = await client.ask(get("/v2/models/m/config"))
        assert answer.json["max_batch_size"] == 4, "without one, the file counts again"


async def test_files_in_the_request_are_the_model_and_are_gone_with_it(tmp_path: Path) -> None:
    def leftovers() -> list[Path]:
        return list(Path(tempfile.gettempdir()).glob("trio-infer-*"))

    before = leftovers()
    config = {
        "max_batch_size": 4,
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [3]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [3]}],
        "parameters": {"execution": {"string_value": "thread"}},
    }
    doubled = ECHO.replace('Tensor("OUT", array)', 'Tensor("OUT", array * 2)')
    async with served(write(tmp_path)) as client:
        answer = await client.ask(
            repository("models/m/load", override(config, **{"1/model.py": doubled, "5/model.py": doubled}))
        )
        assert answer.status == 200, answer.body
        assert len(leftovers()) == len(before) + 1
        answer = await client.ask(get("/v2/models/m"))
        assert answer.json["versions"] == ["5"], "the latest, as the policy has it"
        answer = await client.ask(post("m", "infer", PLAIN))
        assert answer.json["outputs"][0]["data"] == [2, 4, 6]
        answer = await client.ask(repository("models/other/load", override(config, **{"1/model.py": ECHO})))
        assert answer.status == 200, "a model that no repository has"
        answer = await client.ask(repository("models/m/unload", {"parameters": {"unload_dependents": False}}))
        assert answer.status == 200
        assert len(leftovers()) == len(before) + 1
        answer = await client.ask(repository("models/broken/load", override(config, **{"1/model.py": "1 / 0"})))
        assert (answer.status, "ZeroDivisionError" in answer.json["error"]) == (400, True)
    assert leftovers() == before


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        (
            {"config": "{}", "file:../evil.py": ""},
            "must stay in the model's directory, such as '1/model.py', got '../evil.py'",
        ),
        ({"config": "{}", "file:/etc/evil": ""}, "got '/etc/evil'"),
        ({"config": "{}", "file:1/../../evil": ""}, "got '1/../../evil'"),
        ({"config": "{}", "file:1//model.py": ""}, "got '1//model.py'"),
        ({"config": "{}", "file:": ""}, "got ''"),
        ({"config": "{}", "file:1\\model.py": ""}, "must stay"),
        ({"config": "{}", "file:a\u0000b": ""}, "must stay"),
        ({"config": "{}", "file:" + "x" * 300: ""}, "must stay"),
        ({"config": "{}", "file:a": "", "file:a/b": ""}, "can't be written"),
        ({"file:1/model.py": ""}, "need a 'config' beside them"),
        ({"config": "{}", "file:1/model.py": "not base64!"}, "is not base64"),
        ({"config": "{}", "file:1/model.py": 5}, "must be the file's content in base64"),
        ({"config": "nonsense"}, "not JSON"),
        ({"config": "[]"}, "must be a JSON object"),
        ({"config": '{"max_batch_size": "many"}'}, "max_batch_size"),
        ({"config": '{"no_such_field": 1}'}, "no_such_field"),
        ({"config": '{"name": "other"}'}, "it is named 'other'"),
        ({"config": "[" * 5000}, "not JSON"),
        ({"nonsense": 1}, "unknown parameter 'nonsense'"),
    ],
)
async def test_what_a_load_request_must_not_bring_is_refused_and_the_model_serves_on(
    tmp_path: Path, parameters: dict[str, Any], complaint: str
) -> None:
    async with served(write(tmp_path / "r")) as client:
        answer = await client.ask(repository("models/m/load", {"parameters": parameters}))
        assert (answer.status, complaint in answer.json["error"]) == (400, True), answer.json
        assert (await client.ask(post("m", "infer", PLAIN))).status == 200
        answer = await client.ask(repository("index", {"ready": True}))
        assert answer.json == [{"name": "m", "version": "1", "state": "READY"}]
    assert os.listdir(tmp_path) == ["r"]


@pytest.mark.parametrize("path", ["1/model.py", "a", "deep/er/and/deeper.txt", "1/..hidden"])
def test_a_path_that_stays_is_taken(path: str) -> None:
    assert "/".join(check_path(path, "m")) == path


async def test_the_repository_answers_as_triton_s_clients_expect(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, name="second")
    (tmp_path / "second" / "1" / "model.py").write_text("1 / 0")
    async with served(tmp_path, exit_on_error=False) as client:
        answer = await client.ask(repository("index"))
        rows = {row["name"]: row for row in answer.json}
        assert rows["m"] == {"name": "m", "version": "1", "state": "READY"}
        assert rows["second"]["state"] == "UNAVAILABLE"
        assert "ZeroDivisionError" in rows["second"]["reason"]
        assert (await client.ask(get("/v2/health/ready"))).status == 400, "one that should be there is not"
        assert (
            (await client.ask(repository("index", {"ready": "yes"})))
            .json["error"]
            .startswith("Invalid value for 'ready': expected a boolean")
        )
        assert (await client.ask(get("/v2/repository/index"))).status == 405
        for path in ("there/index", "there/models/m/load", "there/models/m/unload"):
            answer = await client.ask(repository(path))
            assert (answer.status, answer.json["error"]) == (501, "'repository_name' specification is not supported")
        answer = await client.ask(repository("models/nobody/load", {}))
        assert answer.status == 500
        assert answer.json["error"].startswith("failed to load 'nobody', failed to poll from model repository")
        answer = await client.ask(repository("models/second/load", {}))
        assert answer.status == 400
        assert answer.json["error"].startswith(
            "load failed for model 'second': version 1 is at UNAVAILABLE state: Internal: "
        )
        known = (await client.ask(repository("index"))).json
        for name, status in ((".", 400), ("..", 400), ("%2e%2e", 500), ("x" * 300, 400), ("nobody", 500)):
            answer = await client.ask(repository(f"models/{name}/load", {}))
            assert answer.status == status, answer.json
            assert status == 500 or "invalid model name" in answer.json["error"]
        assert (await client.ask(repository("index"))).json == known, "nothing is kept of names that somebody made up"
        assert (await client.ask(repository("models/nobody/unload"))).status == 200
        assert (await client.ask(repository("models/m/unload", {}))).status == 200
        answer = await client.ask(post("m", "infer", PLAIN))
        assert (answer.status, answer.json["error"]) == (
            404,
            "Request for unknown model: 'm' has no available versions",
        )
        answer = await client.ask(get("/v2/models/m/versions/1"))
        assert (answer.status, answer.json["error"]) == (
            503,
            "Request for unknown model: 'm' version 1 is not at ready state",
        )
        answer = await client.ask(get("/v2/models/m/ready"))
        assert (answer.status, answer.json["error"]) == (400, "Model version not ready")


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_outside_explicit_mode_nothing_is_loaded_on_request(tmp_path: Path, mode: str) -> None:
    async with served(write(tmp_path), mode) as client:
        for what in ("load", "unload"):
            answer = await client.ask(repository(f"models/m/{what}", {}))
            assert (answer.status, answer.json["error"]) == (
                503,
                "explicit model load / unload is not allowed if polling is enabled",
            )


async def test_a_repository_that_vanishes_under_the_server_fails_its_loads_only(tmp_path: Path) -> None:
    async with served(write(tmp_path / "r")) as client:
        (tmp_path / "r").rename(tmp_path / "elsewhere")
        answer = await client.ask(repository("models/m/load", {}))
        assert (answer.status, "does not exist" in answer.json["error"]) == (400, True)
        answer = await client.ask(repository("index", {}))
        assert (answer.status, "does not exist" in answer.json["error"]) == (500, True)
        assert (await client.ask(post("m", "infer", PLAIN))).status == 200
        (tmp_path / "elsewhere").rename(tmp_path / "r")
        assert (await client.ask(repository("models/m/load", {}))).status == 200


NATIVE = """
from trio_infer import InferResponse, Model

class Echo(Model):
    seen = []

    async def infer(self, request):
        array = request.inputs["IN"]
        self.seen.append(array.shape)
        return InferResponse({"OUT": array}, {"seen": str(self.seen)})
"""


async def test_a_native_model_gets_reshape_labels_and_warm_up_as_its_configuration_says(tmp_path: Path) -> None:
    config = CONFIG.replace('"python"', '"trio_infer"').replace("[ 3 ]", "[ 3 ] reshape { shape: [ 1, 3 ] }")
    write(tmp_path, config + WARM_UP.format(batch=2, dims=3, data='input_data_file: "cold"'))
    (tmp_path / "m" / "1" / "model.py").write_text(NATIVE)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "cold").write_bytes(bytes(2 * 3 * 4))
    async with served(tmp_path) as client:
        answer = await client.ask(post("m", "infer", ASK))
        assert answer.json["outputs"][0]["data"] == ["4.000000:1:dog", "1.000000:2"]
        assert answer.json["parameters"]["seen"] == str([(2, 1, 3)] * 4 + [(1, 1, 3)]), "two instances, twice each"
        answer = await client.ask(get("/v2/models/m/config"))
        assert answer.json["output"][0]["label_filename"] == "labels.txt"
        assert answer.json["model_warmup"][0]["name"] == "once"
        (tmp_path / "m" / "1" / "model.py").write_text("1 / 0")
        for _ in range(2):
            answer = await client.ask(repository("models/m/load", {}))
            assert (answer.status, "version 1 is at UNAVAILABLE" in answer.json["error"]) == (400, True)
        assert (await client.ask(post("m", "infer", PLAIN))).status == 200


TEXTS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    seen = []

    def execute(self, requests):
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            self.seen.append(array.tolist())
            sender = request.get_response_sender()
            for element in array.ravel():
                answer = pb_utils.InferenceResponse(
                    [pb_utils.Tensor("OUT", array)], parameters={"seen": str(self.seen)}
                )
                sender.send(answer)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def test_a_streaming_model_of_texts_is_warmed_up_from_a_file_in_the_wire_s_form(tmp_path: Path) -> None:
    config = CONFIG.replace("FP32", "STRING").replace("[ 3 ]", "[ 2 ]").replace("max_batch_size: 4", "")
    warm_up = WARM_UP.format(batch=0, dims=2, data='input_data_file: "texts"').replace("FP32", "STRING")
    warm_up = warm_up.replace("count: 2", "count: 1")
    write(tmp_path, config + warm_up + "model_transaction_policy { decoupled: true }")
    (tmp_path / "m" / "1" / "model.py").write_text(TEXTS)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "texts").write_bytes(b"\x02\0\0\0hi\x00\0\0\0")
    async with served(tmp_path) as client:
        answer = await client.ask(post("m", "generate_stream", {"IN": ["a", "b"]}))
        assert str([[b"hi", b""], [b"a", b"b"]]) in answer.body.decode()
