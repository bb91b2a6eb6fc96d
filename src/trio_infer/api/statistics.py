"""`stats` and `metrics`: what has been counted, as Triton's JSON and as Prometheus' text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_infer.api.routes import Route, find_route
from trio_infer.errors import ErrorCode, InferError
from trio_infer.protocol.fields import clip
from trio_infer.protocol.jsontext import dumps, error_json
from trio_infer.wire.serve import JSON, Application, Exchange

if TYPE_CHECKING:
    from trio_infer.api.v2 import V2

__all__ = ["metrics", "metrics_port", "statistics"]


async def statistics(app: V2, exchange: Exchange, route: Route) -> None:
    """The statistics of all models that are ready, of one, or of one version of it."""
    ready = {(model.signature.name, model.signature.version) for model in app.catalog if model.ready}
    if route.model and not any(name == route.model for name, _ in ready):
        raise InferError(f"requested model '{clip(route.model)}' is not available")
    if route.version is not None and (route.model, route.version) not in ready:
        raise InferError(f"requested model version is not available for model '{clip(route.model)}'")
    all_books = app.observatory.models
    wanted = all_books.find(route.model, route.version) if route.model else all_books
    entries = [books.as_json() for books in wanted if (books.model, books.version) in ready]
    await exchange.respond(200, [JSON], [dumps({"model_stats": entries})])


async def metrics(app: V2, exchange: Exchange, route: Route) -> None:
    """All metrics, if there are any."""
    exposition = app.observatory.exposition()
    if exposition is None:
        raise InferError("Not Found", ErrorCode.NOT_FOUND)
    kind, text = exposition
    await exchange.respond(200, [("content-type", kind)], [text])


def metrics_port(app: V2) -> Application:
    """What answers on the port for metrics: `/metrics`, and as in Triton an empty 200 for any other path."""

    async def answer(exchange: Exchange) -> None:
        route = find_route(exchange.target) or Route("nothing", ("GET", "HEAD"))
        if exchange.method not in ("GET", "HEAD"):
            await exchange.respond(405, [JSON, ("allow", "GET, HEAD")], [error_json("Method Not Allowed")])
        elif route.action == "metrics":
            await metrics(app, exchange, route)
        else:
            await exchange.respond(200, [("content-type", "text/plain; charset=utf-8")])

    return answer
