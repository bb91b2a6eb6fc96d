"""DLPack, with bfloat16, which numpy lacks.

numpy makes and takes DLPack capsules of all other types. For bfloat16 its capsule of the same bits as uint16 is used,
and the element type in the capsule's struct is overwritten: code 4 (kDLBfloat) for 1 (kDLUInt). The struct is C's
`DLTensor`: data (8 bytes), device (4 + 4), ndim (4), then dtype: code (1), bits (1), lanes (2); so the code is at
offset 20. A capsule named "dltensor" points at one; one named "dltensor_versioned" has 32 bytes before it. Nobody else
holds a capsule that is being made or taken, and its deleter doesn't look at the type.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from trio_infer.protocol.values import Array

__all__ = ["exported", "imported"]

_CODE: Final = 20
_BITS: Final = 21
_UINT: Final = 1
_BFLOAT: Final = 4
_CPU: Final = {1, 3, 11, 13}  # its own memory, pinned for CUDA or ROCm, and managed by CUDA
_STARTS: Final = {b"dltensor": 0, b"dltensor_versioned": 32}

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


def exported(array: Array, *, bfloat16: bool) -> Any:
    """A capsule of a writable array.

    Args:
        bfloat16: the array is float32, and the capsule is of its values in bfloat16, rounded to nearest even.

    Raises:
        BufferError: DLPack has no such element type.
    """
    if array.dtype.kind in "OSU":
        raise BufferError("strings can't be given by DLPack, which has numbers only")
    if not bfloat16:
        return array.__dlpack__()
    capsule = _bfloat16_bits(array).__dlpack__()
    _struct(capsule)[_CODE] = _BFLOAT
    return capsule


def imported(source: Any) -> tuple[Array, bool]:
    """The array of a capsule, or of an object that gives one, and whether it was bfloat16 (then it is float32 now).

    Raises:
        BufferError, RuntimeError, TypeError, ValueError: numpy can't take it: another device, a type that it lacks,
            nothing of the kind.
    """
    if isinstance(source, np.ndarray):
        return source, False
    device = (1, 0)
    capsule = source
    if hasattr(source, "__dlpack__"):
        device = source.__dlpack_device__()
        if int(device[0]) not in _CPU:
            raise BufferError(f"it is on device {(int(device[0]), int(device[1]))}, not in the CPU's memory")
        capsule = source.__dlpack__()
    if not any(_is_valid(capsule, name) for name in _STARTS):
        raise TypeError(f"expected an unused DLPack capsule, or an object with __dlpack__, got {type(source).__name__}")
    struct = _struct(capsule)
    bfloat16 = (struct[_CODE], struct[_BITS]) == (_BFLOAT, 16)
    if bfloat16:
        struct[_CODE] = _UINT
    array: Array = np.from_dlpack(_Capsule(capsule, device))
    if bfloat16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array, bfloat16


class _Capsule:
    """What `numpy.from_dlpack` wants."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def _struct(capsule: Any) -> Any:
    name = next(name for name in _STARTS if _is_valid(capsule, name))
    return (ctypes.c_uint8 * 24).from_address(_get_pointer(capsule, name) + _STARTS[name])


def _bfloat16_bits(array: Array) -> Array:
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32).reshape(array.shape)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # The sum would carry a NaN's payload into its exponent.
    quiet = (bits >> 16) | 0x40
    return np.asarray(np.where(np.isnan(array), quiet, rounded), dtype=np.uint16)
