"""Requests, responses and the sender, as model code handles them; the names and the calls are Triton's.

A request that a model makes itself goes to another model by its instance's `Bridge`, and comes back as responses; what
goes wrong there is a response with an error, and only a call that makes no sense is an exception. All of it is
cancelled with the requests that the model is working on (`triton_current`), and when nobody wants its responses any
more: an iterator that is let go of cancels what is behind it.

`is_cancelled` on requests and senders is not a method but the request's own callable, stored as an attribute: calling
it costs what the callable costs (0.05 microseconds for a life's flag), with no layer between.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from trio_infer.errors import ErrorCode, InferError
from trio_infer.models.bridge import Bridge, Replies
from trio_infer.models.triton_current import Job
from trio_infer.models.triton_imports import ModelCode, calling_code
from trio_infer.models.triton_tensors import Tensor, TritonError, TritonModelException, wire_array
from trio_infer.protocol.values import Array, InferRequest, InferResponse

if TYPE_CHECKING:
    import asyncio  # 40 ms at the start of a worker process, for models that have no use for it

__all__ = [
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "Outlet",
    "ResponseIterator",
    "bridge_of",
]

FINAL: Final = 1
RESCHEDULE: Final = 2


class InferenceResponse:
    """What goes back to the client: tensors or an error.

    Args:
        output_tensors: by name; those that the client didn't ask for are left out.
        error: if given, the client gets it instead.
        parameters: str, int, float or bool by name.
    """

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] | None = None,
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._tensors = list(output_tensors or ())
        for tensor in self._tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"output_tensors must hold pb_utils.Tensor, got {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"error must be a pb_utils.TritonError, got {type(error).__name__}")
        self._error = error
        self._parameters = _checked_parameters(parameters)

    @classmethod
    def received(cls, reply: InferResponse | InferError, wanted: Sequence[str] = ()) -> InferenceResponse:
        """What another model answered, or what went wrong.

        Args:
            wanted: the names of the outputs that were asked for; none for all.
        """
        if isinstance(reply, InferError):
            return cls(error=TritonError(reply.message, reply.code))
        outputs = [
            Tensor(name, np.asarray(value)) for name, value in reply.outputs.items() if not wanted or name in wanted
        ]
        for tensor in outputs:
            tensor.normalise()
        return cls(outputs, parameters=reply.parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The parameters as JSON text."""
        return json.dumps(self._parameters)

    def parameter_values(self) -> dict[str, Any]:
        """The parameters as they were given; for the runner."""
        return self._parameters


