"""`slow`: takes its time and says so, step by step, in the server's log. For watching the work stop.

It has one instance: a second request waits in the queue until the first has ended, or has been left by its client.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
import trio

from trio_infer.errors import InferError
from trio_infer.models.native import Model
from trio_infer.protocol.values import Array, InferRequest, TensorSpec

__all__ = ["Slow"]

logger: logging.Logger = logging.getLogger("trio_infer.models.slow")

STEP: Final = 0.1
"""Seconds a step."""

MOST_STEPS: Final = 36_000
"""An hour."""


class Slow(Model):
    """`steps` steps (100 if the request doesn't say) of a tenth of a second each; answers how many it has done."""

    name = "slow"
    inputs: Sequence[TensorSpec] = (TensorSpec("steps", "INT32", (1,), optional=True),)
    outputs: Sequence[TensorSpec] = (TensorSpec("steps_done", "INT32", (1,)),)
    instances: int | None = 1

    async def infer(self, request: InferRequest) -> dict[str, Array]:
        """Take the steps.

        Raises:
            InferError: `steps` is out of bounds.

        Cancellation: stops within the step it is in, at once, and logs which step that was.
        """
        steps = int(request.inputs["steps"][0]) if "steps" in request.inputs else 100
        if not 1 <= steps <= MOST_STEPS:
            raise InferError(f"'steps' must be from 1 to {MOST_STEPS}, got {steps}")
        done = 0
        try:
            while done < steps:
                await trio.sleep(STEP)
                done += 1
                logger.info("slow: step %d of %d", done, steps)
        except trio.Cancelled:
            logger.info("slow: stopped at step %d", done)
            raise
        return {"steps_done": np.array([done], np.int32)}
