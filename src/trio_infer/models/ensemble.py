"""Runs an ensemble: a request's steps as tasks of its own, each as soon as its tensors are there.

All of a request's work is below one cancel scope in the task of the request: its client's leaving cancels every step,
those that wait in another model's queue as well as those that run, parallel ones too, and through the models' own
requests whatever is below them. Each step is a request of its own to its model, a child of the ensemble's; it waits in
that model's queue like anybody's, and may share a batch with anybody's.

The first step that fails decides: the others are cancelled, and the client is told which step it was. Errors are noted
where they happen and raised outside of all nurseries, so that no exception group reaches anybody.

Each response of a decoupled step is carried through all that depends on it by a task of its own, so those steps may run
for several of them at once (and share batches); what comes of them is sent in the order of the responses. What may hold
up a decoupled step:

- the client, while it doesn't read: as with any model, the response that is being sent holds up the next one.
- `max_inflight_requests`, if the configuration has it: so many responses are on their way.
- nothing else. Were a step held up while the next one waits in a queue, it would keep its own instance meanwhile, and
  two ensembles that use two models in opposite order, or one that uses a model twice, could wait for each other for
  ever. (It was so at first. With `max_inflight_requests` it can still happen, as upstream; a deadline ends it.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import attrs
import trio

from trio_infer.errors import ErrorCode, InferError, ModelLoadError
from trio_infer.lifecycle import Life, StandIn
from trio_infer.models.ensemble_plan import EnsemblePlan, Step
from trio_infer.models.host import Host, NoHost
from trio_infer.models.runner import PROMISES, Instance, Stops
from trio_infer.protocol.model_config import ModelConfig
from trio_infer.protocol.values import Array, InferRequest, InferResponse, Send, Signature

__all__ = ["EnsembleRunner"]


class EnsembleRunner:
    """One version of an ensemble.

    Args:
        config: has `ensemble_scheduling`.
        version: the number that its version directory is named after.
        directory: the ensemble's.
        labels: of the classes of those outputs that have some.

    Raises:
        ModelLoadError: the steps can't be put in order; see `EnsemblePlan.of_config`.

    Attributes:
        requires: the models that must be served before it is.
    """

    instances: int | None = None

    def __init__(
        self,
        config: ModelConfig,
        *,
        version: int,
        directory: Path | None = None,
        labels: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        config.check_tensors()
        self.config: ModelConfig = config
        self.directory = directory
        self.signature: Signature = config.signature(str(version), labels)
        self.on_disconnect: Literal["cancel", "finish"] | None = config.on_disconnect
        self._plan = EnsemblePlan.of_config(config)
        self.requires: tuple[str, ...] = self._plan.models
        self._streams: frozenset[Step] = frozenset()
        self._host: Host = NoHost()

    @property
    def stops(self) -> Stops:
        """As the slowest of the models that it asks; each of them is told of a cancel at once."""
        told = {self._host.stops(step.model, step.version) for step in self._plan.steps}
        return next((promise for promise in reversed(PROMISES) if promise in told), "checkpoint")

    async def load(self, host: Host) -> None:
        """Look whether the models of its steps fit, and take over what they call their classes; they must be served.

        Raises:
            ModelLoadError: one isn't, or doesn't fit.
        """
        self._host = host
        signatures = {}
        for step in self._plan.steps:
            signature = host.signature(step.model, step.version)
            if signature is None:
                what = f"{step.label}{f' version {step.version}' if step.version else ''} is not served"
                raise ModelLoadError(self.config.name, what, where=self.config.where)
            signatures[step] = signature
        self._plan.check(signatures, max_batch_size=self.signature.max_batch_size)
        self._streams = frozenset(step for step, signature in signatures.items() if signature.decoupled)
        self.config = self.config.with_decoupled(bool(self._streams))
        labels = {
            tensor: spec.labels
            for step, signature in signatures.items()
            for spec in signature.outputs
            if (tensor := step.outputs.get(spec.name)) is not None
        }
        outputs = tuple(attrs.evolve(spec, labels=spec.labels or labels[spec.name]) for spec in self.signature.outputs)
        self.signature = attrs.evolve(self.signature, outputs=outputs, decoupled=bool(self._streams))

    async def run(self, instance: Instance, request: InferRequest, send: Send) -> None:
        """Run the steps that the wanted outputs depend on.

        Raises:
            InferError: a step failed; says which.

        Cancellation: cancels each step, and leaves when they have all left.
        """
        instance.begin()
        try:
            await _Run(self._host, self._plan, self._streams, instance.life or StandIn(()), request, send).run()
        finally:
            instance.end()

    async def unload(self) -> None:
        """Nothing to do; the models of its steps stay."""

    async def ready(self) -> bool:
        """Whether the models of all its steps are served."""
        return all(self._host.is_model_ready(step.model, step.version) for step in self._plan.steps)

    def kill(self) -> bool:
        """Nothing to do: its runs end with their tasks."""
        return False


class _Tensors:
    """Tensors by name, some of which are still being made.

    Args:
        names: what will be here.
        parent: where everything else is.
    """

    def __init__(self, names: Iterable[str], parent: _Tensors | None = None) -> None:
        self._arrays: dict[str, Array | None] = {}
        self._made = {name: trio.Event() for name in names}
        self._parent = parent

    def put(self, name: str, array: Array | None) -> None:
        """It is made; None if the request leaves it out."""
        self._arrays[name] = array
        self._made[name].set()

    async def get(self, name: str) -> Array | None:
        """Wait until it is made."""
        if name not in self._made:
            return await self._parent.get(name) if self._parent is not None else None
        await self._made[name].wait()
        return self._arrays[name]


_Then: TypeAlias = Callable[[_Tensors], Awaitable[None]]


@attrs.define(eq=False)
class _Carried:
    """A response of a decoupled step on its way through what depends on it.

    Attributes:
        turn: set when all before it have arrived.
        sent: while what came of it is being sent, or waits for its turn to be.
    """

    turn: trio.Event = attrs.field(factory=trio.Event)
    sent: trio.Event | None = None


@attrs.define(eq=False)
class _Run:
    """One request."""

    host: Host
    plan: EnsemblePlan
    streams: frozenset[Step]
    life: Life
    request: InferRequest
    send: Send
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    failure: Exception | None = None

    async def run(self) -> None:
        wanted = [spec.name for spec in self.plan.outputs]
        if self.request.requested_outputs:
            wanted = [name for name in wanted if name in self.request.requested_outputs]
        steps = self.plan.needed(wanted)
        given = self.request.inputs
        tensors = _Tensors([*(spec.name for spec in self.plan.inputs), *_made_by(steps)])
        for spec in self.plan.inputs:
            tensors.put(spec.name, given.get(spec.name))

        async def answer(found: _Tensors) -> None:
            outputs = {name: await found.get(name) for name in wanted}
            await self.send(InferResponse({name: array for name, array in outputs.items() if array is not None}))

        with self.scope:
            await self._all(steps, tensors, answer, lambda: True)
        if self.failure is not None:
            raise self.failure

    async def _all(self, steps: Sequence[Step], tensors: _Tensors, then: _Then, first: Callable[[], bool]) -> None:
        """Run the steps, and then what comes of them; for each response of a decoupled one of them.

        Args:
            first: whether all that was given before has been sent; once true, it stays so.
        """
        stream = next((step for step in steps if step in self.streams), None)
        after = self.plan.after(stream, steps) if stream is not None else ()
        async with trio.open_nursery() as nursery:
            for step in steps:
                if step is not stream and step not in after:
                    nursery.start_soon(self._once, step, tensors)
            if stream is not None:
                await self._each(stream, after, tensors, then, first)
        if stream is None:
            await self._or_fail(then, tensors)

    async def _once(self, step: Step, tensors: _Tensors) -> None:
        responses: list[InferResponse] = []

        async def keep(response: InferResponse) -> None:
            responses.append(response)

        await self._or_fail(self._ask, step, tensors, keep)
        if len(responses) != 1:
            gave = InferError(f"gave {len(responses)} responses in place of one", ErrorCode.INTERNAL)
            await self._fail(self._named(step, gave))
        await self._put(step, responses[0], tensors)

    async def _each(
        self, step: Step, after: Sequence[Step], tensors: _Tensors, then: _Then, first: Callable[[], bool]
    ) -> None:
        room = trio.CapacityLimiter(self.plan.most_in_flight or math.inf)
        carried: deque[_Carried] = deque()

        async def carry(response: InferResponse, me: _Carried) -> None:
            async def then_in_turn(found: _Tensors) -> None:
                me.sent = sent = trio.Event()
                await me.turn.wait()
                await then(found)
                me.sent = None
                sent.set()

            here = _Tensors(_made_by([step, *after]), tensors)
            await self._put(step, response, here)
            await self._all(after, here, then_in_turn, lambda: first() and me.turn.is_set())
            if not me.turn.is_set():  # a decoupled step among them has given nothing
                await me.turn.wait()
            carried.popleft()
            room.release_on_behalf_of(me)
            if carried:
                carried[0].turn.set()

        async def pass_on(response: InferResponse) -> None:
            await room.acquire_on_behalf_of(me := _Carried())
            if not carried:
                me.turn.set()
            carried.append(me)
            nursery.start_soon(carry, response, me)
            while first() and carried and (sent := carried[0].sent) is not None:
                await sent.wait()

        async with trio.open_nursery() as nursery:
            await self._or_fail(self._ask, step, tensors, pass_on)

    async def _put(self, step: Step, response: InferResponse, tensors: _Tensors) -> None:
        for name, tensor in step.outputs.items():
            if name not in response.outputs:
                missing = InferError(f"gave no output '{name}'", ErrorCode.INTERNAL)
                await self._fail(self._named(step, missing))
            tensors.put(tensor, response.outputs[name])

    async def _ask(self, step: Step, tensors: _Tensors, send: Send) -> None:
        inputs = {name: await tensors.get(tensor) for name, tensor in step.inputs.items()}
        request = attrs.evolve(
            self.request,
            model_name=step.model,
            model_version=step.version,
            inputs={name: array for name, array in inputs.items() if array is not None},
            requested_outputs=tuple(step.outputs),
        )
        try:
            await self.host.infer(self.life, request, send)
        except Exception as error:
            raise self._named(step, error) from (error.__cause__ if isinstance(error, InferError) else error)

    def _named(self, step: Step, error: Exception) -> InferError:
        what = f"in ensemble '{self.plan.name}', {step.label}: "
        if not isinstance(error, InferError):
            return InferError(f"{what}{type(error).__name__}: {error}", ErrorCode.INTERNAL)
        return InferError(what + error.message, error.code, status=error.status, retry_after=error.retry_after)

    async def _or_fail(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            await call(*args)
        except Exception as error:
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        """The whole request fails: stop all steps. What they say to that is of no interest."""
        if self.failure is None:
            self.failure = error
            self.scope.cancel(reason="a step of the ensemble failed")
        await trio.lowlevel.checkpoint()


def _made_by(steps: Iterable[Step]) -> list[str]:
    return [tensor for step in steps for tensor in step.outputs.values()]
