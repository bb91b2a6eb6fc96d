"""Plain functions as models: how one is found in a worker process, and how it is called.

A function travels to its process as the names that it can be imported by, never as a pickle: a pickle runs whatever it
says, and what can be pickled differs by where a function was made. So a function must be found by its module and name,
as `multiprocessing` finds it under `spawn`. That of a script is found there, too: the script is imported a second time,
under the name `__mp_main__`, so what is behind `if __name__ == "__main__":` isn't run again.

To the rest of the server it looks like a Triton Python model, so that it is run, stopped and killed in the same way.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

import attrs

from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.models.backends.joined import joined, parts, split
from trio_infer.models.triton_current import check_cancelled
from trio_infer.models.triton_messages import FINAL, InferenceRequest, InferenceResponse
from trio_infer.models.triton_tensors import Tensor, TritonError
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.outputs import as_tensor
from trio_infer.protocol.values import Array, TensorSpec

__all__ = ["FunctionModel", "Reference", "function_class"]

_SCRIPT: Final = "__mp_main__"


@attrs.frozen
class Reference:
    """Where a function is found.

    Args:
        module: its name; that of a script is "__main__".
        name: within it, with dots.
        file: of the module.
    """

    module: str
    name: str
    file: str

    @classmethod
    def of(cls, function: Callable[..., Any], model: str) -> Reference:
        """That of a function, which is checked to be found there.

        Raises:
            ModelLoadError: it can't be found by a name, so no other process can import it; says why.
        """
        name = getattr(function, "__qualname__", "")
        module = getattr(function, "__module__", None) or ""

        def fault(what: str) -> ModelLoadError:
            return ModelLoadError(
                model, f"{what}, so no other process can import it; define it with `def` at the top of a module"
            )

        if not name or not module:
            raise fault(f"{function!r} has no name of its own")
        if "<lambda>" in name:
            raise fault("it is a lambda")
        if "<locals>" in name:
            raise fault(f"'{name}' is defined within a function")
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        if module == "__main__" and not Path(file).is_file():
            raise fault(f"'{name}' is defined in an interactive session, or in a program without a file")
        try:
            found = _look_up(sys.modules[module], name)
        except (KeyError, AttributeError):
            found = None
        if found is not function:
            raise fault(f"'{name}' in the module {module} is something else")
        spec = getattr(sys.modules[module], "__spec__", None)
        if module == "__main__" and spec is not None:  # `python -m`: it has a name that it can be imported by
            module = spec.name
        return cls(module, name, str(Path(file).absolute()) if file else "")

    def load(self) -> Callable[..., Any]:
        """Import it; whatever the module's code raises comes out as it is.

        Raises:
            AttributeError: the module has no such name, in this process.
        """
        module = _script(self.file) if self.module == "__main__" else importlib.import_module(self.module)
        found: Callable[..., Any] = _look_up(module, self.name)
        return found


def _look_up(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _script(file: str) -> ModuleType:
    known = sys.modules.get(_SCRIPT)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(_SCRIPT, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_SCRIPT] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FunctionModel:
    """Calls a function as a model.

    Attributes:
        function: takes the inputs by their names, and gives a mapping of outputs, or the only output itself.
    """

    function: ClassVar[Callable[..., Any]]

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._name = args["model_name"]
        self._batched = config["max_batch_size"] > 0
        self._outputs = {
            tensor["name"]: TensorSpec(tensor["name"], _DATATYPES[tensor["data_type"]], tensor["dims"])
            for tensor in config["output"]
        }
        self._streams = inspect.isgeneratorfunction(self.function)

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse] | None:
        if self._streams:
            for request in requests:
                self._stream(request)
            return None
        responses: dict[int, InferenceResponse] = {}
        for batch in joined(requests) if self._batched else [[request] for request in requests]:
            check_cancelled()
            try:
                answers = [_response(each) for each in self._split(batch, self._read(self._call(parts(batch))))]
            except InferError as error:
                answers = [_failed(error) for _ in batch]
            responses.update(zip(map(id, batch), answers, strict=True))
        return [responses[id(request)] for request in requests]

    def _call(self, inputs: Mapping[str, Array]) -> Any:
        return type(self).function(**inputs)

    def _stream(self, request: InferenceRequest) -> None:
        sender = request.get_response_sender()
        stream: Iterator[Any] = self._call(parts([request]))
        try:
            for given in stream:
                if request.is_cancelled():
                    break
                sender.send(_response(self._read(given)))
        except InferError as error:
            sender.send(_failed(error), flags=FINAL)
        else:
            sender.send(flags=FINAL)
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()

    def _read(self, given: Any) -> dict[str, Array]:
        """What it gave, as arrays of the declared types.

        Raises:
            InferError: INTERNAL: it gave something else.
        """
        if not isinstance(given, Mapping):
            if len(self._outputs) != 1:
                raise InferError(
                    f"function '{self._name}' must give a mapping of the outputs {list(self._outputs)}, "
                    f"got {type(given).__name__}",
                    ErrorCode.INTERNAL,
                )
            name = next(iter(self._outputs))
            if given is None:  # most likely a forgotten `return`
                raise InferError(f"function '{self._name}' must give the output '{name}', got None", ErrorCode.INTERNAL)
            given = {name: given}
        if given.keys() != self._outputs.keys():
            raise InferError(
                f"function '{self._name}' must give the outputs {list(self._outputs)}, got {list(given)}",
                ErrorCode.INTERNAL,
            )
        return {name: as_tensor(given[name], spec, self._name) for name, spec in self._outputs.items()}

    def _split(self, batch: Sequence[InferenceRequest], outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
        try:
            return split(batch, outputs)
        except ValueError as error:
            raise InferError(f"function '{self._name}': {error}", ErrorCode.INTERNAL) from None


_DATATYPES: Final = {datatype.config_name: datatype for datatype in Datatype}


def _response(outputs: Mapping[str, Array]) -> InferenceResponse:
    return InferenceResponse([Tensor(name, array) for name, array in outputs.items()])


def _failed(error: InferError) -> InferenceResponse:
    return InferenceResponse(error=TritonError(error.message, error.code))


def function_class(function: Callable[..., Any]) -> type[FunctionModel]:
    """The class of the model that calls a function."""
    made: type[FunctionModel] = type("FunctionModel", (FunctionModel,), {"function": staticmethod(function)})
    return made
