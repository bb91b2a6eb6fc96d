"""System shared memory: tensors that go between a client and the server on one machine without going through a socket.

A client makes a POSIX shared memory object, registers it under a name, and from then on names a place in it where an
input is, or where an output is to go.

*Nothing is mapped.* Triton maps a region into the server. Then the client can truncate the object, and the server's
next touch of the lost pages is a SIGBUS: any client could end the server, in the midst of other clients' requests. It
could also change an input while the model reads it, after it was checked. So the object is kept open here and copied
from and to by `pread` and `pwrite`, which report a lost page as a short read. That costs one copy each way, the least
that a socket would cost, too: 16 MiB go at some 4 GB/s (measured). What an inference reads is its own, so a thread that
goes on after its client has left does no harm, whatever becomes of the region.

*What remains.* A client that truncates the object between the check of its size and the write gets it made longer
again, by no more than it registered. And two requests that write to one place get a mixture.

*Names.* `/name` is a file in /dev/shm, as for `shm_open`, and nothing else: no path below it, no link, and only a
regular file. Objects of Triton's Python models and of this server itself are out of reach. All else that the server's
user may open there, clients may register, and so read and write: that is why it must be allowed
(`--allow-client-shm`), and is for trusted clients.

A region whose name is given up stays open for those requests that were told to write to it, until the last of them
ends, also if its client has left and only its thread still runs: they hold the region, and it closes with its last
holder. The name is free at once. Linux only: elsewhere shared memory has no files.
"""

from __future__ import annotations

import os
import stat
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Final

import attrs
import numpy as np

from trio_infer.errors import ErrorCode, InferError, SetupError

__all__ = ["Region", "RegionRegistry"]

DIRECTORY: Final = "/dev/shm"  # noqa: S108 - it is what shm_open opens
RESERVED: Final = ("triton_python_backend_shm_region_", "trio_infer_")
LONGEST_NAME: Final = 255
MOST: Final = 1024
"""Regions at once; each takes a descriptor."""

_LARGEST: Final = 2**64 - 1


class Region:
    """A registered stretch of a shared memory object; closed with its last holder.

    Args:
        name: given by the client.
        key: the object's.
        offset, byte_size: the stretch.
        descriptor: of the open object; the region's from now on.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int, descriptor: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def read(self, offset: int, size: int) -> memoryview:
        """A copy of some of its bytes."""
        data = np.empty(size, np.uint8).data
        got = 0
        while got < size:
            more = os.preadv(self._descriptor, [data[got:]], self.offset + offset + got)
            if not more:
                raise self._gone()
            got += more
        return data

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Put bytes in."""
        at = self.offset + offset
        if os.fstat(self._descriptor).st_size < at + sum(map(len, buffers)):
            raise self._gone()  # writing would make it longer
        try:
            for buffer in buffers:
                view = memoryview(buffer)
                while view:
                    done = os.pwrite(self._descriptor, view, at)
                    view, at = view[done:], at + done
        except OSError as error:
            raise InferError(
                f"can't write to shared memory region '{self.name}': {error.strerror}", ErrorCode.INTERNAL
            ) from None

    def _gone(self) -> InferError:
        return InferError(f"shared memory region '{self.name}' is shorter than it was when it was registered")


@attrs.frozen(eq=False)
class _Place:
    region: Region
    offset: int
    byte_size: int

    def read(self) -> memoryview:
        return self.region.read(self.offset, self.byte_size)

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        self.region.write(self.offset, buffers)


class RegionRegistry:
    """The regions that clients have registered, by name.

    Raises:
        SetupError: the platform has no such shared memory.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise SetupError("client shared memory (--allow-client-shm) needs Linux")
        self._regions: dict[str, Region] = {}

    @property
    def byte_size(self) -> int:
        """Of all regions together."""
        return sum(region.byte_size for region in list(self._regions.values()))

    def regions(self, name: str | None = None) -> Iterable[Region]:
        """Those that are registered, or the one of that name.

        Raises:
            InferError: there is none of that name (NOT_FOUND).
        """
        if name is None:
            return list(self._regions.values())
        if name not in self._regions:
            raise InferError(f"Unable to find system shared memory region: '{name}'", ErrorCode.NOT_FOUND)
        return [self._regions[name]]

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a shared memory object, under a name.

        Args:
            name: any.
            key: the object's, with or without the slash.
            offset, byte_size: the stretch of it that is meant.

        Raises:
            InferError: the name is taken, the key is none, there is no such object (INTERNAL), or it is shorter.
        """
        file = key.lstrip("/")
        if (
            file in ("", ".", "..")
            or "/" in file
            or "\0" in file
            or file.startswith(RESERVED)
            or len(os.fsencode(file.encode("utf-8", "replace"))) > LONGEST_NAME
        ):
            raise InferError(f"cannot register shared memory region '{name}' - invalid shm key '{key[:LONGEST_NAME]}'")
        if name in self._regions:
            raise InferError(f"shared memory region '{name}' already in manager", ErrorCode.ALREADY_EXISTS)
        if len(self._regions) >= MOST:
            raise InferError(f"failed to register shared memory region '{name}': there are {MOST} already")
        descriptor = self._open(file, key)
        try:
            self._check(name, descriptor, offset, byte_size)
        except BaseException:
            os.close(descriptor)
            raise
        self._regions[name] = Region(name, key, offset, byte_size, descriptor)

    def unregister(self, name: str | None = None) -> None:
        """Forget one region, if there is one of that name, or all."""
        if name is None:
            self._regions.clear()
        else:
            self._regions.pop(name, None)

    def find(self, name: str, offset: int, byte_size: int) -> _Place:
        """A place in a region; see `protocol.regions.Regions`."""
        region = self._regions.get(name)
        if region is None:
            raise InferError(f"Unable to find shared memory region: '{name}'", ErrorCode.NOT_FOUND)
        if offset >= region.byte_size:
            raise InferError(f"Invalid offset for shared memory region: '{name}'")
        if byte_size > _LARGEST - offset:
            raise InferError(
                f"Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds maximum value "
                f"({_LARGEST}) for region '{name}'"
            )
        if offset + byte_size > region.byte_size:
            raise InferError(f"Invalid offset + byte size for shared memory region: '{name}'")
        return _Place(region, offset, byte_size)

    def _open(self, file: str, key: str) -> int:
        try:
            # O_NONBLOCK: opening never waits, whatever it is.
            return os.open(f"{DIRECTORY}/{file}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, ValueError):  # ValueError: lone surrogates
            raise InferError(f"Unable to open shared memory region: '{key}'", ErrorCode.INTERNAL) from None

    def _check(self, name: str, descriptor: int, offset: int, byte_size: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not byte_size or offset + byte_size > status.st_size:
            raise InferError(f"failed to register shared memory region '{name}': invalid args")
