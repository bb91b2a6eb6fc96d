"""Copies of a model: the versions that were loaded together, from then until the last of them is cleaned up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import trio

from trio_infer.lifecycle import CancelReason
from trio_infer.scheduling.served import ServedModel
from trio_infer.scheduling.sources import in_thread

__all__ = ["Copy"]

log: logging.Logger = logging.getLogger("trio_infer")

SETTLING: Final = 0.25
"""Seconds for stopped work to end before its model counts as still running."""

UNLOADING: Final = 5.0
"""Seconds that a model may take to clean up."""


@attrs.frozen(eq=False)
class Copy:
    """A model's versions that were loaded together.

    Args:
        name: the model's.
        models: its versions.
        dispose: removes what lies on disk only for them; may block.

    Attributes:
        gone: set when they are cleaned up, or when it turns out that one can't be stopped.
    """

    name: str
    models: Sequence[ServedModel]
    dispose: Callable[[], None] | None = None
    gone: trio.Event = attrs.field(init=False, factory=trio.Event)

    @property
    def requires(self) -> frozenset[str]:
        """The models that must be served before it is."""
        return frozenset(name for model in self.models for name in model.requires)

    async def take_down(self, patience: float, *, at_once: bool = False) -> None:
        """Let its requests finish, stop those that don't, and clean up. It must not be served any more.

        Args:
            patience: seconds that requests have.
            at_once: leave out the clean-up of what can't be stopped, instead of waiting for it.

        Cancellation: leaves at once, but a clean-up that has begun goes on to its end or its time limit.
        """
        for model in self.models:
            model.forget()
        async with trio.open_nursery() as nursery:
            for model in self.models:
                nursery.start_soon(self._take_down_one, model, patience, at_once)
        if self.dispose is not None:
            with trio.CancelScope(shield=True):  # removes a few files
                await in_thread(self.dispose)

    async def _take_down_one(self, model: ServedModel, patience: float, at_once: bool) -> None:
        name = model.signature.name
        if not await _settles(model, patience):
            model.stop(CancelReason.UNLOADED)
            if not await _settles(model, SETTLING):
                if model.kill():
                    log.warning("model '%s' is still running: its processes are killed, its clean-up is left out", name)
                elif at_once:
                    log.warning("model '%s' is still running and can't be stopped: its clean-up is left out", name)
                    return
                else:
                    log.warning("model '%s' is still running and can't be stopped; it is cleaned up when it ends", name)
                    self.gone.set()  # whoever asked for the unload need not wait for that
                    await model.settled()
        with trio.move_on_after(UNLOADING, shield=True) as unloading:
            try:
                await model.unload()
            except Exception:
                log.exception("model '%s' failed to clean up", name)
        if unloading.cancelled_caught:
            log.error("model '%s' took more than %g s to clean up, and was left at it", name, UNLOADING)


async def _settles(model: ServedModel, seconds: float) -> bool:
    with trio.move_on_after(seconds) as waiting:
        await model.settled()
    return not waiting.cancelled_caught
