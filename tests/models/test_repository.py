from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from triton_stage import CONFIG, Client, Repository

from trio_infer.errors import ModelLoadError, SetupError
from trio_infer.models.host import NoHost
from trio_infer.models.native import NativeRunner
from trio_infer.models.repository import find_models
from trio_infer.models.triton_python import TritonPythonRunner
from trio_infer.models.worker.runner import ProcessRunner

EMPTY = "class TritonPythonModel:\n    def execute(self, requests): ...\n"
NATIVE = """
from trio_infer.models.native import Model
from helper import double
class Twice(Model):
    inputs = ()
    async def infer(self, request):
        return {"OUT": double(request.inputs["IN"])}
"""


def found(repository: Repository) -> list[tuple[str, str]]:
    return [(runner.signature.name, runner.signature.version) for runner in find_models([repository.root])]


def test_each_directory_is_a_model_and_stray_things_are_not(repository: Repository) -> None:
    repository.model("b", EMPTY)
    repository.model("a", EMPTY, config="")
    for path in ("README.md", ".git/config", "..data/x", "lost+found/x", "__pycache__/x", "a/1.txt", "a/notes/x"):
        repository.write(path, "")
    (repository.root / "linked").symlink_to(repository.root / "b")
    (repository.root / "linked/config.pbtxt").read_text()
    runners = find_models([repository.root])
    assert [runner.signature.name for runner in runners] == ["a", "b", "linked"]
    assert all(isinstance(runner, ProcessRunner) for runner in runners)
    runners = find_models([repository.root], execution="thread")
    assert all(isinstance(runner, TritonPythonRunner) for runner in runners)
    assert runners[0].config.as_json()["default_model_filename"] == "model.py"


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["2", "10"]),
        ("version_policy { all { } }", ["1", "2", "10"]),
        ("version_policy { specific { versions: [ 1 ] } }", ["1"]),
    ],
)
def test_versions_are_served_by_the_policy(repository: Repository, policy: str, versions: list[str]) -> None:
    for version in ("1", "2", "10", "0", "03", "1a", "-4"):
        repository.write(f"m/{version}/model.py", EMPTY)
    repository.write("m/config.pbtxt", CONFIG + policy)
    assert found(repository) == [("m", version) for version in versions]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"m/config.pbtxt": CONFIG}, "it has no version directory"),
        ({"m/x.txt": ""}, "it has no version directory"),
        ({"m/1/x.txt": ""}, "it has no `backend`, and none of model.py, model.onnx,"),
        (
            {"m/1/x": "", "m/config.pbtxt": 'backend: "tensorrt"'},
            "backend 'tensorrt' is not supported; backends 'python'",
        ),
        (
            {"m/1/x": "", "m/config.pbtxt": 'backend: "onnxruntime"'},
            "each of its version directories must have one of model.onnx, the same in each",
        ),
        (
            {"m/1/model.onnx": "", "m/2/x": "", "m/config.pbtxt": 'backend: "onnxruntime" version_policy { all {} }'},
            "each of its version directories must have one of model.onnx, the same in each",
        ),
        (
            {"m/1/x": "", "m/config.pbtxt": 'backend: "pytorch" platform: "onnxruntime_onnx"'},
            "platform 'onnxruntime_onnx' is not supported; backends 'python'",
        ),
        ({"m/1/x": "", "m/config.pbtxt": 'platform: "ensemble"'}, "must specify 'step' in its"),
        (
            {"m/1/x": "", "m/config.pbtxt": CONFIG + "version_policy { specific { versions: [ 3 ] } }"},
            "`version_policy` asks for version 3, but there is 1",
        ),
        (
            {"m/1/x": "", "m/config.pbtxt": CONFIG + 'default_model_filename: "../../x.py"'},
            "default_model_filename must be the name of a .py file in the version directory, got '../../x.py'",
        ),
        ({"m/1/x": "", "m/config.pbtxt": "nonsense"}, "ModelConfig has no field 'nonsense'"),
        ({"m/1/x": "", "m/config.pbtxt": 'backend: "trio_infer"'}, "there is no model.py"),
        (
            {"m/1/model.py": "x = 1", "m/config.pbtxt": 'backend: "trio_infer"'},
            "its code must define one subclass of trio_infer.Model, found none",
        ),
        (
            {"m/1/model.py": "raise ValueError('boom')", "m/config.pbtxt": 'backend: "trio_infer"'},
            "importing it: ValueError: boom",
        ),
    ],
)
def test_a_model_that_cannot_be_served_says_why(repository: Repository, files: dict[str, str], reason: str) -> None:
    for path, text in files.items():
        repository.write(path, text)
    with pytest.raises(ModelLoadError) as caught:
        found(repository)
    assert caught.value.reason.startswith(reason)
    assert caught.value.model == "m"


