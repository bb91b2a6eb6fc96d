"""`generate` and `generate_stream`: plain JSON keys in and out, as one object or as a stream of server-sent events."""

from __future__ import annotations

from functools import partial
from typing import Final

from trio_infer.api.bodies import off_the_loop, read_plain_body
from trio_infer.errors import InferError
from trio_infer.limits import Limits
from trio_infer.protocol.generate import decode_generate, encode_generate, sse_event
from trio_infer.protocol.jsontext import error_json
from trio_infer.protocol.values import InferResponse
from trio_infer.scheduling.catalog import ServedModel
from trio_infer.wire.serve import JSON, Exchange

__all__ = ["answer_generate", "answer_generate_stream"]

EVENT_STREAM: Final = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]


async def answer_generate(exchange: Exchange, model: ServedModel, limits: Limits) -> None:
    """One response as one JSON object.

    A model may say what its responses are as one. If it doesn't, a second response stops it: there can be no answer any
    more.
    """
    body = await read_plain_body(exchange, limits)
    life = exchange.life
    with exchange.guard(model.on_disconnect):
        decode = partial(decode_generate, limits=limits, is_cancelled=lambda: life.cancelled)
        request = await off_the_loop(len(body), decode, body, model.signature)
        life.request_id = request.id
        responses: list[InferResponse] = []

        async def keep(response: InferResponse) -> None:
            if responses and not model.collects:
                raise _not_one_response()
            responses.append(response)

        await model.infer(life, request, keep)
        response = model.collect(responses)
        if response is None:
            raise _not_one_response()
        await exchange.respond(200, [JSON], [encode_generate(response, request, model.signature)])


def _not_one_response() -> InferError:
    # 200 is what Triton answers here: the status of the first response, which was fine.
    return InferError(
        "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
        "number of responses",
        status=200,
    )


async def answer_generate_stream(exchange: Exchange, model: ServedModel, limits: Limits) -> None:
    """Each response as one event, sent when the model gives it; an error before the first is an ordinary answer."""
    body = await read_plain_body(exchange, limits)
    life = exchange.life
    with exchange.guard(model.on_disconnect):
        decode = partial(decode_generate, limits=limits, is_cancelled=lambda: life.cancelled)
        request = await off_the_loop(len(body), decode, body, model.signature)
        life.request_id = request.id

        async def pass_on(response: InferResponse) -> None:
            event = sse_event(encode_generate(response, request, model.signature))
            if not exchange.streaming:
                await exchange.start_stream(200, EVENT_STREAM, _last_words)
            await exchange.send_part(event)

        await model.infer(life, request, pass_on)
        if not exchange.streaming:
            await exchange.start_stream(200, EVENT_STREAM, _last_words)
        await exchange.end_stream()


def _last_words(message: str) -> bytes:
    return sse_event(error_json(message))
