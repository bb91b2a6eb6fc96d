"""Calls a model's `execute`, in the model's thread, and judges what it gives.

An `async def execute` runs on its instance's event loop (`triton_loop`). The thread waits for it; but not if the model
is decoupled: then the instance takes the next request as soon as the coroutine is scheduled, as Triton does, and what
it raises fails its own requests only.

Nothing interrupts `execute` when its client leaves: it asks `is_cancelled()`. With `cancel_tasks` a coroutine is
cancelled, in asyncio's way, when all of its clients have left. That is off unless the configuration asks for it: code
written for Triton needn't be prepared for a `CancelledError` at each `await`.

Nothing here imports trio, so that worker processes needn't.
"""

from __future__ import annotations

import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import attrs

from trio_infer.errors import ErrorCode, InferError, Rescheduled, RunCancelled
from trio_infer.models.triton_current import Job, is_trio_cancelled, when_all_left, working_on
from trio_infer.models.triton_imports import ModelCode
from trio_infer.models.triton_loop import InstanceLoop
from trio_infer.models.triton_messages import InferenceRequest, InferenceResponse, Outlet
from trio_infer.models.triton_tensors import Tensor, reshaped, wire_array
from trio_infer.protocol.datatypes import Datatype
from trio_infer.protocol.values import InferRequest, InferResponse, Signature

__all__ = ["READY_WITHIN", "Executor", "Loaded"]

READY_WITHIN: Final = 5.0
"""Seconds that a model has to say whether it is ready; Triton's."""

Batch: TypeAlias = "Sequence[tuple[Job, InferRequest]]"
Result: TypeAlias = "InferResponse | InferError | None"
log: logging.Logger = logging.getLogger("trio_infer.models")


@attrs.define(eq=False)
class Loaded:
    """One instance of a model: its code, the model object made from it, and its event loop."""

    name: str
    code: ModelCode
    model: Any
    loop: InstanceLoop = attrs.field(init=False)
    _asked: threading.Thread | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.loop = InstanceLoop(self.name)

    def is_ready(self, within: float = READY_WITHIN) -> bool:
        """What the model's own `is_ready` says, which may be `async`; True if it has none.

        Blocks, no longer than `within` seconds. A model that raises, is slower, or gives anything but a bool is not
        ready, and the log says why. One that is still at its last answer isn't asked again.
        """
        hook = getattr(self.model, "is_ready", None)
        if hook is None:
            return True
        if self._asked is not None and self._asked.is_alive():
            return False
        answer: list[object] = []
        self._asked = threading.Thread(target=self._ask, args=(hook, answer), name=f"{self.name} is_ready", daemon=True)
        self._asked.start()
        self._asked.join(within)
        if not answer:
            log.warning("model instance '%s' is not ready: is_ready has not answered within %g s", self.name, within)
            return False
        (said,) = answer
        if isinstance(said, bool):
            return said
        if isinstance(said, BaseException):
            log.error("model instance '%s' is not ready: is_ready failed", self.name, exc_info=said)
        else:
            kind = type(said).__name__
            log.error("model instance '%s' is not ready: is_ready must return a bool, got %s", self.name, kind)
        return False

    def _ask(self, hook: Callable[[], Any], answer: list[object]) -> None:
        try:
            said = hook()
            if inspect.iscoroutine(said):
                said = self.loop.submit(said).result()
        except BaseException as error:
            said = error
        answer.append(said)

    def finalize(self) -> None:
        """Call the model's `finalize`, end its event loop and forget its code. What it raises is logged.

        Raises:
            trio.Cancelled: the model asked trio whether it is cancelled, and it is.
        """
        self.code.stage = "finalize"
        try:
            hook = getattr(self.model, "finalize", None)
            if hook is not None:
                hook()
        except BaseException as error:
            if is_trio_cancelled(error):
                raise
            log.exception("model instance '%s' failed to finalize", self.name)
        finally:
            self.loop.close()
            self.code.forget()


class _BadReturnError(Exception):
    """`execute` gave what it must not give."""


