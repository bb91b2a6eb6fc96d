"""A request that a model makes of another model, in the trio thread: whose child it is, and how its end is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs
import trio

from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import Life, StandIn
from trio_infer.models.host import Host
from trio_infer.protocol.values import InferRequest, Send

__all__ = ["ask"]

log: logging.Logger = logging.getLogger("trio_infer.models")


async def ask(
    host: Host, lives: Sequence[Life], request: InferRequest, send: Send, scope: trio.CancelScope
) -> InferError | None:
    """Have a model answer another one.

    Args:
        host: the server.
        lives: of the requests that the asking model is working on; the inner one is cancelled when the last of them is.
            None of them if it asks of its own accord.
        request: what it asks.
        send: takes each response in turn.
        scope: cancelled by the caller when nobody wants the rest.

    Returns:
        what went wrong, after the responses that were sent; CANCELLED if it was cancelled in either way.

    Cancellation: as that of a client's request.
    """
    parent = lives[0] if len(lives) == 1 else StandIn(lives)
    name = request.model_name
    request = attrs.evolve(request, is_cancelled=lambda: parent.cancelled or scope.cancel_called)
    error: InferError | None = None
    with scope:
        try:
            if host.is_model_ready(name, request.model_version):
                await host.infer(parent, request, send)
            else:
                error = InferError(
                    f"Failed for execute the inference request. Model '{name}' is not ready.", ErrorCode.UNAVAILABLE
                )
        except InferError as raised:
            error = raised
            if raised.__cause__ is not None:  # the model's own fault, which only its author can mend
                log.error("model '%s' failed for another model", name, exc_info=raised.__cause__)
        except Exception as raised:
            log.exception("model '%s' failed for another model", name)
            error = InferError(f"{type(raised).__name__}: {raised}", ErrorCode.INTERNAL)
        finally:
            if isinstance(parent, StandIn):
                parent.leave()
    if parent.cancelled or scope.cancelled_caught:
        return InferError(f"the request of model '{name}' was cancelled", ErrorCode.CANCELLED)
    return error
