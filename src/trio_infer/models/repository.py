"""Finds the models in model repositories: `REPOSITORY/MODEL/[config.pbtxt]`, `REPOSITORY/MODEL/VERSION/model.py`.

Each directory in a repository is a model, and a broken one is an error, not a gap: a server that came up without the
model that it was started for is worse than one that says why it didn't. Left out are files, names that begin with a dot
(Kubernetes mounts a `..data` beside the models), `lost+found` and `__pycache__`. In a model's directory only those
subdirectories are versions whose names are positive numbers without a leading zero.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Literal

import attrs

from trio_infer.errors import ModelLoadError, SetupError, UnknownModelError
from trio_infer.models.backends import BACKENDS, backend_of_platform
from trio_infer.models.ensemble import EnsembleRunner
from trio_infer.models.model_files import fingerprint, read_labels
from trio_infer.models.native import NativeRunner
from trio_infer.models.native_loading import load_native
from trio_infer.models.overrides import check_name, is_name, read_config, write_files
from trio_infer.models.runner import Runner
from trio_infer.models.triton_python import TritonPythonRunner
from trio_infer.models.worker.runner import ProcessRunner
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.worker_settings import WORKER_PARAMETERS

__all__ = ["ModelRepository", "Prepared", "find_models", "load_model"]

log: logging.Logger = logging.getLogger("trio_infer")

MOST_INSTANCES: Final = 1000
"""Of one version of a Triton Python model: each is a process, or keeps a model in memory. More is a slip of the pen."""

TWICE: Final = "model appears in two or more repositories"

PYTHON: Final = ("python", "trio_infer")
"""The backends whose models are Python code of the user's."""

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
        with _reading(root):
            for directory in root.iterdir():
                if _is_model(directory):
                    _add(found.setdefault(directory.name, []), directory)
    return found


def _directories_of(name: str, roots: Sequence[Path]) -> list[Path]:
    """Those of one model, without a look at the others."""
    found: list[Path] = []
    for root in roots:
        with _reading(root):
            if _is_model(root / name):
                _add(found, root / name)
    return found


@contextmanager
def _reading(root: Path) -> Iterator[None]:
    try:
        if not root.is_dir():
            fault = "is not a directory" if root.exists() else "does not exist"
            raise SetupError(f"the model repository {root} {fault}")
        if (root / "config.pbtxt").is_file():
            raise SetupError(f"{root} is a model, not a repository: give the directory that it is in")
        yield
    except OSError as error:
        raise SetupError(f"the model repository {root} can't be read: {error}") from error


def _is_model(directory: Path) -> bool:
    return not directory.name.startswith(".") and directory.name not in _NO_MODELS and directory.is_dir()


def _add(others: list[Path], directory: Path) -> None:
    if all(other.resolve() != directory.resolve() for other in others):
        others.append(directory)


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
    try:
        return _load_model(directory, name or directory.name, config, auto_complete, execution)
    except OSError as error:
        raise ModelLoadError(name or directory.name, f"its files can't be read: {error}") from error


def _load_model(
    directory: Path,
    served_as: str,
    config: str | None,
    auto_complete: bool,
    execution: Literal["process", "thread"],
) -> list[Runner]:
    name = directory.name
    file = directory / "config.pbtxt"
    read = read_config(config, name) if config is not None else _read_file(file, name)
    versions = _versions(read, directory)
    labels = {output: read_labels(name, directory, path) for output, path in read.label_files.items()}
    if read.is_ensemble:
        read = read.renamed(served_as)
        return [EnsembleRunner(read, version=version, directory=directory, labels=labels) for version in versions]
    read = read.with_backend(*_backend(read, directory, versions)).renamed(served_as)
    if read.backend == "trio_infer":
        return _natives(read, directory, versions, read.default_model_filename, labels)
    if read.instance_count > MOST_INSTANCES:
        reason = f"{read.instance_count} instances are asked for by `instance_group`, more than {MOST_INSTANCES}"
        raise ModelLoadError(name, reason, where=read.where)
    if read.backend in BACKENDS and BACKENDS[read.backend].stops_in_thread(read.default_model_filename) != "never":
        execution = "thread"  # the library releases the GIL, and its work can be stopped there
    in_thread = (read.execution or execution) == "thread"
    kind = TritonPythonRunner if in_thread else ProcessRunner
    useless = sorted(read.parameters.keys() & WORKER_PARAMETERS.keys()) if in_thread else ()
    if useless:
        log.warning(
            "model '%s' runs in a thread, which can't be killed or limited: %s has no effect there; say execution "
            "'process'",
            served_as,
            ", ".join(useless),
        )
    return [
        kind(read, directory=directory, version=version, auto_complete=auto_complete, labels=labels)
        for version in versions
    ]


def _read_file(file: Path, name: str) -> ModelConfig:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        # A link that leads nowhere is no model without a configuration: a mount is broken.
        if not isinstance(error, FileNotFoundError) or file.is_symlink():
            raise ModelLoadError(name, f"its configuration can't be read: {error}", where=file) from error
        text = ""
    return ModelConfig.parse(text, name=name, where=file)


