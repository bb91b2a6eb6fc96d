"""The shared memory endpoints. System shared memory is real; CUDA's answers as on a machine without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_infer.api.bodies import read_body
from trio_infer.api.regions import RegionRegistry
from trio_infer.errors import ErrorCode, InferError
from trio_infer.protocol.fields import optional, required
from trio_infer.protocol.infer import read_document
from trio_infer.protocol.jsontext import dumps
from trio_infer.protocol.regions import DISABLED
from trio_infer.wire.serve import JSON, Exchange

if TYPE_CHECKING:
    from trio_infer.api.routes import Route
    from trio_infer.api.v2 import V2

__all__ = ["shared_memory"]


async def shared_memory(app: V2, exchange: Exchange, route: Route) -> None:
    """Tell of regions, register one, or unregister one or all."""
    kind, operation, region = route.rest
    regions = app.regions
    if operation == "status":
        answer = _cuda_status(regions, region) if kind == "cuda" else _status(regions, region)
        await exchange.respond(200, [JSON], [dumps(answer)])
        return
    if regions is None:
        raise InferError(DISABLED, ErrorCode.UNSUPPORTED)
    if operation == "register":
        if not region:
            raise InferError(f"'region name' is necessary to register {kind} shared memory region")
        if kind == "cuda":
            raise InferError(f"failed to register CUDA shared memory region: '{region}', GPUs not supported")
        document = read_document(await read_body(exchange, app.limits), app.limits)
        for field in ("key", "byte_size"):
            if field not in document:
                raise InferError(f"Shared memory register request has no '{field}' field")
        regions.register(
            region,
            required(document, "key", str),
            optional(document, "offset", int, 0),
            required(document, "byte_size", int),
        )
    elif kind == "system":
        regions.unregister(region or None)
    await exchange.respond(200, [JSON])


def _status(regions: RegionRegistry | None, name: str) -> list[dict[str, object]]:
    if regions is None:
        if name:
            raise InferError(f"Unable to find system shared memory region: '{name}'", ErrorCode.NOT_FOUND)
        return []
    return [
        {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
        for region in regions.regions(name or None)
    ]


def _cuda_status(regions: RegionRegistry | None, name: str) -> list[dict[str, object]]:
    if not name:
        return []
    if regions is not None and any(region.name == name for region in regions.regions()):
        raise InferError(
            f"The region named '{name}' is registered as system shared memory, not CUDA shared memory",
            ErrorCode.NOT_FOUND,
        )
    raise InferError(f"Unable to find cuda shared memory region: '{name}'", ErrorCode.NOT_FOUND)
