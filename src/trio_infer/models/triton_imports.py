"""Imports a model's code so that nothing of it is seen by, or mixed up with, any other model's.

Triton runs each instance in a process of its own: `model.py` is a module of a package named after the version, the
version directory and the model directory are on `sys.path`, and module globals belong to one instance. Here several
models that each have a `utils.py` live in one process, and so do several instances of one model. So each instance's
code is imported into a package of its own, `trio_infer_models.NAME_NUMBER`, whose `__path__` is the version directory
and the model directory:

- relative imports (`from .utils import x`) need nothing more;
- absolute ones (`import utils`) are looked up in that package first. Its modules have an `__import__` of their own, by
  the `__builtins__` in their globals, which the interpreter consults for each import statement, in any thread and at
  any time: imports inside functions, long after loading, work too.

Rejected: having the directories on `sys.path` while loading and taking the modules out of `sys.modules` after it. Two
models that load at once would have to wait for each other, and an import inside `execute` would find nothing, or
another model's module.

What this does not do: `importlib.import_module("utils")`, and pickles that name `utils.Something`, go past import
statements. Write `importlib.import_module(".utils", __package__)`.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, Literal

from trio_infer.models.bridge import Bridge

__all__ = ["ModelCode", "calling_code", "code_of"]

ROOT: Final = "trio_infer_models"
PB_UTILS: Final = "triton_python_backend_utils"
_numbers = itertools.count(1)
_codes: dict[str, ModelCode] = {}


def code_of(module_name: object) -> ModelCode | None:
    """Whose code a module is; None if it is no model's."""
    if not isinstance(module_name, str) or not module_name.startswith(f"{ROOT}."):
        return None
    return _codes.get(module_name.split(".", 2)[1])


def calling_code() -> ModelCode | None:
    """The model's code that the caller was called by, however far up.

    A call that comes from no model's code (a library's thread calls back what it was given) is taken for that of the
    only instance in this process, if there is but one. None: it can't be told.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = code_of(frame.f_globals.get("__name__"))
        if code is not None:
            return code
        frame = frame.f_back
    codes = [*_codes.values()]
    return codes[0] if len(codes) == 1 else None


class ModelCode:
    """The code of one instance of one model.

    Args:
        model: the model's name.
        file: its `model.py`; the directory above its own is the model's.
        bridge: how the code reaches the server; None outside of one.

    Attributes:
        stage: the hook that is running, of those in which not everything is allowed; "" once requests may come.
    """

    def __init__(self, model: str, file: Path, bridge: Bridge | None = None) -> None:
        self.model = model
        self.bridge = bridge
        self.stage: Literal["auto_complete_config", "initialize", "finalize", ""] = "initialize"
        self.file: Path = file.absolute()
        self.version_directory: Path = self.file.parent
        self.model_directory: Path = self.version_directory.parent
        self._key = f"{re.sub(r'[^0-9A-Za-z_]', '_', model)}_{next(_numbers)}"
        self.package: str = f"{ROOT}.{self._key}"
        self.path: list[str] = [str(self.version_directory), str(self.model_directory)]
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}

    def load(self) -> ModuleType:
        """Import the file. Whatever its code raises comes out as it is."""
        _install()
        self.register()
        package = ModuleType(self.package)
        package.__path__ = self.path
        package.__package__ = self.package
        sys.modules[self.package] = package
        name = f"{self.package}.{self.file.stem}"
        loader = _Loader(name, str(self.file))
        module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=str(self.file)))
        module.__file__ = str(self.file)
        sys.modules[name] = module
        loader.exec_module(module)
        return module

    def register(self) -> None:
        """From now on this is known as the code of one instance, until `forget`."""
        _codes[self._key] = self

    def forget(self) -> None:
        """Take all of it out of `sys.modules`. Code that is still running keeps what it has."""
        _codes.pop(self._key, None)
        for name in list(sys.modules):  # in one step, as other threads import meanwhile
            if name == self.package or name.startswith(f"{self.package}."):
                sys.modules.pop(name, None)

    def owns(self, filename: str) -> bool:
        """Whether a source file is one of the model's."""
        return Path(filename).is_relative_to(self.model_directory)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 (`__import__`'s names)
        locals: Mapping[str, object] | None = None,  # noqa: A002 (as above)
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not self._has(top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        if fromlist:
            return builtins.__import__(f"{self.package}.{name}", globals, locals, fromlist, 0)
        importlib.import_module(f"{self.package}.{name}")
        return sys.modules[f"{self.package}.{top}"]

    def _has(self, top: str) -> bool:
        if f"{self.package}.{top}" in sys.modules:
            return True
        if top == PB_UTILS:
            return False
        spec = PathFinder.find_spec(top, self.path)
        if spec is None:
            return False
        # A directory without __init__.py may be no package at all (weights in `numpy/`): the installed one goes first.
        return spec.loader is not None or (top not in sys.modules and PathFinder.find_spec(top) is None)


class _Loader(SourceFileLoader):
    """Gives the module its model's `__import__` before its code runs."""

    def exec_module(self, module: ModuleType) -> None:
        code = code_of(module.__name__)
        if code is not None:
            module.__dict__["__builtins__"] = code.builtins
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType | None:
        # No bytecode is written: a repository may be shared and read-only, and files may be replaced within a second.
        return self.source_to_code(self.get_data(self.path), self.path)


class _Finder:
    """Finds the siblings, and has them loaded by `_Loader`."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if code_of(fullname) is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _install() -> None:
    if ROOT not in sys.modules:
        root = ModuleType(ROOT)
        root.__path__ = []
        sys.modules[ROOT] = root
        sys.meta_path.insert(0, _Finder)
