"""A request's inputs: from their JSON and the bytes behind it to arrays that the model's signature allows.

For each input, in the request's order: its head is read, held against the model, and only then its data is looked at;
so nothing large is converted in vain, and no array has a shape that the model did not declare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trio_infer.errors import InferError
from trio_infer.limits import Limits
from trio_infer.protocol.binary import bytes_to_array, check_bytes
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.fields import clip, found, optional, refuse, required, wrong_type
from trio_infer.protocol.regions import Regions, find_place
from trio_infer.protocol.shapes import check_size, check_spec, element_count, fit, read_shape
from trio_infer.protocol.tensors import json_to_array, object_array
from trio_infer.protocol.values import Array, Signature, TensorSpec

__all__ = ["check_arrays", "check_complete", "read_inputs", "read_raw_input"]


class _Tail:
    """The bytes behind the JSON, taken off in the order of the inputs."""

    def __init__(self, data: memoryview, model: str) -> None:
        self._data = data
        self._model = model

    def take(self, size: int, name: str) -> memoryview:
        missing = size - self._data.nbytes
        if missing > 0:
            raise InferError(
                f"unexpected size for input '{name}', expecting {missing} additional bytes for model '{self._model}' "
                f"(binary_data_size is {size}, {self._data.nbytes} bytes are left behind the JSON)"
            )
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def finish(self) -> None:
        if self._data.nbytes:
            raise InferError(
                f"unexpected additional input data for model '{self._model}' ({self._data.nbytes} bytes are left after "
                "the last input with a binary_data_size)"
            )


def read_inputs(
    members: list[Any],
    binary: memoryview,
    signature: Signature,
    request_id: str,
    limits: Limits,
    regions: Regions,
) -> dict[str, Array]:
    """All inputs of an infer request.

    Args:
        members: the request's `inputs`.
        binary: the body's bytes behind the JSON.
        signature: the model's.
        request_id: for messages.
        limits: `http_max_input_size` bounds each JSON tensor.
        regions: of shared memory, from which inputs may come; they are copied out of it.

    Returns:
        Arrays by name, in the request's order.

    Raises:
        BadJSONError, InferError: see the module.
    """
    specs = {spec.name: spec for spec in signature.inputs}
    tail = _Tail(binary, signature.name)
    inputs: dict[str, Array] = {}
    for index, member in enumerate(members):
        if not isinstance(member, dict):
            raise wrong_type("inputs", "object", member, f"element {index}")
        name = required(member, "name", str, f"element {index} of 'inputs'")
        if name in inputs:
            raise refuse(request_id, f"input '{name}' already exists in request")
        if name not in specs:
            raise InferError(
                f"unexpected inference input '{clip(name)}' for model '{signature.name}' (it takes {_quoted(specs)})"
            )
        inputs[name] = _read_input(member, specs[name], tail, signature, request_id, limits, regions)
    tail.finish()
    check_complete(inputs, signature, request_id)
    return inputs


def _read_input(
    member: dict[str, Any],
    spec: TensorSpec,
    tail: _Tail,
    signature: Signature,
    request_id: str,
    limits: Limits,
    regions: Regions,
) -> Array:
    name, model = spec.name, signature.name
    where = f"input '{name}'"
    text = required(member, "datatype", str, where)
    datatype = Datatype.__members__.get(text)
    if datatype is None:
        known = ", ".join(item.value for item in Datatype)
        raise InferError(f"invalid datatype for input {name} (got {found(text)}, expected one of {known})")
    shape = read_shape(required(member, "shape", list, where), where)
    count = element_count(shape, datatype, name)
    check_spec(spec, datatype, shape, signature, request_id)
    parameters = optional(member, "parameters", dict, {}, where)
    way = _way(member, parameters, where)
    if way == "data":
        if datatype.in_json:
            check_size(count * datatype.itemsize, limits.http_max_input_size, f"Byte size of input '{name}'")
        return json_to_array(required(member, "data", list, where), datatype, shape, name)
    if way == "binary_data_size":
        data = tail.take(required(parameters, "binary_data_size", int, where), name)
    else:
        place = find_place(parameters, regions, where)
        check_bytes(place.byte_size, count, datatype, name, model=model, request_id=request_id)  # before reading
        data = place.read()
    return bytes_to_array(data, datatype, shape, name, model=model, request_id=request_id)


def _way(member: dict[str, Any], parameters: dict[str, Any], where: str) -> str:
    """The one way in which an input's data comes."""
    ways: list[str] = [key for key in ("binary_data_size", "shared_memory_region") if key in parameters]
    if "data" in member:
        ways.append("data")
    if len(ways) != 1:
        raise InferError(
            f"{where} must have exactly one of 'data', parameter 'binary_data_size' and parameter "
            f"'shared_memory_region'; got {' and '.join(ways) or 'none'}"
        )
    return ways[0]


