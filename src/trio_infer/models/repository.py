"""Finds the models in model repositories: `REPOSITORY/MODEL/[config.pbtxt]`, `REPOSITORY/MODEL/VERSION/model.py`.

Each directory in a repository is a model, and a broken one is an error, not a gap: a server that came up without the
model that it was started for is worse than one that says why it didn't. Left out are files, names that begin with a dot
(Kubernetes mounts a `..data` beside the models), `lost+found` and `__pycache__`. In a model's directory only those
subdirectories are versions whose names are positive numbers without a leading zero.
"""

from __future__ import annotations

import itertools
import logging
import re
import stat
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal

import attrs

from trio_infer.errors import ModelLoadError, SetupError, UnknownModelError
from trio_infer.models.native import Model, NativeRunner
from trio_infer.models.overrides import check_name, read_config, write_files
from trio_infer.models.runner import Runner
from trio_infer.models.triton_imports import ModelCode
from trio_infer.models.triton_loading import model_fault
from trio_infer.models.triton_python import TritonPythonRunner
from trio_infer.models.worker.runner import ProcessRunner
from trio_infer.protocol.model_config import ModelConfig

__all__ = ["ModelRepository", "Prepared", "find_models", "load_model"]

log: logging.Logger = logging.getLogger("trio_infer")

LARGEST_LABELS: Final = 2**24
"""Bytes of one file of labels; ImageNet's 21,841 classes take less than one MiB."""

MOST_FILES: Final = 100_000
"""That a model's directory is looked through for, to tell whether something has changed."""

TWICE: Final = "model appears in two or more repositories"

_NO_MODELS: Final = {"lost+found", "__pycache__"}


def find_models(
    roots: Sequence[Path], *, auto_complete: bool = True, execution: Literal["process", "thread"] = "process"
) -> list[Runner]:
    """A runner for each version that is to be served of each model; not loaded yet.

    Args:
        roots: the repositories.
        auto_complete: whether Python models are asked to complete their configuration when they load.
        execution: where Triton's Python models run, if their configuration doesn't say: each instance in a process of
            its own, or in threads of this one.

    Returns:
        by name, the versions of each from the lowest.

    Raises:
        SetupError: a repository isn't a directory, or is a model.
        ModelLoadError: of the first model, by name, that can't be served; or two repositories have it.
    """
    found: dict[str, Path] = {}
    for name, directories in _directories(roots).items():
        if len(directories) > 1:
            reason = f"it is in two repositories, here and in {directories[0].parent}"
            raise ModelLoadError(name, reason, where=directories[1].parent)
        found[name] = directories[0]
    return [
        runner
        for name in sorted(found)
        for runner in load_model(found[name], auto_complete=auto_complete, execution=execution)
    ]


def _directories(roots: Sequence[Path]) -> dict[str, list[Path]]:
    """By name, the directories of each model: several if more than one repository has it."""
    found: dict[str, list[Path]] = {}
    for root in roots:
        if not root.is_dir():
            fault = "is not a directory" if root.exists() else "does not exist"
            raise SetupError(f"the model repository {root} {fault}")
        if (root / "config.pbtxt").is_file():
            raise SetupError(f"{root} is a model, not a repository: give the directory that it is in")
        for directory in root.iterdir():
            name = directory.name
            if name.startswith(".") or name in _NO_MODELS or not directory.is_dir():
                continue
            others = found.setdefault(name, [])
            if all(other.resolve() != directory.resolve() for other in others):
                others.append(directory)
    return found


def load_model(
    directory: Path,
    *,
    name: str = "",
    config: str | None = None,
    auto_complete: bool = True,
    execution: Literal["process", "thread"] = "process",
) -> list[Runner]:
    """The runners of one model.

    Args:
        directory: named after the model.
        name: what it is to be served as, if not by the directory's name.
        config: JSON text in place of its `config.pbtxt`.
        auto_complete, execution: as for `find_models`.

    Raises:
        ModelLoadError: no version to serve, a broken configuration, a backend that isn't there.
    """
    served_as, name = name, directory.name
    file = directory / "config.pbtxt"
    if config is not None:
        read = read_config(config, name)
    else:
        try:
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(name, f"its configuration can't be read: {error}", where=file) from error
        read = ModelConfig.parse(text, name=name, where=file)
    filename = read.default_model_filename or "model.py"
    if Path(filename).name != filename or not filename.endswith(".py"):
        reason = f"default_model_filename must be the name of a .py file in the version directory, got '{filename}'"
        raise ModelLoadError(name, reason, where=file)
    versions = _versions(read, directory)
    read = read.with_backend(_backend(read, directory, versions, filename))
    labels = {output: _labels(name, directory, path) for output, path in read.label_files.items()}
    if served_as:
        read = read.renamed(served_as)
    if read.has_sequences:
        log.warning(
            "model '%s' has `sequence_batching`, which isn't there yet: requests of a sequence run one by one, on any "
            "of its %d instances",
            read.name,
            read.instance_count,
        )
    if read.backend == "trio_infer":
        return [_native(read, directory, version, filename, labels) for version in versions]
    kind = TritonPythonRunner if (read.execution or execution) == "thread" else ProcessRunner
    return [
        kind(read, directory=directory, version=version, auto_complete=auto_complete, labels=labels)
        for version in versions
    ]


