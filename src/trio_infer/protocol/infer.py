"""`/infer`: a request's body to an `InferRequest` and back from an `InferResponse`, in Triton's HTTP form.

A body is JSON, with the bytes of binary tensors behind it; the header `Inference-Header-Content-Length` says where the
JSON ends. Without it all is JSON. With the value 0, or with an empty body, there is no JSON at all and the body is the
only input of the model.

Which outputs come back as bytes: those listed say so themselves; `binary_data_output` covers only requests that list
none. A listed output without `binary_data` is JSON, whatever `binary_data_output` says.

An output that can't be sent the way it was asked for is refused here, before the model runs, where that is known.

Errors are Triton's, text and status, with what was expected and what came behind them; see `inputs` and `fields`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import attrs
import orjson

from trio_infer.errors import ErrorCode, InferError
from trio_infer.limits import Limits
from trio_infer.protocol.binary import to_buffer
from trio_infer.protocol.classification import check_classifiable, classify
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.fields import clip, found, optional, refuse, required, wrong_type
from trio_infer.protocol.inputs import read_inputs, read_raw_input
from trio_infer.protocol.jsontext import dumps, loads
from trio_infer.protocol.outputs import select
from trio_infer.protocol.parameters import read_parameters
from trio_infer.protocol.regions import NO_REGIONS, Place, Regions, find_place
from trio_infer.protocol.shapes import check_size
from trio_infer.protocol.tensors import to_json
from trio_infer.protocol.values import InferRequest, InferResponse, RequestedOutput, ResponsePlan, Signature

__all__ = ["EncodedResponse", "decode_request", "encode_response", "parse_header_length", "read_document"]


_INTEGER: Final = re.compile(r"-?[0-9]{1,20}")


@attrs.frozen(eq=False)
class EncodedResponse:
    """An answer's body.

    Args:
        buffers: to be sent one after the other; views share memory with the model's arrays.
        header_length: bytes of JSON in front, for `Inference-Header-Content-Length`; None if all is JSON.
    """

    buffers: list[bytes | memoryview]
    header_length: int | None

    @property
    def content_type(self) -> str:
        """What the body is: JSON, or JSON with bytes behind it."""
        return "application/json" if self.header_length is None else "application/octet-stream"


def parse_header_length(value: str | None, body_size: int, name: str = "Inference-Header-Content-Length") -> int | None:
    """Where the JSON ends.

    Args:
        value: what the request says, or None.
        body_size: bytes of the (decompressed) body.
        name: of what says it, for messages.

    Returns:
        Bytes of JSON in front; None if nothing is said.

    Raises:
        InferError: no number, or not between 0 and `body_size`.
    """
    if value is None:
        return None
    if not _INTEGER.fullmatch(value.strip()):
        raise InferError(f"Unable to parse {name}, got: {found(value)}")
    length = int(value)
    if not 0 <= length <= body_size:
        raise InferError(f"inference header size should be in range (0, {body_size}), got: {length}")
    return length


def read_document(text: bytes | bytearray | memoryview, limits: Limits) -> dict[str, Any]:
    """The JSON object that a request consists of.

    Args:
        text: the JSON.
        limits: on its size and depth.

    Raises:
        InferError: too large, or too deep.
        BadJSONError: no JSON, or no object.
    """
    check_size(len(text), limits.http_max_input_size, "Request JSON size")
    document = loads(text, max_depth=limits.max_json_depth)
    if not isinstance(document, dict):
        raise wrong_type("request", "object", document)
    return document


def decode_request(
    body: bytes | bytearray | memoryview,
    header_length: int | None,
    signature: Signature,
    *,
    limits: Limits,
    is_cancelled: Callable[[], bool] | None = None,
    regions: Regions = NO_REGIONS,
) -> tuple[InferRequest, ResponsePlan]:
    """An infer request, checked against the model.

    Args:
        body: the whole, decompressed body; arrays of the request may share its memory, so it must not change.
        header_length: bytes of JSON in front; None: all is JSON; 0: none is.
        signature: the model's.
        limits: `http_max_input_size` and `max_json_depth` are looked at.
        is_cancelled: goes into the request.
        regions: of shared memory that tensors may come from and go to.

    Returns:
        The request, and how its client wants the answer.

    Raises:
        BadJSONError: no JSON, a field missing, or of the wrong JSON type.
        InferError: anything else that is wrong with it.
    """
    view = memoryview(body).toreadonly().cast("B")
    if header_length == 0 or not view.nbytes:
        request = InferRequest(signature.name, signature.version, read_raw_input(view, signature, limits))
        plan = ResponsePlan(binary_default=True)
    else:
        request, plan = _decode_document(view, header_length, signature, limits, regions)
    if is_cancelled is not None:
        request = attrs.evolve(request, is_cancelled=is_cancelled)
    return request, plan


def _decode_document(
    view: memoryview, header_length: int | None, signature: Signature, limits: Limits, regions: Regions
) -> tuple[InferRequest, ResponsePlan]:
    end = view.nbytes if header_length is None else header_length
    document = read_document(view[:end], limits)
    request_id = optional(document, "id", str, "")
    parameters, binary_default = read_parameters(document)
    members = required(document, "inputs", list)
    outputs = optional(document, "outputs", list, [])
    plan = ResponsePlan(_read_outputs(outputs, signature, request_id, regions), binary_default)
    _check_sendable(plan, signature)
    request = InferRequest(
        model_name=signature.name,
        model_version=signature.version,
        inputs=read_inputs(members, view[end:], signature, request_id, limits, regions),
        id=request_id,
        parameters=parameters,
        requested_outputs=tuple(output.name for output in plan.outputs),
        timeout=optional(document.get("parameters", {}), "timeout", int, 0),
    )
    return request, plan


def _read_outputs(
    members: list[Any], signature: Signature, request_id: str, regions: Regions
) -> tuple[RequestedOutput, ...]:
    known = [spec.name for spec in signature.outputs]
    outputs: dict[str, RequestedOutput] = {}
    for index, member in enumerate(members):
        if not isinstance(member, dict):
            raise wrong_type("outputs", "object", member, f"element {index}")
        name = required(member, "name", str, f"element {index} of 'outputs'")
        if name not in known:
            raise InferError(
                f"unexpected inference output '{clip(name)}' for model '{signature.name}' (it gives {', '.join(known)})"
            )
        if name in outputs:
            raise refuse(request_id, f"output '{name}' already exists in request")
        where = f"output '{name}'"
        parameters = optional(member, "parameters", dict, {}, where)
        binary = optional(parameters, "binary_data", bool, False, where)
        classes = optional(parameters, "classification", int, 0, where)
        if "shared_memory_region" in parameters:
            if binary or classes:
                other = "'binary_data'" if binary else "'classification'"
                raise InferError(f"{where} can't have both 'shared_memory_region' and {other}")
            outputs[name] = RequestedOutput(name, False, place=find_place(parameters, regions, where))
        else:
            outputs[name] = RequestedOutput(name, binary, classes)
    return tuple(outputs.values())


def _check_sendable(plan: ResponsePlan, signature: Signature) -> None:
    for spec in signature.outputs:
        output = plan.find(spec.name)
        if output is None:
            continue
        if output.classes:
            check_classifiable(spec.datatype, spec.name)
        elif not (spec.datatype.in_json or output.binary or output.place):
            raise InferError(
                f"sending {spec.datatype.value} data via JSON is not supported. "
                f"Please use the binary data format for output {spec.name}"
            )


def encode_response(
    response: InferResponse,
    request: InferRequest,
    plan: ResponsePlan,
    signature: Signature,
) -> EncodedResponse:
    """The answer to an infer request.

    Args:
        response: what the model gave.
        request, plan: as decoded.
        signature: the model's.

    Returns:
        JSON, and behind it the bytes of binary outputs in the order in which the JSON lists them.

    Raises:
        InferError: the model gave not what it declares or what was asked for (INTERNAL), or something that JSON can't
            carry where JSON was asked for.
    """
    outputs: list[dict[str, Any]] = []
    buffers: list[bytes | memoryview] = []
    shared: list[tuple[Place, bytes | memoryview]] = []
    for spec, array in select(response, request.requested_outputs, signature):
        wanted = plan.find(spec.name) or RequestedOutput(spec.name, plan.binary_default)
        datatype = spec.datatype
        if wanted.classes:
            batched = signature.max_batch_size > 0
            array = classify(array, spec.name, wanted.classes, spec.labels, batched=batched)
            datatype = Datatype.BYTES
        entry: dict[str, Any] = {"name": spec.name, "datatype": datatype.value, "shape": list(array.shape)}
        if wanted.place is not None:
            buffer = to_buffer(array, datatype, spec.name)
            _check_room(wanted.place, len(buffer), spec.name)
            shared.append((wanted.place, buffer))
        elif wanted.binary:
            buffer = to_buffer(array, datatype, spec.name)
            entry["parameters"] = {"binary_data_size": len(buffer)}
            if len(buffer):
                buffers.append(buffer)
        else:
            entry["data"] = orjson.Fragment(to_json(array, datatype, spec.name))
        outputs.append(entry)
    for place, buffer in shared:  # when nothing can be refused any more
        place.write([buffer])
    document: dict[str, Any] = {"id": request.id} if request.id else {}
    document |= {"model_name": signature.name, "model_version": signature.version}
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    document["outputs"] = outputs
    try:
        header = dumps(document)
    except TypeError as error:
        raise InferError(
            f"model '{signature.name}' gave parameters that JSON can't carry: {error}", ErrorCode.INTERNAL
        ) from error
    # With nothing behind the JSON this is plain JSON, even if outputs were asked for as bytes and have none.
    return EncodedResponse([header, *buffers], len(header) if buffers else None)


def _check_room(place: Place, size: int, name: str) -> None:
    if size > place.byte_size:
        raise InferError(
            f"shared memory size specified with the request for output '{name}' ({place.byte_size} bytes) should be at "
            f"least {size} bytes to hold the results"
        )
