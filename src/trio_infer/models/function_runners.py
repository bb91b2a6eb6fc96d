"""Runners for plain functions: in processes that can be killed, or in threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import attrs

from trio_infer.errors import ModelLoadError
from trio_infer.models.functions import Reference, function_class
from trio_infer.models.runner import Runner
from trio_infer.models.triton_imports import ModelCode
from trio_infer.models.triton_python import TritonPythonRunner
from trio_infer.models.worker.runner import ProcessRunner
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.queueing import Batching, Queueing
from trio_infer.protocol.values import Signature, TensorSpec

__all__ = ["process", "thread"]


class _InProcesses(ProcessRunner):
    def __init__(self, config: ModelConfig, *, reference: Reference, **options: Any) -> None:
        self._reference = reference
        super().__init__(config, **options)

    @property
    def program(self) -> Mapping[str, str]:
        return attrs.asdict(self._reference)

    @property
    def file(self) -> Path:
        return Path(self._reference.file)


class _InThreads(TritonPythonRunner):
    def __init__(self, config: ModelConfig, *, function: Callable[..., Any], file: str, **options: Any) -> None:
        self._function = function
        self._file = file
        super().__init__(config, **options)

    def import_class(self, code: ModelCode) -> type[Any]:
        code.register()
        return function_class(self._function)

    @property
    def file(self) -> Path:
        return Path(self._file)


def process(
    function: Callable[..., Any],
    *,
    name: str = "",
    version: str = "1",
    inputs: Sequence[TensorSpec] = (),
    outputs: Sequence[TensorSpec] = (),
    max_batch_size: int = 0,
    instances: int = 1,
    queueing: Queueing | None = None,
    batching: Batching | None = None,
    on_disconnect: Literal["cancel", "finish"] | None = None,
    cancel_grace: float | None = 0.25,
    spares: int | None = None,
    max_requests: int = 0,
    memory_limit: int = 0,
    cpu_affinity: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Runner:
    """A model that calls a plain function, in a worker process for each instance; give it to `Server` like a model.

    The function is called with the inputs by their names, as numpy arrays, and gives a mapping of the outputs, or the
    only output itself: anything that `np.asarray` takes. One that yields gives any number of responses. It may ask
    `trio_infer.is_cancelled()`, or call `trio_infer.check_cancelled()`, at each step; if it doesn't, it is killed.

    Args:
        function: defined with `def` at the top of a module, so that a process can import it by name. A script's is
            imported from the script's file, so the script needs the guard `if __name__ == "__main__":`.
        name: in URLs; that of the function if it isn't given.
        version: a positive number, as text.
        inputs, outputs: tensors with their datatypes and shapes (without the batch dimension).
        max_batch_size: 0 for no batch dimension; else the most rows that a request may have.
        instances: how many calls may go on at once, each in a process of its own.
        queueing, batching: as `Model` has them; rows of several requests are laid below each other.
        on_disconnect: `"cancel"` or `"finish"`; None (the default) leaves it to the server.
        cancel_grace: seconds that the function has to end after its last client left, before its process is killed;
            None for any time. 0.25, as for Triton Python models.
        spares: processes that are kept ready to take the place of one that was killed; None for one if anything can be
            killed, else none.
        max_requests: that a process serves before another takes its place; 0 for any number.
        memory_limit: bytes of private, writable memory that a process may have; 0 for any number.
        cpu_affinity: the CPUs that processes run on, such as `"0-3;4-7"` (sets parted by `;` are taken in turns).
        environment: variables that processes have besides the server's.

    Raises:
        ModelLoadError: no process can import the function, or something else that is given can't be; says why.
    """
    name = name or _name(function)
    reference = Reference.of(function, name)
    parameters = {f"env.{key}": value for key, value in environment.items()}
    parameters["cancel_grace_ms"] = "none" if cancel_grace is None else str(round(cancel_grace * 1000))
    for key, value in {
        "spares": spares,
        "max_requests": max_requests or None,
        "memory_limit_mb": -(-memory_limit // 2**20) or None,
        "cpu_affinity": cpu_affinity or None,
    }.items():
        if value is not None:
            parameters[key] = str(value)
    signature = _signature(function, name, version, inputs, outputs, max_batch_size)
    config = _config(signature, instances, queueing, batching, on_disconnect, parameters)
    options = _options(reference.file, version)
    return _InProcesses(config, reference=reference, **options)


def thread(
    function: Callable[..., Any],
    *,
    name: str = "",
    version: str = "1",
    inputs: Sequence[TensorSpec] = (),
    outputs: Sequence[TensorSpec] = (),
    max_batch_size: int = 0,
    instances: int = 1,
    queueing: Queueing | None = None,
    batching: Batching | None = None,
    on_disconnect: Literal["cancel", "finish"] | None = None,
) -> Runner:
    """A model that calls a plain function, in a thread of this process.

    It is called as by `process`, and may be any callable. Nothing can kill it: one that doesn't ask whether it is
    cancelled keeps its instance until it is done. One that computes in Python, or holds the GIL, slows the whole
    server; that is for `process`. In a thread `trio.from_thread.check_cancelled()` can be used, too.

    Args:
        function, name, version, inputs, outputs, max_batch_size, queueing, batching, on_disconnect: as for `process`.
        instances: how many calls may go on at once, each in a thread of its own.

    Raises:
        ModelLoadError: something that is given can't be; says why.
    """
    name = name or _name(function)
    signature = _signature(function, name, version, inputs, outputs, max_batch_size)
    config = _config(signature, instances, queueing, batching, on_disconnect, {})
    file = inspect.getsourcefile(function) if inspect.isroutine(function) and not inspect.isbuiltin(function) else ""
    return _InThreads(config, function=function, file=file or "", **_options(file or "", version))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _signature(
    function: Callable[..., Any],
    name: str,
    version: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int,
) -> Signature:
    if not callable(function):
        raise ModelLoadError(name, f"it must be a function, got {type(function).__name__}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ModelLoadError(name, "it is `async def`, which is for `trio_infer.Model`; here a plain `def` is called")
    _check_call(function, name, inputs)
    return Signature(
        name,
        version,
        tuple(inputs),
        tuple(outputs),
        max_batch_size=max_batch_size,
        decoupled=inspect.isgeneratorfunction(function),
    )


def _check_call(function: Callable[..., Any], name: str, inputs: Sequence[TensorSpec]) -> None:
    """Whether the function can be called with the inputs, all of them and only those that must be there."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one of C that doesn't tell
        return
    for given in (inputs, [spec for spec in inputs if not spec.optional]):
        try:
            signature.bind(**{spec.name: None for spec in given})
        except TypeError as error:
            names = [spec.name for spec in given]
            raise ModelLoadError(name, f"{name}{signature} can't be called with the inputs {names}: {error}") from None


def _config(
    signature: Signature,
    instances: int,
    queueing: Queueing | None,
    batching: Batching | None,
    on_disconnect: Literal["cancel", "finish"] | None,
    parameters: Mapping[str, str],
) -> ModelConfig:
    if instances < 1:
        raise ModelLoadError(signature.name, f"`instances` must be at least 1, got {instances}")
    if on_disconnect is not None:
        parameters = {**parameters, "on_disconnect": on_disconnect}
    config = ModelConfig.of_signature(signature, instances=instances).with_scheduling(queueing, batching)
    config = config.with_backend("function", "").with_parameters(parameters)
    return ModelConfig.of_json(config.as_json(), name=signature.name, where=None)


def _options(file: str, version: str) -> dict[str, Any]:
    directory = Path(file).parent
    return {"directory": directory, "version": int(version), "auto_complete": False}
