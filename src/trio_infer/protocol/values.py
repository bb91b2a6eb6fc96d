"""What a request asks and what an answer says, as plain values: the types that models and codecs meet in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import attrs
import numpy as np

from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.regions import Place

__all__ = [
    "Array",
    "InferRequest",
    "InferResponse",
    "ParameterValue",
    "RequestedOutput",
    "ResponsePlan",
    "Send",
    "Signature",
    "TensorSpec",
]

Array: TypeAlias = "np.ndarray[Any, Any]"
ParameterValue: TypeAlias = "bool | int | float | str"


def _never_cancelled() -> bool:
    return False


def _datatype(value: Datatype | str) -> Datatype:
    if isinstance(value, Datatype):
        return value
    try:
        return Datatype[value]
    except KeyError:
        names = ", ".join(each.value for each in Datatype)
        raise ValueError(f"`datatype` must be one of {names}, got {value!r}") from None


def _shape(value: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    return tuple(value)


@attrs.frozen
class TensorSpec:
    """One input or output of a model.

    Args:
        name: unique among the model's inputs (or outputs).
        datatype: a `Datatype`, or its name on the wire (`"FP32"`).
        shape: the dimensions without the batch dimension; -1 is any size, `()` a scalar.
        optional: whether a request may leave this input out.
        labels: what the classes are called that an output's elements stand for, by their index.

    Raises:
        ValueError: there is no such datatype.
    """

    name: str
    datatype: Datatype = attrs.field(converter=_datatype)
    shape: tuple[int, ...] = attrs.field(converter=_shape)
    optional: bool = attrs.field(default=False, kw_only=True)
    labels: tuple[str, ...] = attrs.field(default=(), kw_only=True, repr=False)


@attrs.frozen
class Signature:
    """What goes into a model and comes out of it; requests are checked against it before the model sees them.

    Args:
        name: the model's name.
        version: the model's version.
        inputs, outputs: in the order in which metadata lists them.
        max_batch_size: 0 if tensors have no batch dimension; else they all have one in front, and at most so many rows.
        decoupled: whether a request may have any number of responses (0, 1, many) rather than exactly one.
    """

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    decoupled: bool = False

    def wire_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape as metadata gives it: with -1 in front if there is a batch dimension."""
        return (-1, *spec.shape) if self.max_batch_size else spec.shape


@attrs.frozen(eq=False)
class InferRequest:
    """What a client asks of a model.

    Args:
        model_name, model_version: who is asked.
        inputs: by name, in the request's order. Shapes include the batch dimension if the model has one. Arrays may be
            read-only views of the bytes received: copy before writing. BYTES tensors are object arrays of `bytes`.
        id: as the client gave it; "" if it gave none.
        parameters: the request's own (`sequence_id`, `priority`, ... included).
        requested_outputs: names of the outputs that the client wants; empty means all.
        timeout: microseconds that it may wait for an instance; 0 for any time.
        is_cancelled: true as soon as the request's work is not wanted any more; safe in any thread, and cheap.
        parts: of a batch that a native model gets as one request: those that it was joined from, in the order of their
            rows; empty for a request by itself.
    """

    model_name: str
    model_version: str
    inputs: Mapping[str, Array]
    id: str = ""
    parameters: Mapping[str, ParameterValue] = attrs.field(factory=dict)
    requested_outputs: tuple[str, ...] = ()
    timeout: int = attrs.field(default=0, kw_only=True)
    is_cancelled: Callable[[], bool] = attrs.field(default=_never_cancelled, kw_only=True)
    parts: tuple[InferRequest, ...] = attrs.field(default=(), kw_only=True)


@attrs.frozen(eq=False)
class InferResponse:
    """One response of a model.

    Args:
        outputs: by name; shapes include the batch dimension if the model has one.
        parameters: the response's own; sent along as they are.
    """

    outputs: Mapping[str, Array]
    parameters: Mapping[str, ParameterValue] = attrs.field(factory=dict)


Send: TypeAlias = Callable[[InferResponse], Awaitable[None]]
"""Takes one response of a request on its way; returns when the next one may come (that is the backpressure)."""


@attrs.frozen
class RequestedOutput:
    """How the client wants one output.

    Args:
        name: the output's.
        binary: as raw bytes after the JSON, else inside it.
        classes: if not 0, so many of its largest elements, as text.
        place: where in shared memory it is to go, instead of into the answer.
    """

    name: str
    binary: bool
    classes: int = 0
    place: Place | None = None


@attrs.frozen
class ResponsePlan:
    """How the client wants the answer; decoded with the request, used when the answer is encoded.

    Args:
        outputs: those it listed, in its order; empty means all, each as `binary_default` says.
        binary_default: Triton's `binary_data_output`: holds for outputs that are not listed, and for no others.
    """

    outputs: tuple[RequestedOutput, ...] = ()
    binary_default: bool = False

    def find(self, name: str) -> RequestedOutput | None:
        """How an output goes; None if it doesn't go at all."""
        if not self.outputs:
            return RequestedOutput(name, self.binary_default)
        return next((output for output in self.outputs if output.name == name), None)
