"""Bodies of requests, decompressed and within bounds; and work on large ones, off the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, TypeVarTuple

import trio

from trio_infer.errors import InferError
from trio_infer.limits import Limits
from trio_infer.protocol.compression import Decompressor, parse_content_encoding
from trio_infer.wire.serve import Body, Exchange

__all__ = ["off_the_loop", "read_body", "read_plain_body"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

OFF_THE_LOOP: Final = 256 * 1024
"""Bytes of JSON or of compressed data from which decoding and encoding go to a thread, so that other connections are
heard meanwhile: JSON takes some 20 ms a MiB, zlib 10."""

GROWTH: Final = 64
"""How much larger compressed bytes count when that is decided: deflate grows them by 1032 at most, so that 4 KiB, which
are inflated at once, may hold the loop up for some 10 ms and no longer."""


async def read_body(exchange: Exchange, limits: Limits, *, binary: bool = False) -> Body:
    """The request's body, decompressed.

    Args:
        limits: on its size.
        binary: it announces binary tensors, on which Triton has no limit and we have a larger one.

    Raises:
        InferError: too large, or compressed in an unknown or a broken way.
    """
    encoding = parse_content_encoding(exchange.header(b"content-encoding"))  # refuses unknown ones, unread
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
    return await off_the_loop(len(body) * GROWTH, _decompress, decompressor, body)


async def read_plain_body(exchange: Exchange, limits: Limits) -> Body:
    """As `read_body`, but the body must not be compressed.

    Raises:
        InferError: it is, or it is too large.
    """
    if (exchange.header(b"content-encoding") or "identity").strip().lower() != "identity":
        raise InferError("Unsupported content-encoding, only 'identity' is supported.")
    return await read_body(exchange, limits)


async def off_the_loop(size: int, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
    """Call a function that takes time with `size`: in a thread if that is worth a thread's 0.2 ms."""
    if size < OFF_THE_LOOP:
        return function(*args)
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)


def _too_large(exchange: Exchange, limit: int, status: int) -> InferError:
    length = exchange.content_length
    size = "more than that" if length is None else f"{length} bytes"
    option = "--http-max-input-size" if status == 400 else "--max-body-size"
    return InferError(
        f"request body exceeds the maximum allowed size of {limit} bytes, got {size}. "
        f"Use {option} to increase the limit.",
        status=status,
    )


def _decompress(decompressor: Decompressor, body: Body) -> bytearray:
    data = bytearray(decompressor.feed(body))
    decompressor.finish()
    return data
