"""What heads say that h11 has no word for: how a body is delimited, the date, the reason phrases."""

from __future__ import annotations

import time
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, TypeAlias

__all__ = ["REASONS", "Headers", "framing", "http_date"]

Headers: TypeAlias = "list[tuple[str, str]]"

REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus} | {499: b"Client Closed Request"}


def framing(headers: Iterable[tuple[bytes, bytes]]) -> tuple[int | None, bool]:
    """How a request's body is delimited, by headers that h11 has checked.

    Returns:
        its length, None if it comes in chunks; and whether the headers say both, in which case chunks win.
    """
    length, chunked = None, False
    for name, value in headers:
        if name == b"transfer-encoding":
            chunked = True
        elif name == b"content-length":
            length = int(value)
    return (None, length is not None) if chunked else (length or 0, False)


_date: tuple[int, str] = (0, "")


def http_date() -> str:
    """The value of `Date`, made once a second."""
    global _date
    now = int(time.time())
    if _date[0] != now:
        _date = (now, formatdate(now, usegmt=True))
    return _date[1]
