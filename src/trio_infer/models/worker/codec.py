"""What the server and a worker process say to each other: messages on a stream socket, and tensors in them.

A message is a head (its size, its kind), JSON, and raw bytes that the JSON describes. Tensors of at most `INLINE` bytes
are among these; larger ones are in shared memory and the message says where (`memory`). BYTES tensors are their
elements one after the other, each with its length in front. There is no pickle: neither side can make the other run
anything.

The worker runs code that the operator chose, so it is not an enemy, but it may be broken in any way (a stray pointer
can write into the socket's descriptor). So the server checks each size, offset, shape and dtype, and what doesn't add
up is a `CodecError`, which costs the worker its life and nobody else's.
"""

from __future__ import annotations

import enum
import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import numpy as np
import orjson

from trio_infer.errors import ErrorCode, InferError
from trio_infer.models.worker.memory import Blocks, Memory
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.values import Array

__all__ = [
    "INLINE",
    "CodecError",
    "Inbox",
    "Kind",
    "Message",
    "RemoteTraceback",
    "encode",
    "error_fields",
    "pack",
    "read_error",
    "unpack",
]

INLINE: Final = 16 * 1024
"""Bytes up to which a tensor goes through the socket: there a block costs as much as its copying (measured)."""

LARGEST: Final = 2**30
"""Bytes of a message: far beyond any tensor list; a log record of a Gigabyte is a fault."""

_HEAD: Final = struct.Struct("<IIB")
_ITEM: Final = struct.Struct("<I")


class Kind(enum.IntEnum):
    """What a message is about; the first two groups go to the worker, the others come from it."""

    # on the run socket, in order, to the main thread
    IMPORT = 1
    INITIALIZE = 2
    RUN = 3
    EXECUTE = 4
    FINALIZE = 5
    # on the control socket, to its thread
    LEFT = 10
    CREDIT = 11
    ANSWER = 12
    REPLY = 13
    IS_READY = 14
    LEVELS = 15
    FREED = 16
    # from the worker
    IMPORTED = 20
    FAULT = 21
    READY = 22
    RESPONSE = 23
    FINISHED = 24
    DETACHED = 25
    DROPPED = 26
    FINALIZED = 27
    LOG = 28
    CALL = 29
    TELL = 30
    ASK = 31
    ASK_CANCEL = 32
    ASK_CREDIT = 33
    READINESS = 34


_PLAIN_JSON: Final = 0x80
"""In a head's kind: the JSON is the standard library's, as it has something that orjson changes on the way: NaN, or an
integer of more than 64 bits. orjson is several times as fast, and a request pays for two messages."""

_KINDS: Final = {int(kind): kind for kind in Kind}


class CodecError(Exception):
    """The other side said what can't be."""


@attrs.frozen(eq=False)
class Message:
    """One message.

    Attributes:
        fields: of its JSON.
        tail: the bytes behind it.
    """

    kind: Kind
    fields: dict[str, Any]
    tail: bytearray


def encode(kind: Kind, fields: Mapping[str, Any], tail: bytes = b"") -> bytes:
    """A message as bytes."""
    number = int(kind)
    try:
        text = orjson.dumps(fields)
    except TypeError:  # an integer of more than 64 bits, half a surrogate pair
        text = b"null"
    if b"null" in text:  # perhaps it was no number
        number |= _PLAIN_JSON
        text = json.dumps(fields, separators=(",", ":")).encode()
    return _HEAD.pack(len(text), len(tail), number) + text + tail


