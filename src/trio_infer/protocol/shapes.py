"""Shapes as they come from a client: read, counted, and held against what a model declares.

Everything is checked before an array is made, so that numpy never meets a shape that it refuses: Python's integers
count without overflow, and a shape is compared with the model's (which bounds the number of dimensions) before it is
used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from trio_infer.errors import InferError
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.fields import refuse, unsigned, wrong_type
from trio_infer.protocol.values import Signature, TensorSpec

__all__ = ["check_size", "check_spec", "element_count", "fit", "read_shape", "show"]

_MOST: Final = 2**63 - 1


def show(shape: Sequence[int]) -> str:
    """`[1,16]`, as Triton writes shapes in messages."""
    text = ",".join(map(str, shape[:16]))
    return f"[{text}{',...' if len(shape) > 16 else ''}]"


def read_shape(dims: list[Any], where: str) -> tuple[int, ...]:
    """A shape from its JSON form.

    Args:
        dims: integers >= 0; none for a scalar.
        where: the tensor, for the message.

    Raises:
        BadJSONError: a dimension is negative or no integer.
    """
    for dim in dims:
        if not unsigned(dim):
            raise wrong_type("shape", "unsigned-integer", dim, where)
    return tuple(dims)


def element_count(shape: tuple[int, ...], datatype: Datatype, name: str) -> int:
    """How many elements a tensor has.

    Args:
        shape: dimensions >= 0, of any size.
        datatype: its elements.
        name: the input, for the message.

    Raises:
        InferError: more elements, or bytes, than 64 bits count. Zeros don't hide a factor that is too large: numpy
            refuses such shapes.
    """
    product = 1
    for dim in shape:
        product *= dim or 1
        # Stop here: a product of many thousand factors takes minutes.
        if product > _MOST:
            raise InferError(
                f"shape {show(shape)} of input '{name}' causes total element count to exceed maximum size of {_MOST}"
            )
    if product * max(datatype.itemsize, datatype.dtype.itemsize) > _MOST:
        raise InferError(f"byte size overflow for input '{name}': shape {show(shape)} of {datatype.value}")
    return 0 if 0 in shape else product


def check_size(size: int, limit: int, what: str) -> None:
    """Refuse what is larger than the operator's limit.

    Args:
        size, limit: bytes.
        what: starts the message: `Request JSON size`.

    Raises:
        InferError: `size` exceeds `limit` (400).
    """
    if size > limit:
        raise InferError(
            f"{what} of {size} bytes exceeds the maximum allowed value of {limit} bytes. "
            "Use --http-max-input-size to increase the limit."
        )


def check_spec(
    spec: TensorSpec, datatype: Datatype, shape: tuple[int, ...], signature: Signature, request_id: str
) -> None:
    """Hold one input's datatype and shape against the model's.

    Args:
        spec: what the model declares.
        datatype, shape: what the client sent; the shape with the batch dimension, if the model has one.
        signature: the model.
        request_id: for the message.

    Raises:
        InferError: they differ, or the batch is larger than the model takes.
    """
    name, model, most = spec.name, signature.name, signature.max_batch_size
    if datatype is not spec.datatype:
        raise refuse(
            request_id,
            f"inference input '{name}' data-type is '{datatype.value}', but model '{model}' expects "
            f"'{spec.datatype.value}'",
        )
    if most and not shape:
        raise refuse(request_id, f"input '{name}' has no shape but model requires batch dimension for '{model}'")
    if most and shape[0] > most:
        raise refuse(
            request_id,
            f"inference request batch-size must be <= {most} for '{model}' (input '{name}' has {shape[0]} rows)",
        )
    expected = signature.wire_shape(spec)
    if len(expected) != len(shape) or any(want not in (-1, got) for want, got in zip(expected, shape, strict=True)):
        note = f" NOTE: max_batch_size is {most}, so each input's first dimension is the batch." if most else ""
        raise refuse(
            request_id,
            f"unexpected shape for input '{name}' for model '{model}'. Expected {show(expected)}, "
            f"got {show(shape)}.{note}",
        )


def fit(count: int, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape for so many elements: the innermost -1 takes what the fixed dimensions leave, other -1 become 1.

    Args:
        count: elements.
        dims: what the model declares, -1 for any size.

    Returns:
        The shape, or None if there is none.
    """
    fixed = math.prod(dim for dim in dims if dim != -1)
    shape = [1 if dim == -1 else dim for dim in dims]
    innermost = max((axis for axis, dim in enumerate(dims) if dim == -1), default=None)
    if innermost is not None and fixed:
        shape[innermost] = count // fixed
    return tuple(shape) if math.prod(shape) == count else None
