"""A served model without HTTP: guests ask it in tasks of their own, and leave when told to."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np
import trio
import trio.testing

from trio_infer.lifecycle import CancelReason, Life, LifeWatcher, Outcome, Phase
from trio_infer.models.host import NoHost
from trio_infer.models.runner import Runner
from trio_infer.observe.model_statistics import ModelBooks, ModelStatistics
from trio_infer.protocol.values import InferRequest, InferResponse
from trio_infer.scheduling.response_cache import ResponseCache
from trio_infer.scheduling.served import ServedModel

EXAMPLES: Final = int(os.environ.get("EXAMPLES", "0"))
"""How many worlds property tests of schedulers are to go through; 0 for the ordinary number of each."""


class Guest:
    """One client: its request, its answers, its error, and when it was done."""

    def __init__(self, desk: Desk, request: InferRequest) -> None:
        self.life = Life(desk.watchers, label=request.id)
        self.life.model, self.life.version = desk.model.signature.name, desk.model.signature.version
        self.request = InferRequest(
            request.model_name,
            request.model_version,
            request.inputs,
            request.id,
            request.parameters,
            request.requested_outputs,
            timeout=request.timeout,
            is_cancelled=lambda: self.life.cancelled,
        )
        self.responses: list[InferResponse] = []
        self.error: Exception | None = None
        self.ended_at = -1.0
        self.done = trio.Event()

    def leave(self, reason: CancelReason = CancelReason.DISCONNECTED) -> None:
        self.life.cancel(reason)

    @property
    def values(self) -> list[Any]:
        """The rows of its only output in its only response."""
        (response,) = self.responses
        (output,) = response.outputs.values()
        return np.asarray(output).tolist()

    async def run(self, desk: Desk) -> None:
        async def keep(response: InferResponse) -> None:
            self.responses.append(response)

        life = self.life
        with trio.CancelScope() as scope:
            life.canceller = lambda reason: scope.cancel(reason=reason.value)
            if life.cancelled:
                scope.cancel()
            try:
                await desk.model.infer(life, self.request, keep)
            except Exception as error:
                self.error = error
        if life.reason is None:
            life.advance(Phase.SENDING)
            life.status = 200 if self.error is None else getattr(self.error, "status", 500)
        life.end()
        self.ended_at = trio.current_time()
        desk.order.append(self)
        self.done.set()


class Desk:
    """Where guests ask."""

    def __init__(self, model: ServedModel, nursery: trio.Nursery, watchers: Sequence[LifeWatcher] = ()) -> None:
        self.model = model
        self.statistics = ModelStatistics()
        self.statistics.add(
            model.signature.name, model.signature.version, decoupled=model.signature.decoupled, cached=model.cached
        )
        self.watchers = (self.statistics, *watchers)
        self.order: list[Guest] = []
        self._nursery = nursery

    @property
    def books(self) -> ModelBooks:
        (books,) = self.statistics
        return books

    def ask(self, *rows: Any, name: str = "x", **fields: Any) -> Guest:
        """A guest comes, with a batch of rows; nothing has run yet."""
        array = np.array(rows, dtype=np.float32)
        signature = self.model.signature
        guest = Guest(self, InferRequest(signature.name, signature.version, {name: array}, **fields))
        self._nursery.start_soon(guest.run, self)
        return guest

    async def asked(self, *rows: Any, **fields: Any) -> Guest:
        """A guest comes, and everybody does what can be done without time passing."""
        guest = self.ask(*rows, **fields)
        await trio.testing.wait_all_tasks_blocked()
        return guest

    def check_balance(self) -> None:
        """Nobody is left, and everyone who came has left once, with one outcome."""
        queue = self.model.statistics()
        assert (queue.running, queue.waiting, queue.abandoned) == (0, 0, 0), queue
        assert queue.entered == queue.left, "every request that entered has left exactly once"
        assert all(guest.life.outcome is not None for guest in self.order)
        assert len(set(self.order)) == len(self.order)
        assert self.books.pending == 0


@asynccontextmanager
async def desk(runner: Runner, *watchers: LifeWatcher, cache: ResponseCache | None = None) -> AsyncIterator[Desk]:
    """Serve a model until the block ends and all guests are gone; then everything must balance."""
    model = ServedModel(runner, cache)
    await model.load(NoHost())
    model.ready = True
    try:
        async with trio.open_nursery() as nursery:
            yield (found := Desk(model, nursery, watchers))
        await model.settled()
        found.check_balance()
        ended = sum(1 for guest in found.order if guest.life.outcome is Outcome.COMPLETED)
        assert found.books.success.count == ended
    finally:
        await model.unload()
