"""One run for all who ask the same: requests of a model that is cached, from the lookup to the answer.

    look up ── the answer is there ─────────────────────────────────────────── answer (a hit)
            ├─ it is being computed ── join ─────────────┐
            └─ neither ── draw a ticket, begin a run ── wait ── answer ── ... and it is kept

A run is a task of its own, under a cancel scope of its own, with a `SharedLife`; no client's task is needed for it to
go on. So it makes no difference who came first. Clients only wait, each under its own scope: one that leaves, at
whatever moment, is gone at once and the others notice nothing; the last one to leave takes the ticket out of the queue
or cancels the run, in that instant, and the next to ask begins a new one.

A run may be joined, and its answer be kept, as long as it is the one that is listed for its digest. It is taken off the
list when it ends, when its last client leaves, and when the model's answers are forgotten: so an answer that comes
after a cancel, or from a model that has been replaced meanwhile, is never kept. Errors are told to all who wait, and
not kept.

In the queue a run has the best priority of its clients, and the longest patience. Each client has its own: one whose
time is over is refused while the others go on waiting.

What a model asks of another (BLS) is looked up as well. A model may write into its arrays when it has its answer or
gives up on it, so it is given copies both ways.
"""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Protocol

import attrs
import numpy as np
import trio

from trio_infer.lifecycle import CacheLook, Life, Phase, SharedLife
from trio_infer.protocol.values import InferRequest, InferResponse, Send, Signature
from trio_infer.scheduling.response_cache import Key, ResponseCache, owned, wait_digest
from trio_infer.scheduling.ticket import InstanceQueue, Ticket

__all__ = ["Computes", "SharedRuns"]


class Computes(Protocol):
    """What runs a request that has to be run: the served model.

    Attributes:
        signature: of its requests and responses.
        queue: where it waits.
    """

    @property
    def signature(self) -> Signature: ...
    @property
    def queue(self) -> InstanceQueue: ...

    def draw(self, life: Life, request: InferRequest) -> Ticket:
        """Enter the queue.

        Raises:
            InferError: it is full.
        """

    async def run(self, life: Life, request: InferRequest, ticket: Ticket, send: Send) -> None:
        """Wait for an instance, and run; gives the ticket up at the end.

        Raises:
            InferError: it has waited for too long, or the model says so.
            Exception: the model failed.

        Cancellation: leaves the queue at once; a run stops as its runner promises.
        """


class SharedRuns:
    """The requests of one model that is cached.

    Args:
        model: runs what isn't there.
        cache: shared with other models.
    """

    def __init__(self, model: Computes, cache: ResponseCache) -> None:
        self._model = model
        self._cache = cache
        self._runs: dict[bytes, _Run] = {}

    async def prepare(self, life: Life, request: InferRequest) -> tuple[InferRequest, bytes]:
        """Find out what a request asks.

        Returns:
            the request, with inputs that nobody will change; its digest.

        Cancellation: leaves at once.
        """
        began = time.perf_counter_ns()
        if life.parent is not None:
            inputs = {name: np.array(array) for name, array in request.inputs.items()}
            request = attrs.evolve(request, inputs=inputs)
        found = await wait_digest(request)
        life.look = CacheLook(hit=False, ns=time.perf_counter_ns() - began)
        return request, found

    async def infer(self, life: Life, request: InferRequest, digest: bytes, send: Send) -> None:
        """Answer from the cache, or from a run for all who ask the same.

        Args:
            request, digest: from `prepare`.

        Raises:
            InferError: the model says so, or the queue was full, or the request has waited there for too long.
            Exception: the model failed.

        Cancellation: leaves at once; the last one to leave stops the run.
        """
        look = life.look
        assert look is not None
        began = time.perf_counter_ns()
        key: Key = (self, digest)
        response = self._cache.find(key)
        if response is not None:
            look.hit = True
            look.ns += time.perf_counter_ns() - began
            life.advance(Phase.RUNNING)
            await send(_for(life, response))
            return
        run = self._runs.get(digest)
        if run is None:
            shared = SharedLife(life)
            request = attrs.evolve(request, is_cancelled=lambda: shared.cancelled)
            try:
                ticket = self._model.draw(shared, request)
            except BaseException:
                shared.leave(life)
                raise
            run = self._runs[digest] = _Run(self._model, shared, request, ticket)
            shared.canceller = lambda _: self._stop(digest, run)
            if shared.cancelled:  # it had left before it came here
                self._stop(digest, run)
            until = self._model.queue.patience(ticket)
            trio.lowlevel.spawn_system_task(self._compute, digest, run, name=f"<run of {request.model_name}>")
        else:
            self._cache.joined += 1
            look.hit = True
            run.life.join(life)
            priority = request.parameters.get("priority", 0)
            until = self._model.queue.share(run.ticket, priority=priority, timeout=request.timeout)
        look.ns += time.perf_counter_ns() - began
        try:
            await run.wait(until)
        finally:
            run.life.leave(life)
        for response in run.result():
            await send(_for(life, response))

    def forget(self) -> None:
        """Drop the model's answers, and don't keep those that are being computed; who waits for them gets them."""
        self._cache.drop(self)
        self._runs.clear()

    async def _compute(self, digest: bytes, run: _Run) -> None:
        """In a system task, which nothing but its cancellation may leave."""
        await run.run()
        if self._runs.get(digest) is run:
            del self._runs[digest]
            if run.error is None and len(run.responses) == 1:
                began = time.perf_counter_ns()
                self._cache.put((self, digest), run.responses[0])
                run.life.kept(time.perf_counter_ns() - began)
        run.life.over = True
        run.done.set()

    def _stop(self, digest: bytes, run: _Run) -> None:
        """Its last client has left."""
        if self._runs.get(digest) is run:
            del self._runs[digest]
        run.scope.cancel(reason="all who asked for it have left")


@attrs.define(eq=False)
class _Run:
    """One run, and those who wait for it.

    Attributes:
        life: theirs, together.
        scope: around it.
        done: set when there is a result.
    """

    model: Computes
    life: SharedLife
    request: InferRequest
    ticket: Ticket
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    done: trio.Event = attrs.field(factory=trio.Event)
    responses: list[InferResponse] = attrs.field(factory=list)
    error: Exception | None = None
    traceback: TracebackType | None = None

    async def run(self) -> None:
        """Notes what comes of it."""

        async def keep(response: InferResponse) -> None:
            self.responses.append(owned(response, self.request, self.model.signature))

        try:
            with self.scope:
                if self.life.cancelled:  # before this task began
                    self.model.queue.give_up(self.ticket)
                    return
                await self.model.run(self.life, self.request, self.ticket, keep)
        except Exception as error:
            self.error, self.traceback = error, error.__traceback__

    async def wait(self, until: float) -> None:
        """Wait for the result, of one who has left the queue by then.

        Raises:
            InferError: UNAVAILABLE: it was still in the queue then.
        """
        granted = self.ticket.granted
        if granted is not None and until < math.inf:
            with trio.move_on_at(until):
                await granted.wait()
            if not granted.is_set():
                raise self.model.queue.too_late()
        await self.done.wait()

    def result(self) -> list[InferResponse]:
        """The responses; it is done.

        Raises:
            Exception: the run's error, as if it had struck here.
        """
        if self.error is not None:
            raise self.error.with_traceback(self.traceback)  # each who is told adds frames of its own
        return self.responses


def _for(life: Life, response: InferResponse) -> InferResponse:
    """The response for whom it is: a model gets arrays of its own, as it gets from a run."""
    if life.parent is None:
        return response
    return attrs.evolve(response, outputs={name: array.copy() for name, array in response.outputs.items()})
