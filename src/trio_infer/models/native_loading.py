"""From a model repository's `model.py` to a native model with the configuration that lies beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trio_infer.errors import ModelLoadError
from trio_infer.models.native import Model, NativeRunner
from trio_infer.models.token_model import TokenModel
from trio_infer.models.token_runner import TokenRunner
from trio_infer.models.triton_imports import ModelCode
from trio_infer.models.triton_loading import model_fault
from trio_infer.protocol.model_config import ModelConfig

__all__ = ["load_native", "native_runner"]


def native_runner(model: Model, **options: Any) -> NativeRunner:
    """The runner for a model of whatever kind.

    Args:
        options: see `NativeRunner`.

    Raises:
        ModelLoadError: it can't be run.
    """
    if isinstance(model, TokenModel):
        return TokenRunner(model, **options)
    return NativeRunner(model, **options)


def load_native(
    config: ModelConfig, directory: Path, version: int, filename: str, labels: Mapping[str, tuple[str, ...]]
) -> NativeRunner:
    """Import one version of a native model, and have the file's words go before the code's.

    Args:
        config: from its `config.pbtxt`.
        directory: the model's.
        filename: of its code, in the version's directory.
        labels: of the classes of those outputs that have some.

    Raises:
        ModelLoadError: the code raises, or isn't one model.
    """
    code = ModelCode(config.name, directory / str(version) / filename)
    try:
        model = _model(code, config)
        _configure(model, config, version, labels)
        return native_runner(model, config=config, directory=directory, forget=code.forget)
    except BaseException as error:
        code.forget()
        if isinstance(error, ModelLoadError):
            error.version = str(version)
        raise


def _model(code: ModelCode, config: ModelConfig) -> Model:
    if not code.file.is_file():
        raise ModelLoadError(config.name, f"there is no {code.file.name} in its version directory", where=code.file)
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
    return model


def _configure(model: Model, config: ModelConfig, version: int, labels: Mapping[str, tuple[str, ...]]) -> None:
    config.check_tensors()
    given: dict[str, object] = {"name": config.name, "version": str(version)}
    if config.inputs or config.outputs:
        outputs = config.signature(str(version), labels).outputs
        given |= {"inputs": config.inputs, "outputs": outputs, "max_batch_size": config.max_batch_size}
    elif config.max_batch_size:
        given["max_batch_size"] = config.max_batch_size
    if isinstance(model, TokenModel):
        given |= config.token_loop
    elif config.has_instance_group:
        given["instances"] = config.instance_count
    if config.on_disconnect is not None:
        given["on_disconnect"] = config.on_disconnect
    for attribute, value in given.items():
        object.__setattr__(model, attribute, value)  # also of a frozen attrs class
