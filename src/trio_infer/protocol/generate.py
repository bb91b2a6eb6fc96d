"""`/generate` and `/generate_stream`: one flat JSON object each way, for models that take and give a few values.

A request's keys that are inputs of the model become tensors, `parameters` is an object of further such keys, and all
else becomes a parameter. An input's value is an element or an array of them; how many there are is fitted to the
declared shape: the fixed dimensions must divide it, the innermost free one takes the rest, further free ones are 1.

An answer has the outputs by name: the bare element if there is one, else a flat array.

A stream is server-sent events, each one `data:` line of JSON (which never holds a line break).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import orjson

from trio_infer.errors import ErrorCode, InferError
from trio_infer.limits import Limits
from trio_infer.protocol.fields import optional
from trio_infer.protocol.infer import read_document
from trio_infer.protocol.inputs import check_complete
from trio_infer.protocol.jsontext import dumps
from trio_infer.protocol.outputs import select
from trio_infer.protocol.parameters import check_parameter
from trio_infer.protocol.shapes import check_spec, fit, show
from trio_infer.protocol.tensors import elements_to_array, flatten, to_json
from trio_infer.protocol.values import Array, InferRequest, InferResponse, ParameterValue, Signature, TensorSpec

__all__ = ["decode_generate", "encode_generate", "sse_event"]


def decode_generate(
    body: bytes | bytearray | memoryview,
    signature: Signature,
    *,
    limits: Limits,
    is_cancelled: Callable[[], bool] | None = None,
) -> InferRequest:
    """A generate request, checked against the model.

    Args:
        body: the whole body.
        signature: the model's.
        limits: `http_max_input_size` and `max_json_depth` are looked at.
        is_cancelled: goes into the request.

    Returns:
        The request. Its parameters are of any plain type, `priority` and the like included: Triton gives them no
        meaning here.

    Raises:
        BadJSONError: no JSON object, or an input's element of the wrong JSON type.
        InferError: anything else that is wrong with it.
    """
    document = read_document(body, limits)
    request_id = optional(document, "id", str, "")
    specs = {spec.name: spec for spec in signature.inputs}
    inputs: dict[str, Array] = {}
    parameters: dict[str, ParameterValue] = {}

    def convert(members: dict[str, Any], prefix: str) -> None:
        for name, value in members.items():
            if name in specs:
                if name in inputs:
                    raise InferError(f"{prefix}input '{name}' is given twice, also inside 'parameters'")
                inputs[name] = _read_input(value, specs[name], signature, request_id)
            else:
                parameters[name] = check_parameter(name, value, prefix)

    nested: Any = {} if "parameters" in specs else document.pop("parameters", {})
    convert(document, "")
    if not isinstance(nested, dict):
        raise InferError("Expected JSON object for keyword: 'parameters'")
    convert(nested, "Converting keyword: 'parameters': ")
    check_complete(inputs, signature, request_id)
    request = InferRequest(signature.name, signature.version, inputs, id=request_id, parameters=parameters)
    return request if is_cancelled is None else attrs.evolve(request, is_cancelled=is_cancelled)


def _read_input(value: Any, spec: TensorSpec, signature: Signature, request_id: str) -> Array:
    elements, kinds = flatten(value if isinstance(value, list) else [value])
    flat = elements_to_array(elements, kinds, spec.datatype, spec.name)
    dims = signature.wire_shape(spec)
    shape = fit(len(flat), dims)
    if shape is None:
        raise InferError(
            f"The schema can not convert input '{spec.name}' to tensor with proper shape "
            f"(the model takes {show(dims)}, got {len(flat)} elements)"
        )
    check_spec(spec, spec.datatype, shape, signature, request_id)
    return flat.reshape(shape)


def encode_generate(response: InferResponse, request: InferRequest, signature: Signature) -> bytes:
    """One response of a generate request, as JSON.

    Args:
        response: what the model gave.
        request: as decoded.
        signature: the model's.

    Raises:
        InferError: the model gave not what it declares (INTERNAL), or something that JSON can't carry.
    """
    document: dict[str, Any] = {"id": request.id} if request.id else {}
    document |= {"model_name": signature.name, "model_version": signature.version}
    document |= response.parameters
    for spec, array in select(response, request.requested_outputs, signature):
        text = to_json(array, spec.datatype, spec.name)
        document[spec.name] = orjson.Fragment(text[1:-1] if array.size == 1 else text)
    try:
        return dumps(document)
    except TypeError as error:
        raise InferError(
            f"model '{signature.name}' gave parameters that JSON can't carry: {error}", ErrorCode.INTERNAL
        ) from error


def sse_event(payload: bytes) -> bytes:
    """One server-sent event.

    Args:
        payload: JSON without line breaks, as `encode_generate` and `error_json` write it.
    """
    return b"data: " + payload + b"\n\n"
