"""`cancel`: stop requests by the id that their client gave them, from another connection.

It is for who can't just hang up: a client behind a proxy that keeps its connections, or another process than the one
that asked. The id is the client's own, so whoever knows it may use it; restrict the inference API if that is too many.

There is no register of ids: the requests in flight are looked through. Requests that models make of other models are
not, since they go with the one that they are made for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_infer.api.bodies import read_body
from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import CancelReason
from trio_infer.protocol.fields import clip, found
from trio_infer.protocol.infer import read_document
from trio_infer.protocol.jsontext import dumps
from trio_infer.wire.serve import JSON, Exchange

if TYPE_CHECKING:
    from trio_infer.api.routes import Route
    from trio_infer.api.v2 import V2

__all__ = ["cancel"]


async def cancel(app: V2, exchange: Exchange, route: Route) -> None:
    """Cancel each request in flight that has the id and is of the model; say how many there were."""
    if not app.catalog.knows(route.model, route.version):
        app.catalog.find_ready(route.model, route.version)  # says so
    document = read_document(await read_body(exchange, app.limits), app.limits)
    request_id = document.get("id")
    if not isinstance(request_id, str) or not request_id:
        got = found(request_id) if "id" in document else "none"
        raise InferError(f"'id' must be the id of a request, a string that is not empty; got {got}")
    cancelled = sum(
        life.cancel(CancelReason.REQUESTED)
        for life in list(app.lives())
        if life.request_id == request_id and life.model == route.model and route.version in (None, life.version)
    )
    if not cancelled:
        version = f" version {route.version}" if route.version else ""
        raise InferError(
            f"no request with id '{clip(request_id)}' of model '{route.model}'{version} is in flight",
            ErrorCode.NOT_FOUND,
        )
    await exchange.respond(200, [JSON], [dumps({"cancelled": cancelled})])
