"""KServe v2 as Triton speaks it: health, metadata, config and infer.

What needs no model is answered unwatched, since it takes no time. Whatever runs a model does so under the exchange's
guard, from the moment its body is read to the last byte of its answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar, TypeVarTuple

import attrs
import trio

from trio_infer._version import __version__
from trio_infer.api.generate import answer_generate, answer_generate_stream
from trio_infer.api.routes import Route, find_route
from trio_infer.errors import ErrorCode, InferError
from trio_infer.limits import Limits
from trio_infer.protocol.compression import Decompressor, choose_encoding, compress, parse_content_encoding
from trio_infer.protocol.infer import decode_request, encode_response, parse_header_length
from trio_infer.protocol.jsontext import dumps, error_json
from trio_infer.protocol.metadata import model_metadata, server_metadata
from trio_infer.protocol.values import InferResponse, ResponsePlan
from trio_infer.scheduling.catalog import Catalog, ServedModel
from trio_infer.wire.serve import JSON, Body, Exchange

__all__ = ["EXTENSIONS", "V2"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

EXTENSIONS: Final = ("model_configuration", "binary_tensor_data", "parameters")
"""The protocol's extensions that are served."""

OFF_THE_LOOP: Final = 256 * 1024
"""Bytes of JSON or of compressed data from which decoding and encoding go to a thread, so that other connections are
heard meanwhile: JSON takes some 20 ms a MiB, zlib 10."""

GROWTH: Final = 64
"""How much larger compressed bytes count when that is decided: deflate grows them by 1032 at most, so that 4 KiB, which
are inflated at once, may hold the loop up for some 10 ms and no longer."""

HEADER_LENGTH: Final = "inference-header-content-length"


