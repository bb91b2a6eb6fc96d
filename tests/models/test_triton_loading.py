from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from triton_stage import CONFIG, Client, Repository, happens

from trio_infer.errors import ModelLoadError
from trio_infer.models.host import NoHost

pytestmark = pytest.mark.trio

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.mark.parametrize(
    ("code", "reason", "line"),
    [
        ("def f(:\n", "importing it: SyntaxError: invalid syntax", 3),
        ("import no_such_library\n", "importing it: ModuleNotFoundError: No module named 'no_such_library'", 3),
        ("raise SystemExit(3)\n", "importing it: SystemExit: 3", 3),
        (
            "x = 1\n",
            "there is no class TritonPythonModel in its code; what else a model.py may be, `backend` has to say: "
            '"pytorch" for a PyTorch module, "trio_infer" for a trio_infer.Model',
            None,
        ),
        ("class TritonPythonModel:\n    pass\n", "its TritonPythonModel has no method execute", None),
        (
            "class TritonPythonModel:\n"
            "    def initialize(self, args):\n"
            "        self.help()\n"
            "    def help(self):\n"
            "        raise ValueError('no\\nweights')\n"
            "    def execute(self, requests): ...\n",
            "initialize: ValueError: no weights",
            7,
        ),
        (
            "class TritonPythonModel:\n"
            "    def __init__(self):\n"
            "        raise KeyError\n"
            "    def execute(self, requests): ...\n",
            "TritonPythonModel(): KeyError",
            5,
        ),
        (
            "class TritonPythonModel:\n"
            "    @staticmethod\n"
            "    def auto_complete_config(config):\n"
            "        config.add_input({'name': 'IN', 'data_type': 'TYPE_INT8', 'dims': [1]})\n"
            "    def execute(self, requests): ...\n",
            "auto_complete_config: ValueError: input 'IN' has data_type TYPE_FP32 in config.pbtxt",
            6,
        ),
        (
            "class TritonPythonModel:\n"
            "    @staticmethod\n"
            "    def auto_complete_config(config):\n"
            "        return 7\n"
            "    def execute(self, requests): ...\n",
            "auto_complete_config must return its argument, got int",
            None,
        ),
    ],
)
async def test_a_model_that_cannot_be_loaded_says_why_in_one_sentence(
    repository: Repository, code: str, reason: str, line: int | None
) -> None:
    file = repository.model("m", code)
    before = set(sys.modules)
    with pytest.raises(ModelLoadError) as caught:
        await repository.runner().load(NoHost())
    assert caught.value.reason.startswith(reason)
    assert (caught.value.where, caught.value.line) == (file, line)
    assert "\n" not in str(caught.value)
    assert not [name for name in set(sys.modules) - before if name.startswith("trio_infer_models.")]


async def test_initialize_gets_seven_strings(repository: Repository, stage: Any) -> None:
    await repository.loaded(
        """
        import stage
        class TritonPythonModel:
            def initialize(self, args): stage.args = args
            def execute(self, requests): ...
        """
    )
    config = stage.args.pop("model_config")
    assert config.startswith('{"name":"m"')
    assert stage.args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0",
        "model_instance_device_id": "0",
        "model_repository": str(repository.root / "m"),
        "model_version": "1",
        "model_name": "m",
    }


async def test_a_model_without_a_configuration_completes_it_itself(repository: Repository) -> None:
    code = """
    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(auto_complete_model_config):
            auto_complete_model_config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
            auto_complete_model_config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
            auto_complete_model_config.set_max_batch_size(4)
            return auto_complete_model_config
        def execute(self, requests): ...
    """
    runner = await repository.loaded(code, config="")
    assert runner.config.backend == "python"
    assert [spec.name for spec in runner.signature.inputs] == ["IN"]
    assert runner.signature.max_batch_size == 4


async def test_auto_completion_can_be_turned_off(repository: Repository, stage: Any) -> None:
    repository.model(
        "m",
        """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config): raise RuntimeError
            def execute(self, requests): ...
        """,
    )
    await repository.runner(auto_complete=False).load(NoHost())


