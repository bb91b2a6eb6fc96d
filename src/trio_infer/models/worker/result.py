"""Something that will be known, or has failed."""

from __future__ import annotations

from typing import Any

import trio

from trio_infer.errors import ModelLoadError

__all__ = ["Result"]


class Result:
    """Something that will be known, or has failed; the first to say counts."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._value: Any = None
        self._error: ModelLoadError | None = None

    @property
    def known_good(self) -> bool:
        return self._event.is_set() and self._error is None

    def set(self, value: Any) -> None:
        if not self._event.is_set():
            self._value = value
            self._event.set()

    def fail(self, error: ModelLoadError) -> None:
        if not self._event.is_set():
            self._error = error
            self._event.set()

    async def wait(self) -> Any:
        """Its value.

        Raises:
            ModelLoadError: it has failed.

        Cancellation: just stops waiting.
        """
        await self._event.wait()
        if self._error is not None:
            raise self._error
        return self._value
