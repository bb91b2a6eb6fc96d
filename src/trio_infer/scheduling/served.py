"""One version of one model that is served: the queue in front of its instances, and who is in it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Literal

from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.lifecycle import CancelReason, Life, Phase, Timing
from trio_infer.models.host import Host
from trio_infer.models.runner import Batches, Collects, Runner, Stops
from trio_infer.models.warmup import warm_up
from trio_infer.observe.live_models import LiveModel
from trio_infer.observe.model_statistics import MOST_RESPONSES
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.queueing import Needs
from trio_infer.protocol.values import InferRequest, InferResponse, Send, Signature
from trio_infer.scheduling.order import Order
from trio_infer.scheduling.resources import Claims, Resources
from trio_infer.scheduling.response_cache import ResponseCache
from trio_infer.scheduling.sequencer import Sequencer
from trio_infer.scheduling.shared_runs import SharedRuns
from trio_infer.scheduling.ticket import InstanceQueue, QueueStatistics, Ticket

__all__ = ["ServedModel"]


class ServedModel:
    """One version of one model, with the queue in front of its instances.

    Args:
        runner: not loaded yet.
        cache: of the server, for models that are to be cached; None if it has none.
        resources: what its instances share with those of other models; None if nothing is rationed.

    Attributes:
        queue: in front of the instances; of no meaning for sequences, which have one for each instance.
        ready: whether it takes requests; set by the catalog.
        successor: what has taken its place when it was reloaded; a request that was still on its way to it goes there,
            if that takes and gives the same tensors.
    """

    def __init__(self, runner: Runner, cache: ResponseCache | None = None, resources: Resources | None = None) -> None:
        self._runner = runner
        self._cache = cache
        self._resources = resources
        self._claims: Claims | None = None
        self.queue: InstanceQueue = InstanceQueue(runner.instances)
        self._shared: SharedRuns | None = None
        self._sequencer: Sequencer | None = None
        self._order: Order | None = None
        self._ragged: frozenset[str] = frozenset()
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
        """The model's; loading may complete it."""
        return self._runner.config

    @property
    def stops(self) -> Stops:
        """Where a cancelled run ends."""
        return self._runner.stops

    @property
    def shown(self) -> ModelConfig:
        """What `/config` answers."""
        return self.config.with_promise(self.stops)

    @property
    def requires(self) -> Sequence[str]:
        """The models that must be served before it is: those of an ensemble's steps."""
        return getattr(self._runner, "requires", ())

    @property
    def on_disconnect(self) -> Literal["cancel", "finish"] | None:
        """What happens when the client leaves; None leaves it to the server."""
        return self._runner.on_disconnect

    async def load(self, host: Host) -> None:
        """Load the model, and run its warm-up.

        Args:
            host: what the model may ask of the server.

        Raises:
            ModelLoadError: with the model's own words for why not; or it is to be cached, and can't be.

        Cancellation: leaves at once; call `unload`, which undoes what was begun.
        """
        self._begun = True
        await self._runner.load(host)
        if self.config.response_cache:
            fault = self.config.cache_fault
            if fault:
                raise ModelLoadError(self.signature.name, fault, where=self.config.where)
            self._shared = None if self._cache is None else SharedRuns(self, self._cache)
        await warm_up(self._runner)
        try:
            self._configure()
        except (InferError, OSError, ValueError, MemoryError) as error:
            raise ModelLoadError(self.signature.name, str(error), where=self.config.where) from error

    def _configure(self) -> None:
        """Queue requests as the configuration says now; loading may complete it."""
        runner, config = self._runner, self._runner.config
        sequencing = config.sequencing
        batching = config.batching if sequencing is None else sequencing.batching
        make = partial(
            InstanceQueue,
            queueing=config.queueing,
            batching=batching if config.max_batch_size > 0 else None,
            max_batch_size=config.max_batch_size,
            start=runner.begin_batch if isinstance(runner, Batches) and runner.joins else None,
        )
        if self._resources is not None and runner.instances is not None and self._claims is None:
            needs = [config.instance_needs(index) for index in range(min(runner.instances, config.instance_count))]
            needs += [Needs()] * (runner.instances - len(needs))  # a token model's further slots
            self._claims = self._resources.register(config.name, needs)
        claims = self._claims
        self.queue = make(runner.instances, claims=claims)
        self._ragged = config.ragged_inputs
        in_order = batching is not None and batching.preserve_ordering and not self.signature.decoupled
        self._order = Order() if in_order else None
        self._sequencer = None
        if sequencing is not None:
            queues = [
                make(1, first=index, lingers=True, claims=None if claims is None else claims.part(index, 1))
                for index in range(runner.instances or 1)
            ]
            directory = getattr(runner, "directory", None)
            self._sequencer = Sequencer(sequencing, self.signature, queues, self._run_in, directory)

    async def is_ready(self) -> bool:
        """Whether it takes requests, and its model says so, too, if it has a say.

        Cancellation: just stops waiting.
        """
        return self.ready and await self._runner.ready()

    async def infer(self, life: Life, request: InferRequest, send: Send) -> None:
        """Wait for an instance, and run; or answer from the cache.

        Args:
            life: is told of the phases.
            send: takes each response in turn.

        Raises:
            InferError: the model is not ready, or says so itself; or the queue was full, or the request has waited
                there for too long.
            Exception: the model failed.

        Cancellation: leaves the queue at once; a run stops as its runner promises.
        """
        shared, digest = self._shared, b""
        if shared is not None and self.ready:
            request, digest = await shared.prepare(life, request)
        if not self.ready:
            heir = self.successor
            if heir is not None and heir.signature == self.signature:
                life.look = None
                await heir.infer(life, request, send)
                return
            raise InferError(f"Request for model '{self.signature.name}' which is not ready", ErrorCode.UNAVAILABLE)
        if self.signature.max_batch_size > 0 and request.inputs:
            life.rows = next(iter(request.inputs.values())).shape[0]
        self._lives.add(life)
        try:
            if self._sequencer is not None:
                await self._sequencer.infer(life, request, send)
            elif shared is not None:
                await self._in_order(partial(shared.infer, life, request, digest), send)
            else:
                await self._run_in(self.queue, life, request, send)
        finally:
            self._lives.discard(life)

    async def _run_in(self, queue: InstanceQueue, life: Life, request: InferRequest, send: Send) -> None:
        """Wait in a queue, and run."""
        ticket = self._draw_in(queue, life, request)
        await self._in_order(partial(self._run, queue, life, request, ticket), send)

    def _draw_in(self, queue: InstanceQueue, life: Life, request: InferRequest) -> Ticket:
        return queue.draw(
            life,
            request,
            rows=life.rows,
            shapes=self._shapes(request) if queue.joins else None,
            priority=request.parameters.get("priority", 0),
            timeout=request.timeout,
        )

    async def _run(self, queue: InstanceQueue, life: Life, request: InferRequest, ticket: Ticket, send: Send) -> None:
        try:
            if ticket.instance is None:
                if life.phase is Phase.RECEIVING:  # in a sequence it may be further
                    life.advance(Phase.QUEUED)
                await queue.wait_turn(ticket)
            assert ticket.instance is not None
            if life.phase in (Phase.RECEIVING, Phase.QUEUED):
                life.advance(Phase.RUNNING)
            if self.signature.decoupled:
                send = _noting(ticket.instance.timing, send)
            if ticket.attend is not None:
                await ticket.attend(send)
            else:
                await self._runner.run(ticket.instance, request, send)
        finally:
            queue.give_up(ticket)

    def draw(self, life: Life, request: InferRequest) -> Ticket:
        """Enter the queue, for several who ask the same; see `Computes`."""
        return self._draw_in(self.queue, life, request)

    async def run(self, life: Life, request: InferRequest, ticket: Ticket, send: Send) -> None:
        """Wait and run, for several who ask the same; see `Computes`."""
        await self._run(self.queue, life, request, ticket, send)

    async def _in_order(self, infer: Callable[[Send], Awaitable[None]], send: Send) -> None:
        """Infer, and send the response after those of all who came before, if that is asked for."""
        order, turn = self._order, object()
        if order is None:
            await infer(send)
            return
        order.enter(turn)

        async def send_in_order(response: InferResponse) -> None:
            await order.wait_first(turn)
            await send(response)

        try:
            await infer(send_in_order)
        finally:
            order.leave(turn)

    def _shapes(self, request: InferRequest) -> Hashable:
        """What must be alike in two requests that are to be joined."""
        ragged = self._ragged
        return tuple((name, None if name in ragged else array.shape[1:]) for name, array in request.inputs.items())

    @property
    def collects(self) -> bool:
        """Whether all responses of one request can be made one, for a client that wants just one."""
        return isinstance(self._runner, Collects) and self._runner.collects

    def collect(self, responses: Sequence[InferResponse]) -> InferResponse | None:
        """The response for a client that wants just one; None if there isn't one.

        Raises:
            InferError: the model makes of them what it must not.
        """
        if isinstance(self._runner, Collects) and self._runner.collects:
            return self._runner.collect(responses)
        return responses[0] if len(responses) == 1 else None

    @property
    def cached(self) -> bool:
        """Whether its answers are kept."""
        return self._shared is not None

    def forget(self) -> None:
        """Drop its answers from the cache: they are not what it would answer now."""
        if self._shared is not None:
            self._shared.forget()

    def stop(self, reason: CancelReason) -> None:
        """Cancel all that waits or runs."""
        for life in list(self._lives):
            life.cancel(reason)

    async def settled(self) -> None:
        """Return when nothing runs, waits, or goes on after its request has left.

        Cancellation: just stops waiting.
        """
        await (self._sequencer or self.queue).settled()

    async def unload(self) -> None:
        """Let the model clean up, if it was ever asked to load. Call it when it has settled; only once counts.

        Cancellation: leaves at once; a clean-up in a thread goes on there.
        """
        if self._begun:
            self._begun = False
            if self._claims is not None:
                self._claims.close()
            await self._runner.unload()

    def kill(self) -> bool:
        """Stop what still runs in it, if that is possible; says whether it is."""
        return self._runner.kill()

    def statistics(self) -> QueueStatistics:
        """How the queue stands, now."""
        return (self._sequencer or self.queue).statistics()

    def live(self) -> LiveModel:
        """What is told of it in the metrics, now."""
        signature = self.signature
        return LiveModel(
            signature.name,
            signature.version,
            self.stops,
            self.abandoned,
            getattr(self._runner, "workers", {}),
            getattr(self._runner, "exits", {}),
        )

    @property
    def abandoned(self) -> int:
        """How many requests' work goes on for nobody: in an instance, or by senders that outlive it."""
        return self.statistics().abandoned + getattr(self._runner, "abandoned", 0)


def _noting(timing: Timing, send: Send) -> Send:
    """A `send` that notes when it was given what."""

    async def noting(response: InferResponse) -> None:
        if len(timing.responses) < MOST_RESPONSES:
            timing.responses.append(time.perf_counter_ns())
        await send(response)

    return noting
