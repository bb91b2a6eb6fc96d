"""Memory that the server and one worker process share: tensors too large for a socket, and a flag for each request.

There is one anonymous file (`memfd_create`; elsewhere a temporary file that has no name any more), mapped once by each
side and inherited by descriptor. So it can't be left behind in `/dev/shm`, whoever is killed: the kernel frees it with
the last of the two processes. The file is *sparse*: it is as large as anybody may ever need, and costs only the pages
that were written to.

    0 ................................ half ................... the end
    | a flag    | blocks that the      | blocks that the worker
    | a request | server hands out     | hands out

Who hands a block out is the only one to write to it and to take it back; who reads it says when it is done (`freed`),
which travels with the next message. A reader gets arrays on the block itself. A numpy array's `base` skips other
arrays, so that nothing hangs on the first of them; below all of them there is a ctypes array that they do keep alive,
and when it goes, the block has been read.

Facts (Linux 6, 2 cores): fresh pages cost 0.25 ms a MiB to touch, more than to copy into them, so blocks are used
again, the last one freed first. What lies free beyond `KEEP` is given back to the kernel (`MADV_REMOVE`) and stays
addressable.

Flags: the server writes a request's number into its cell when the request is cancelled; the worker compares. It is one
aligned 64-bit store, seen by the other process at once, without a message.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, Final

__all__ = ["CELLS", "Blocks", "Memory", "create"]

CELLS: Final = 8192
"""How many requests one worker may have in hand; thousands of streams that wait is far beyond what was seen."""

_START: Final = CELLS * 8
HALVES: Final = (64 * 2**30, 4 * 2**30, 2**29)
"""Address space for each direction, of no cost until it is used; the largest that the process may have (`ulimit`)."""

SMALLEST: Final = 4096
KEEP: Final = 64 * 2**20
"""Bytes that a direction keeps for reuse: a 4K image in FP32 both ways, a few times over."""


def create() -> tuple[int, Memory]:
    """A new file of that kind, mapped; its descriptor is not inheritable and the caller's to close.

    Raises:
        OSError: there is no memory or no descriptor to be had.
    """
    for half in HALVES[:-1]:
        with suppress(OSError):
            return _create(half)
    return _create(HALVES[-1])


def _create(half: int) -> tuple[int, Memory]:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("trio-infer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, 2 * half)
        if hasattr(fcntl, "F_ADD_SEALS"):
            # If either side could cut it, the other would die of SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, Memory(fd)
    except OSError:
        os.close(fd)
        raise


class Memory:
    """One side's mapping.

    Args:
        fd: as `create` gives it; not needed any more afterwards.

    Attributes:
        size: of the whole file.
        cells: the flags, by the request's cell.
        freed: the offsets of blocks that this side has read; whoever sends the next message takes them along.
    """

    def __init__(self, fd: int) -> None:
        self.size: int = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size)
        self.cells: memoryview = memoryview(self._map)[:_START].cast("q")
        self.freed: deque[int] = deque()

    def view(self, offset: int, size: int) -> Any:
        """A block's bytes, to write into: anything that takes a buffer takes this."""
        return memoryview(self._map)[offset : offset + size]

    def lend(self, offset: int, size: int) -> Any:
        """A block's bytes, to read; when the last thing made from them is gone, the block is in `freed`.

        Raises:
            ValueError: there is no such place.
        """
        if offset < _START or size < 1 or offset + size > self.size:
            raise ValueError(f"no block of {size} bytes can be at {offset}")
        block = (ctypes.c_ubyte * size).from_buffer(self._map, offset)
        weakref.finalize(block, self.freed.append, offset).atexit = False
        return block

    def take_freed(self) -> list[int]:
        """What is to be told to the other side, now."""
        freed = []
        with suppress(IndexError):  # other threads add to it
            while True:
                freed.append(self.freed.popleft())
        return freed

    def give_back(self, offset: int, size: int) -> None:
        """Let the kernel have a block's pages; they read as zeros from then on."""
        if hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):  # a file system without holes: then it stays
                self._map.madvise(mmap.MADV_REMOVE, offset, size)


class Blocks:
    """Hands out the blocks of one direction. Sizes are powers of two, so that a freed block fits the next that size.

    Args:
        memory: this side's.
        upper: which direction: that of the worker, or the server's.
        keep: bytes of free blocks that keep their pages.
    """

    def __init__(self, memory: Memory, *, upper: bool, keep: int = KEEP) -> None:
        self.memory = memory
        half = memory.size // 2
        self._next = half if upper else _START
        self._end = memory.size if upper else half
        self._keep = keep
        self._kept = 0
        self._taken: dict[int, int] = {}
        self._free: dict[int, list[tuple[int, bool]]] = {}

    @property
    def taken(self) -> int:
        """How many blocks are handed out."""
        return len(self._taken)

    def take(self, size: int) -> int:
        """Hand out a block of at least `size` bytes; its offset.

        Raises:
            MemoryError: the address space is used up.
        """
        whole = max(SMALLEST, 1 << (size - 1).bit_length())
        free = self._free.get(whole)
        if free:
            offset, kept = free.pop()
            self._kept -= whole if kept else 0
        else:
            if self._next + whole > self._end:
                raise MemoryError(f"no room for a tensor of {size} bytes between the server and its worker process")
            offset = self._next
            self._next += whole
        self._taken[offset] = whole
        return offset

    def free(self, offset: int) -> None:
        """Take a block back.

        Raises:
            ValueError: it is not handed out.
        """
        whole = self._taken.pop(offset, 0)
        if not whole:
            raise ValueError(f"no block was handed out at {offset}")
        kept = self._kept + whole <= self._keep
        if kept:
            self._kept += whole
        else:
            self.memory.give_back(offset, whole)
        free = self._free.setdefault(whole, [])
        # Those whose pages are there go first.
        free.insert(len(free) if kept else 0, (offset, kept))
