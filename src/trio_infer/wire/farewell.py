"""What a client is told whose request was stopped while it was still there.

A client that has left, or does not read, is told nothing. The others are: in place of the answer an error with the
reason's status, or as the last event of a stream whose status has gone out.
"""

from __future__ import annotations

from typing import Final

from trio_infer.lifecycle import STATUS, CancelReason, Life
from trio_infer.wire.deadline import Deadline

__all__ = ["UNREACHABLE", "farewell"]

UNREACHABLE: Final = frozenset({CancelReason.DISCONNECTED, CancelReason.STALLED})
"""Reasons after which there is nobody to tell."""


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
        case CancelReason.SEQUENCE:
            words = f"cancelled while {where}: a request before it in its sequence was cancelled"
        case reason:
            words = f"cancelled while {where}: {reason.value}"
    return STATUS[life.reason], words
