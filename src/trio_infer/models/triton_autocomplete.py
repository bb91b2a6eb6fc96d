"""What `auto_complete_config` works on: the configuration as a dict; its setters refuse to contradict the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["AutoCompleteConfig"]

_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


class AutoCompleteConfig:
    """A model's configuration while the model completes it.

    Args:
        config: as `ModelConfig.as_json` gives it; changed in place.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._model_config = config

    def as_dict(self) -> dict[str, Any]:
        """The configuration so far; changes to it count."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Say how many rows a request may have.

        Raises:
            ValueError: the file allows more.
        """
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(f"config.pbtxt has max_batch_size {configured}, the model can do only {max_batch_size}")
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Let the server join requests, unless the file names another way of scheduling."""
        if not any(scheduler in self._model_config for scheduler in _SCHEDULERS):
            self._model_config["dynamic_batching"] = {}

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Say whether the model is decoupled: `{"decoupled": True}`.

        Raises:
            ValueError: another key, or the file says otherwise.
        """
        unknown = set(transaction_policy_dict) - {"decoupled"}
        if unknown:
            raise ValueError(f"a transaction policy has the key 'decoupled' only, got {sorted(unknown)}")
        wanted = transaction_policy_dict.get("decoupled", False)
        configured = self._model_config.get("model_transaction_policy")
        if configured is not None and configured["decoupled"] != wanted:
            raise ValueError(f"config.pbtxt has decoupled {configured['decoupled']}, the model wants {wanted}")
        self._model_config["model_transaction_policy"] = {"decoupled": bool(wanted)}

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 (Triton's name)
        """Describe an input: `name`, `data_type`, `dims` (without the batch dimension) and perhaps `optional`.

        Raises:
            ValueError: a key is missing or unknown, or the file says otherwise.
        """
        self._add("input", input, {"name", "data_type", "dims", "optional"})

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Describe an output: `name`, `data_type`, `dims` (without the batch dimension).

        Raises:
            ValueError: a key is missing or unknown, or the file says otherwise.
        """
        self._add("output", output, {"name", "data_type", "dims"})

    def _add(self, kind: str, tensor: Mapping[str, Any], known: set[str]) -> None:
        name = tensor.get("name")
        unknown, missing = set(tensor) - known, {"name", "data_type", "dims"} - set(tensor)
        if unknown:
            raise ValueError(f"{kind} '{name}' has keys that it can't have: {sorted(unknown)}")
        if missing:
            raise ValueError(f"{kind} '{name}' lacks {sorted(missing)}")
        for configured in self._model_config[kind]:
            if configured["name"] == name:
                for key, nothing in (("data_type", "TYPE_INVALID"), ("dims", [])):
                    given = list(tensor[key]) if key == "dims" else tensor[key]
                    if configured[key] not in (nothing, given):
                        raise ValueError(
                            f"{kind} '{name}' has {key} {configured[key]} in config.pbtxt, the model wants {given}"
                        )
                    configured[key] = given
                if tensor.get("optional"):
                    configured["optional"] = True
                return
        self._model_config[kind].append({**tensor, "dims": list(tensor["dims"])})
