"""The sentinel's truth table: what one look at a connection may show, and what follows from it.

The whole of the sentinel's judgement is `verdict`, a table look-up; the docs draw their table from the same rows.
"""

from __future__ import annotations

import enum
from typing import Final

from trio_infer.limits import DisconnectPolicy

__all__ = ["ROWS", "Action", "Sight", "verdict"]


class Sight(enum.Enum):
    """What one look shows (for a socket: what `recv(1, MSG_PEEK)` says)."""

    QUIET = "nothing to read"
    """EAGAIN, EWOULDBLOCK or EINTR: a spurious wake-up."""
    DATA = "bytes of a next request"
    """One byte: the client pipelines. It stays where it is."""
    EOF = "end of stream"
    """Closed or half-closed: the kernel can't tell which, both are CLOSE_WAIT."""
    RESET = "reset"
    """ECONNRESET, EPIPE, ETIMEDOUT, ...: reset, or keepalive gave up."""


class Action(enum.Enum):
    """What the sentinel does next."""

    WAIT = "keeps waiting"
    CANCEL = "cancels the inference"
    DISARM = "is disarmed until this request ends"
    WATCH_HANGUP = "sleeps through the bytes, and cancels at a FIN or a reset behind them"
    WATCH_RESET = "sleeps through the end of stream, and cancels at a reset"


ROWS: Final = (
    # the look shows, half_close, pipelined, so the sentinel ("*": whatever the policy)
    (Sight.QUIET, "*", "*", Action.WAIT),
    (Sight.RESET, "*", "*", Action.CANCEL),
    (Sight.EOF, "gone", "*", Action.CANCEL),
    (Sight.EOF, "wait", "*", Action.WATCH_RESET),
    (Sight.DATA, "*", "disarm", Action.DISARM),
    (Sight.DATA, "gone", "watch", Action.WATCH_HANGUP),
    (Sight.DATA, "wait", "watch", Action.WATCH_RESET),
)

_TABLE: Final = {
    (sight, half_close, pipelined): action
    for sight, row_half_close, row_pipelined, action in ROWS
    for half_close in ("gone", "wait")
    for pipelined in ("disarm", "watch")
    if row_half_close in ("*", half_close) and row_pipelined in ("*", pipelined)
}


def verdict(sight: Sight, policy: DisconnectPolicy) -> Action:
    """What the sentinel does after `sight` under `policy`."""
    return _TABLE[sight, policy.half_close, policy.pipelined]
