"""Backends that come with the server: each runs the models of a library, and knows how to stop that library's work.

A backend is a class that looks to the server like a Triton Python model: `auto_complete_config`, `initialize`,
`execute`, `finalize`. So it runs in threads or in worker processes, alone or in batches, with one response or many, by
the same code that runs models written for Triton; what it adds is how its library is told that a result is not wanted
any more (`triton_current.when_cancelled` and `is_cancelled`).

Its module is imported when the first of its models loads, where that runs: the libraries are optional, and heavy.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import attrs

from trio_infer.errors import ModelLoadError
from trio_infer.models.triton_imports import ModelCode

__all__ = ["BACKENDS", "Backend", "BackendModel", "backend_class", "backend_of_platform"]


@attrs.frozen
class Backend:
    """One backend.

    Args:
        name: as a configuration's `backend` has it.
        home: the module with its class, `Model`.
        files: what a model may lie in, in a version's directory; the first that is there counts.
        package: what has to be installed.
        extra: of this package, that installs it.
        platforms: names for it in a configuration's `platform`.
        stops: where a cancelled run of it ends, in a thread, if no process can be killed; as `Stops`.
        never_stops: suffixes of those files whose runs nothing can end in a thread.
        pieces: BYTES outputs that come in pieces, one in each of a request's responses: joined, they are what a client
            gets that wants one response.
    """

    name: str
    home: str
    files: tuple[str, ...]
    package: str
    extra: str
    platforms: tuple[str, ...] = ()
    stops: Literal["operator", "token"] = "operator"
    never_stops: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()

    def stops_in_thread(self, filename: str) -> Literal["operator", "token", "never"]:
        """Where a cancelled run ends of a model that is this file, if it runs in a thread."""
        return "never" if filename.endswith(self.never_stops) else self.stops

    def find(self, directory: Path) -> str:
        """The name of the model's file in a version's directory, or ""."""
        return next((name for name in self.files if (directory / name).is_file()), "")


BACKENDS: Final = {
    backend.name: backend
    for backend in (
        Backend(
            "onnxruntime",
            home="trio_infer.models.backends.onnx",
            files=("model.onnx",),
            package="onnxruntime",
            extra="onnx",
            platforms=("onnxruntime_onnx",),
        ),
        Backend(
            "pytorch",
            home="trio_infer.models.backends.pytorch",
            files=("model.py", "model.pt2", "model.pt"),
            package="torch",
            extra="torch",
            platforms=("pytorch_libtorch",),
            never_stops=(".pt2", ".pt"),
        ),
        Backend(
            "transformers",
            home="trio_infer.models.backends.text_generation",
            files=("config.json",),
            package="transformers",
            extra="transformers",
            stops="token",
            pieces=("text_output",),
        ),
    )
}


def backend_of_platform(platform: str) -> str:
    """The backend that a configuration's `platform` means, or ""."""
    return next((name for name, backend in BACKENDS.items() if platform in backend.platforms), "")


class BackendModel:
    """Base class of backends' models; each model's own subclass knows its files.

    Attributes:
        code: the model's files: `file` is the one it is in; `load()` imports that, if it is Python.
    """

    code: ClassVar[ModelCode]


def backend_class(name: str, code: ModelCode) -> type[BackendModel]:
    """The class that runs a model of this backend.

    Args:
        name: the backend's.
        code: the model's files.

    Raises:
        ModelLoadError: the backend's library isn't installed.
    """
    backend = BACKENDS[name]
    if importlib.util.find_spec(backend.package) is None:
        raise ModelLoadError(
            code.model,
            f"backend '{name}' needs the package {backend.package}, which is not installed: "
            f"pip install 'trio-infer[{backend.extra}]'",
            where=code.file,
        )
    base: Any = importlib.import_module(backend.home).Model
    made: type[BackendModel] = type(base.__name__, (base,), {"code": code})
    return made
