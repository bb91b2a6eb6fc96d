"""Tensors and errors, as model code handles them; the names and the calls are Triton's.

Triton passes tensors between processes; here they are the arrays themselves. Two consequences:

- An input array that came off the wire may be a read-only view of the bytes received. `as_numpy` copies such an array,
  once, when it is first asked for: model code writes into its inputs, and `torch.from_numpy` warns about read-only
  ones. A tensor that is never looked at is never copied.
- An output array is not copied when it is contiguous, so a model must not write into it after handing it over.

numpy has no bfloat16. A BF16 tensor's array is float32 here, as in the server's codecs; a model never sees that: it
gets and gives such tensors by DLPack only, as in Triton.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trio_infer.errors import ErrorCode
from trio_infer.models.triton_dlpack import exported, imported
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.values import Array

__all__ = ["Tensor", "TritonError", "TritonModelException", "reshaped", "wire_array"]

_TYPE_NUMBERS = {
    datatype: number
    for number, datatype in enumerate(
        (
            Datatype.BOOL,
            Datatype.UINT8,
            Datatype.UINT16,
            Datatype.UINT32,
            Datatype.UINT64,
            Datatype.INT8,
            Datatype.INT16,
            Datatype.INT32,
            Datatype.INT64,
            Datatype.FP16,
            Datatype.FP32,
            Datatype.FP64,
            Datatype.BYTES,
            Datatype.BF16,
        ),
        start=1,
    )
}


class TritonModelException(Exception):
    """Something that model code did wrong, or raises to say that it can't go on."""

    def message(self) -> str:
        """The text."""
        return str(self)


class TritonError:
    """An error to send to the client.

    Args:
        message: what the client is told.
        code: one of this class's codes; picks the HTTP status.
    """

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        if not isinstance(code, ErrorCode):
            raise TritonModelException(f"the code of a TritonError must be one of TritonError's own, got {code!r}")
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code

    def __str__(self) -> str:
        return self._message


class Tensor:
    """A named array.

    Args:
        name: the input's or output's name.
        numpy_array: of a dtype that the protocol has; strings and bytes as an object array.

    Raises:
        TritonModelException: not an array, or a dtype that the protocol has no type for.
    """

    __slots__ = ("_array", "_datatype", "_name")

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not isinstance(numpy_array, np.ndarray):
            kind = type(numpy_array).__name__
            raise TritonModelException(f"tensor '{name}' needs a numpy array, got {kind}; wrap it in numpy.array(...)")
        try:
            datatype = Datatype.of_array(numpy_array)
        except TypeError as error:
            raise TritonModelException(f"tensor '{name}': {error}") from None
        self._name = str(name)
        self._array = numpy_array if numpy_array.flags.c_contiguous else numpy_array.copy(order="C")
        self._datatype = datatype

    @classmethod
    def received(cls, name: str, array: Array, datatype: Datatype) -> Tensor:
        """A tensor of a request, whose datatype is known; for the runner, not for models."""
        self = cls.__new__(cls)
        self._name, self._array, self._datatype = name, array, datatype
        return self

    def name(self) -> str:
        return self._name

    def triton_dtype(self) -> int:
        """The datatype's number in Triton's C API: 11 for FP32, 13 for BYTES."""
        return _TYPE_NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        return list(self._array.shape)

    @property
    def array(self) -> Array:
        """The array as it is, perhaps read-only; for the runner."""
        return self._array

    def normalise(self) -> None:
        """Make its strings `bytes`; for the runner."""
        self._array = wire_array(self)

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> Array:
        """The array, writable. BYTES tensors are object arrays of `bytes`.

        Raises:
            TritonModelException: it is a BF16 tensor.
        """
        if self._datatype is Datatype.BF16:
            raise TritonModelException(
                f"tensor '{self._name}' is of TYPE_BF16, which numpy does not have: take it by to_dlpack()"
            )
        return self._writable()

    def _writable(self) -> Array:
        if not self._array.flags.writeable:
            self._array = self._array.copy()
        return self._array

    def to_dlpack(self) -> Any:
        """A DLPack capsule that shares the array's memory (BF16: a copy).

        Raises:
            BufferError: DLPack has no such element type (strings).
        """
        return exported(self._writable(), bfloat16=self._datatype is Datatype.BF16)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"tensor '{self._name}' is in the CPU's memory, and can't be given on device {dl_device}")
        array = self._writable()
        return exported(array.copy() if copy else array, bfloat16=self._datatype is Datatype.BF16)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor from a DLPack capsule, or from an object that gives one (`torch.Tensor`), in the CPU's memory.

        Shares the memory, unless it isn't contiguous, or is bfloat16.

        Raises:
            TritonModelException: it is on another device, or of an element type that the protocol lacks.
        """
        try:
            array, bfloat16 = imported(tensor)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"tensor '{name}' can't be taken from DLPack: {error}") from error
        made = Tensor(name, array)
        if bfloat16:
            made._datatype = Datatype.BF16
        return made

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, {self._datatype.value}, {self.shape()})"


def wire_array(tensor: Tensor) -> Array:
    """The array as the server's codecs want it: little endian; strings as an object array of `bytes`."""
    array = tensor.array
    if array.dtype.kind not in "OSU":
        return array.astype(array.dtype.newbyteorder("<"), copy=False)
    elements = array.ravel().tolist()
    if array.dtype.kind == "O" and all(type(element) is bytes for element in elements):
        return array
    flat = np.empty(len(elements), dtype=object)
    flat[:] = [element if isinstance(element, bytes) else str(element).encode() for element in elements]
    return flat.reshape(array.shape)


def reshaped(array: Array, seen: tuple[int, ...], wanted: tuple[int, ...], *, batched: bool) -> Array:
    """An array between the shape that clients see and the one that the model sees.

    Args:
        array: of shape `seen`, with the batch dimension in front if there is one.
        seen, wanted: dims from the configuration; the sizes of -1 are taken over in their order.
        batched: whether there is a batch dimension.

    Raises:
        ValueError: it doesn't fit.
    """
    lead = array.shape[:1] if batched else ()
    sizes = iter([size for size, dim in zip(array.shape[len(lead) :], seen, strict=False) if dim == -1])
    return array.reshape((*lead, *(next(sizes, -1) if dim == -1 else dim for dim in wanted)))
