"""Answers in the order in which requests came (`preserve_ordering`), whatever order they are ready in."""

from __future__ import annotations

import trio

__all__ = ["Order"]


class Order:
    """Those who have come and not gone yet."""

    def __init__(self) -> None:
        self._there: dict[object, trio.Event] = {}

    def enter(self, who: object) -> None:
        """Come, behind all others."""
        event = self._there[who] = trio.Event()
        if len(self._there) == 1:
            event.set()

    async def wait_first(self, who: object) -> None:
        """Wait until all who came before have gone.

        Cancellation: just stops waiting.
        """
        await self._there[who].wait()

    def leave(self, who: object) -> None:
        """Go, whether it was answered or not."""
        if self._there.pop(who, None) is not None and self._there:
            next(iter(self._there.values())).set()