def test_settings_of_processes_are_warned_of_where_there_are_none(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    settings = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "1" }} }}\n'
        for key in ("spares", "cancel_grace_ms", "mine")
    )
    repository.model("m", EMPTY, CONFIG + settings)
    repository.execution = "process"
    repository.runner()
    assert caplog.records == []
    repository.execution = "thread"
    repository.runner()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == (
        "model 'm' runs in a thread, which can't be killed or limited: cancel_grace_ms, spares has no effect there; "
        "say execution 'process'"
    )


def test_a_model_given_as_a_repository_is_told_apart(repository: Repository) -> None:
    repository.model("m", EMPTY)
    with pytest.raises(SetupError, match="is a model, not a repository: give the directory that it is in"):
        find_models([repository.root / "m"])


def test_a_configuration_that_is_not_text_is_a_load_error(repository: Repository) -> None:
    repository.model("m", EMPTY)
    (repository.root / "m/config.pbtxt").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match="its configuration can't be read"):
        found(repository)


def test_a_missing_repository_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"^the model repository .*/none does not exist$"):
        find_models([tmp_path / "none"])
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"is not a directory$"):
        find_models([tmp_path / "file"])


def test_one_name_in_two_repositories_is_refused_but_the_same_repository_twice_is_not(tmp_path: Path) -> None:
    for root in ("one", "two"):
        Repository(tmp_path / root).model("m", EMPTY)
    with pytest.raises(ModelLoadError, match=r"it is in two repositories, here and in .*/one"):
        find_models([tmp_path / "one", tmp_path / "two"])
    assert len(find_models([tmp_path / "one", tmp_path / "one"])) == 1


@pytest.mark.trio
async def test_a_native_model_in_a_repository_takes_its_tensors_from_the_configuration(repository: Repository) -> None:
    config = CONFIG.replace('"python"', '"trio_infer"') + "instance_group { count: 2 }"
    repository.write("m/1/model.py", NATIVE)
    repository.write("m/config.pbtxt", config + 'parameters { key: "on_disconnect" value { string_value: "finish" } }')
    repository.write("m/1/helper.py", "def double(array): return array * 2\n")
    runner: Any = repository.runner()
    assert isinstance(runner, NativeRunner)
    assert (runner.instances, runner.on_disconnect) == (2, "finish")
    assert [spec.name for spec in runner.signature.inputs] == ["IN"]
    await runner.load(NoHost())
    assert (await Client(runner).ask()).outputs["OUT"].tolist() == [2, 4]


def test_a_native_model_may_say_everything_itself(repository: Repository) -> None:
    repository.write("m/config.pbtxt", 'backend: "trio_infer"')
    repository.write(
        "m/3/model.py",
        """
        import attrs
        from trio_infer.models.native import Model
        from trio_infer.protocol.values import TensorSpec
        @attrs.frozen
        class Mine(Model):
            inputs = (TensorSpec("X", "INT8", ()),)
            max_batch_size = 7
            async def infer(self, request): ...
        """,
    )
    (runner,) = find_models([repository.root])
    assert (runner.signature.name, runner.signature.version, runner.instances) == ("m", "3", None)
    assert runner.signature.inputs[0].name == "X"
    assert runner.signature.max_batch_size == 7


def test_a_native_model_named_otherwise_is_refused(repository: Repository) -> None:
    repository.write("m/config.pbtxt", 'backend: "trio_infer"')
    repository.write("m/1/model.py", NATIVE.replace("inputs = ()", 'name = "n"').replace("from helper", "from .helper"))
    repository.write("m/1/helper.py", "double = None")
    with pytest.raises(ModelLoadError, match="its `name` is 'n' but its directory is 'm'"):
        found(repository)
