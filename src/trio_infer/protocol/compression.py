"""gzip and deflate, both ways, with a bound on what a small body may grow into.

Inflating happens a piece at a time and never beyond the bound: zlib is told how much it may give (`max_length`), so a
bomb costs the bound's memory plus one byte, not its own size. Whoever feeds decides when to yield to others: a piece of
64 KiB may become 64 MiB (1:1032 at most).

- A gzip body may have several members, as RFC 1952 says; their number is bounded, since finding where one ends costs a
  copy of what follows it.
- *deflate* means the zlib format (RFC 9110); some clients send the bare stream, so that is taken too. Two bytes tell
  the formats apart.
- A stream that ends early, or has anything behind its end, is refused: half a tensor must not pass for a whole one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Any, Final

from trio_infer.errors import ErrorCode, InferError
from trio_infer.protocol.shapes import check_size

__all__ = ["Decompressor", "choose_encoding", "compress", "parse_content_encoding"]

_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's window bits also choose the format
_PIECE: Final = 2**16
_MAX_MEMBERS: Final = 1024
_LEVEL: Final = 1  # nginx's gzip_comp_level: most of the gain for a fifth of level 6's time

_QUALITY: Final = re.compile(r"\s*q\s*=\s*([01](?:\.[0-9]*)?|\.[0-9]+)\s*", re.IGNORECASE)


def parse_content_encoding(value: str | None) -> str | None:
    """How a request's body is compressed.

    Args:
        value: the header `Content-Encoding`, or None.

    Returns:
        `gzip` or `deflate`; None if it is not compressed.

    Raises:
        InferError: anything else (UNSUPPORTED, 501).
    """
    encoding = (value or "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "deflate"):
        raise _unsupported(encoding)
    return encoding


def _unsupported(encoding: str) -> InferError:
    return InferError(
        f"Unsupported compression type (got {encoding[:40]!r}, expected gzip or deflate)", ErrorCode.UNSUPPORTED
    )


class Decompressor:
    """Inflates a body that arrives in pieces.

    Args:
        encoding: `gzip` or `deflate`.
        max_size: most bytes that may come out, over all pieces.

    Raises:
        InferError: another encoding (UNSUPPORTED).
    """

    def __init__(self, encoding: str, max_size: int) -> None:
        if encoding not in ("gzip", "deflate"):
            raise _unsupported(encoding)
        self._encoding = encoding
        self._max_size = max_size
        self._size = 0
        self._members = 0
        self._head = b""
        self._stream: Any = None

    def feed(self, chunk: bytes | bytearray | memoryview) -> bytes:
        """What comes out of the next bytes.

        Args:
            chunk: of any size, also none.

        Raises:
            InferError: more than `max_size` in all, not the format, or something behind the end.
        """
        view = memoryview(chunk)
        out = [self._inflate(bytes(view[start : start + _PIECE])) for start in range(0, len(view), _PIECE)]
        return b"".join(out)

    def finish(self) -> None:
        """Say that there is no more.

        Raises:
            InferError: the stream isn't complete.
        """
        if self._head or self._stream is None or not self._stream.eof:
            raise InferError(f"the request's {self._encoding} body ends before its compressed data does")

    def _inflate(self, data: bytes) -> bytes:
        out = []
        while data:
            if self._stream is None or self._stream.eof:
                data = self._open(data)
                if not data:
                    break
            try:
                inflated = self._stream.decompress(data, self._max_size - self._size + 1)
            except zlib.error as error:
                raise InferError(f"the request's body is not valid {self._encoding} data: {error}") from None
            self._size += len(inflated)
            check_size(self._size, self._max_size, "Decompressed request body")
            out.append(inflated)
            # As long as the bound isn't reached, zlib leaves nothing unconsumed.
            data = self._stream.unused_data
        return b"".join(out)

    def _open(self, data: bytes) -> bytes:
        """Start a stream, if there are bytes enough to tell which; returns the bytes to give it."""
        if self._stream is not None and self._encoding == "deflate":
            raise InferError("the request's deflate body has data behind its end")
        if self._encoding == "gzip":
            self._members += 1
            if self._members > _MAX_MEMBERS:
                raise InferError(f"the request's gzip body has more than {_MAX_MEMBERS} members")
            self._stream = zlib.decompressobj(_GZIP)
            return data
        data, self._head = self._head + data, b""
        if len(data) < 2:
            self._head = data
            return b""
        first, second = data[0], data[1]
        zlib_format = first & 0x0F == 8 and first >> 4 <= 7 and (first << 8 | second) % 31 == 0
        self._stream = zlib.decompressobj(_ZLIB if zlib_format else _RAW)
        return data


def choose_encoding(accept_encoding: str | None) -> str | None:
    """How to compress an answer.

    Args:
        accept_encoding: the request's header, or None.

    Returns:
        Of gzip, deflate and identity the one that is wanted most, the first named of equals; None for identity, and if
        none of them is wanted. What can't be read is passed over, `*` too.
    """
    best, best_quality = None, 0.0
    for item in (accept_encoding or "").split(","):
        name, *options = item.split(";")
        encoding = name.strip().lower()
        quality = 1.0
        if options:
            match = _QUALITY.fullmatch(options[0])
            quality = float(match[1]) if match else 0.0
        if encoding in ("gzip", "deflate", "identity") and best_quality < quality <= 1:
            best, best_quality = encoding, quality
    return None if best == "identity" else best


def compress(encoding: str, buffers: Iterable[bytes | memoryview]) -> bytes:
    """Compress an answer's body.

    Args:
        encoding: `gzip` or `deflate`.
        buffers: the body, in order.
    """
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, {"gzip": _GZIP, "deflate": _ZLIB}[encoding])
    return b"".join([*map(stream.compress, buffers), stream.flush()])