class Outlet:
    """What a request and its senders hold of the work they belong to: when the last of them goes, it hears of it.

    Args:
        work: takes the responses.
        encode: makes what the server sends of a response, in the model's thread.
    """

    __slots__ = ("_encode", "_work", "promise", "reschedule")

    def __init__(self, work: Job, encode: Callable[[InferenceResponse], InferResponse | InferError]) -> None:
        self._work = work
        self._encode = encode
        self.promise: Callable[[], None] = work.promise
        self.reschedule: Callable[[], None] = work.reschedule

    def put(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Pass a response on; waits while too many are on their way.

        Raises:
            ValueError: it can't be sent; says why.
        """
        self._work.put(None if response is None else self._encode(response), final=final)

    def __del__(self) -> None:
        self._work.drop()


def _never() -> bool:
    return False


class InferenceResponseSender:
    """Sends a request's responses one by one, from any thread, also after `execute` has returned.

    Attributes:
        is_cancelled: call it to learn whether the client has left; cheap enough for each step of a loop.
    """

    __slots__ = ("_outlet", "is_cancelled")

    def __init__(self, outlet: Outlet, is_cancelled: Callable[[], bool]) -> None:
        self._outlet = outlet
        self.is_cancelled: Callable[[], bool] = is_cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send one response, or only the flag that no more will come.

        Waits while the client reads more slowly than the model sends. After the client has left it returns at once.

        Args:
            response: may be None together with the final flag.
            flags: `TRITONSERVER_RESPONSE_COMPLETE_FINAL` with the last call.

        Raises:
            TritonModelException: sent after the final flag, nothing to send, a flag that doesn't exist.
        """
        fault = ""
        if flags not in {0, FINAL}:
            fault = f"The flags must be 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL (1), got {flags!r}."
        elif response is None and not flags:
            fault = "Without the final flag there must be a response."
        elif response is not None and not isinstance(response, InferenceResponse):
            fault = f"It must be a pb_utils.InferenceResponse, got {type(response).__name__}."
        if not fault:
            try:
                self._outlet.put(response, final=flags == FINAL)
            except ValueError as error:
                fault = str(error)
        if fault:
            raise TritonModelException(f"Unable to send response. {fault}")


class ResponseIterator:
    """The responses to a request that a model made with `decoupled=True`, as they come; also an async iterator.

    The last one may have an error. Whoever stops early need do no more than let go of it.
    """

    __slots__ = ("_replies", "_wanted")

    def __init__(self, replies: Replies, wanted: Sequence[str]) -> None:
        self._replies = replies
        self._wanted = wanted

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        reply = self._replies.next()
        if reply is None:
            raise StopIteration
        return InferenceResponse.received(reply, self._wanted)

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        reply = await _next_async(self._replies)
        if reply is None:
            raise StopAsyncIteration
        return InferenceResponse.received(reply, self._wanted)

    def cancel(self) -> None:
        """The rest is not wanted. The iteration ends soon, perhaps after a response with a CANCELLED error."""
        self._replies.cancel()

    def __del__(self) -> None:
        self._replies.cancel()


class InferenceRequest:
    """What a client asks, or what a model asks another one.

    Args:
        request_id: any text; the other model sees it.
        correlation_id: of the sequence that it belongs to; 0 or "" for none.
        inputs: tensors by the other model's names.
        requested_output_names: the outputs that are wanted.
        model_name, model_version: who is asked; version -1 for the newest that is ready.
        flags: TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END, added up.
        timeout: in microseconds; 0 for none.
        preferred_memory, trace: accepted without effect.
        parameters: str, int, float or bool by name; the other model sees them.

    Attributes:
        is_cancelled: call it to learn whether the client has left; cheap enough for each step of a loop.
    """

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: Any = None,
        trace: Any = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        for tensor in self._inputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"inputs must hold pb_utils.Tensor, got {type(tensor).__name__}")
        self._requested = list(requested_output_names)
        self._model = model_name, model_version
        self._flags = flags
        self._timeout = timeout
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters = _checked_parameters(parameters)
        self._outlet: Outlet | None = None
        self.is_cancelled: Callable[[], bool] = _never
        # Here, since `exec` may be called by a library: `pool.submit(request.exec)`.
        self._code = calling_code()

    @classmethod
    def received(
        cls, request: InferRequest, inputs: list[Tensor], outputs: Sequence[str], outlet: Outlet
    ) -> InferenceRequest:
        """A client's request; for the runner, not for models.

        Args:
            request: as the server decoded it.
            inputs: its tensors, as the model sees them.
            outputs: the names of all of the model's outputs, for a request that names none.
            outlet: where a sender's responses go.
        """
        self = cls.__new__(cls)
        get = request.parameters.get
        sequence, timeout = get("sequence_id", 0), get("timeout", 0)
        self._request_id = request.id
        self._correlation_id = sequence if isinstance(sequence, (int, str)) else 0
        self._inputs = inputs
        self._requested = list(request.requested_outputs or outputs)
        self._model = request.model_name, int(request.model_version) if request.model_version.isdecimal() else -1
        self._flags = bool(get("sequence_start", False)) | bool(get("sequence_end", False)) << 1
        self._timeout = timeout if isinstance(timeout, int) else 0
        self._preferred_memory = self._trace = None
        self._parameters = {key: value for key, value in request.parameters.items() if key not in _KNOWN_PARAMETERS}
        self._outlet = outlet
        self._code = None
        self.is_cancelled = request.is_cancelled
        return self

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._requested

    def model_name(self) -> str:
        return self._model[0]

    def model_version(self) -> int:
        return self._model[1]

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """The request's own, in microseconds; 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """The request's own parameters as JSON text."""
        return json.dumps(self._parameters)

    def preferred_memory(self) -> Any:
        return self._preferred_memory

    def trace(self) -> Any:
        return self._trace

    def set_release_flags(self, flags: int) -> None:
        """Say what happens to the request after `execute`: it is released, or comes again in an iterative sequence.

        Raises:
            TritonModelException: the request isn't a client's.
        """
        if flags & RESCHEDULE:
            if self._outlet is None:
                raise TritonModelException("only a request that execute() was given can be rescheduled")
            self._outlet.reschedule()

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of this request's responses.

        Raises:
            TritonModelException: the request isn't a client's.
        """
        if self._outlet is None:
            raise TritonModelException("only a request that execute() was given has a response sender")
        self._outlet.promise()
        return InferenceResponseSender(self._outlet, self.is_cancelled)

    def exec(self, decoupled: bool = False) -> Any:
        """Have the other model answer, and wait for it.

        Args:
            decoupled: whether it may give any number of responses.

        Returns:
            an InferenceResponse, whose `has_error()` says whether it went wrong; a ResponseIterator with `decoupled`,
            at once.

        Raises:
            TritonModelException: it makes no sense: outside of a server, in `initialize` or `finalize`, a tensor that
                can't be sent.
        """
        replies = self._ask(self._bridge("exec()"))
        if decoupled:
            return ResponseIterator(replies, self._requested)
        first = replies.next()
        return self._only(replies, first, None if first is None else replies.next())

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """As `exec`, for `async def execute`: await what it gives. The request is on its way already, so that several
        can be awaited together (`asyncio.gather`); cancelling the awaiting task cancels it.

        Raises:
            RuntimeError: there is no running event loop.
            TritonModelException: as `exec`.
        """
        import asyncio

        bridge = self._bridge("async_exec()")
        loop = asyncio.get_running_loop()
        replies = self._ask(bridge)
        if decoupled:
            future: asyncio.Future[ResponseIterator] = loop.create_future()
            future.set_result(ResponseIterator(replies, self._requested))
            return future
        return loop.create_task(self._only_async(replies))

    def _bridge(self, what: str) -> Bridge:
        return bridge_of(calling_code() or self._code, what, only_in_execute=True)

    def _ask(self, bridge: Bridge) -> Replies:
        inputs = {tensor.name(): _read_only(wire_array(tensor)) for tensor in self._inputs}
        name, version = self._model
        parameters = dict(self._parameters)
        if self._correlation_id:
            start, end = bool(self._flags & 1), bool(self._flags & 2)
            parameters |= {"sequence_id": self._correlation_id, "sequence_start": start, "sequence_end": end}
        if self._timeout:
            parameters["timeout"] = self._timeout
        return bridge.infer(
            InferRequest(
                name,
                "" if version < 0 else str(version),
                inputs,
                id=str(self._request_id),
                parameters=parameters,
                requested_outputs=tuple(self._requested),
            )
        )

    def _only(
        self, replies: Replies, first: InferResponse | InferError | None, second: InferResponse | InferError | None
    ) -> InferenceResponse:
        if first is None:
            first = InferError(f"model '{self._model[0]}' gave no response", ErrorCode.INTERNAL)
        elif isinstance(second, InferError):
            first = second
        elif second is not None:
            replies.cancel()
            first = InferError(
                f"model '{self._model[0]}' gave more than one response: call it with exec(decoupled=True)",
                ErrorCode.UNSUPPORTED,
            )
        return InferenceResponse.received(first, self._requested)

    async def _only_async(self, replies: Replies) -> InferenceResponse:
        import asyncio

        try:
            first = await _next_async(replies)
            return self._only(replies, first, None if first is None else await _next_async(replies))
        except asyncio.CancelledError:
            replies.cancel()
            raise


def bridge_of(code: ModelCode | None, what: str, *, only_in_execute: bool = False) -> Bridge:
    """How a model's code reaches the server.

    Args:
        code: whose; None if that can't be told.
        what: it wants, for messages.
        only_in_execute: whether that is refused in `initialize` and `finalize`; it is in `auto_complete_config`.

    Raises:
        TritonModelException: it can't, or not now.
    """
    if code is None or code.bridge is None:
        raise TritonModelException(f"{what} needs a server, and the calling code is no served model's")
    if only_in_execute and code.stage:
        raise TritonModelException(
            f"BLS is only supported during the 'execute' function: {what} was called during '{code.stage}'"
        )
    if code.stage == "auto_complete_config":
        raise TritonModelException(f"{what} can't be called during 'auto_complete_config'")
    return code.bridge


def _read_only(array: Array) -> Array:
    # The other model may be of this process: it gets the memory itself, and copies it before it writes.
    view = array.view()
    view.flags.writeable = False
    return view


async def _next_async(replies: Replies) -> InferResponse | InferError | None:
    import asyncio

    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(_set, ready)

    replies.when_ready(tell)
    await ready
    return replies.next()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# The server acts on these itself; a model sees them through other methods.
_KNOWN_PARAMETERS = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"}
)


def _checked_parameters(parameters: Mapping[Any, Any] | None) -> dict[str, Any]:
    checked = dict(parameters or {})
    for key, value in checked.items():
        if not isinstance(key, str) or not isinstance(value, (bool, int, float, str)):
            kind = type(value).__name__
            raise TritonModelException(f"parameter {key!r} must be a str, int, float or bool by name, got {kind}")
    return checked