@attrs.frozen(kw_only=True)
class V2:
    """The application behind every connection.

    Args:
        catalog: what is served.
        limits: bounds on bodies.
        name: of the server, in its metadata.
        draining: whether the server is on its way down.
    """

    catalog: Catalog
    limits: Limits
    name: str = "trio-infer"
    draining: Callable[[], bool] = lambda: False

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request, or raise the error that is to be answered."""
        route = find_route(exchange.target)
        if route is None:
            raise InferError("Not Found", ErrorCode.NOT_FOUND)
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
            await exchange.respond(200 if self.catalog.ready else 400, PLAIN)

    async def server(self, exchange: Exchange, route: Route) -> None:
        await _respond_json(exchange, server_metadata(self.name, __version__, EXTENSIONS))

    async def metadata(self, exchange: Exchange, route: Route) -> None:
        model = self.catalog.find_ready(route.model, route.version)
        versions = [route.version] if route.version else self.catalog.versions(route.model)
        platform = model.config.platform or model.config.backend
        await _respond_json(exchange, model_metadata(model.signature, versions, platform))

    async def model_ready(self, exchange: Exchange, route: Route) -> None:
        if not self.catalog.find(route.model, route.version).ready:
            raise InferError("Model version not ready")
        await exchange.respond(200, PLAIN)

    async def config(self, exchange: Exchange, route: Route) -> None:
        model = self.catalog.find_ready(route.model, route.version)
        await _respond_json(exchange, model.config.as_json())

    # -- Inference --------------------------------------------------------------------------------------------------

    async def infer(self, exchange: Exchange, route: Route) -> None:
        model = self._find(exchange, route)
        signature, life = model.signature, exchange.life
        if signature.decoupled:
            raise InferError(
                "HTTP end point doesn't support models with decoupled transaction policy: "
                f"'{signature.name}' gives any number of responses; use its generate_stream",
                ErrorCode.UNSUPPORTED,
            )
        given_length = exchange.header(HEADER_LENGTH.encode())
        body = await self._body(exchange, binary=given_length not in (None, "0"))
        with exchange.guard(model.on_disconnect):
            header_length = parse_header_length(given_length, len(body))
            request, plan = await _off_the_loop(
                len(body) if header_length is None else header_length,
                partial(decode_request, limits=self.limits, is_cancelled=lambda: life.cancelled),
                body,
                header_length,
                signature,
            )
            life.request_id = request.id
            responses: list[InferResponse] = []

            async def keep(response: InferResponse) -> None:
                responses.append(response)

            await model.infer(life, request, keep)
            if len(responses) != 1:
                raise InferError(f"expected a single response, got {len(responses)}", ErrorCode.INTERNAL)
            encoded = await _off_the_loop(
                _json_size(responses[0], plan),
                encode_response,
                responses[0],
                request,
                plan,
                signature,
            )
            headers = [("content-type", encoded.content_type)]
            if encoded.header_length is not None:
                headers.append((HEADER_LENGTH, str(encoded.header_length)))
            buffers = encoded.buffers
            encoding = choose_encoding(exchange.header(b"accept-encoding"))
            if encoding is not None:
                size = sum(len(buffer) for buffer in buffers)
                buffers = [await _off_the_loop(size, compress, encoding, buffers)]
                headers.append(("content-encoding", encoding))
            await exchange.respond(200, headers, buffers)

    async def generate(self, exchange: Exchange, route: Route) -> None:
        model = self._find(exchange, route)
        await answer_generate(exchange, model, await self._generate_body(exchange), self.limits)

    async def generate_stream(self, exchange: Exchange, route: Route) -> None:
        model = self._find(exchange, route)
        await answer_generate_stream(exchange, model, await self._generate_body(exchange), self.limits)

    def _find(self, exchange: Exchange, route: Route) -> ServedModel:
        model = self.catalog.find_ready(route.model, route.version)
        exchange.life.model, exchange.life.version = model.signature.name, model.signature.version
        return model

    async def _generate_body(self, exchange: Exchange) -> Body:
        if (exchange.header(b"content-encoding") or "identity").strip().lower() != "identity":
            raise InferError("Unsupported content-encoding, only 'identity' is supported.")
        return await self._body(exchange, binary=False)

    async def _body(self, exchange: Exchange, *, binary: bool) -> Body:
        """The request's body, decompressed.

        Args:
            binary: it announces binary tensors, on which Triton has no limit and we have a larger one.
        """
        encoding = parse_content_encoding(exchange.header(b"content-encoding"))  # refuses unknown ones, unread
        limits = self.limits
        if binary and encoding is None:
            return await exchange.body(limits.max_body_size, _too_large(exchange, limits.max_body_size, 413))
        if limits.max_body_size < limits.http_max_input_size:
            limit, status = limits.max_body_size, 413
        else:
            limit, status = limits.http_max_input_size, 400
        body = await exchange.body(limit, _too_large(exchange, limit, status))
        if encoding is None:
            return body
        decompressor = Decompressor(encoding, limits.http_max_input_size)
        return await _off_the_loop(len(body) * GROWTH, _decompress, decompressor, body)


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
}


async def _respond_json(exchange: Exchange, value: object) -> None:
    await exchange.respond(200, [JSON], [dumps(value)])


def _too_large(exchange: Exchange, limit: int, status: int) -> InferError:
    length = exchange.content_length
    size = "more than that" if length is None else f"{length} bytes"
    option = "--http-max-input-size" if status == 400 else "--max-body-size"
    return InferError(
        f"request body exceeds the maximum allowed size of {limit} bytes, got {size}. "
        f"Use {option} to increase the limit.",
        status=status,
    )


def _json_size(response: InferResponse, plan: ResponsePlan) -> int:
    """About how many bytes of the response go as JSON."""
    given = response.outputs.items()  # anything that numpy can make an array of; lists are not worth measuring
    return sum(getattr(array, "nbytes", 0) for name, array in given if not plan.is_binary(name))


def _decompress(decompressor: Decompressor, body: Body) -> bytearray:
    data = bytearray(decompressor.feed(body))
    decompressor.finish()
    return data


async def _off_the_loop(size: int, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
    """Call a function that takes time with `size`: in a thread if that is worth a thread's 0.2 ms."""
    if size < OFF_THE_LOOP:
        return function(*args)
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)
