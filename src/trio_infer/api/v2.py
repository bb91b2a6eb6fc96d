"""KServe v2 as Triton speaks it: health, metadata, config and infer.

What needs no model is answered unwatched, since it takes no time. Whatever runs a model does so under the exchange's
guard, from the moment its body is read to the last byte of its answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import attrs

from trio_infer._version import __version__
from trio_infer.api import repository
from trio_infer.api.cancel import cancel
from trio_infer.api.generate import answer_generate, answer_generate_stream
from trio_infer.api.header_patterns import HeaderPattern
from trio_infer.api.infer import answer_infer
from trio_infer.api.regions import RegionRegistry
from trio_infer.api.restrictions import Restrictions
from trio_infer.api.routes import Route, find_route
from trio_infer.api.settings import logging_settings, trace_settings
from trio_infer.api.shared_memory import shared_memory
from trio_infer.api.statistics import metrics, statistics
from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import Life
from trio_infer.limits import Limits
from trio_infer.observe.observatory import Observatory
from trio_infer.protocol.jsontext import dumps, error_json
from trio_infer.protocol.metadata import model_metadata, server_metadata
from trio_infer.scheduling.catalog import Catalog, ServedModel
from trio_infer.scheduling.control import ModelControl
from trio_infer.wire.serve import JSON, Exchange

__all__ = ["V2"]


@attrs.frozen(kw_only=True)
class V2:
    """The application behind every connection.

    Args:
        catalog: what is served.
        control: what loads and unloads.
        limits: bounds on bodies.
        name: of the server, in its metadata.
        draining: whether the server is on its way down.
        lives: of the requests in flight.
        observatory: what has been seen of the requests.
        restrictions: which endpoints ask for a header.
        forwarded: which headers become parameters of infer requests.
        regions: of shared memory; None if clients may not use any.
    """

    catalog: Catalog
    limits: Limits
    control: ModelControl
    name: str = "trio-infer"
    draining: Callable[[], bool] = lambda: False
    lives: Callable[[], Iterable[Life]] = tuple
    observatory: Observatory = attrs.field(factory=Observatory)
    restrictions: Restrictions = attrs.field(factory=Restrictions)
    forwarded: HeaderPattern | None = None
    regions: RegionRegistry | None = None

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request, or raise the error that is to be answered."""
        route = find_route(exchange.target)
        if route is None:
            raise InferError("Not Found", ErrorCode.NOT_FOUND)
        self.restrictions.check(route.category, exchange.header)
        if exchange.method not in route.methods:
            headers = [JSON, ("allow", ", ".join(route.methods))]
            await exchange.respond(405, headers, [error_json("Method Not Allowed")])
            return
        await _ANSWERS[route.action](self, exchange, route)

    # -- Health and metadata ----------------------------------------------------------------------------------------

    async def live(self, exchange: Exchange, route: Route) -> None:
        await exchange.respond(200, PLAIN)

    async def ready(self, exchange: Exchange, route: Route) -> None:
        if self.draining():
            await exchange.respond(503, PLAIN)
        else:
            await exchange.respond(200 if self.control.ready else 400, PLAIN)

    async def server(self, exchange: Exchange, route: Route) -> None:
        await _respond_json(exchange, server_metadata(self.name, __version__, self.extensions()))

    def extensions(self) -> list[str]:
        """The protocol's extensions that are served, in Triton's order."""
        served = {*_ANSWERS, "system_shared_memory"} if self.regions is not None else set(_ANSWERS)
        return [name for name, needed in _EXTENSIONS if needed in served]

    async def metadata(self, exchange: Exchange, route: Route) -> None:
        model = self.catalog.find_ready(route.model, route.version)
        versions = [route.version] if route.version else self.catalog.versions(route.model)
        platform = model.config.platform or model.config.backend
        await _respond_json(exchange, model_metadata(model.signature, versions, platform))

    async def model_ready(self, exchange: Exchange, route: Route) -> None:
        model = self.catalog.find(route.model, route.version)
        if model is None and not self.catalog.knows(route.model, route.version):
            self.catalog.find_ready(route.model, route.version)  # says so
        if model is None or not await model.is_ready():
            raise InferError("Model version not ready")
        await exchange.respond(200, PLAIN)

    async def config(self, exchange: Exchange, route: Route) -> None:
        model = self.catalog.find_ready(route.model, route.version)
        await _respond_json(exchange, model.shown.as_json())

    # -- Inference --------------------------------------------------------------------------------------------------

    async def infer(self, exchange: Exchange, route: Route) -> None:
        model = self.find(exchange, route.model, route.version)
        await answer_infer(exchange, model, self.limits, forwarded=self.forwarded, regions=self.regions)

    async def generate(self, exchange: Exchange, route: Route) -> None:
        await answer_generate(exchange, self.find(exchange, route.model, route.version), self.limits)

    async def generate_stream(self, exchange: Exchange, route: Route) -> None:
        await answer_generate_stream(exchange, self.find(exchange, route.model, route.version), self.limits)

    def find(self, exchange: Exchange, name: str, version: str | None) -> ServedModel:
        """The model that a request is for, whichever port it came by; its life is told.

        Raises:
            InferError: there is none that is ready, or inference is restricted.
        """
        self.restrictions.check("inference", exchange.header)
        model = self.catalog.find_ready(name, version)
        exchange.life.model, exchange.life.version = model.signature.name, model.signature.version
        return model


PLAIN: Final = [("content-type", "text/plain")]

_ANSWERS: Final[dict[str, Callable[[V2, Exchange, Route], Awaitable[None]]]] = {
    "live": V2.live,
    "ready": V2.ready,
    "server": V2.server,
    "metadata": V2.metadata,
    "model_ready": V2.model_ready,
    "config": V2.config,
    "infer": V2.infer,
    "generate": V2.generate,
    "generate_stream": V2.generate_stream,
    "cancel": cancel,
    "index": repository.index,
    "load": repository.load,
    "unload": repository.unload,
    "no_repository_names": repository.no_repository_names,
    "statistics": statistics,
    "metrics": metrics,
    "logging": logging_settings,
    "trace_setting": trace_settings,
    "shared_memory": shared_memory,
}


_EXTENSIONS: Final = (
    ("classification", "infer"),
    ("sequence", "infer"),
    ("model_repository", "load"),
    ("model_repository(unload_dependents)", "unload"),
    ("schedule_policy", "infer"),
    ("model_configuration", "config"),
    ("system_shared_memory", "system_shared_memory"),
    ("binary_tensor_data", "infer"),
    ("parameters", "infer"),
    ("statistics", "statistics"),
    ("trace", "trace_setting"),
    ("logging", "logging"),
)
"""Extensions, and what each needs: an action that is answered, or the shared memory of this machine."""


async def _respond_json(exchange: Exchange, value: object) -> None:
    await exchange.respond(200, [JSON], [dumps(value)])
