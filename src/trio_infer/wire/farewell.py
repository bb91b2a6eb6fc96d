"""Deadlines of requests, and what a client is told whose request was stopped while it was still there.

A client that has left, or does not read, is told nothing. The others are: in place of the answer an error with the
reason's status, or as the last event of a stream whose status has gone out.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from trio_infer.errors import InferError
from trio_infer.lifecycle import STATUS, CancelReason, Life

__all__ = ["DEADLINE_HEADER", "UNREACHABLE", "Deadline", "farewell", "read_deadline"]

DEADLINE_HEADER: Final = b"inference-timeout-ms"

LONGEST: Final = 2**31 - 1
"""Milliseconds; 24 days."""

UNREACHABLE: Final = frozenset({CancelReason.DISCONNECTED, CancelReason.STALLED})
"""Reasons after which there is nobody to tell."""

_NUMBER: Final = re.compile(r"[0-9]{1,10}")


@attrs.frozen
class Deadline:
    """How long a request may take, from the arrival of its head to the last byte of its answer.

    Args:
        milliseconds: more than 0.
        source: who says so, for the message.
    """

    milliseconds: int
    source: str


def read_deadline(header: str | None, most: int) -> Deadline | None:
    """The deadline of one request.

    Args:
        header: the value of `Inference-Timeout-Ms`, if there is one.
        most: milliseconds that the server allows any request; 0 for no bound.

    Raises:
        InferError: the header is no number of milliseconds.
    """
    own = None
    if header is not None:
        text = header.strip()
        if not _NUMBER.fullmatch(text) or not 0 < int(text) <= LONGEST:
            got = text if len(text) <= 40 else f"{text[:37]}..."
            raise InferError(
                f"Inference-Timeout-Ms must be a whole number of milliseconds, 1 to {LONGEST}, got {got!r}"
            )
        own = int(text)
    if own is not None and (not most or own <= most):
        return Deadline(own, "its Inference-Timeout-Ms")
    return Deadline(most, "the server's --request-timeout-ms") if most else None


def farewell(life: Life, deadline: Deadline | None) -> tuple[int, str]:
    """The status and the words for a client that is still there.

    Args:
        life: cancelled, with a reason that is not among the `UNREACHABLE`.
        deadline: of this request, if it had one.
    """
    assert life.reason is not None
    assert life.struck is not None
    where = life.struck.value
    match life.reason:
        case CancelReason.SHUTDOWN:
            words = "cancelled: the server is shutting down"
        case CancelReason.DEADLINE if deadline is not None:
            words = f"deadline passed while {where}: the request had {deadline.milliseconds} ms ({deadline.source})"
        case CancelReason.REQUESTED:
            words = f"cancelled by request while {where}"
        case CancelReason.UNLOADED:
            words = f"cancelled while {where}: model '{life.model}' is being unloaded"
        case reason:
            words = f"cancelled while {where}: {reason.value}"
    return STATUS[life.reason], words