class Inbox:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Bytes off the socket, however they were cut."""
        self._buffer += data

    def next(self) -> Message | None:
        """The next whole message; None if it isn't there yet.

        Raises:
            CodecError: it can't be one.
        """
        buffer = self._buffer
        if len(buffer) < _HEAD.size:
            return None
        text_size, tail_size, number = _HEAD.unpack_from(buffer)
        if text_size + tail_size > LARGEST:
            raise CodecError(f"a message of {text_size + tail_size} bytes")
        kind = _KINDS.get(number & ~_PLAIN_JSON)
        if kind is None:
            raise CodecError(f"a message of kind {number}")
        middle = _HEAD.size + text_size
        end = middle + tail_size
        if len(buffer) < end:
            return None
        text = buffer[_HEAD.size : middle]
        try:
            fields = json.loads(text) if number & _PLAIN_JSON else orjson.loads(text)
        except (ValueError, RecursionError) as error:
            raise CodecError(f"JSON that can't be read: {error}") from None
        if not isinstance(fields, dict):
            raise CodecError("JSON that is no object")
        tail = buffer[middle:end]
        del buffer[:end]
        return Message(kind, fields, tail)


# ---- tensors


def pack(arrays: Mapping[str, Array], blocks: Blocks | None) -> tuple[list[Any], bytes]:
    """Put tensors into a message.

    Args:
        arrays: of a datatype's own dtype; BYTES as object arrays of `bytes`.
        blocks: where large ones go; None keeps them in the message.

    Returns:
        what goes into the JSON, and what goes behind it.

    Raises:
        MemoryError: no room; blocks taken before are free again.
        InferError: a BYTES element of 4 GiB or more.
    """
    described: list[Any] = []
    tail: list[bytes] = []
    taken: list[int] = []
    try:
        for name, array in arrays.items():
            strings = array.dtype.kind == "O"
            data = _join(array, name) if strings else b""
            size = len(data) if strings else array.nbytes
            offset = -1
            if size > INLINE and blocks is not None:
                offset = blocks.take(size)
                taken.append(offset)
                view = blocks.memory.view(offset, size)
                if strings:
                    view[:] = data
                else:
                    np.copyto(np.frombuffer(view, array.dtype.newbyteorder("<")).reshape(array.shape), array)
            else:
                tail.append(data if strings else array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            described.append([name, array.dtype.newbyteorder("<").str, list(array.shape), size, offset])
    except BaseException:
        for offset in taken:
            if blocks is not None:
                blocks.free(offset)
        raise
    return described, b"".join(tail)


def unpack(described: object, tail: bytearray, memory: Memory | None) -> dict[str, Array]:
    """Take tensors out of a message: writable arrays, of the message's own bytes or on the block itself.

    Args:
        described: from the JSON.
        tail: from behind it.
        memory: this side's; None if everything is in the message.

    Raises:
        CodecError: it doesn't add up.
    """
    try:
        arrays, used = {}, 0
        rest = memoryview(tail)
        for name, dtype, shape, size, offset in described:  # type: ignore[attr-defined]  # any other type is refused
            kind = _DTYPES[dtype]
            count = math.prod(shape)
            if not (isinstance(name, str) and all(dim >= 0 for dim in shape) and size >= 0):
                raise ValueError("a negative size")
            if offset == -1:
                data: Any = rest[used : used + size]
                used += size
            elif memory is None:
                raise ValueError("a block without memory")
            else:
                data = memory.lend(offset, size)
            if kind.kind == "O":
                array = _split(data, count)
            elif count * kind.itemsize != size:
                raise ValueError(f"{size} bytes for shape {shape} of {dtype}")
            else:
                array = np.frombuffer(data, kind) if size else np.empty(0, kind)
            arrays[name] = array.reshape(shape)
        if used != len(tail):
            raise ValueError(f"{len(tail)} bytes, {used} described")
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise CodecError(f"tensors that can't be: {error!r}") from None
    return arrays


_DTYPES: Final = {datatype.dtype.newbyteorder("<").str: datatype.dtype for datatype in Datatype}


def _join(array: Array, name: str) -> bytes:
    parts: list[bytes] = []
    for element in array.ravel().tolist():
        content = element if isinstance(element, bytes) else str(element).encode()
        if len(content) >= 2**32:
            raise InferError(f"tensor '{name}' has an element of 4 GiB or more", ErrorCode.INTERNAL)
        parts += (_ITEM.pack(len(content)), content)
    return b"".join(parts)


def _split(data: Any, count: int) -> Array:
    whole = bytes(data)
    elements, at = [], 0
    while at < len(whole):
        end = at + 4 + _ITEM.unpack_from(whole, at)[0] if at + 4 <= len(whole) else len(whole) + 1
        if end > len(whole):
            raise ValueError("strings that are cut off")
        elements.append(whole[at + 4 : end])
        at = end
    if len(elements) != count:
        raise ValueError(f"{len(elements)} strings for {count}")
    array = np.empty(count, dtype=object)
    array[:] = elements
    return array


# ---- errors

_CODES: Final = {code.value: code for code in ErrorCode}


class RemoteTraceback(Exception):
    """What a worker's exception looked like there; stands in its place as the cause of an `InferError`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"in the worker process:\n{self.text}"


def error_fields(error: InferError, trace: Callable[[BaseException], str] | None = None) -> list[Any]:
    """An error for a message.

    Args:
        trace: makes text of its cause; None leaves that out.
    """
    cause = error.__cause__
    return [error.message, error.code.value, error.status, trace(cause) if trace is not None and cause else None]


def read_error(fields: object) -> InferError:
    """An error out of a message; its cause stands for the traceback that it had there.

    Raises:
        CodecError: it isn't one.
    """
    match fields:
        case [str(message), int(code), int(status), (str() | None) as trace]:
            try:
                error = InferError(message, _CODES[code], status=status)
            except KeyError:
                raise CodecError(f"an error with code {code}") from None
            if trace is not None:
                error.__cause__ = RemoteTraceback(trace)
            return error
    raise CodecError("an error that is none")
