"""The access log: a line for each request that was cancelled, and on demand for each of the others.

A departure is a normal event: INFO, no traceback, status 499 (which is never sent).
"""

from __future__ import annotations

import logging

from trio_infer.lifecycle import Life, Outcome, Phase

__all__ = ["AccessLog"]

logger: logging.Logger = logging.getLogger("trio_infer.access")


class AccessLog:
    """Watches lives and logs how they end (a `LifeWatcher`).

    Args:
        everything: also log requests that were answered.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self._everything = everything

    def life_moved(self, life: Life, left: Phase | None) -> None:
        pass

    def work_ended(self, life: Life) -> None:
        pass

    def life_ended(self, life: Life) -> None:
        if life.parent is not None:  # told of by its parent
            return
        milliseconds = (life.ended - life.entered[Phase.RECEIVING]) / 1e6
        what = life.label or "(no request line)"
        if life.request_id:
            what += f" id={life.request_id!r}"
        if life.outcome is Outcome.CANCELLED:
            assert life.reason is not None
            assert life.struck is not None
            logger.info(
                "%s %d after %.1f ms: %s while %s",
                what,
                life.status,
                milliseconds,
                life.reason.value,
                life.struck.value,
            )
        elif life.outcome is Outcome.UNDELIVERED:
            logger.info("%s %d after %.1f ms: finished, not delivered", what, life.status, milliseconds)
        elif self._everything:
            logger.info("%s %d after %.1f ms", what, life.status, milliseconds)
