"""Batches of a native model: several requests joined to one along the first dimension, and its response split again.

Joining copies each input once, to where its rows lie in the batch; splitting copies nothing, as each client's outputs
are views of the model's. A batch runs in a task of its own, under a cancel scope of its own: the clients' tasks only
wait for their part. One that leaves is passed over when the response is split, or already when the batch is joined if
it leaves before that; the last one to leave cancels the scope, and the model gets `trio.Cancelled` as if it had run for
one client.

A request that makes the model raise shouldn't cost others their answers. Which one it was can't be told from the
exception, so each is then run by itself, one after the other, in the same instance: those that raise again are told so,
the others get their answers late.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import attrs
import numpy as np
import trio

from trio_infer.errors import ErrorCode, InferError
from trio_infer.models.ragged import batch_inputs, flat, scatter
from trio_infer.models.runner import Attend, Instance
from trio_infer.protocol.model_config import Ragged
from trio_infer.protocol.values import Array, InferRequest, InferResponse, Send

__all__ = ["AT_ONCE", "begin_joined", "join", "split"]

AT_ONCE: Final = 4
"""Clients' tasks that are woken in one tick of the loop. What runs next in the instance begins before them, and if it
does so in a thread, that gets the GIL between two ticks, and not after all their encoding: with 32 clients, a pause of
3 ms between two batches in place of 5 (measured)."""

NOTHING_RAGGED: Final = Ragged()

Infer = Callable[[InferRequest], Awaitable[InferResponse]]

log: logging.Logger = logging.getLogger("trio_infer.models")


def join(requests: Sequence[InferRequest], ragged: Ragged = NOTHING_RAGGED) -> InferRequest:
    """Several requests as one.

    Args:
        requests: of one model, with inputs of the same names, and shapes that differ only in the first dimension.
        ragged: which inputs may differ in any way; see `ragged`.

    Returns:
        their rows in one request, which has them as its `parts`. It asks for all that any of them asks for, and is
        cancelled when they all are.
    """
    first = requests[0]
    inputs: dict[str, Array] = {}
    for name in first.inputs:
        arrays = [request.inputs[name] for request in requests]
        inputs[name] = flat(arrays) if name in ragged.inputs else np.concatenate(arrays)
    inputs |= batch_inputs(ragged, [request.inputs for request in requests])
    wanted: tuple[str, ...] = ()
    if all(request.requested_outputs for request in requests):
        wanted = tuple(dict.fromkeys(name for request in requests for name in request.requested_outputs))
    return InferRequest(
        first.model_name,
        first.model_version,
        inputs,
        requested_outputs=wanted,
        is_cancelled=lambda: all(request.is_cancelled() for request in requests),
        parts=tuple(requests),
    )


def split(
    response: InferResponse, requests: Sequence[InferRequest], ragged: Ragged = NOTHING_RAGGED
) -> list[InferResponse]:
    """The response to a joined request as one for each.

    Args:
        requests: that it was joined from.
        ragged: which outputs are taken apart like an input.

    Raises:
        InferError: INTERNAL: an output doesn't have as many rows as the inputs, or elements as its input.
    """
    rows = [_rows(request) for request in requests]
    ends = np.cumsum(rows).tolist()
    parts: list[dict[str, Array]] = [{} for _ in requests]
    for name, array in response.outputs.items():
        if name in ragged.scattered:
            sources = [request.inputs[ragged.scattered[name]] for request in requests]
            try:
                pieces = scatter(np.asarray(array), sources)
            except ValueError as error:
                raise InferError(f"output '{name}' of a ragged batch has {error}", ErrorCode.INTERNAL) from None
        else:
            shape = np.shape(array)
            if not shape or shape[0] != ends[-1]:
                must = f"must have {ends[-1]} rows, as its inputs have"
                raise InferError(f"output '{name}' of a batch {must}, got shape {list(shape)}", ErrorCode.INTERNAL)
            pieces = [array[end - count : end] for count, end in zip(rows, ends, strict=True)]
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return [InferResponse(part, response.parameters) for part in parts]


def _rows(request: InferRequest) -> int:
    return int(next(iter(request.inputs.values())).shape[0])


def begin_joined(
    infer: Infer, batch: Sequence[tuple[Instance, InferRequest]], name: str, ragged: Ragged = NOTHING_RAGGED
) -> Sequence[Attend]:
    """Run requests as one; see `Batches.begin_batch`.

    Args:
        infer: the model, for one request.
        name: the model's.
        ragged: see `join`.
    """
    joined = _Joined(infer, [_Member(instance, request) for instance, request in batch], name, ragged)
    for instance, _ in batch:
        instance.begin()
    trio.lowlevel.spawn_system_task(joined.run, name=f"<batch of {name}>")
    return [partial(joined.attend, member) for member in joined.members]


@attrs.define(eq=False)
class _Member:
    instance: Instance
    request: InferRequest
    left: bool = False
    told: trio.Event = attrs.field(factory=trio.Event)
    response: InferResponse | None = None
    error: Exception | None = None

    def tell(self, result: InferResponse | Exception) -> None:
        if isinstance(result, InferResponse):
            self.response = result
        else:
            self.error = result
        self.told.set()


class _Joined:
    def __init__(self, infer: Infer, members: Sequence[_Member], name: str, ragged: Ragged) -> None:
        self.members = members
        self._name = name
        self._ragged = ragged
        self._infer = infer
        self._scope = trio.CancelScope()

    async def attend(self, member: _Member, send: Send) -> None:
        """In the request's task: wait for its part."""
        try:
            await member.told.wait()
        finally:
            member.left = True
            if all(other.left for other in self.members):
                self._scope.cancel(reason="all clients of the batch have left")
        if member.error is not None:
            raise member.error
        assert member.response is not None
        await send(member.response)

    async def run(self) -> None:
        """In a system task, which nothing but its cancellation may leave."""
        members = [member for member in self.members if not member.left]
        gone = InferError("the batch was stopped", ErrorCode.UNAVAILABLE)
        results: Sequence[InferResponse | Exception] = [gone for _ in members]  # told to nobody: they have all left
        try:
            with self._scope:
                results = await self._results(members)
        except trio.Cancelled:
            raise  # the run ends
        except BaseException as error:  # `sys.exit`, or what was raised beside a `Cancelled`; here it would stop trio
            log.exception("model '%s' left its batch by %s", self._name, type(error).__name__)
            text = f"the model left its batch by {type(error).__name__}: {error}"
            results = [InferError(text, ErrorCode.INTERNAL) for _ in members]
        finally:
            for member in self.members:
                member.instance.end()
        for number, (member, result) in enumerate(zip(members, results, strict=True)):
            if number % AT_ONCE == 0:
                await trio.lowlevel.cancel_shielded_checkpoint()
            member.tell(result)

    async def _results(self, members: Sequence[_Member]) -> Sequence[InferResponse | Exception]:
        if len(members) == 1:
            return [await self._alone(members[0])]
        began = time.perf_counter_ns()
        try:
            requests = [member.request for member in members]
            results = split(await self._infer(join(requests, self._ragged)), requests, self._ragged)
        except Exception:
            return [await self._alone(member) for member in members]
        ended = time.perf_counter_ns()
        for member in members:
            member.instance.timing.infer_began, member.instance.timing.infer_ended = began, ended
        return results

    async def _alone(self, member: _Member) -> InferResponse | Exception:
        if member.left:
            return InferResponse({})  # nobody takes it
        timing = member.instance.timing
        timing.infer_began = time.perf_counter_ns()
        try:
            return await self._infer(member.request)
        except Exception as error:
            return error
        finally:
            timing.infer_ended = time.perf_counter_ns()
