"""What the server does for a model that asks: the `Host` that its runner is given.

A request that a model makes is checked as a client's is, waits in the other model's queue as a client's does, and is a
life of its own, a child of those that it is made for: it counts in the other model's books, and is cancelled with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import attrs
import trio

from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import STATUS, CancelReason, Life, Phase
from trio_infer.models.host import Host, MetricKind, NoHost
from trio_infer.protocol.inputs import check_arrays
from trio_infer.protocol.outputs import select
from trio_infer.protocol.values import InferRequest, InferResponse, Send, Signature
from trio_infer.scheduling.catalog import Catalog
from trio_infer.scheduling.served import ServedModel

__all__ = ["Loader", "MetricStore", "ModelHost"]


class MetricStore(Protocol):
    """Keeps metrics of models' own; see `Host`."""

    def register_metric(self, name: str, description: str, kind: MetricKind) -> None: ...

    def change_metric(
        self,
        name: str,
        labels: Mapping[str, str],
        operation: Literal["create", "increment", "set", "observe", "value", "remove"],
        value: float = 0.0,
        buckets: Sequence[float] | None = None,
    ) -> float: ...


class Loader(Protocol):
    """Loads and unloads for a model that asks; see `Host`."""

    async def load_for(self, asker: str, name: str, config: str | None, files: Mapping[str, bytes]) -> None: ...

    async def unload_for(self, asker: str, name: str, *, dependents: bool = False) -> None: ...


@attrs.frozen
class ModelHost(Host):
    """The host of one model.

    Args:
        model: its name.
        catalog: where it finds others.
        loader: loads others for it.
        metrics: keeps its metrics; None if none are kept.
    """

    model: str
    catalog: Catalog
    loader: Loader
    metrics: MetricStore | None = None

    async def infer(self, parent: Life, request: InferRequest, send: Send) -> None:
        version = None if request.model_version in {"", "-1"} else request.model_version
        served = self.catalog.find_ready(request.model_name, version)
        signature = served.signature
        request = attrs.evolve(
            request,
            model_version=signature.version,
            inputs=check_arrays(request.inputs, signature, request.id),
        )
        life = parent.child(f"{self.model} -> {signature.name}")
        life.model, life.version, life.request_id = signature.name, signature.version, request.id
        with trio.CancelScope() as scope:
            life.canceller = lambda reason: scope.cancel(reason=reason.value)
            if life.cancelled:
                scope.cancel()
            try:
                await _run(served, life, request, send)
            except InferError as error:
                _fail(life, error.status)
                raise
            except Exception:
                _fail(life, 500)
                raise
            finally:
                if life.outcome is None:  # cancelled, by its life or by whoever runs this
                    life.cancel(CancelReason.REQUESTED)
                    life.end()
        if life.reason is not None:
            raise InferError(
                f"the request of model '{self.model}' to '{signature.name}' was cancelled: {life.reason.value}",
                ErrorCode.CANCELLED,
                status=STATUS[life.reason],
            )

    async def load_model(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        await self.loader.load_for(self.model, name, config, files)

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        await self.loader.unload_for(self.model, name, dependents=unload_dependents)

    def is_model_ready(self, name: str, version: str) -> bool:
        return self.signature(name, version) is not None

    def signature(self, name: str, version: str) -> Signature | None:
        found = self.catalog.find(name, None if version in {"", "-1"} else version)
        return None if found is None else found.signature

    def stops(self, name: str, version: str) -> str:
        found = self.catalog.find(name, None if version in {"", "-1"} else version)
        return "" if found is None else found.stops

    def register_metric(self, name: str, description: str, kind: MetricKind) -> None:
        (self.metrics or NoHost()).register_metric(name, description, kind)

    def change_metric(
        self,
        name: str,
        labels: Mapping[str, str],
        operation: Literal["create", "increment", "set", "observe", "value", "remove"],
        value: float = 0.0,
        buckets: Sequence[float] | None = None,
    ) -> float:
        return (self.metrics or NoHost()).change_metric(name, labels, operation, value, buckets)


async def _run(served: ServedModel, life: Life, request: InferRequest, send: Send) -> None:
    signature = served.signature
    only: list[InferResponse] = []

    async def pass_on(response: InferResponse) -> None:
        chosen = select(response, request.requested_outputs, signature)
        response = InferResponse({spec.name: array for spec, array in chosen}, response.parameters)
        if not signature.decoupled:
            only.append(response)
            return
        if life.phase is not Phase.STREAMING:
            life.advance(Phase.STREAMING)
            life.status = 200
        await send(response)

    await served.infer(life, request, pass_on)
    if not signature.decoupled:
        if len(only) != 1:
            raise InferError(f"expected a single response, got {len(only)}", ErrorCode.INTERNAL)
        life.advance(Phase.SENDING)
        await send(only[0])
    elif life.phase is not Phase.STREAMING:
        life.advance(Phase.SENDING)
    life.status = 200
    life.end()


def _fail(life: Life, status: int) -> None:
    """It has no answer, or none to the end."""
    if life.reason is None and life.phase not in (Phase.STREAMING, Phase.SENDING):
        life.advance(Phase.SENDING)
    if life.phase is not Phase.STREAMING:
        life.status = status
    life.end(failed=True)
