"""`infer`: tensors in, tensors out, one response; in every dialect that has it.

Dialects differ in how they say where a body's JSON ends and its binary tensors begin, in a request and in an answer;
that is a `Framing`. All else is the same, whichever way a request came in.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Protocol

import attrs

from trio_infer.api.bodies import OFF_THE_LOOP, off_the_loop, read_body
from trio_infer.api.header_patterns import HeaderPattern
from trio_infer.api.regions import RegionRegistry
from trio_infer.errors import ErrorCode, InferError
from trio_infer.limits import Limits
from trio_infer.protocol.compression import choose_encoding, compress
from trio_infer.protocol.infer import EncodedResponse, decode_request, encode_response, parse_header_length
from trio_infer.protocol.regions import NO_REGIONS
from trio_infer.protocol.values import InferResponse, ResponsePlan
from trio_infer.scheduling.catalog import ServedModel
from trio_infer.wire.headers import Headers
from trio_infer.wire.serve import Exchange

__all__ = ["BY_HEADER", "Framing", "answer_infer"]


class Framing(Protocol):
    """How a dialect says how many bytes of a body are JSON, with binary tensors behind them.

    Attributes:
        name: of what says it, for messages.
        takes_nothing: whether an empty body is a tensor without elements, as in Triton's own dialect, or a mistake.
    """

    @property
    def name(self) -> str: ...
    @property
    def takes_nothing(self) -> bool: ...

    def announced(self, exchange: Exchange) -> str | None:
        """What the request says, as it stands there; None if it says nothing, and all is JSON."""

    def headers(self, encoded: EncodedResponse) -> Headers:
        """What says it in an answer, its content type included."""


class _ByHeader:
    """Triton's own way: a header beside the content type."""

    name = "Inference-Header-Content-Length"
    takes_nothing = True

    def announced(self, exchange: Exchange) -> str | None:
        return exchange.header(b"inference-header-content-length")

    def headers(self, encoded: EncodedResponse) -> Headers:
        headers = [("content-type", encoded.content_type)]
        if encoded.header_length is not None:
            headers.append(("inference-header-content-length", str(encoded.header_length)))
        return headers


COPYING: Final = 64
"""How much less a byte of shared memory counts than one of JSON, when it is decided whether a thread is worth while:
16 MiB, which are copied at once, hold the loop up for some 5 ms."""

BY_HEADER: Final[Framing] = _ByHeader()


async def answer_infer(
    exchange: Exchange,
    model: ServedModel,
    limits: Limits,
    framing: Framing = BY_HEADER,
    *,
    compressed: bool = True,
    forwarded: HeaderPattern | None = None,
    regions: RegionRegistry | None = None,
) -> None:
    """Read an infer request, run it, and answer with its one response.

    Args:
        model: of any kind; decoupled ones are refused, unless they say what all their responses are as one.
        limits: on the body.
        framing: of the dialect.
        compressed: the answer may be, if the client takes that.
        forwarded: which headers become parameters of the request; one that it has already stays as it is.
        regions: of shared memory; None if clients may not use any.

    Raises:
        InferError: the request is wrong, or the model says so.
    """
    signature, life = model.signature, exchange.life
    if signature.decoupled and not model.collects:
        raise InferError(
            "HTTP end point doesn't support models with decoupled transaction policy: "
            f"'{signature.name}' gives any number of responses; use its generate_stream",
            ErrorCode.UNSUPPORTED,
        )
    announced = framing.announced(exchange)
    body = await read_body(exchange, limits, binary=announced not in (None, "0"))
    if not body and not framing.takes_nothing:
        raise InferError("the request has no body: expected an inference request as JSON")
    with exchange.guard(model.on_disconnect):
        header_length = parse_header_length(announced, len(body), framing.name)
        size = len(body) if header_length is None else header_length
        if regions is not None and size < OFF_THE_LOOP and b"shared_memory_region" in bytes(body[:size]):
            size += regions.byte_size // COPYING
        request, plan = await off_the_loop(
            size,
            partial(decode_request, limits=limits, is_cancelled=lambda: life.cancelled, regions=regions or NO_REGIONS),
            body,
            header_length,
            signature,
        )
        if forwarded is not None:
            parameters = {**forwarded.parameters(exchange.headers()), **request.parameters}
            request = attrs.evolve(request, parameters=parameters)
        life.request_id = request.id
        responses: list[InferResponse] = []

        async def keep(response: InferResponse) -> None:
            responses.append(response)

        await model.infer(life, request, keep)
        response = model.collect(responses)
        if response is None:
            raise InferError(f"expected a single response, got {len(responses)}", ErrorCode.INTERNAL)
        encoded = await off_the_loop(_work(response, plan), encode_response, response, request, plan, signature)
        headers, buffers = framing.headers(encoded), encoded.buffers
        encoding = choose_encoding(exchange.header(b"accept-encoding")) if compressed else None
        if encoding is not None:
            size = sum(len(buffer) for buffer in buffers)
            buffers = [await off_the_loop(size, compress, encoding, buffers)]
            headers.append(("content-encoding", encoding))
        await exchange.respond(200, headers, buffers)


def _work(response: InferResponse, plan: ResponsePlan) -> int:
    """About how much work it is to encode the response, in bytes of JSON."""
    work = 0
    for name, array in response.outputs.items():
        wanted = plan.find(name)
        if wanted is not None and not wanted.binary:
            # Anything that numpy can make an array of; lists are not worth measuring.
            work += getattr(array, "nbytes", 0) // (COPYING if wanted.place else 1)
    return work
