"""Tensors as JSON `data`: Python lists of parsed JSON to numpy arrays, and numpy arrays to JSON text.

No loop over elements is written in Python: types are collected by `set(map(type, ...))`, values converted by one numpy
call, text written by orjson from the array. Element types are as strict as Triton's, with one difference: an integer
too large for a narrow type (300 for UINT8), which Triton wraps without a word, is refused.

FP32 is written as the double it equals (0.1 becomes 0.10000000149011612), as Triton writes it. BYTES is UTF-8 text.
Half-precision types have no JSON form.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from trio_infer.errors import BadJSONError, InferError
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.fields import found, wrong_type
from trio_infer.protocol.shapes import element_count, show
from trio_infer.protocol.values import Array

__all__ = ["elements_to_array", "flatten", "json_to_array", "to_json"]

_FLOATS: Final = frozenset({float, int})
_BARE: Final = {"nan": b"NaN", "inf": b"Infinity", "-inf": b"-Infinity"}


def json_to_array(data: list[Any], datatype: Datatype, shape: tuple[int, ...], name: str) -> Array:
    """A tensor from the JSON of its elements.

    Args:
        data: the elements, row-major; flat, nested or both.
        datatype: what they must be.
        shape: dimensions >= 0.
        name: the input, for messages.

    Raises:
        BadJSONError: not as many elements as the shape says, or one of another JSON type.
        InferError: the type has no JSON form, or a value doesn't fit it.
    """
    count = element_count(shape, datatype, name)
    flat, kinds = flatten(data)
    if len(flat) != count:
        # Two texts, as Triton has: its parser notices too many at once, and too few at the end.
        text = (
            "Unable to parse 'data': Shape does not match true shape of 'data' field"
            if len(flat) > count
            else "Failed to parse 'data' field: shape does not match true shape"
        )
        raise BadJSONError(
            f"{text} (input '{name}' has shape {show(shape)}, expected {count} elements, got {len(flat)})"
        )
    return elements_to_array(flat, kinds, datatype, name).reshape(shape)


def flatten(data: list[Any]) -> tuple[list[Any], set[type]]:
    """The elements of nested lists, in order, and their types.

    Args:
        data: lists within it are opened, at C speed where a level is all lists, once over the rest.
    """
    while True:
        kinds = set(map(type, data))
        if list not in kinds:
            return data, kinds
        data = list(chain.from_iterable(data)) if kinds == {list} else list(_walk(data))


def _walk(data: list[Any]) -> Iterator[Any]:
    levels = [iter(data)]
    while levels:
        for item in levels[-1]:
            if type(item) is list:
                levels.append(iter(item))
                break
            yield item
        else:
            levels.pop()


def elements_to_array(flat: list[Any], kinds: set[type], datatype: Datatype, name: str) -> Array:
    """A one-dimensional array of parsed JSON values.

    Args:
        flat: no lists among them.
        kinds: the types in it.
        datatype: what they must be.
        name: the input, for messages.

    Raises:
        BadJSONError: one is of another JSON type.
        InferError: the type has no JSON form, or a value doesn't fit it.
    """
    if not datatype.in_json:
        raise InferError(
            f"receiving {datatype.value} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    match datatype.dtype.kind:
        case "b":
            if not kinds <= {bool}:
                raise _wrong_element(flat, "boolean", datatype, name, {bool})
            return np.array(flat, np.bool_)
        case "f":
            if not kinds <= _FLOATS:
                raise _wrong_element(flat, "number", datatype, name, _FLOATS)
            with np.errstate(over="ignore"):  # 1e40 is Infinity in FP32
                return np.array(flat, datatype.dtype)
        case "O":
            if not kinds <= {str}:
                culprit = next(item for item in flat if type(item) is not str)
                raise BadJSONError(
                    "Unable to parse JSON bytes array: attempt to access JSON non-string as string "
                    f"(got {found(culprit)} in input '{name}'; BYTES is JSON strings, or binary data)"
                )
            return object_array(list(map(str.encode, flat)))
        case _:
            return _integers(flat, kinds, datatype, name)


def object_array(items: list[bytes]) -> Array:
    """A one-dimensional object array; numpy's own conversion would make a fixed-width type and drop trailing NULs."""
    array = np.empty(len(items), object)
    array[:] = items
    return array


def _wrong_element(
    flat: list[Any], word: str, datatype: Datatype, name: str, right: set[type] | frozenset[type]
) -> BadJSONError:
    index, culprit = next((index, item) for index, item in enumerate(flat) if type(item) not in right)
    return wrong_type("data", word, culprit, f"element {index} of input '{name}', {datatype.value}")


def _integers(flat: list[Any], kinds: set[type], datatype: Datatype, name: str) -> Array:
    signed = datatype.dtype.kind == "i"
    word = "signed-integer" if signed else "unsigned-integer"
    if not kinds <= {int}:
        raise _wrong_element(flat, word, datatype, name, {int})
    if not flat:
        return np.empty(0, datatype.dtype)
    exact = np.iinfo(datatype.dtype)
    with suppress(OverflowError):  # of 64 bits
        array = np.array(flat, np.int64)
        if exact.min <= int(array.min()) and int(array.max()) <= exact.max:
            return array.astype(datatype.dtype, copy=False)
    low, high = min(flat), max(flat)
    # Beyond 64 bits, and negative for an unsigned type, is what Triton's JSON reader itself refuses.
    widest = np.iinfo(np.int64 if signed else np.uint64)
    for value in (low, high):
        if not widest.min <= value <= widest.max:
            raise wrong_type("data", word, value, f"element {flat.index(value)} of input '{name}', {datatype.value}")
    for value in (low, high):
        if not exact.min <= value <= exact.max:
            raise InferError(
                f"element {flat.index(value)} of input '{name}' is {value}, "
                f"which {datatype.value} can't hold; expected {exact.min} to {exact.max}"
            )
    return np.array(flat, datatype.dtype)


def to_json(array: Array, datatype: Datatype, name: str) -> bytes:
    """A flat JSON array of a tensor's elements, row-major.

    Args:
        array: of the datatype's own dtype; any shape and layout.
        datatype: decides how elements are written.
        name: the output, for messages.

    Raises:
        InferError: the type has no JSON form, or a BYTES element is not UTF-8; the message points to binary output.
    """
    if not datatype.in_json:
        raise InferError(
            f"sending {datatype.value} data via JSON is not supported. "
            f"Please use the binary data format for output {name}"
        )
    flat = array.reshape(-1)
    if datatype is Datatype.BYTES:
        try:
            return orjson.dumps(list(map(bytes.decode, flat.tolist())))
        except UnicodeDecodeError:
            raise InferError(
                f"output '{name}' holds bytes that are not UTF-8, which JSON can't carry. "
                f"Please use the binary data format for output {name}"
            ) from None
    if datatype.dtype.kind == "f":
        return _floats_to_json(flat.astype(np.float64))
    return orjson.dumps(np.ascontiguousarray(flat, flat.dtype.newbyteorder("=")), option=orjson.OPT_SERIALIZE_NUMPY)


def _floats_to_json(flat: Array) -> bytes:
    text = orjson.dumps(np.ascontiguousarray(flat), option=orjson.OPT_SERIALIZE_NUMPY)
    finite = np.isfinite(flat)
    if finite.all():
        return text
    # orjson wrote a null for each of these, in order.
    tokens = [_BARE[repr(value)] for value in flat[~finite].tolist()]
    pieces = text.split(b"null")
    return b"".join(chain.from_iterable(zip(pieces, tokens, strict=False))) + pieces[-1]