async def test_incomplete_tensors_stop_the_loading(repository: Repository) -> None:
    repository.model("m", ECHO, 'backend: "python" input { name: "IN" }')
    runner = repository.runner()
    assert runner.signature.inputs == ()
    with pytest.raises(ModelLoadError, match="input 'IN' has no `data_type`"):
        await runner.load(NoHost())


async def test_each_instance_is_a_model_with_module_globals_of_its_own(repository: Repository) -> None:
    runner = await repository.loaded(
        """
        calls = []
        class TritonPythonModel:
            def execute(self, requests):
                calls.append(1)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([len(calls)]))])]
        """,
        CONFIG + "instance_group { count: 2 }",
    )
    assert runner.instances == 2
    counts = [int((await Client(runner, index=index).ask()).outputs["OUT"][0]) for index in (0, 0, 1)]
    assert counts == [1, 2, 1]


async def test_models_with_siblings_of_the_same_name_do_not_collide(repository: Repository, stage: Any) -> None:
    code = """
    import helper                          # in the version directory
    import package, package.part as part   # a package
    from package import other
    from . import helper as same
    from shared import WHO as shared_who   # in the model's directory

    class TritonPythonModel:
        def execute(self, requests):
            import late
            from .late import WHO
            assert helper is same and late.WHO == WHO
            who = [helper.WHO, part.WHO, other.WHO, package.WHO, shared_who, late.WHO, late.helper.WHO]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(who, dtype=object))])]
    """
    for name in ("a", "b"):
        repository.model(name, code)
        for file in ("1/helper", "1/package/__init__", "1/package/part", "1/package/other", "shared"):
            repository.write(f"{name}/{file}.py", f"WHO = {name + file!r}\n")
        repository.write(f"{name}/1/late.py", f"import helper\nWHO = {name + 'late'!r}\n")
        # Must not shadow what is installed: a directory that is no package, and a copy of Triton's own module.
        repository.write(f"{name}/1/numpy/weights.txt", "")
        repository.write(f"{name}/1/triton_python_backend_utils.py", "raise RuntimeError\n")
    runners = [repository.runner("a"), repository.runner("b")]
    async with trio.open_nursery() as nursery:
        for runner in runners:
            nursery.start_soon(runner.load, NoHost())
    for name, runner in zip("ab", runners, strict=True):
        who = (await Client(runner).ask()).outputs["OUT"].tolist()
        expected = ("1/helper", "1/package/part", "1/package/other", "1/package/__init__", "shared", "late", "1/helper")
        assert who == [(name + file).encode() for file in expected]
    assert not {"helper", "package", "shared", "late"} & set(sys.modules)
    assert str(repository.root) not in "".join(sys.path)
    for runner in runners:
        await runner.unload()
    assert not [name for name in sys.modules if name.startswith(("trio_infer_models.a_", "trio_infer_models.b_"))]


async def test_loading_leaves_no_files_behind(repository: Repository) -> None:
    repository.write("m/1/helper.py", "")
    await repository.loaded("import helper\n" + ECHO.lstrip())
    assert sorted(path.name for path in repository.root.rglob("*")) == [
        "1",
        "config.pbtxt",
        "helper.py",
        "m",
        "model.py",
    ]


async def test_another_default_model_filename_is_honoured(repository: Repository) -> None:
    repository.model("m", ECHO, CONFIG + 'default_model_filename: "my-model.v2.py"')
    (repository.root / "m/1/model.py").rename(repository.root / "m/1/my-model.v2.py")
    runner = repository.runner()
    await runner.load(NoHost())
    assert np.array_equal((await Client(runner).ask()).outputs["OUT"], [1, 2])