class Executor:
    """Knows how requests look to a model.

    Args:
        signature: the model's.
        reshapes: by tensor name, the dims that clients see and those that the model sees.
        cancel_tasks: whether the coroutine of an `async def execute` is cancelled when its clients have left.
    """

    def __init__(
        self,
        signature: Signature,
        reshapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
        *,
        cancel_tasks: bool = False,
    ) -> None:
        self._name = signature.name
        self._datatypes = {spec.name: spec.datatype for spec in signature.inputs}
        self._outputs = [spec.name for spec in signature.outputs]
        self._reshapes = reshapes
        self._batched = signature.max_batch_size > 0
        self._decoupled = signature.decoupled
        self._cancel_tasks = cancel_tasks

    def execute(self, loaded: Loaded, job: Job, request: InferRequest) -> InferResponse | None:
        """Run the model for one request.

        Returns:
            the response that the model's `execute` returned; None if it comes, or came, by a sender.

        Raises:
            InferError: the response is an error, or the model failed; then its cause is what the model raised.
            trio.Cancelled: the model used `trio.from_thread.check_cancelled`.
        """
        (result,) = self.execute_batch(loaded, [(job, request)])
        if isinstance(result, InferError):
            raise result
        return result

    def execute_batch(self, loaded: Loaded, batch: Batch) -> list[Result]:
        """Run the model once for several requests, which it gets in one list.

        Returns:
            for each request what `execute` would return or raise. If `execute` itself fails, each request does.

        Raises:
            trio.Cancelled: as `execute`.
        """
        begun = [(job, request) for job, request in batch if job.start()]
        results: dict[Job, Result] = {}
        if begun:
            jobs = [job for job, _ in begun]
            with working_on(jobs):
                judged = self._call(loaded, begun)
            if judged is not None:
                results.update(zip(jobs, judged, strict=True))
                _finish(results)
        return [results.get(job) for job, _ in batch]

    def _call(self, loaded: Loaded, batch: Batch) -> list[Result] | None:
        """A result for each request; None if a coroutine goes on with them."""
        try:
            # Only the model holds the list: when it lets go of a request, that is gone.
            returned = loaded.model.execute([self._received(job, request) for job, request in batch])
            if inspect.iscoroutine(returned):
                running = self._submit(loaded, batch, returned)
                if running is None:
                    return None
                returned = running.result()
            return self._judge(loaded, batch, returned)
        except BaseException as error:
            if is_trio_cancelled(error):
                for job, _ in batch:
                    job.finish(expect_more=False)
                raise
            return self._failures(loaded, error, len(batch))

    def _submit(self, loaded: Loaded, batch: Batch, coroutine: Coroutine[Any, Any, Any]) -> Any:
        running = loaded.loop.submit(coroutine)
        if self._cancel_tasks:
            when_all_left([job for job, _ in batch], running.cancel)
        if not self._decoupled:
            return running
        for job, _ in batch:
            job.detach()
        running.done.add_done_callback(lambda _: self._detached_ended(loaded, batch, running.result))
        return None

    def _detached_ended(self, loaded: Loaded, batch: Batch, result: Callable[[], Any]) -> None:
        try:
            judged = self._judge(loaded, batch, result())
        except BaseException as error:
            judged = self._failures(loaded, error, len(batch))
        results = {job: result for (job, _), result in zip(batch, judged, strict=True)}
        _finish(results)
        for job, told in results.items():
            if isinstance(told, InferError) and job.error is not told:
                log.error("model instance '%s' failed after its final response", loaded.name, exc_info=told.__cause__)

    def _judge(self, loaded: Loaded, batch: Batch, returned: Any) -> list[Result]:
        """What the model returned, as the server wants it.

        Raises:
            _BadReturnError: the model gave what it must not give.
        """
        if self._decoupled:
            if returned is not None:
                raise _BadReturnError(
                    f"Python model '{self._name}' is using the decoupled mode and the execute function "
                    f"must return None and use senders, got {type(returned).__name__}."
                )
            return [Rescheduled() if job.rescheduled else None for job, _ in batch]
        if not isinstance(returned, (list, tuple)):
            raise _BadReturnError(f"Expected a list in the execute return, found type '{type(returned).__name__}'.")
        if len(returned) != len(batch):
            were = "request" if len(batch) == 1 else "requests"
            raise _BadReturnError(
                "Number of InferenceResponse objects do not match number of InferenceRequest objects: "
                f"execute was given {len(batch)} {were} and returned {len(returned)} responses."
            )
        for (job, _), response in zip(batch, returned, strict=True):
            excused = response is None and (job.promised or job.rescheduled)
            if not (isinstance(response, InferenceResponse) or excused):
                raise _BadReturnError(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response).__name__}'."
                )
        return [
            self._result(loaded, request, response)
            if response is not None
            else Rescheduled()
            if job.rescheduled
            else None
            for (job, request), response in zip(batch, returned, strict=True)
        ]

    def _result(self, loaded: Loaded, request: InferRequest, response: InferenceResponse) -> Result:
        try:
            return self._encode(request, response)
        except Exception as error:
            return self._failure(loaded, error)

    def _failures(self, loaded: Loaded, error: BaseException, count: int) -> list[Result]:
        """`execute` failed for all of them; the first one has the cause, so that the log has it once."""
        if isinstance(error, RunCancelled):  # and nobody is left to be told
            return [
                InferError(f"model instance '{loaded.name}' was cancelled", ErrorCode.CANCELLED) for _ in range(count)
            ]
        failures: list[Result] = [self._failure(loaded, error) for _ in range(count)]
        for failure in failures[1:]:
            assert failure is not None
            failure.__cause__ = None  # type: ignore[union-attr]  # all of them are errors
        return failures

    def _failure(self, loaded: Loaded, error: BaseException) -> InferError:
        message = _explain(error, loaded.code)
        failure = InferError(
            f"Failed to process the request(s) for model '{loaded.name}', message: {message}", ErrorCode.INTERNAL
        )
        failure.__cause__ = error
        return failure

    def _received(self, job: Job, request: InferRequest) -> InferenceRequest:
        outlet = Outlet(job, partial(self._encode, request))
        return InferenceRequest.received(request, self._tensors(request), self._outputs, outlet)

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


def _finish(results: Mapping[Job, Result]) -> None:
    for job, result in results.items():
        job.finish(expect_more=result is None, error=result if isinstance(result, InferError) else None)


def _explain(error: BaseException, code: ModelCode) -> str:
    """What was raised, and below it the model's own frames, the innermost first."""
    if isinstance(error, _BadReturnError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if code.owns(frame.filename)), len(frames))
    lines = [f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames[first:])]
    return f"{type(error).__name__}: {error}" + ("\n\nAt:\n" + "".join(lines) if lines else "")
