"""From a `model.py` to a model that is ready: called in a worker thread, and each fault is one sentence."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trio_infer.errors import ModelLoadError
from trio_infer.models import triton_utils
from trio_infer.models.triton_autocomplete import AutoCompleteConfig
from trio_infer.models.triton_current import is_trio_cancelled
from trio_infer.models.triton_imports import PB_UTILS, ModelCode
from trio_infer.protocol.model_config import ModelConfig

__all__ = ["import_model", "initialize", "model_fault"]


def import_model(code: ModelCode, config: ModelConfig, *, auto_complete: bool) -> tuple[Any, ModelConfig]:
    """Import the file and make the model object.

    Args:
        code: an instance's own.
        config: as far as it is known.
        auto_complete: whether to ask the model for the rest of it.

    Returns:
        the model, not initialized yet; the configuration, complete.

    Raises:
        ModelLoadError: what is wrong, with the file and line where there is one.
    """
    if not code.file.is_file():
        raise ModelLoadError(config.name, f"there is no {code.file.name} in its version directory", where=code.file)
    sys.modules[PB_UTILS] = triton_utils
    with model_fault(code, "importing it"):
        module = code.load()
    made = getattr(module, "TritonPythonModel", None)
    if not isinstance(made, type):
        raise ModelLoadError(config.name, "there is no class TritonPythonModel in its code", where=code.file)
    if not callable(getattr(made, "execute", None)):
        raise ModelLoadError(config.name, "its TritonPythonModel has no method execute", where=code.file)
    if auto_complete and hasattr(made, "auto_complete_config"):
        code.stage = "auto_complete_config"
        with model_fault(code, "auto_complete_config"):
            completed = AutoCompleteConfig(config.as_json())
            completed = made.auto_complete_config(completed) or completed
        code.stage = "initialize"
        if not isinstance(completed, AutoCompleteConfig):
            reason = f"auto_complete_config must return its argument, got {type(completed).__name__}"
            raise ModelLoadError(config.name, reason, where=code.file)
        config = ModelConfig.of_json(completed.as_dict(), name=config.name, where=code.file)
    config.check_tensors()
    with model_fault(code, "TritonPythonModel()"):
        return made(), config


def initialize(model: Any, code: ModelCode, config: ModelConfig, index: int, version: int) -> None:
    """Call the model's `initialize`, if it has one, with what Triton gives: seven strings.

    Raises:
        ModelLoadError: it raised.
    """
    if not hasattr(model, "initialize"):
        code.stage = ""
        return
    kind, device = config.instance_device(index)
    with model_fault(code, "initialize"):
        model.initialize(
            {
                "model_config": config.json_text,
                "model_instance_kind": kind,
                "model_instance_name": config.instance_name(index),
                "model_instance_device_id": str(device),
                "model_repository": str(code.model_directory),
                "model_version": str(version),
                "model_name": config.name,
            }
        )
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
