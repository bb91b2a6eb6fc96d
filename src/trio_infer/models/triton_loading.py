"""From a `model.py` to a model that is ready: called in a worker thread, and each fault is one sentence."""

from __future__ import annotations

from typing import Any

from trio_infer.models import triton_hooks
from trio_infer.models.triton_hooks import model_fault
from trio_infer.models.triton_imports import ModelCode
from trio_infer.protocol.model_config import ModelConfig

__all__ = ["initialize", "initialize_arguments", "make_model", "model_fault"]


def make_model(made: Any, code: ModelCode, config: ModelConfig, *, auto_complete: bool) -> tuple[Any, ModelConfig]:
    """Make the model object.

    Args:
        made: its class.
        code: an instance's own.
        config: as far as it is known.
        auto_complete: whether to ask the model for the rest of it.

    Returns:
        the model, not initialized yet; the configuration, complete.

    Raises:
        ModelLoadError: what is wrong, with the file and line where there is one.
    """
    if auto_complete:
        completed = triton_hooks.auto_complete(made, code, config.as_json())
        if completed is not None:
            config = ModelConfig.of_json(completed, name=config.name, where=code.file)
    config.check_tensors()
    return triton_hooks.make(made, code), config


def initialize(model: Any, code: ModelCode, config: ModelConfig, index: int, version: int) -> None:
    """Call the model's `initialize`, if it has one.

    Raises:
        ModelLoadError: it raised.
    """
    directory = str(code.model_directory)
    triton_hooks.initialize(model, code, initialize_arguments(config, index, version, directory))


def initialize_arguments(
    config: ModelConfig, index: int, version: int, directory: str, name: str = ""
) -> dict[str, str]:
    """What Triton gives to `initialize`: seven strings.

    Args:
        index: of the instance.
        directory: the model's.
        name: of an instance that is to be able to stand in for it; "" for itself.
    """
    kind, device = config.instance_device(index)
    return {
        "model_config": config.json_text,
        "model_instance_kind": kind,
        "model_instance_name": name or config.instance_name(index),
        "model_instance_device_id": str(device),
        "model_repository": directory,
        "model_version": str(version),
        "model_name": config.name,
    }