def _labels(model: str, directory: Path, path: str) -> tuple[str, ...]:
    """The labels of an output's classes, one a line."""
    file = directory / path
    if not file.resolve().is_relative_to(directory.resolve()):
        raise ModelLoadError(model, f"`label_filename` must be in the model's directory, got '{path}'")
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_LABELS + 1)
        if len(content) > LARGEST_LABELS:
            raise ModelLoadError(model, f"the labels are larger than {LARGEST_LABELS} bytes", where=file)
        return tuple(content.decode().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(model, f"the labels can't be read: {error}", where=file) from error


def _versions(config: ModelConfig, directory: Path) -> tuple[int, ...]:
    found = {
        int(entry.name) for entry in directory.iterdir() if re.fullmatch(r"[1-9]\d*", entry.name) and entry.is_dir()
    }
    if not found:
        raise ModelLoadError(config.name, "it has no version directory (a positive number, such as 1)", where=directory)
    versions = config.version_policy.pick(found)
    missing = set(config.version_policy.specific) - found
    if missing:
        reason = f"`version_policy` asks for version {min(missing)}, but there is {', '.join(map(str, sorted(found)))}"
        raise ModelLoadError(config.name, reason, where=directory)
    return versions


def _backend(config: ModelConfig, directory: Path, versions: Sequence[int], filename: str) -> str:
    if config.backend in {"python", "trio_infer"} and not config.platform:
        return config.backend
    if not config.backend and not config.platform:
        if all((directory / str(version) / filename).is_file() for version in versions):
            return "python"
        raise ModelLoadError(config.name, f"it has no `backend`, and no {filename} to tell it by", where=directory)
    kind = f"platform '{config.platform}'" if config.platform else f"backend '{config.backend}'"
    raise ModelLoadError(config.name, f"{kind} is not supported; 'python' and 'trio_infer' are", where=config.where)


def _native(
    config: ModelConfig, directory: Path, version: int, filename: str, labels: Mapping[str, tuple[str, ...]]
) -> NativeRunner:
    code = ModelCode(config.name, directory / str(version) / filename)
    if not code.file.is_file():
        raise ModelLoadError(config.name, f"there is no {filename} in its version directory", where=code.file)
    with model_fault(code, "importing it"):
        module = code.load()
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Model) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        names = ", ".join(kind.__name__ for kind in classes) or "none"
        reason = f"its code must define one subclass of trio_infer.Model, found {names}"
        raise ModelLoadError(config.name, reason, where=code.file)
    with model_fault(code, f"{classes[0].__name__}()"):
        model = classes[0]()
    if getattr(model, "name", config.name) != config.name:
        reason = f"its `name` is '{model.name}' but its directory is '{config.name}'"
        raise ModelLoadError(config.name, reason, where=code.file)
    config.check_tensors()
    given: dict[str, object] = {"name": config.name, "version": str(version)}
    if config.inputs or config.outputs:
        outputs = config.signature(str(version), labels).outputs
        given |= {"inputs": config.inputs, "outputs": outputs, "max_batch_size": config.max_batch_size}
    if config.has_instance_group:
        given["instances"] = config.instance_count
    if config.on_disconnect is not None:
        given["on_disconnect"] = config.on_disconnect
    for attribute, value in given.items():
        object.__setattr__(model, attribute, value)  # also of a frozen attrs class
    return NativeRunner(model)


@attrs.frozen
class Prepared:
    """One model's versions, read but not loaded.

    Args:
        name: the model's.
        runners: its versions, the lowest first.
        files: the directory of files that were given for it; None if they are a repository's.
    """

    name: str
    runners: tuple[Runner, ...]
    files: tempfile.TemporaryDirectory[str] | None = attrs.field(default=None, repr=False)

    def dispose(self) -> None:
        """Remove the files that were given for it. Blocks."""
        if self.files is not None:
            self.files.cleanup()


def _paths(roots: Iterable[Path | str]) -> tuple[Path, ...]:
    return tuple(map(Path, roots))


@attrs.frozen
class ModelRepository:
    """Model repositories, of which a server loads model by model. All of it blocks.

    Args:
        roots: the directories that models are in.
        auto_complete, execution: as for `find_models`.
    """

    roots: Sequence[Path] = attrs.field(converter=_paths)
    auto_complete: bool = attrs.field(default=True, kw_only=True)
    execution: Literal["process", "thread"] = attrs.field(default="process", kw_only=True)

    def scan(self) -> dict[str, str]:
        """The names of all models, and why one can't be served as a whole, or "".

        Raises:
            SetupError: a root isn't a directory, or is a model.
        """
        return {
            name: "" if len(directories) == 1 else TWICE
            for name, directories in sorted(_directories(self.roots).items())
        }

    def fingerprint(self, name: str) -> Hashable:
        """Changes when the model's files do: their paths, sizes, times and inodes; contents aren't read."""
        marks = []
        for directory in _directories(self.roots).get(name, ()):
            for file in sorted(itertools.islice(directory.rglob("*"), MOST_FILES)):
                with suppress(OSError):  # it was there a moment ago
                    status = file.stat()
                    if "__pycache__" not in file.parts and stat.S_ISREG(status.st_mode):
                        marks.append((str(file), status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(marks)

    def prepare(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] = {}) -> Prepared:
        """Read a model.

        Args:
            config: JSON text in place of its configuration file.
            files: contents by path, such as `1/model.py`, in place of all its files.

        Raises:
            UnknownModelError: no repository has it.
            ModelLoadError: it can't be served.
        """
        check_name(name)
        load = partial(load_model, config=config, auto_complete=self.auto_complete, execution=self.execution)
        if files:
            holder = write_files(name, files)
            try:
                return Prepared(name, tuple(load(Path(holder.name) / name)), holder)
            except BaseException:
                holder.cleanup()
                raise
        directories = _directories(self.roots).get(name, [])
        if not directories:
            raise UnknownModelError(name, f"there is no directory of that name in {', '.join(map(str, self.roots))}")
        if len(directories) > 1:
            raise ModelLoadError(name, TWICE, where=directories[1].parent)
        return Prepared(name, tuple(load(directories[0])))
