"""Calls a model's `execute` for one request, in the model's thread, and judges what it gives.

An `async def execute` gets an asyncio event loop of its own for each request. Tasks that it leaves behind are cancelled
when it returns; a model that wants to stream after that keeps a loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import trio

from trio_infer.errors import ErrorCode, InferError
from trio_infer.models.triton_imports import ModelCode
from trio_infer.models.triton_messages import InferenceRequest, InferenceResponse, Outlet
from trio_infer.models.triton_tensors import Tensor, reshaped, wire_array
from trio_infer.models.triton_work import Work
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.values import InferRequest, InferResponse, Signature

__all__ = ["Executor", "Loaded"]


@attrs.frozen(eq=False)
class Loaded:
    """One instance of a model: its code, and the model object made from it."""

    name: str
    code: ModelCode
    model: Any


class _BadReturnError(Exception):
    """`execute` gave what it must not give."""


class Executor:
    """Knows how requests look to a model.

    Args:
        signature: the model's.
        reshapes: by tensor name, the dims that clients see and those that the model sees.
    """

    def __init__(self, signature: Signature, reshapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self._datatypes = {spec.name: spec.datatype for spec in signature.inputs}
        self._outputs = [spec.name for spec in signature.outputs]
        self._reshapes = reshapes
        self._batched = signature.max_batch_size > 0
        self._decoupled = signature.decoupled

    def execute(self, loaded: Loaded, work: Work, request: InferRequest) -> InferResponse | None:
        """Run the model.

        Returns:
            the response that the model's `execute` returned; None if it comes, or came, by a sender.

        Raises:
            InferError: the response is an error, or the model failed; then its cause is what the model raised.
            trio.Cancelled: the model used `trio.from_thread.check_cancelled`.
        """
        if not work.start():
            return None
        expect_more = False
        failure: InferError | None = None
        try:
            response = self._call(loaded, work, request, partial(self._encode, request))
            expect_more = response is None
        except trio.Cancelled:
            raise
        except InferError as error:
            failure = error
            raise
        except BaseException as error:
            message = _explain(error, loaded.code)
            text = f"Failed to process the request(s) for model '{loaded.name}', message: {message}"
            failure = InferError(text, ErrorCode.INTERNAL)
            raise failure from error
        finally:
            work.finish(expect_more=expect_more, error=failure)
        return response

    def _call(
        self,
        loaded: Loaded,
        work: Work,
        request: InferRequest,
        encode: Callable[[InferenceResponse], InferResponse | InferError],
    ) -> InferResponse | None:
        # The list is the only reference to the request that is kept here: when the model lets go of it, it is gone.
        returned = loaded.model.execute(
            [InferenceRequest.received(request, self._tensors(request), self._outputs, Outlet(work, encode))]
        )
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        if self._decoupled:
            if returned is not None:
                kind = type(returned).__name__
                raise _BadReturnError(f"execute of a decoupled model must return None and use senders, got {kind}.")
            return None
        if not isinstance(returned, (list, tuple)):
            raise _BadReturnError(f"Expected a list in the execute return, found type '{type(returned).__name__}'.")
        if len(returned) != 1:
            raise _BadReturnError(f"execute was given 1 request and returned {len(returned)} responses.")
        response = returned[0]
        if response is None and work.promised:
            return None
        if not isinstance(response, InferenceResponse):
            raise _BadReturnError(
                "Expected an 'InferenceResponse' object in the execute function return list, "
                f"found type '{type(response).__name__}'."
            )
        answer = encode(response)
        if isinstance(answer, InferError):
            raise answer
        return answer

    def _tensors(self, request: InferRequest) -> list[Tensor]:
        tensors = []
        for name, array in request.inputs.items():
            if name in self._reshapes:
                array = reshaped(array, *self._reshapes[name], batched=self._batched)
            tensors.append(Tensor.received(name, array, self._datatypes.get(name) or Datatype.of_array(array)))
        return tensors

    def _encode(self, request: InferRequest, response: InferenceResponse) -> InferResponse | InferError:
        error = response.error()
        if error is not None:
            return InferError(error.message(), error.code())
        outputs = {}
        for tensor in response.output_tensors():
            name = tensor.name()
            if request.requested_outputs and name not in request.requested_outputs:
                continue
            outputs[name] = wire_array(tensor)
            if name in self._reshapes:
                dims, model_dims = self._reshapes[name]
                outputs[name] = reshaped(outputs[name], model_dims, dims, batched=self._batched)
        return InferResponse(outputs, response.parameter_values())


def _explain(error: BaseException, code: ModelCode) -> str:
    """What was raised, and below it the model's own frames, the innermost first."""
    if isinstance(error, _BadReturnError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if code.owns(frame.filename)), len(frames))
    lines = [f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames[first:])]
    return f"{type(error).__name__}: {error}" + ("\n\nAt:\n" + "".join(lines) if lines else "")
