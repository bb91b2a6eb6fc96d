"""`/v2/repository`: which models there are, loading and unloading.

A client that leaves while a model loads stops nothing: the load goes on to its end, so that there is no half state, and
the next client sees in the index what came of it. Hence these routes run unwatched.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from trio_infer.api.bodies import off_the_loop, read_body
from trio_infer.errors import ErrorCode, InferError, ModelLoadError, UnknownModelError
from trio_infer.protocol.fields import clip, found, optional, required
from trio_infer.protocol.infer import read_document
from trio_infer.protocol.jsontext import dumps
from trio_infer.scheduling.control import ModelControl
from trio_infer.scheduling.sources import ModelSet
from trio_infer.wire.serve import JSON, Body, Exchange

if TYPE_CHECKING:
    from trio_infer.api.routes import Route
    from trio_infer.api.v2 import V2

__all__ = ["index", "load", "load_runners", "no_repository_names", "unload"]

FILE: Final = "file:"


async def index(app: V2, exchange: Exchange, route: Route) -> None:
    """All models of the repositories and all that are loaded, each version with its state."""
    document = await _document(app, exchange)
    only_ready = document.get("ready", False)
    if not isinstance(only_ready, bool):
        raise InferError(f"Invalid value for 'ready': expected a boolean, got {found(only_ready)}")
    rows = []
    for name, version, state in await app.control.index():
        row: dict[str, str] = {"name": name}
        if state is not None:
            row |= {"version": version, "state": state.state} | ({"reason": state.reason} if state.reason else {})
        if not only_ready or (state is not None and state.state == "READY"):
            rows.append(row)
    await exchange.respond(200, [JSON], [dumps(rows)])


async def load(app: V2, exchange: Exchange, route: Route) -> None:
    """Load a model, from the repository or from what the request brings; answered when it serves."""
    document = await _document(app, exchange)
    parameters = optional(document, "parameters", dict, {})
    config, files = await off_the_loop(
        sum(len(value) for value in parameters.values() if isinstance(value, str)), _overrides, parameters
    )
    with _in_tritons_words(route.model):
        await app.control.load(route.model, config=config, files=files)
    await exchange.respond(200, [JSON])


async def load_runners(control: ModelControl, name: str, prepare: Callable[[], ModelSet]) -> None:
    """Load a model from elsewhere than the repositories; see `ModelControl.load_runners`.

    Raises:
        InferError: it can't be loaded, in Triton's words, or models are not loaded on request.
    """
    with _in_tritons_words(name):
        await control.load_runners(name, prepare)


@contextmanager
def _in_tritons_words(name: str) -> Iterator[None]:
    try:
        yield
    except UnknownModelError as error:
        raise InferError(
            f"failed to load '{clip(name)}', failed to poll from model repository ({error.reason})", ErrorCode.INTERNAL
        ) from None
    except ModelLoadError as error:
        version = f"version {error.version} is at UNAVAILABLE state: " if error.version else ""
        raise InferError(f"load failed for model '{clip(name)}': {version}Internal: {error.text};") from None


async def unload(app: V2, exchange: Exchange, route: Route) -> None:
    """Serve a model no more; answered when its requests have ended and it is cleaned up."""
    parameters = optional(await _document(app, exchange), "parameters", dict, {})
    dependents = bool(optional(parameters, "unload_dependents", bool, False))
    await app.control.unload(route.model, dependents=dependents)
    await exchange.respond(200, [JSON])


async def no_repository_names(app: V2, exchange: Exchange, route: Route) -> None:
    """Repositories have no names here, as in Triton."""
    raise InferError("'repository_name' specification is not supported", ErrorCode.UNSUPPORTED)


async def _document(app: V2, exchange: Exchange) -> dict[str, Any]:
    body: Body = await read_body(exchange, app.limits)
    return await off_the_loop(len(body), read_document, body, app.limits) if len(body) else {}


def _overrides(parameters: dict[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    config = required(parameters, "config", str) if "config" in parameters else None
    files = {}
    for key, value in parameters.items():
        if not key.startswith(FILE):
            if key != "config":
                raise InferError(f"unknown parameter '{clip(key)}'; expected 'config' and 'file:<path>'")
            continue
        if not isinstance(value, str):
            raise InferError(f"'{clip(key)}' must be the file's content in base64, got {found(value)}")
        try:
            files[key.removeprefix(FILE)] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InferError(f"'{clip(key)}' is not base64: {error}") from None
    if files and config is None:
        raise InferError("files in place of the repository's need a 'config' beside them")
    return config, files