async def test_logger_and_model_dir_know_the_model_in_every_thread(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    repository.write(
        "m/1/helper.py", "import triton_python_backend_utils as u\ndef speak(): u.Logger.log_warn(u.get_model_dir())\n"
    )
    runner = await repository.loaded(
        """
        import helper, threading
        class TritonPythonModel:
            def execute(self, requests):
                pb_utils.Logger.log_info("from the model")
                thread = threading.Thread(target=helper.speak)
                thread.start()
                thread.join()
                return [pb_utils.InferenceResponse([])]
        """
    )
    with caplog.at_level(logging.INFO):
        await Client(runner).ask()
    said = [(r.name, r.levelname, r.message, r.filename, r.lineno) for r in caplog.records]
    assert said == [
        ("trio_infer.model.m", "INFO", "from the model", "model.py", 7),
        ("trio_infer.model.m", "WARNING", str(repository.root / "m/1"), "helper.py", 2),
    ]


FINALIZED = """
import stage
class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        if getattr(stage, "fail", "") == self.name:
            raise RuntimeError("no memory")
        if hasattr(stage, "reached"):
            stage.reached.set()
            stage.go_on.wait(10)
    def execute(self, requests): return [pb_utils.InferenceResponse([])]
    def finalize(self):
        stage.finalized.append(self.name)
        raise ValueError("ignored")
"""


async def test_finalize_runs_exactly_once_an_instance_and_its_errors_are_logged(
    repository: Repository, stage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stage.finalized = []
    runner = await repository.loaded(FINALIZED, CONFIG + "instance_group { count: 2 }")
    await runner.unload()
    await runner.unload()
    assert stage.finalized == ["m_0_0", "m_0_1"]
    assert [record.message for record in caplog.records] == [
        "model instance 'm_0_0' failed to finalize",
        "model instance 'm_0_1' failed to finalize",
    ]


async def test_instances_that_were_ready_are_finalized_when_a_later_one_fails(
    repository: Repository, stage: Any
) -> None:
    stage.finalized, stage.fail = [], "m_0_1"
    with pytest.raises(ModelLoadError, match="RuntimeError: no memory"):
        await repository.loaded(FINALIZED, CONFIG + "instance_group { count: 2 }")
    assert stage.finalized == ["m_0_0"]


async def test_a_cancelled_load_leaves_at_once_and_what_it_began_is_finalized(
    repository: Repository, stage: Any
) -> None:
    import threading

    stage.reached, stage.go_on, done = threading.Event(), threading.Event(), threading.Event()

    class Finalized(list):  # type: ignore[type-arg]
        def append(self, name: str) -> None:
            super().append(name)
            done.set()

    stage.finalized = Finalized()
    repository.model("m", FINALIZED, CONFIG + "instance_group { count: 2 }")
    runner = repository.runner()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.load, NoHost())
        await happens(stage.reached)
        nursery.cancel_scope.cancel()
    await runner.unload()
    assert stage.finalized == []
    stage.go_on.set()
    await happens(done)
    assert stage.finalized == ["m_0_0"]


async def test_unload_waits_for_the_work_that_is_going_on(repository: Repository, stage: Any) -> None:
    import threading

    stage.started, stage.go_on, stage.order = threading.Event(), threading.Event(), []
    runner = await repository.loaded(
        """
        import stage
        class TritonPythonModel:
            def execute(self, requests):
                stage.started.set()
                stage.go_on.wait(10)
                stage.order.append("executed")
            def finalize(self): stage.order.append("finalized")
        """
    )
    client = Client(runner)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.stay)
        await happens(stage.started)
        client.leave()
        await client.gone.wait()
        nursery.start_soon(runner.unload)
        stage.go_on.set()
    assert stage.order == ["executed", "finalized"]


async def test_a_missing_model_file_is_named(repository: Repository) -> None:
    repository.write("m/config.pbtxt", CONFIG)
    (repository.root / "m/1").mkdir()
    with pytest.raises(ModelLoadError, match=r"there is no model\.py in its version directory") as caught:
        await repository.runner().load(NoHost())
    assert caught.value.where == Path(repository.root / "m/1/model.py")
