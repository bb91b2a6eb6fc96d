"""One version of one model that is served: the queue in front of its instances, and who is in it."""

from __future__ import annotations

import math
import time
from typing import Final, Literal

import trio

from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import CancelReason, Life, Phase, Timing
from trio_infer.models.host import Host
from trio_infer.models.runner import Runner
from trio_infer.models.warmup import warm_up
from trio_infer.observe.model_statistics import MOST_RESPONSES
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferRequest, InferResponse, Send, Signature
from trio_infer.scheduling.ticket import InstanceQueue, QueueStatistics

__all__ = ["ServedModel"]

FOR_EVER: Final = 2**63
"""Microseconds; a float takes no integer of any size."""


class ServedModel:
    """One version of one model, with the queue in front of its instances.

    Args:
        runner: not loaded yet.

    Attributes:
        ready: whether it takes requests; set by the catalog.
        successor: what has taken its place when it was reloaded; a request that was still on its way to it goes there,
            if that takes and gives the same tensors.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._queue = InstanceQueue(runner.instances)
        self._lives: set[Life] = set()
        self._begun = False
        self.ready: bool = False
        self.successor: ServedModel | None = None

    @property
    def signature(self) -> Signature:
        """What requests are checked against; loading may complete it."""
        return self._runner.signature

    @property
    def config(self) -> ModelConfig:
        """What `/config` answers; loading may complete it."""
        return self._runner.config

    @property
    def on_disconnect(self) -> Literal["cancel", "finish"] | None:
        """What happens when the client leaves; None leaves it to the server."""
        return self._runner.on_disconnect

    async def load(self, host: Host) -> None:
        """Load the model, and run its warm-up.

        Args:
            host: what the model may ask of the server.

        Raises:
            ModelLoadError: with the model's own words for why not.

        Cancellation: leaves at once; call `unload`, which undoes what was begun.
        """
        self._begun = True
        await self._runner.load(host)
        await warm_up(self._runner)
        self._queue = InstanceQueue(self._runner.instances)

    async def is_ready(self) -> bool:
        """Whether it takes requests, and its model says so, too, if it has a say.

        Cancellation: just stops waiting.
        """
        return self.ready and await self._runner.ready()

    async def infer(self, life: Life, request: InferRequest, send: Send) -> None:
        """Wait for an instance, and run.

        Args:
            life: is told of the phases.
            send: takes each response in turn.

        Raises:
            InferError: the model is not ready, or says so itself; or the request's own timeout expired in the queue.
            Exception: the model failed.

        Cancellation: leaves the queue at once; a run stops as its runner promises.
        """
        if not self.ready:
            heir = self.successor
            if heir is not None and heir.signature == self.signature:
                await heir.infer(life, request, send)
                return
            raise InferError(f"Request for model '{self.signature.name}' which is not ready", ErrorCode.UNAVAILABLE)
        if self.signature.max_batch_size > 0 and request.inputs:
            life.rows = next(iter(request.inputs.values())).shape[0]
        ticket = self._queue.draw(life)
        self._lives.add(life)
        try:
            if ticket.instance is None:
                life.advance(Phase.QUEUED)
                with trio.move_on_after(_seconds(request.timeout)):
                    await self._queue.wait_turn(ticket)
            instance = ticket.instance  # one that was granted in the tick in which the time was over is kept
            if instance is None:
                raise InferError("Request timeout expired", ErrorCode.UNAVAILABLE)
            life.advance(Phase.RUNNING)
            if self.signature.decoupled:
                send = _noting(instance.timing, send)
            await self._runner.run(instance, request, send)
        finally:
            self._lives.discard(life)
            self._queue.give_up(ticket)

    def stop(self, reason: CancelReason) -> None:
        """Cancel all that waits or runs."""
        for life in list(self._lives):
            life.cancel(reason)

    async def settled(self) -> None:
        """Return when nothing runs, waits, or goes on after its request has left.

        Cancellation: just stops waiting.
        """
        await self._queue.settled()

    async def unload(self) -> None:
        """Let the model clean up, if it was ever asked to load. Call it when it has settled; only once counts.

        Cancellation: leaves at once; a clean-up in a thread goes on there.
        """
        if self._begun:
            self._begun = False
            await self._runner.unload()

    def kill(self) -> bool:
        """Stop what still runs in it, if that is possible; says whether it is."""
        return self._runner.kill()

    def statistics(self) -> QueueStatistics:
        """How the queue stands, now."""
        return self._queue.statistics()

    @property
    def abandoned(self) -> int:
        """How many requests' work goes on for nobody: in an instance, or by senders that outlive it."""
        return self._queue.statistics().abandoned + getattr(self._runner, "abandoned", 0)


def _noting(timing: Timing, send: Send) -> Send:
    """A `send` that notes when it was given what."""

    async def noting(response: InferResponse) -> None:
        if len(timing.responses) < MOST_RESPONSES:
            timing.responses.append(time.perf_counter_ns())
        await send(response)

    return noting


def _seconds(timeout: int) -> float:
    return min(timeout, FOR_EVER) / 1e6 if timeout > 0 else math.inf
