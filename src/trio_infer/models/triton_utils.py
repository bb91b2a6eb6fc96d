"""What a model file gets by `import triton_python_backend_utils as pb_utils`.

This module is registered under that name when the first Triton Python model loads, and wins over an installed module of
the same name, since that one works only inside Triton's own process.

Not supported yet; each raises `TritonModelException` and names itself:

- calling models from models: `InferenceRequest.exec`, `InferenceRequest.async_exec`
- `load_model`, `unload_model`, `is_model_ready`
- `MetricFamily`, `Metric`
- rescheduling: `TRITONSERVER_REQUEST_RELEASE_RESCHEDULE`

Accepted without effect: `PreferredMemory`, `InferenceTrace` (there is one kind of memory, and no trace to hang on to).

The functions that depend on which model calls (`Logger`, `get_model_dir`) find it from the calling code's module, so
they work in any thread and in sibling modules. A call that comes from no model's code (a callback run by a library) is
logged under the common name.
"""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import attrs
import numpy as np

from trio_infer.models.triton_autocomplete import AutoCompleteConfig as ModelConfig
from trio_infer.models.triton_imports import ModelCode, code_of
from trio_infer.models.triton_messages import InferenceRequest, InferenceResponse, InferenceResponseSender
from trio_infer.models.triton_tensors import Tensor, TritonError, TritonModelException, unsupported
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.values import Array

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    datatype.config_name: datatype.dtype.type for datatype in Datatype if datatype is not Datatype.BF16
}
# By the numbers that `Tensor.triton_dtype` gives; numpy has nothing for BF16 (14).
_NUMPY_TYPES = dict(
    enumerate(
        (
            np.bool_,
            np.uint8,
            np.uint16,
            np.uint32,
            np.uint64,
            np.int8,
            np.int16,
            np.int32,
            np.int64,
            np.float16,
            np.float32,
            np.float64,
            np.object_,
        ),
        start=1,
    )
)
_TYPE_NUMBERS: dict[Any, int] = {numpy_type: number for number, numpy_type in _NUMPY_TYPES.items()}


def _calling_model() -> ModelCode | None:
    frame = sys._getframe(2)
    while True:
        code = code_of(frame.f_globals.get("__name__"))
        if code is not None or frame.f_back is None:
            return code
        frame = frame.f_back


class Logger:
    """Writes to the server's log, under the calling model's name and with its file and line."""

    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    VERBOSE = logging.DEBUG

    @staticmethod
    def log(message: str, level: int = logging.INFO) -> None:
        code = _calling_model()
        _log(code, level, message)

    @staticmethod
    def log_info(message: str) -> None:
        code = _calling_model()
        _log(code, logging.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        code = _calling_model()
        _log(code, logging.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        code = _calling_model()
        _log(code, logging.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        code = _calling_model()
        _log(code, logging.DEBUG, message)


def _log(code: ModelCode | None, level: int, message: str) -> None:
    logger = logging.getLogger("trio_infer.model" if code is None else f"trio_infer.model.{code.model}")
    logger.log(level, "%s", message, stacklevel=3)


def get_model_dir() -> str:
    """The calling model's version directory, the one that its `model.py` is in.

    Raises:
        TritonModelException: the call doesn't come from a model's code.
    """
    code = _calling_model()
    if code is None:
        raise TritonModelException("get_model_dir() must be called from a model's own code")
    return str(code.version_directory)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input of that name; None if it has none."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of that name; None if it has none."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """What the configuration (a dict) says of that input; None if it has none of that name."""
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """What the configuration (a dict) says of that output; None if it has none of that name."""
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the configuration (a dict) lets a request have any number of responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a `TYPE_...` name.

    Raises:
        KeyError: no such name, or TYPE_BF16.
    """
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a datatype's number; None if numpy has none."""
    return _NUMPY_TYPES.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The datatype's number of a numpy type or dtype; None if there is none."""
    kind = np.dtype(data_type).type
    return 13 if kind is np.bytes_ else _TYPE_NUMBERS.get(kind)


def serialize_byte_tensor(input_tensor: Array) -> bytes | None:
    """The elements in C order, each as 4 bytes of length and its content; None for an empty or another array."""
    if input_tensor.size == 0 or input_tensor.dtype.kind not in "OS":
        return None
    parts = []
    for element in input_tensor.ravel().tolist():
        content = element if isinstance(element, bytes) else str(element).encode()
        parts += [struct.pack("<I", len(content)), content]
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """A flat object array of `bytes` from what `serialize_byte_tensor` gives."""
    elements, offset = [], 0
    while offset < len(encoded_tensor):
        (size,) = struct.unpack_from("<I", encoded_tensor, offset)
        elements.append(bytes(encoded_tensor[offset + 4 : offset + 4 + size]))
        offset += 4 + size
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


@attrs.frozen
class PreferredMemory:
    """Accepted without effect."""

    preferred_memory_type: int = TRITONSERVER_MEMORY_CPU
    preferred_device_id: int = 0


class InferenceTrace:
    """Accepted without effect."""


class MetricFamily:
    """Not supported yet."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str = "", description: str = "", kind: int = 0) -> None:
        unsupported("a metric of a model's own (MetricFamily)")


def load_model(model_name: str, files: Any = None, config: str = "") -> NoReturn:
    """Not supported yet."""
    unsupported("loading a model from a model (load_model)")


def unload_model(model_name: str, unload_dependents: bool = False) -> NoReturn:
    """Not supported yet."""
    unsupported("unloading a model from a model (unload_model)")


def is_model_ready(model_name: str, model_version: str = "") -> NoReturn:
    """Not supported yet."""
    unsupported("asking for a model from a model (is_model_ready)")
