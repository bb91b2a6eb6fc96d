"""A host made of runners: it runs what models ask of each other, and keeps their metrics in a dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import Life, Phase
from trio_infer.models.host import NoHost
from trio_infer.protocol.values import InferRequest, Send
from trio_infer.scheduling.ticket import InstanceQueue


class FakeHost(NoHost):
    """Models that ask each other.

    Attributes:
        children: the life of each inner request, in the order in which they were made.
        calls: what models asked for besides that.
        metrics: by name and labels.
    """

    def __init__(self) -> None:
        self.runners: dict[str, Any] = {}
        self.queues: dict[str, InstanceQueue] = {}
        self.children: list[Life] = []
        self.calls: list[tuple[Any, ...]] = []
        self.metrics: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.asked = trio.Event()

    async def load(self, *runners: Any) -> None:
        for runner in runners:
            await runner.load(self)
            self.runners[runner.signature.name] = runner
            self.queues[runner.signature.name] = InstanceQueue(runner.instances)

    async def unload(self) -> None:
        for runner in self.runners.values():
            await runner.unload()

    async def infer(self, parent: Life, request: InferRequest, send: Send) -> None:
        child = parent.child(f"ask {request.model_name}")
        self.children.append(child)
        self.asked.set()
        queue = self.queues[request.model_name]
        request = attrs.evolve(request, is_cancelled=lambda: child.cancelled)
        with trio.CancelScope() as scope:
            child.canceller = lambda reason: scope.cancel(reason=reason.value)
            if child.cancelled:
                scope.cancel()
            ticket = queue.draw(child)
            try:
                instance = await queue.wait_turn(ticket)
                child.advance(Phase.RUNNING)
                await self.runners[request.model_name].run(instance, request, send)
            finally:
                queue.give_up(ticket)
                if child.reason is None:
                    child.advance(Phase.SENDING)
                child.end()

    def is_model_ready(self, name: str, version: str) -> bool:
        return name in self.runners and version in {"", self.runners[name].signature.version}

    async def load_model(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        self.calls.append(("load", name, config, dict(files)))
        if name == "broken":
            raise InferError("failed to load 'broken'", ErrorCode.INVALID_ARG)

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        self.calls.append(("unload", name, unload_dependents))

    def register_metric(self, name: str, description: str, kind: Any) -> None:
        if not name.isidentifier():
            raise InferError(f"'{name}' can't be a metric's name")
        self.calls.append(("register", name, description, kind))

    def change_metric(
        self,
        name: str,
        labels: Mapping[str, str],
        operation: Any,
        value: float = 0.0,
        buckets: Sequence[float] | None = None,
    ) -> float:
        self.calls.append((operation, name, value, buckets))
        key = name, tuple(labels.items())
        if operation == "remove":
            return self.metrics.pop(key)
        old = self.metrics.setdefault(key, 0.0)
        self.metrics[key] = value if operation == "set" else old + value
        return self.metrics[key]
