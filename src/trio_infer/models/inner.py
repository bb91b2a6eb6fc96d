"""A request that a model makes of another model, in the trio thread: whose child it is, and how its end is told."""

from __future__ import annotations

import logging

import attrs

from trio_infer.errors import ErrorCode, InferError
from trio_infer.lifecycle import StandIn
from trio_infer.models.host import Host
from trio_infer.protocol.values import InferRequest, Send

__all__ = ["ask"]

log: logging.Logger = logging.getLogger("trio_infer.models")


async def ask(host: Host, parent: StandIn, request: InferRequest, send: Send) -> InferError | None:
    """Have a model answer another one.

    Args:
        host: the server.
        parent: stands for the requests that the asking model is working on; cancelled with the last of them, and by the
            caller when nobody wants the rest.
        request: what is asked.
        send: takes each response in turn.

    Returns:
        what went wrong, after the responses that were sent; CANCELLED if it was cancelled.

    Cancellation: as that of a client's request.
    """
    name = request.model_name
    request = attrs.evolve(request, is_cancelled=lambda: parent.cancelled)
    error: InferError | None = None
    try:
        if host.is_model_ready(name, request.model_version):
            await host.infer(parent, request, send)
        else:
            error = InferError(
                f"Failed for execute the inference request. Model '{name}' is not ready.", ErrorCode.UNAVAILABLE
            )
    except InferError as raised:
        error = raised
        if (
            raised.__cause__ is not None and not parent.cancelled
        ):  # the model's own fault, which only its author can mend
            log.error("model '%s' failed for another model", name, exc_info=raised.__cause__)
    except Exception as raised:
        log.exception("model '%s' failed for another model", name)
        error = InferError(f"{type(raised).__name__}: {raised}", ErrorCode.INTERNAL)
    finally:
        parent.leave()
    return (
        InferError(f"the request of model '{name}' was cancelled", ErrorCode.CANCELLED) if parent.cancelled else error
    )
