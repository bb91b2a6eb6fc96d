"""Bytes on their way out: many buffers, few segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

__all__ = ["SEND_SLICE", "Buffer", "gather"]

Buffer: TypeAlias = "bytes | bytearray | memoryview"

SEND_SLICE: Final = 64 * 1024
"""Where progress can't be seen (a stream other than a socket), it is looked at each time so many bytes were sent."""


def gather(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The same bytes in fewer buffers: neighbours that are small are joined, so that they leave in one segment."""
    if len(buffers) == 1:
        return list(buffers)
    gathered: list[Buffer] = []
    small: list[Buffer] = []
    size = 0
    for buffer in buffers:
        if size + len(buffer) > SEND_SLICE and small:
            gathered.append(b"".join(small))
            small, size = [], 0
        if len(buffer) > SEND_SLICE:
            gathered.append(buffer)
        else:
            small.append(buffer)
            size += len(buffer)
    if small:
        gathered.append(b"".join(small))
    return gathered
