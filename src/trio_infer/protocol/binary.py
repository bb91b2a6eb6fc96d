"""Tensors as raw bytes: little endian, row-major, no padding; without copying where the layout is numpy's own.

- A numeric tensor is a read-only view of the bytes received. It may be unaligned (it starts where the JSON before it
  ends): numpy works with that; code that hands the pointer on should copy.
- BF16 is the upper half of an FP32. Reading shifts it up, exactly. Writing rounds to nearest, ties to even, as hardware
  does; a value that came from BF16 goes back bit by bit, NaN payloads included, because only integers are touched.
- BYTES elements follow each other, each with its length in front as 4 bytes, little endian.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import Final

import numpy as np

from trio_infer.errors import ErrorCode, InferError
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.fields import refuse
from trio_infer.protocol.shapes import element_count
from trio_infer.protocol.tensors import object_array
from trio_infer.protocol.values import Array

__all__ = ["bytes_to_array", "check_bytes", "to_buffer"]

_PREFIX: Final = struct.Struct("<I")


def bytes_to_array(
    data: memoryview, datatype: Datatype, shape: tuple[int, ...], name: str, *, model: str, request_id: str
) -> Array:
    """A tensor from its bytes.

    Args:
        data: exactly this tensor's bytes (itemsize 1).
        datatype: of the elements.
        shape: dimensions >= 0.
        name, model, request_id: for messages.

    Returns:
        The array; read-only, sharing memory with `data`, unless it is BYTES or BF16.

    Raises:
        InferError: `data` is not as long as the shape says, or its length prefixes don't add up.
    """
    count = element_count(shape, datatype, name)
    if datatype is Datatype.BYTES:
        return _strings(bytes(data), count, name, model, request_id).reshape(shape)
    check_bytes(data.nbytes, count, datatype, name, model=model, request_id=request_id)
    data = data.toreadonly()
    if datatype is Datatype.BF16:
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    if datatype is Datatype.BOOL:
        # numpy's bool must be 0 or 1; other bytes would compare unequal to True.
        raw = np.frombuffer(data, np.uint8)
        return (raw.view(np.bool_) if not raw.size or raw.max() <= 1 else raw != 0).reshape(shape)
    return np.frombuffer(data, datatype.dtype).reshape(shape)


def check_bytes(size: int, count: int, datatype: Datatype, name: str, *, model: str, request_id: str) -> None:
    """Check that a tensor has as many bytes as its elements take; of BYTES that can't be told beforehand.

    Raises:
        InferError: it has more or fewer.
    """
    if datatype is not Datatype.BYTES and size != count * datatype.itemsize:
        raise refuse(
            request_id,
            f"input byte size mismatch for input '{name}' for model '{model}'. "
            f"Expected {count * datatype.itemsize}, got {size}",
        )


def _strings(data: bytes, count: int, name: str, model: str, request_id: str) -> Array:
    items: list[bytes] = []
    offset, end = 0, len(data)
    form = "each BYTES element is a 4-byte little-endian length followed by so many bytes"
    while offset < end:
        if len(items) == count:
            raise refuse(
                request_id,
                f"unexpected number of string elements {count + 1} for inference input '{name}' for model '{model}', "
                f"expecting {count}",
            )
        start = offset + 4
        if start > end:
            raise refuse(
                request_id,
                f"incomplete string length indicator for inference input '{name}' for model '{model}', expecting 4 "
                f"bytes but only {end - offset} bytes available; {form}",
            )
        offset = start + int.from_bytes(data[offset:start], "little")
        if offset > end:
            raise refuse(
                request_id,
                f"incomplete string data for inference input '{name}' for model '{model}', expecting string of length "
                f"{offset - start} but only {end - start} bytes available; {form}",
            )
        items.append(data[start:offset])
    if len(items) != count:
        raise refuse(
            request_id,
            f"expected {count} string elements for inference input '{name}' for model '{model}', got {len(items)}",
        )
    return object_array(items)


def to_buffer(array: Array, datatype: Datatype, name: str) -> bytes | memoryview:
    """A tensor's bytes.

    Args:
        array: of the datatype's own dtype; any shape and layout.
        datatype: of the elements.
        name: the output, for messages.

    Returns:
        Bytes, or a flat byte view of the array's own memory if that is contiguous and little endian.

    Raises:
        InferError: a BYTES element of 4 GiB or more (INTERNAL).
    """
    if datatype is Datatype.BYTES:
        items = array.reshape(-1).tolist()
        try:
            prefixes = map(_PREFIX.pack, map(len, items))
            return b"".join(chain.from_iterable(zip(prefixes, items, strict=True)))
        except struct.error:
            raise InferError(f"output '{name}' has an element of 4 GiB or more", ErrorCode.INTERNAL) from None
    if datatype is Datatype.BF16:
        array = _to_bf16(array)
    wire = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return wire.reshape(-1).view(np.uint8).data.toreadonly()


def _to_bf16(array: Array) -> Array:
    bits = np.ascontiguousarray(array, "<f4").reshape(-1).view("<u4")
    upper = bits >> 16
    rounded: Array = (bits + (0x7FFF + (upper & 1))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        # Cutting may leave a mantissa of 0, which would be an infinity: then set the quiet bit.
        kept = np.where(upper & 0x7F, upper, upper | 0x40)
        rounded = np.where(nan, kept, rounded)
    return rounded.astype("<u2")
