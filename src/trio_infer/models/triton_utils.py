"""What a model file gets by `import triton_python_backend_utils as pb_utils`.

This module is registered under that name when the first Triton Python model loads, and wins over an installed module of
the same name, since that one works only inside Triton's own process. `trio_infer.triton_utils` is the public way to it.

Not supported; each raises `TritonModelException` and says so:

- tensors in a GPU's memory: `Tensor.from_dlpack` takes those that are in the CPU's

Accepted without effect: `PreferredMemory`, `InferenceTrace` (there is one kind of memory, and no trace to hang on to).

What depends on which model calls (`Logger`, `get_model_dir`, `load_model`, metrics, requests that a model makes) finds
it from the calling code's module, so it works in any thread and in sibling modules. A call that comes from no model's
code (a library calls back) is taken for that of the process's only instance; if there are several, it is logged under
the common name, and what needs the model is refused.
"""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from trio_infer.errors import InferError
from trio_infer.models.triton_autocomplete import AutoCompleteConfig as ModelConfig
from trio_infer.models.triton_imports import calling_code
from trio_infer.models.triton_log import log_as
from trio_infer.models.triton_messages import (
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    ResponseIterator,
    bridge_of,
)
from trio_infer.models.triton_metrics import Metric, MetricFamily
from trio_infer.models.triton_tensors import Tensor, TritonError, TritonModelException
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
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
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


class Logger:
    """Writes to the server's log, under the calling model's name and with its file and line."""

    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    VERBOSE = logging.DEBUG

    @staticmethod
    def log(message: str, level: int = logging.INFO) -> None:
        """Write a line at a level: `Logger.INFO`, `WARNING`, `ERROR` or `VERBOSE`."""
        _log(level, message)

    @staticmethod
    def log_info(message: str) -> None:
        _log(logging.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        _log(logging.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        _log(logging.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log(logging.DEBUG, message)


def _log(level: int, message: str) -> None:
    frame = sys._getframe(2)
    file, line = frame.f_code.co_filename, frame.f_lineno
    code = calling_code()
    if code is None or code.bridge is None:
        log_as("" if code is None else code.model, level, str(message), file, line)
    else:
        code.bridge.log(level, str(message), file, line)


def get_model_dir() -> str:
    """The calling model's version directory, the one that its `model.py` is in.

    Raises:
        TritonModelException: the call doesn't come from a model's code.
    """
    code = calling_code()
    if code is None:
        raise TritonModelException("get_model_dir() must be called from a model's own code")
    return str(code.version_directory)


def load_model(model_name: str, files: Mapping[str, bytes] | None = None, config: str = "") -> None:
    """Load a model, or load it anew, as a client's `/v2/repository/models/{model_name}/load` does; waits for it.

    Args:
        files: contents by path in the model's directory, as `"file:1/model.py"`, to load it from in place of what is in
            the repository; they need a `config`.
        config: JSON text, in place of `config.pbtxt`.

    Raises:
        TritonModelException: it can't be loaded; or the server doesn't load models on request.
    """
    bridge = bridge_of(calling_code(), "load_model()")
    contents = {path.removeprefix("file:"): bytes(content) for path, content in (files or {}).items()}
    try:
        bridge.load_model(model_name, config or None, contents)
    except InferError as error:
        raise TritonModelException(error.message) from None


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model, as a client does; returns when it takes no more requests.

    Raises:
        TritonModelException: the server doesn't unload models on request.
    """
    bridge = bridge_of(calling_code(), "unload_model()")
    try:
        bridge.unload_model(model_name, unload_dependents=unload_dependents)
    except InferError as error:
        raise TritonModelException(error.message) from None


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model would answer; version "" for any."""
    bridge = bridge_of(calling_code(), "is_model_ready()")
    try:
        return bridge.is_model_ready(model_name, str(model_version))
    except InferError as error:
        raise TritonModelException(error.message) from None


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
