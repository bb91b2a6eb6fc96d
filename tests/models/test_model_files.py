"""What lies on disk: read within the model's directory, told apart when it changes, refused in words if broken."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_stage import CONFIG, Repository

from trio_infer.errors import ModelLoadError, SetupError, UnknownModelError
from trio_infer.models.model_files import fingerprint, read_inside, read_labels
from trio_infer.models.overrides import check_path, read_config, write_files
from trio_infer.models.repository import ModelRepository

EMPTY = "class TritonPythonModel:\n    def execute(self, requests): ...\n"
NATIVE = """
from trio_infer.models.native import Model
import helper
class Echo(Model):
    async def infer(self, request):
        return {"OUT": request.inputs["IN"]}
"""


@pytest.fixture
def models(repository: Repository) -> ModelRepository:
    repository.model("m", EMPTY)
    return ModelRepository([repository.root])


# ---- labels


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        ("", ()),
        ("cat", ("cat",)),
        ("cat\ndog\n", ("cat", "dog")),
        ("cat\r\ndog\r\n", ("cat", "dog")),
        ("cat\n\ndog\n\n", ("cat", "", "dog", "")),
        (
            "form\x0cfeed\nline\u2028separator\nnext\x85line\nKätzchen",
            ("form\x0cfeed", "line\u2028separator", "next\x85line", "Kätzchen"),
        ),
    ],
)
def test_a_label_is_a_line_and_nothing_else_ends_one(tmp_path: Path, content: str, labels: tuple[str, ...]) -> None:
    (tmp_path / "labels.txt").write_bytes(content.encode())
    assert read_labels("m", tmp_path, "labels.txt") == labels


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../secret", "must be in the model's directory, got '../secret'"),
        ("/etc/hostname", "must be in the model's directory, got '/etc/hostname'"),
        ("out", "must be in the model's directory, got 'out'"),
        ("ring", "'ring' is a link that leads to itself"),
        ("pipe", "'pipe' is not a regular file"),
        ("1", "'1' is not a regular file"),
        ("a\0b", "null"),
        ("x" * 300, "File name too long"),
        ("missing", "No such file"),
    ],
)
def test_labels_that_are_no_file_of_the_model_are_refused_in_words(tmp_path: Path, path: str, reason: str) -> None:
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (directory / "out").symlink_to(tmp_path / "secret")
    (directory / "ring").symlink_to("ring")
    os.mkfifo(directory / "pipe")
    with pytest.raises(ModelLoadError) as caught:
        read_labels("m", directory, path)
    assert caught.value.reason.startswith("the labels can't be read: ")
    assert reason in caught.value.reason


def test_a_file_may_have_as_many_bytes_as_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    assert read_inside(tmp_path, "x", most=4, rule="") == b"1234"
    with pytest.raises(ValueError, match="'x' is larger than 3 bytes"):
        read_inside(tmp_path, "x", most=3, rule="")


# ---- what has changed


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        (lambda m: (m / "1/model.py").write_text("other"), True),
        (lambda m: os.utime(m / "config.pbtxt", ns=(1, 1)), True),
        (lambda m: (m / "labels.txt").write_text(""), True),
        (lambda m: (m / "1/model.py").unlink(), True),
        (lambda m: shutil.copytree(m / "1", m / "2"), True),
        (lambda m: (m / "1/model.py").rename(m / "1/other.py"), True),
        (lambda m: (m.parent / "weights.bin").write_text("retrained"), True),
        (lambda m: (m / "1/__pycache__").mkdir(), False),
        (lambda m: (m / "1/__pycache__/x.pyc").parent.mkdir() or (m / "1/__pycache__/x.pyc").touch(), False),
        (lambda m: (m.parent / "other/1").mkdir(parents=True), False),
        (lambda m: (m / "nowhere").symlink_to("missing"), False),
        (lambda m: (m / "up").symlink_to(m), False),
    ],
)
def test_the_fingerprint_follows_the_model_s_own_files(
    repository: Repository, models: ModelRepository, change: Callable[[Path], Any], changes: bool
) -> None:
    directory = repository.root / "m"
    repository.write("weights.bin", "x")
    (directory / "1" / "weights.bin").symlink_to("../../weights.bin")
    before = models.fingerprint("m")
    assert models.fingerprint("m") == before
    change(directory)
    assert (models.fingerprint("m") != before) == changes


def test_a_mount_that_is_swapped_as_kubernetes_does_it_counts_as_changed(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for revision in ("one", "two"):
        Repository(root / f"..{revision}").model("m", EMPTY)
    (root / "..data").symlink_to("..one")
    (root / "m").symlink_to("..data/m")
    models = ModelRepository([root])
    assert models.scan() == {"m": ""}
    before = models.fingerprint("m")
    (root / "..next").symlink_to("..two")
    (root / "..next").rename(root / "..data")
    assert models.fingerprint("m") != before
    (runner,) = models.prepare("m").runners
    assert runner.signature.name == "m"


def test_a_fingerprint_looks_at_no_other_model_and_has_a_bound(
    repository: Repository, models: ModelRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: asked.append(os.fspath(path)) or scan(path))
    for number in range(20):
        repository.model(f"other{number}", EMPTY)
    asked.clear()
    models.fingerprint("m")
    assert asked == [str(repository.root / "m"), str(repository.root / "m" / "1")]
    assert fingerprint([repository.root / "missing"]) == fingerprint([])


# ---- repositories that break


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\\b", "a\0b", "a\nb", "a\x1b[2J", "x" * 256, "\ud800"])
def test_what_can_not_be_a_name_is_refused_before_any_file_is_looked_for(models: ModelRepository, name: str) -> None:
    for files in ({}, {"1/model.py": b""}):
        with pytest.raises(ModelLoadError, match="invalid model name"):
            models.prepare(name, config="{}", files=files)
    models.fingerprint(name)


@pytest.mark.parametrize("name", ["nobody", "a;b", "$(reboot)", "..data", "lost+found"])
def test_a_name_that_is_not_there_is_unknown(models: ModelRepository, name: str) -> None:
    with pytest.raises(UnknownModelError, match="there is no directory of that name in"):
        models.prepare(name)


def test_a_repository_that_has_vanished_is_told_and_not_a_crash(
    repository: Repository, models: ModelRepository
) -> None:
    shutil.rmtree(repository.root)
    with pytest.raises(SetupError, match="does not exist"):
        models.scan()
    models.fingerprint("m")
    with pytest.raises(ModelLoadError, match=r"the model repository .* does not exist") as caught:
        models.prepare("m")
    assert not isinstance(caught.value, UnknownModelError)


def test_files_that_can_not_be_read_are_told(models: ModelRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> Any:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "iterdir", broken)
    with pytest.raises(SetupError, match=r"the model repository .* can't be read: .*Input/output error"):
        models.scan()
    with pytest.raises(ModelLoadError, match=r"its files can't be read: .*Input/output error"):
        models.prepare("m")


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (
            lambda m: ((m / "config.pbtxt").unlink(), (m / "config.pbtxt").symlink_to("x")),
            "its configuration can't be read",
        ),
        (lambda m: ((m / "config.pbtxt").unlink(), (m / "config.pbtxt").mkdir()), "its configuration can't be read"),
        (lambda m: (m / "1").rename(m / "1\u0663"), "it has no version directory"),
        (lambda m: (m / "1").rename(m / ("1" + "0" * 18)), "it has no version directory"),
        (
            lambda m: (m / "config.pbtxt").write_text(CONFIG + "instance_group { count: 2147483647 }"),
            "2147483647 instances",
        ),
        (
            lambda m: (shutil.rmtree(m / "1"), (m / "config.pbtxt").write_text('platform: "ensemble"')),
            "it has no version directory",
        ),
        (
            lambda m: (m / "config.pbtxt").write_text("ensemble_scheduling { }"),
            "must specify 'step' in its `ensemble_scheduling`: there is none",
        ),
    ],
)
def test_a_model_s_directory_that_is_broken_says_how(
    repository: Repository, models: ModelRepository, arrange: Callable[[Path], Any], reason: str
) -> None:
    arrange(repository.root / "m")
    with pytest.raises(ModelLoadError) as caught:
        models.prepare("m")
    assert caught.value.reason.startswith(reason)


# ---- native models


def ours() -> set[str]:
    return {name for name in sys.modules if name.startswith("trio_infer_models.")}


def test_native_code_is_forgotten_with_what_was_prepared_of_it(repository: Repository) -> None:
    before = ours()
    config = CONFIG.replace('"python"', '"trio_infer"') + "version_policy { all {} }"
    for version in ("1", "2"):
        repository.write(f"m/{version}/model.py", NATIVE)
    repository.write("m/config.pbtxt", config)
    repository.write("m/helper.py", "")
    models = ModelRepository([repository.root])
    prepared = models.prepare("m")
    assert len(ours() - before) == 6
    prepared.dispose()
    assert ours() == before
    repository.write("m/2/model.py", "1 / 0")
    with pytest.raises(ModelLoadError, match="importing it: ZeroDivisionError") as caught:
        models.prepare("m")
    assert caught.value.version == "2"
    assert ours() == before


def test_the_configuration_of_a_native_model_is_what_its_file_and_its_code_say(repository: Repository) -> None:
    repository.write("m/helper.py", "")
    config = 'backend: "trio_infer" max_batch_size: 8 metric_tags { key: "a" value: "b" } version_policy { all {} }'
    repository.write("m/config.pbtxt", config)
    repository.write(
        "m/1/model.py",
        """
        from trio_infer import Model, TensorSpec
        class Stream(Model):
            inputs = (TensorSpec("IN", "BYTES", (1,), optional=True),)
            instances = 3
            async def infer(self, request):
                yield {}
        """,
    )
    (runner,) = ModelRepository([repository.root]).prepare("m").runners
    shown = runner.config.as_json()
    assert shown["metric_tags"] == {"a": "b"}
    assert shown["version_policy"] == {"all": {}}
    assert shown["max_batch_size"] == runner.signature.max_batch_size == 8
    assert shown["model_transaction_policy"] == {"decoupled": True}
    assert [(group["name"], group["count"]) for group in shown["instance_group"]] == [("m", 3)]
    assert [(tensor["name"], tensor["optional"]) for tensor in shown["input"]] == [("IN", True)]


# ---- what load requests bring

KEYS = st.sampled_from(
    ["name", "backend", "max_batch_size", "input", "output", "dims", "data_type", "reshape", "shape", "instance_group",
     "count", "kind", "gpus", "parameters", "string_value", "version_policy", "latest", "num_versions", "specific",
     "versions", "dynamic_batching", "preferred_batch_size", "priority_queue_policy", "1", "model_warmup", "inputs",
     "sequence_batching", "direct", "minimum_slot_utilization", "optimization", "@type", "[a.b]", "maxBatchSize"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=5))
def test_any_json_is_a_configuration_or_a_load_error(document: Any) -> None:
    try:
        config = read_config(json.dumps(document), "m")
        config.check_tensors()
    except ModelLoadError:
        pass
    else:
        assert json.loads(config.json_text)["name"] == "m"


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab./\\\0\n~1é\ud800"), max_size=12))
def test_a_path_is_refused_or_stays_below(path: str) -> None:
    try:
        steps = check_path(path, "m")
    except ModelLoadError:
        return
    below = os.path.normpath(os.path.join("/models/m", path))
    assert below == "/models/m/" + "/".join(steps)


def test_files_lie_where_only_the_server_can_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    holder = write_files("m", {"1/model.py": b"x", "1/deep/er": b"y"})
    assert Path(holder.name).stat().st_mode & 0o777 == 0o700
    assert (Path(holder.name) / "m/1/deep/er").read_bytes() == b"y"
    holder.cleanup()
    for files in (
        {"/".join("a" * 33): b""},
        {f"{number}": b"" for number in range(1001)},
        {"a": b"", "a/b": b""},
        {"a": b"", "../b": b""},
    ):
        with pytest.raises(ModelLoadError):
            write_files("m", files)
    assert os.listdir(tmp_path) == []


def test_files_need_a_configuration_beside_them(models: ModelRepository) -> None:
    with pytest.raises(ModelLoadError, match="need a configuration beside them"):
        models.prepare("m", files={"1/model.py": b""})
