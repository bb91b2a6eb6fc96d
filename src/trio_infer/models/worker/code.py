"""Imports a model's code as Triton's own worker does; possible only where a process has one instance and nothing else.

`model.py` is the module `model` of a package named after the version, and the model's and the version's directory are
on `sys.path`, behind everything else. So all ways of importing work (statements, `importlib`, pickles that name
`utils.Something`), and nothing of the model's shadows an installed package. See `triton_imports` for what is done where
models share a process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from trio_infer.models.triton_imports import ModelCode

__all__ = ["WorkerCode"]


class WorkerCode(ModelCode):
    """The code of the instance that this process is for."""

    def load(self) -> ModuleType:
        self.register()
        sys.path += [str(self.model_directory), str(self.version_directory)]
        sys.meta_path.insert(0, _Finder(self))
        return importlib.import_module(f"{self.version_directory.name}.{self.file.stem}")

    def forget(self) -> None:
        """Nothing to do: the process ends."""


class _Finder:
    """Has the model's own files loaded by `_Loader`."""

    def __init__(self, code: ModelCode) -> None:
        self._code = code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        if not Path(spec.loader.path).is_relative_to(self._code.model_directory):
            return None
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Neither reads nor writes bytecode: repositories are shared, read-only, and changed within one second."""

    def get_code(self, fullname: str) -> CodeType | None:
        return self.source_to_code(self.get_data(self.path), self.path)
