"""A request's `parameters`: which are Triton's own, which go to the model as they are, which are refused."""

from __future__ import annotations

from typing import Any, Final

from trio_infer.errors import InferError
from trio_infer.protocol.fields import clip, optional, required, unsigned, wrong_type
from trio_infer.protocol.values import ParameterValue

__all__ = ["check_parameter", "read_parameters"]

_BOOLEANS: Final = ("sequence_start", "sequence_end", "binary_data_output")
_UNSIGNED: Final = ("priority", "timeout")
_PLAIN: Final = frozenset({bool, int, float, str})


def check_parameter(name: str, value: Any, prefix: str = "") -> ParameterValue:
    """A parameter that goes to the model as it is.

    Args:
        name: its key.
        value: parsed JSON.
        prefix: starts the message.

    Raises:
        InferError: it is null, an array or an object, or its name is reserved.
    """
    if name.startswith("triton_"):
        raise InferError(
            f"{prefix}parameter keys starting with 'triton_' are reserved for Triton usage and should not be "
            f"specified. (got '{clip(name)}')"
        )
    if type(value) not in _PLAIN:
        raise InferError(
            f"{prefix}parameter '{clip(name)}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
    plain: ParameterValue = value
    return plain


def read_parameters(document: dict[str, Any]) -> tuple[dict[str, ParameterValue], bool]:
    """The `parameters` of an infer request.

    Args:
        document: the whole request.

    Returns:
        The parameters, and `binary_data_output`, which is about the transport and not among them.

    Raises:
        BadJSONError: one of Triton's own has the wrong JSON type.
        InferError: any other is null, an array or an object, or has a reserved name.
    """
    members = optional(document, "parameters", dict, {})
    for name in _BOOLEANS:
        optional(members, name, bool, False)
    for name in _UNSIGNED:
        optional(members, name, int, 0)
    sequence = members.get("sequence_id", 0)
    if type(sequence) is not str and not unsigned(sequence):
        raise wrong_type("sequence_id", "unsigned-integer", sequence, "parameters; a string will do, too")
    binary = "binary_data_output" in members and required(members, "binary_data_output", bool)
    return {
        name: check_parameter(name, value) for name, value in members.items() if name != "binary_data_output"
    }, binary
