"""Shared memory as the codecs see it: regions with names, and places in them to read from and to write to.

No I/O happens here; `api/regions.py` has the real thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from trio_infer.errors import ErrorCode, InferError
from trio_infer.protocol.fields import optional, required

__all__ = ["DISABLED", "NO_REGIONS", "NoRegions", "Place", "Regions", "find_place"]

DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


class Place(Protocol):
    """A stretch of a region; what holds one keeps the region, also when its name is given up."""

    @property
    def byte_size(self) -> int: ...

    def read(self) -> memoryview:
        """A copy of its bytes, which nobody else can change.

        Raises:
            InferError: the memory is gone.
        """

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Put bytes there, from its beginning on; no more than there is room for.

        Raises:
            InferError: the memory is gone.
        """


class Regions(Protocol):
    """The regions that clients have registered."""

    def find(self, name: str, offset: int, byte_size: int) -> Place:
        """A place in a region.

        Raises:
            InferError: there is no such region (NOT_FOUND), or no such place in it.
        """


@attrs.frozen
class NoRegions:
    """Where shared memory is not allowed."""

    def find(self, name: str, offset: int, byte_size: int) -> Place:
        raise InferError(DISABLED, ErrorCode.UNSUPPORTED)


NO_REGIONS: Regions = NoRegions()


def find_place(parameters: dict[str, Any], regions: Regions, where: str) -> Place:
    """The place that a tensor's parameters name.

    Args:
        parameters: `shared_memory_region` among them.
        regions: known ones.
        where: the tensor, for messages.

    Raises:
        BadJSONError: a parameter is missing or of the wrong JSON type.
        InferError: as `Regions.find`.
    """
    name = required(parameters, "shared_memory_region", str, where)
    byte_size = required(parameters, "shared_memory_byte_size", int, where)
    return regions.find(name, optional(parameters, "shared_memory_offset", int, 0, where), byte_size)
