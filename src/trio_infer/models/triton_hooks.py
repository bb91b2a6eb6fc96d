"""Calls a Python model's code while it loads; each fault is one sentence. Needs neither trio nor protobuf."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trio_infer.errors import ModelLoadError
from trio_infer.models import triton_utils
from trio_infer.models.backends import backend_class
from trio_infer.models.functions import Reference, function_class
from trio_infer.models.triton_autocomplete import AutoCompleteConfig
from trio_infer.models.triton_current import is_trio_cancelled
from trio_infer.models.triton_imports import PB_UTILS, ModelCode

__all__ = ["auto_complete", "import_class", "initialize", "make", "model_fault"]


def import_class(code: ModelCode, program: Mapping[str, str]) -> type[Any]:
    """Import the file, and find the class in it; or the class that a backend has for it, or that calls a function.

    Args:
        code: an instance's own.
        program: `backend` is the name of the backend that runs it; `module`, `name` and `file` say where a function is
            (see `Reference`); empty for a Triton Python model.

    Raises:
        ModelLoadError: what is wrong, with the file and line where there is one.
    """
    if "module" in program:
        code.register()
        with model_fault(code, f"importing {program['name']} from {program['module']}"):
            return function_class(Reference(**program).load())
    if not code.file.is_file():
        raise ModelLoadError(code.model, f"there is no {code.file.name} in its version directory", where=code.file)
    sys.modules[PB_UTILS] = triton_utils
    if "backend" in program:
        code.register()
        with model_fault(code, f"backend '{program['backend']}'"):
            return backend_class(program["backend"], code)
    with model_fault(code, "importing it"):
        module = code.load()
    made = getattr(module, "TritonPythonModel", None)
    if not isinstance(made, type):
        what = "there is no class TritonPythonModel in its code; what else a model.py may be, `backend` has to say:"
        others = '"pytorch" for a PyTorch module, "trio_infer" for a trio_infer.Model'
        raise ModelLoadError(code.model, f"{what} {others}", where=code.file)
    if not callable(getattr(made, "execute", None)):
        raise ModelLoadError(code.model, "its TritonPythonModel has no method execute", where=code.file)
    return made


def auto_complete(model_class: Any, code: ModelCode, config: dict[str, Any]) -> dict[str, Any] | None:
    """Have the model complete its configuration.

    Args:
        config: as `ModelConfig.as_json` gives it; may be changed.

    Returns:
        the complete one, not checked; None if the model has no say in it.

    Raises:
        ModelLoadError: it raised, or returned something else.
    """
    if not hasattr(model_class, "auto_complete_config"):
        return None
    code.stage = "auto_complete_config"
    with model_fault(code, "auto_complete_config"):
        completed = AutoCompleteConfig(config)
        completed = model_class.auto_complete_config(completed) or completed
    code.stage = "initialize"
    if not isinstance(completed, AutoCompleteConfig):
        reason = f"auto_complete_config must return its argument, got {type(completed).__name__}"
        raise ModelLoadError(code.model, reason, where=code.file)
    return completed.as_dict()


def make(model_class: Any, code: ModelCode) -> Any:
    """Make the model object.

    Raises:
        ModelLoadError: it raised.
    """
    with model_fault(code, f"{model_class.__name__}()"):
        return model_class()


def initialize(model: Any, code: ModelCode, arguments: Mapping[str, str]) -> None:
    """Call the model's `initialize`, if it has one.

    Args:
        arguments: what Triton gives: seven strings.

    Raises:
        ModelLoadError: it raised.
    """
    if hasattr(model, "initialize"):
        with model_fault(code, "initialize"):
            model.initialize(dict(arguments))
    code.stage = ""


@contextmanager
def model_fault(code: ModelCode, doing: str) -> Iterator[None]:
    """Turn whatever model code raises into a ModelLoadError, with the innermost of the model's own lines.

    Even SystemExit: in a worker thread it would end nothing, and the server isn't the model's to end.
    """
    try:
        yield
    except ModelLoadError:
        raise
    except BaseException as error:
        if is_trio_cancelled(error):
            raise
        where: Path = code.file
        line = None
        text = str(error)
        if isinstance(error, SyntaxError) and error.filename:
            where, line, text = Path(error.filename), error.lineno, error.msg
        else:
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if code.owns(frame.filename)]
            if own:
                where, line = Path(own[-1].filename), own[-1].lineno
        reason = " ".join(f"{doing}: {type(error).__name__}: {text}".split()).rstrip(": ")
        raise ModelLoadError(code.model, reason, where=where, line=line) from error
