"""The protocol's datatypes, and what each is in numpy, in JSON and in `config.pbtxt`: one table."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

__all__ = ["Datatype"]


class Datatype(enum.Enum):
    """A KServe v2 datatype; the value is its name on the wire.

    Attributes:
        dtype: the numpy dtype, little endian, that a tensor of this type has in the server. BYTES tensors are object
            arrays of `bytes`. numpy has no BF16: such tensors are float32, which holds each BF16 value exactly.
        itemsize: bytes an element takes on the wire; 0 for BYTES (4 bytes of length, then the content).
        config_name: the name in `config.pbtxt`.
        in_json: whether Triton reads and writes it as JSON (half-precision types go as binary only).
    """

    dtype: np.dtype[Any]
    itemsize: int
    config_name: str
    in_json: bool

    def __new__(cls, wire_name: str, dtype: str, itemsize: int) -> Datatype:
        self = object.__new__(cls)
        self._value_ = wire_name
        self.dtype = np.dtype(dtype)
        self.itemsize = itemsize
        self.config_name = "TYPE_STRING" if wire_name == "BYTES" else f"TYPE_{wire_name}"
        self.in_json = wire_name not in {"FP16", "BF16"}
        return self

    BOOL = "BOOL", "?", 1
    UINT8 = "UINT8", "u1", 1
    UINT16 = "UINT16", "<u2", 2
    UINT32 = "UINT32", "<u4", 4
    UINT64 = "UINT64", "<u8", 8
    INT8 = "INT8", "i1", 1
    INT16 = "INT16", "<i2", 2
    INT32 = "INT32", "<i4", 4
    INT64 = "INT64", "<i8", 8
    FP16 = "FP16", "<f2", 2
    FP32 = "FP32", "<f4", 4
    FP64 = "FP64", "<f8", 8
    BF16 = "BF16", "<f4", 2
    BYTES = "BYTES", "O", 0

    @classmethod
    def of_array(cls, array: np.ndarray[Any, Any]) -> Datatype:
        """The datatype of a numpy array (float32 is FP32, never BF16).

        Raises:
            TypeError: no datatype has that dtype (complex, datetime, structured).
        """
        try:
            return _BY_KIND[array.dtype.kind, 0 if array.dtype.kind in "OSU" else array.itemsize]
        except KeyError:
            raise TypeError(f"no protocol datatype for numpy dtype {array.dtype}") from None


_BY_KIND = {
    (datatype.dtype.kind, datatype.itemsize): datatype
    for datatype in Datatype
    if datatype not in {Datatype.BF16, Datatype.BYTES}
} | {(kind, 0): Datatype.BYTES for kind in "OSU"}
