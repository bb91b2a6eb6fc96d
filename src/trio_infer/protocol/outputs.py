"""A model's outputs: what it gave, made into what it declared.

Models give anything that numpy can take (lists, scalars, arrays of any layout and byte order). A conversion happens
only where no meaning is lost: within floats, within integers as far as the values fit, from plain Python integers to
floats, from str to UTF-8 bytes. Anything else is the model's mistake, answered 500 with what was expected and what was
given.

An array of no elements has no values that could be wrong, so its dtype is not looked at: `np.array([])` is float64 for
want of anything better. Shapes are not held against the signature: Triton doesn't, and models rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from trio_infer.errors import ErrorCode, InferError
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.tensors import object_array
from trio_infer.protocol.values import Array, InferResponse, Signature, TensorSpec

__all__ = ["as_tensor", "select"]


def select(response: InferResponse, requested: Iterable[str], signature: Signature) -> list[tuple[TensorSpec, Array]]:
    """The outputs to send, in the order to send them.

    Args:
        response: what the model gave.
        requested: names that the client asked for; none for all that the model gave, in the signature's order.
        signature: the model's.

    Raises:
        InferError: the model didn't give what was asked for, or gave it in a wrong type (INTERNAL). A declared output
            that nobody asked for may be absent; but if another name was given in its place, that is taken for a slip.
    """
    given = response.outputs
    specs = {spec.name: spec for spec in signature.outputs}
    names = list(requested)
    missing = [name for name in names or specs if name not in given]
    if missing and (names or any(name not in specs for name in given)):
        raise InferError(
            f"model '{signature.name}' gave no output '{missing[0]}'; it declares {list(specs)} and gave {list(given)}",
            ErrorCode.INTERNAL,
        )
    return [
        (specs[name], as_tensor(given[name], specs[name], signature.name)) for name in names or specs if name in given
    ]


def as_tensor(value: Any, spec: TensorSpec, model: str) -> Array:
    """What a model gave for one output, as an array of the declared type.

    Args:
        value: anything that `np.asarray` takes.
        spec: the declaration.
        model: for messages.

    Returns:
        An array of the datatype's dtype; `value` itself if it is one already.

    Raises:
        InferError: it is of another type (INTERNAL).
    """
    datatype = spec.datatype
    wanted = f"output '{spec.name}' of model '{model}' must be {datatype.value} ({_numpy_name(datatype)})"
    plain = not isinstance(value, np.ndarray | np.generic)
    try:
        # object for BYTES: by itself numpy makes b"a\0" a fixed-width string and drops the NUL.
        array = np.asarray(value, object if plain and datatype is Datatype.BYTES else None)
    except Exception as error:
        raise InferError(f"{wanted}, got {type(value).__name__}: {error}", ErrorCode.INTERNAL) from error
    if array.dtype == datatype.dtype and datatype is not Datatype.BYTES:
        return array
    if not array.size:
        return np.empty(array.shape, datatype.dtype)
    if datatype is Datatype.BYTES:
        return _as_strings(array, wanted)
    if not _convertible(array, datatype, plain):
        raise InferError(f"{wanted}, got numpy {array.dtype}{_range(array)}", ErrorCode.INTERNAL)
    with np.errstate(over="ignore"):
        return array.astype(datatype.dtype)


@cache
def _numpy_name(datatype: Datatype) -> str:
    if datatype is Datatype.BYTES:
        return "str or bytes elements"
    return "numpy float32" if datatype is Datatype.BF16 else f"numpy {datatype.dtype.name}"


def _convertible(array: Array, datatype: Datatype, plain: bool) -> bool:
    have: str = array.dtype.kind
    want: str = datatype.dtype.kind
    if want == "f":
        # bfloat16 of ml_dtypes is of kind V, or f, by version.
        return have == "f" or array.dtype.name == "bfloat16" or (plain and have in "iu")
    if want in "iu" and have in "iu":
        limits = np.iinfo(datatype.dtype)
        return limits.min <= int(array.min()) and int(array.max()) <= limits.max
    return have == want


def _range(array: Array) -> str:
    return f" with values from {array.min()} to {array.max()}" if array.dtype.kind in "iu" else ""


def _as_strings(array: Array, wanted: str) -> Array:
    if array.dtype.kind not in "OSUT":
        raise InferError(f"{wanted}, got numpy {array.dtype}", ErrorCode.INTERNAL)
    items = array.reshape(-1).astype(object).tolist()
    kinds = set(map(type, items))
    try:
        if kinds == {str}:
            items = list(map(str.encode, items))
        elif kinds != {bytes}:
            items = [_as_bytes(item, wanted) for item in items]
    except UnicodeEncodeError as error:
        raise InferError(f"{wanted}, got a str that UTF-8 can't carry: {error}", ErrorCode.INTERNAL) from error
    return object_array(items).reshape(array.shape)


def _as_bytes(item: Any, wanted: str) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    raise InferError(f"{wanted}, got an element of type {type(item).__name__}", ErrorCode.INTERNAL)