def check_complete(inputs: Mapping[str, Array], signature: Signature, request_id: str) -> None:
    """Check what can only be told when all inputs are known: none is missing, and their batches are equally large.

    Args:
        inputs: each already as the model wants it.
        signature: the model's.
        request_id: for messages.

    Raises:
        InferError: one is missing or has another batch size than the first.
    """
    model, most = signature.name, len(signature.inputs)
    missing = [spec.name for spec in signature.inputs if spec.name not in inputs and not spec.optional]
    if missing:
        least = sum(not spec.optional for spec in signature.inputs)
        expected = (
            f"expected {most} inputs" if least == most else f"expected number of inputs between {least} and {most}"
        )
        raise refuse(
            request_id,
            f"{expected} but got {len(inputs)} inputs for model '{model}'. Got input(s) {_quoted(inputs)}, "
            f"but missing required input(s) {_quoted(missing)}. Please provide all required input(s).",
        )
    if signature.max_batch_size and inputs:
        first, *others = inputs
        rows = inputs[first].shape[0]
        for name in others:
            if inputs[name].shape[0] != rows:
                raise refuse(
                    request_id,
                    f"input '{name}' batch size does not match other inputs for '{model}' "
                    f"('{first}' has {rows} rows, '{name}' {inputs[name].shape[0]})",
                )


def check_arrays(inputs: Mapping[str, Array], signature: Signature, request_id: str) -> Mapping[str, Array]:
    """Inputs that a model gives to another model, held against what that takes.

    Args:
        inputs: by name; BF16 tensors are float32.
        signature: the model's.
        request_id: for messages.

    Returns:
        the same.

    Raises:
        InferError: as for a client's request.
    """
    specs = {spec.name: spec for spec in signature.inputs}
    for name, array in inputs.items():
        spec = specs.get(name)
        if spec is None:
            raise InferError(
                f"unexpected inference input '{clip(name)}' for model '{signature.name}' (it takes {_quoted(specs)})"
            )
        datatype = spec.datatype if array.dtype == spec.datatype.dtype else Datatype.of_array(array)
        check_spec(spec, datatype, array.shape, signature, request_id)
    check_complete(inputs, signature, request_id)
    return inputs


def _quoted(names: Any) -> str:
    return f"[{','.join(repr(name) for name in names)}]"


def read_raw_input(body: memoryview, signature: Signature, limits: Limits) -> dict[str, Array]:
    """The only input of a model, sent as the whole body.

    Args:
        body: the tensor's bytes; for BYTES, the one element itself, without a length in front.
        signature: the model's.
        limits: `http_max_input_size` bounds the body.

    Returns:
        The input; its batch, if the model has one, is 1, and at most one further dimension is found from the length.

    Raises:
        InferError: the shape doesn't follow from the length, or the model doesn't have exactly one input.
    """
    model = signature.name
    if len(signature.inputs) != 1:
        raise refuse(
            "",
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(signature.inputs)} inputs in '{model}' model configuration",
        )
    check_size(body.nbytes, limits.http_max_input_size, "Raw request")
    (spec,) = signature.inputs
    name = spec.name
    batch = (1,) if signature.max_batch_size else ()
    if spec.datatype is Datatype.BYTES:
        if spec.shape != (1,):
            raise refuse("", f"For BYTE datatype raw input '{name}', the model must have input shape [1]")
        return {name: object_array([bytes(body)]).reshape((*batch, 1))}
    if spec.shape.count(-1) > 1:
        raise refuse(
            "",
            f"The shape of the raw input '{name}' can not be deduced because there are more than one "
            "variable-sized dimension",
        )
    count, rest = divmod(body.nbytes, spec.datatype.itemsize)
    shape = None if rest else fit(count, spec.shape)
    if shape is None:
        fixed = element_count(tuple(dim for dim in spec.shape if dim != -1), spec.datatype, name)
        size = fixed * spec.datatype.itemsize
        expected = f"a multiple of {size}" if -1 in spec.shape else str(size)
        raise refuse(
            "",
            f"input byte size mismatch for input '{name}' for model '{model}'. Expected {expected}, got {body.nbytes} "
            "(the request has no JSON part, so the body is the tensor itself)",
        )
    array = bytes_to_array(body, spec.datatype, (*batch, *shape), name, model=model, request_id="")
    return {name: array}
