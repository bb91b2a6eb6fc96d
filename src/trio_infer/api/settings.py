"""`logging` and `trace/setting`: what is logged and traced, read and changed while the server runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trio_infer.api.bodies import read_body
from trio_infer.errors import ErrorCode, InferError
from trio_infer.protocol.fields import clip, required
from trio_infer.protocol.infer import read_document
from trio_infer.protocol.jsontext import dumps
from trio_infer.wire.serve import JSON, Exchange

if TYPE_CHECKING:
    from trio_infer.api.routes import Route
    from trio_infer.api.v2 import V2

__all__ = ["logging_settings", "trace_settings"]

_LOGGING: Final[dict[str, type]] = {
    "log_info": bool,
    "log_warning": bool,
    "log_error": bool,
    "log_verbose_level": int,
    "log_format": str,
}

MOST_VERBOSE: Final = 2**31 - 1


async def logging_settings(app: V2, exchange: Exchange, route: Route) -> None:
    """The settings of the log, after those that the body changes; `null` leaves one as it is."""
    settings = app.observatory.logs
    if settings is None:
        raise InferError(
            "the server does not support dynamic logging: it is part of a program that does its own logging",
            ErrorCode.UNAVAILABLE,
        )
    if exchange.method == "POST":
        document: dict[str, Any] = read_document(await read_body(exchange, app.limits), app.limits)
        given = {name: value for name, value in document.items() if value is not None}
        if "log_file" in given:
            raise InferError("log file location can not be updated through network protocol", ErrorCode.UNSUPPORTED)
        for name in given:
            if name not in _LOGGING:
                raise InferError(f"unknown log setting '{clip(name, 80)}', expected one of {', '.join(_LOGGING)}")
        changes: dict[str, Any] = {
            name: required(given, name, kind) for name, kind in _LOGGING.items() if name in given
        }
        if changes.get("log_verbose_level", 0) > MOST_VERBOSE:
            changes["log_verbose_level"] = MOST_VERBOSE
        settings.update(**changes)
    await exchange.respond(200, [JSON], [dumps(settings.as_json())])


async def trace_settings(app: V2, exchange: Exchange, route: Route) -> None:
    """The trace settings of a model or of all, after those that the body changes; `null` takes one back."""
    settings = app.observatory.traces
    if route.model and not app.catalog.versions(route.model):
        raise InferError(f"Request for unknown model : {clip(route.model)}")
    if exchange.method == "POST":
        settings.update(read_document(await read_body(exchange, app.limits), app.limits), route.model)
    await exchange.respond(200, [JSON], [dumps(settings.of(route.model))])