def _natives(
    config: ModelConfig, directory: Path, versions: Sequence[int], filename: str, labels: Mapping[str, tuple[str, ...]]
) -> list[Runner]:
    runners: list[Runner] = []
    try:
        for version in versions:
            runners.append(load_native(config, directory, version, filename, labels))  # noqa: PERF401 (for `_forget`)
    except BaseException:
        _forget(runners)
        raise
    return runners


def _forget(runners: Iterable[Runner]) -> None:
    """Take the code of native models out of `sys.modules`: they are imported before they are loaded."""
    for runner in runners:
        if isinstance(runner, NativeRunner):
            runner.forget()


def _versions(config: ModelConfig, directory: Path) -> tuple[int, ...]:
    found = {
        int(entry.name)
        for entry in directory.iterdir()
        if re.fullmatch(r"[1-9][0-9]{0,17}", entry.name) and entry.is_dir()
    }
    if not found:
        raise ModelLoadError(config.name, "it has no version directory (a positive number, such as 1)", where=directory)
    versions = config.version_policy.pick(found)
    missing = set(config.version_policy.specific) - found
    if missing:
        reason = f"`version_policy` asks for version {min(missing)}, but there is {', '.join(map(str, sorted(found)))}"
        raise ModelLoadError(config.name, reason, where=directory)
    return versions


def _backend(config: ModelConfig, directory: Path, versions: Sequence[int]) -> tuple[str, str]:
    """Which backend it is for, and the name of the model's file."""
    name = config.backend or backend_of_platform(config.platform) or _tell(config, directory, versions)
    backend = BACKENDS.get(name)
    if (backend is None and (name not in PYTHON or config.platform)) or (
        backend is not None and config.platform not in {"", *backend.platforms}
    ):
        kind = f"platform '{config.platform}'" if config.platform else f"backend '{config.backend}'"
        known = ", ".join(f"'{each}'" for each in (*PYTHON, *BACKENDS))
        raise ModelLoadError(
            config.name, f"{kind} is not supported; backends {known} are, and platform 'ensemble'", where=config.where
        )
    filename = config.default_model_filename
    if not filename:
        found = (
            [backend.find(directory / str(version)) for version in versions] if backend is not None else ["model.py"]
        )
        if backend is not None and (len(set(found)) > 1 or not found[0]):
            reason = f"each of its version directories must have one of {', '.join(backend.files)}, the same in each"
            raise ModelLoadError(config.name, reason, where=directory)
        filename = found[0]
    suffixes = {Path(file).suffix for file in backend.files} if backend is not None else {".py"}
    if Path(filename).name != filename or Path(filename).suffix not in suffixes:
        kinds = " or ".join(sorted(suffixes))
        reason = f"default_model_filename must be the name of a {kinds} file in the version directory, got '{filename}'"
        raise ModelLoadError(config.name, reason, where=config.where or directory / "config.pbtxt")
    return name, filename


def _tell(config: ModelConfig, directory: Path, versions: Sequence[int]) -> str:
    """The backend of a model whose configuration says neither that nor a platform, by its files."""
    if config.platform:
        return ""
    files = {config.default_model_filename or "model.py": "python"}
    files |= {file: name for name, backend in BACKENDS.items() for file in backend.files if not file.endswith(".py")}
    for file, name in files.items():
        if all((directory / str(version) / file).is_file() for version in versions):
            return name
    reason = f"it has no `backend`, and none of {', '.join(files)} to tell it by"
    raise ModelLoadError(config.name, reason, where=directory)


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
        """Remove what it has left behind: files that were given for it, imported code. Blocks."""
        _forget(self.runners)
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
        try:
            return fingerprint(_directories_of(name, self.roots) if is_name(name) else ())
        except SetupError:
            return ""  # `prepare` says it, too, and to somebody

    def prepare(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] = {}) -> Prepared:
        """Read a model.

        Args:
            config: JSON text in place of its configuration file.
            files: contents by path, such as `1/model.py`, in place of all its files.

        Raises:
            UnknownModelError: no repository has it.
            ModelLoadError: it can't be served, or a repository can't be read any more.
        """
        check_name(name)
        load = partial(load_model, config=config, auto_complete=self.auto_complete, execution=self.execution)
        if files:
            if config is None:
                raise ModelLoadError(name, "files in place of the repository's need a configuration beside them")
            holder = write_files(name, files)
            try:
                return Prepared(name, tuple(load(Path(holder.name) / name)), holder)
            except BaseException:
                holder.cleanup()
                raise
        try:
            directories = _directories_of(name, self.roots)
        except SetupError as error:
            raise ModelLoadError(name, str(error)) from error
        if not directories:
            raise UnknownModelError(name, f"there is no directory of that name in {', '.join(map(str, self.roots))}")
        if len(directories) > 1:
            raise ModelLoadError(name, TWICE, where=directories[1].parent)
        return Prepared(name, tuple(load(directories[0])))
