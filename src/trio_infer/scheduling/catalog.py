"""The models that are served, and the way from a request to an instance of one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import trio

from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.lifecycle import Life, Phase, Timing
from trio_infer.models.host import Host
from trio_infer.models.runner import Runner
from trio_infer.observe.model_statistics import MOST_RESPONSES
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import InferRequest, InferResponse, Send, Signature
from trio_infer.scheduling.ticket import InstanceQueue, QueueStatistics

__all__ = ["Catalog", "ServedModel"]

FOR_EVER: Final = 2**63
"""Microseconds; a float takes no integer of any size."""


class ServedModel:
    """One version of one model, with the queue in front of its instances.

    Args:
        runner: not loaded yet.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._queue = InstanceQueue(runner.instances)
        self.ready: bool = False
        self._begun = False

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
        """Load the model, and be ready.

        Args:
            host: what the model may ask of the server.

        Raises:
            ModelLoadError: with the model's own words for why not.
        """
        self._begun = True
        await self._runner.load(host)
        self.ready = True

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
            raise InferError(f"Request for model '{self.signature.name}' which is not ready", ErrorCode.UNAVAILABLE)
        if self.signature.max_batch_size > 0 and request.inputs:
            life.rows = next(iter(request.inputs.values())).shape[0]
        ticket = self._queue.draw(life)
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
            self._queue.give_up(ticket)

    async def settled(self) -> None:
        """Be ready no more, and return when nothing runs, waits, or goes on after its request has left."""
        self.ready = False
        await self._queue.settled()

    def kill(self) -> bool:
        """Stop what still runs in it, if that is possible; says whether it is."""
        return self._runner.kill()

    async def unload(self) -> None:
        """Let the model clean up, if it was ever asked to load. Call it when it has settled.

        Cancellation: leaves at once; a clean-up in a thread goes on there.
        """
        if self._begun:
            await self._runner.unload()

    def statistics(self) -> QueueStatistics:
        """How the queue stands, now."""
        return self._queue.statistics()


def _noting(timing: Timing, send: Send) -> Send:
    """A `send` that notes when it was given what."""

    async def noting(response: InferResponse) -> None:
        if len(timing.responses) < MOST_RESPONSES:
            timing.responses.append(time.perf_counter_ns())
        await send(response)

    return noting


def _seconds(timeout: int) -> float:
    return min(timeout, FOR_EVER) / 1e6 if timeout > 0 else math.inf


class Catalog:
    """All models that are served, by name and version.

    Args:
        runners: not loaded yet.

    Raises:
        ModelLoadError: two of them have the same name and version.
    """

    def __init__(self, runners: Iterable[Runner]) -> None:
        self._models: dict[str, dict[str, ServedModel]] = {}
        for runner in runners:
            signature = runner.signature
            versions = self._models.setdefault(signature.name, {})
            if signature.version in versions:
                raise ModelLoadError(signature.name, f"version {signature.version} is given twice")
            versions[signature.version] = ServedModel(runner)

    def __iter__(self) -> Iterator[ServedModel]:
        for versions in self._models.values():
            yield from versions.values()

    @property
    def ready(self) -> bool:
        """Whether all of them are (Triton's strict readiness)."""
        return all(model.ready for model in self)

    def versions(self, name: str) -> list[str]:
        """The versions of a model that are ready, lowest first."""
        return sorted((version for version, model in self._models.get(name, {}).items() if model.ready), key=int)

    def find(self, name: str, version: str | None) -> ServedModel:
        """The model of that name, whether ready or not.

        Args:
            version: None for the highest that is ready.

        Raises:
            InferError: NOT_FOUND, in Triton's words.
        """
        versions = self._models.get(name)
        if versions is None:
            raise InferError(f"Request for unknown model: '{name}' is not found", ErrorCode.NOT_FOUND)
        if version is None:
            ready = self.versions(name)
            version = ready[-1] if ready else max(versions, key=int)
        model = versions.get(version)
        if model is None:
            raise InferError(f"Request for unknown model: '{name}' version {version} is not found", ErrorCode.NOT_FOUND)
        return model

    def find_ready(self, name: str, version: str | None) -> ServedModel:
        """As `find`, but only if it is ready.

        Raises:
            InferError: NOT_FOUND or UNAVAILABLE, in Triton's words.
        """
        model = self.find(name, version)
        if model.ready:
            return model
        if version is None:
            raise InferError(f"Request for unknown model: '{name}' has no available versions", ErrorCode.NOT_FOUND)
        raise InferError(
            f"Request for unknown model: '{name}' version {version} is not at ready state", ErrorCode.UNAVAILABLE
        )
