"""The line of those who wait: by priority level, first come first served in each, and last those who waited too long.

A plain data structure without a clock. Entering, leaving and taking the first cost the same in a line of ten thousand
as in one of ten: each level is a dict, which keeps its order and lets go of any entry at once.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Line"]

T = TypeVar("T", bound=Hashable)


class _Level(Generic[T]):
    __slots__ = ("delayed", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[T, None] = {}
        self.delayed: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)


class Line(Generic[T]):
    """Everyone who waits. Iterating gives them in the order in which they are to be served."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level[T]] = {}
        self._order: list[int] = []  # of levels that aren't empty
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for number in self._order:
            level = self._levels[number]
            yield from level.waiting
            yield from level.delayed

    def size(self, level: int) -> int:
        """How many wait in a level."""
        found = self._levels.get(level)
        return 0 if found is None else len(found)

    def enter(self, level: int, who: T) -> None:
        """Join at the end of a level."""
        found = self._levels.get(level)
        if found is None:
            found = self._levels[level] = _Level()
            insort(self._order, level)
        found.waiting[who] = None
        self._size += 1

    def delay(self, level: int, who: T) -> None:
        """Let everyone pass who waits in this level, and all who come."""
        found = self._levels[level]
        del found.waiting[who]
        found.delayed[who] = None

    def leave(self, level: int, who: T) -> bool:
        """Go. Whether it was there."""
        found = self._levels.get(level)
        if found is None:
            return False
        if who in found.waiting:
            del found.waiting[who]
        elif who in found.delayed:
            del found.delayed[who]
        else:
            return False
        self._size -= 1
        if not found.waiting and not found.delayed:
            del self._levels[level]
            self._order.remove(level)
        return True
